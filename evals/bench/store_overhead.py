"""What storing costs: a cold first token while it is stored behind the caller, and a store alone.

Expected: storing in the background adds at most 2% to the time to first token of a cold prompt; a
prefix stored and acknowledged (over loopback, with checksums, in the server's log) takes at most
2.5 times as long as mlx-lm's `save_prompt_cache` writes its file. SmolLM2-135M in float32 for the
first, 1,024 tokens of a cache of its shape (47 MB) for the second. Ratios are of interleaved
rounds, with a 95% interval of the median.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.models import cache as mlx_lm_cache

from evals.findings import Bar, Findings, Table
from evals.rounds import interleave, medians, ratio_of
from pion_patches.cache_rebuild import dismantle
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prompt_cache import PREFILL_STEP, PionPromptCache
from pion_vllm_mlx.small_model import small_model_dir
from pion_vllm_mlx.storing import Storing
from pion_vllm_mlx.tally import Tally
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport.endpoint import Endpoint

PREFIX_TOKENS = 256
QUESTION_TOKENS = 16
ROUNDS = 9
STORED_TOKENS = 1024
STORE_ROUNDS = 15
_LAYERS, _HEADS, _DIM = 30, 3, 64
_stock: Any = mlx_lm_cache


def run(
    prefix_tokens: int = PREFIX_TOKENS, rounds: int = ROUNDS, store_rounds: int = STORE_ROUNDS
) -> Findings:
    """Seconds of every round by way, and the ratios of the rounds."""
    with (
        tempfile.TemporaryDirectory(prefix="pion-bench-") as folder,
        LocalServer(Path(folder) / "data", Path(folder) / "server.log") as server,
    ):
        first_token = _first_token(server, prefix_tokens, rounds)
        stored = _stored(server, Path(folder), store_rounds)
    return _findings(first_token, stored)


def _findings(first_token: Mapping[str, Any], stored: Mapping[str, Any]) -> Findings:
    titles = {
        f"{first_token['tokens']} cold tokens, then {QUESTION_TOKENS}: to the first token": (
            first_token,
            "storing",
            1.02,
        ),
        f"{stored['tokens']} tokens, stored and acknowledged": (stored, "Pion", 2.5),
    }
    tables, bars = [], []
    for title, (found, ours, most) in titles.items():
        ratio = found["ratio"]
        told = f"{ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        rows = [
            (way, f"{middle * 1e3:.1f} ms", told if way == ours else "-")
            for way, middle in medians(found["seconds"]).items()
        ]
        tables.append(Table(title, ("way", "median", "to the other (95%)"), rows))
        # It holds where the interval of the ratio reaches it.
        bars.append(Bar(f"{title}: other / ours", 1 / ratio["low"], 1 / most, decides=False))
    figures = {"first_token": first_token, "store": stored}
    return Findings(figures, tables, bars=bars)


def _first_token(server: LocalServer, tokens: int, rounds: int) -> Mapping[str, Any]:
    """Cold prompts of random tokens, no two alike, with and without a prompt cache that stores."""
    model: Any = load(str(small_model_dir()))[0]
    random = np.random.default_rng(0)
    question = mx.array([random.integers(0, 1000, QUESTION_TOKENS).tolist()])

    def prefix() -> list[int]:
        ids: list[int] = random.integers(0, 40_000, tokens).tolist()
        return ids

    def answer(cache: list[Any]) -> None:
        mx.eval(mx.argmax(model(question, cache=cache)[0, -1]))

    with PionPromptCache(model, port=server.port, timeout=10, held_bytes=1 << 28) as pc:

        def without() -> None:
            ids, cache = prefix(), _stock.make_prompt_cache(model)
            prefill(model, ids, cache, PREFILL_STEP)
            answer(cache)

        def storing() -> None:
            ids = prefix()
            answer(pc.get_or_prefill(ids, PionPromptCache.make_namespace(*ids)))

        # The store of one round must not run into the next; how long it still takes is counted.
        ways = {"without Pion": without, "storing": storing, "flush": lambda: _done(pc.flush(60))}
        seconds = interleave(ways, rounds)
        stats = pc.stats()
    if stats["stores"] != rounds + 1 or stats["hits"]:
        raise RuntimeError(f"not every prompt was cold and stored: {stats}")
    ratio = ratio_of(seconds["storing"], seconds["without Pion"])
    _print(f"{tokens} tokens, then {QUESTION_TOKENS}: to the first token", seconds, ratio)
    return {"tokens": tokens, "seconds": seconds, "ratio": ratio}


def _stored(server: LocalServer, folder: Path, rounds: int) -> Mapping[str, Any]:
    """The same cache into an mlx-lm file and to the server, under a new name each time.

    Nothing is removed meanwhile: both write to pages that held nothing before.
    """
    cache = _made_cache(STORED_TOKENS)
    ids = list(range(STORED_TOKENS))
    lane = Endpoint("127.0.0.1", server.port, connect_timeout=10)
    storing = Storing("sync", lane, Tier(), Tally(), PREFILL_STEP, 10)
    names = itertools.count()

    def file() -> None:
        _stock.save_prompt_cache(str(folder / f"{next(names)}.safetensors"), cache)

    def pion() -> None:
        image = dismantle(cache, STORED_TOKENS, wait=False)
        _done(storing.begin(b"%d" % next(names), tuple(ids), "0" * 64, image, 1)())

    try:
        seconds = interleave({"mlx-lm file": file, "Pion": pion}, rounds)
    finally:
        storing.close()
    ratio = ratio_of(seconds["Pion"], seconds["mlx-lm file"])
    _print(f"{STORED_TOKENS} tokens: stored and acknowledged", seconds, ratio)
    return {"tokens": STORED_TOKENS, "seconds": seconds, "ratio": ratio}


def _made_cache(tokens: int) -> list[Any]:
    """SmolLM2's caches after prefills of 512 tokens, of random numbers."""
    cache = []
    for _ in range(_LAYERS):
        layer = _stock.KVCache()
        for start in range(0, tokens, PREFILL_STEP):
            shape = (1, _HEADS, min(PREFILL_STEP, tokens - start), _DIM)
            layer.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
        mx.eval(layer.keys, layer.values)
        cache.append(layer)
    return cache


def _done(well: bool) -> None:
    if not well:
        raise RuntimeError("a prefix was not stored")


def _print(title: str, seconds: Mapping[str, list[float]], ratio: Mapping[str, float]) -> None:
    print(title)
    for way, middle in medians(seconds).items():
        print(f"  {way:<14}{middle * 1e3:>10.1f} ms")
    print("  ratio {ratio:.3f} ({low:.3f} to {high:.3f})".format(**ratio), flush=True)


if __name__ == "__main__":
    run()
