"""Restoring on the server's own machine: the local lane against mlx-lm's load_prompt_cache.

Expected: at most 1.1 times mlx-lm's file, both for the restore alone (from the call to evaluated
arrays) and with the first append of one token; TCP beside it. A random model of SmolLM2-135M's
cache shapes, 30 plain layers, with few other weights. Everybody takes turns in one process, in
another order each round; files are in the page cache. Ratios are medians of the rounds' own ratios
with their 95% interval.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models import llama

from evals.bench.restore_tcp import PLAIN, VOCAB, append_one
from evals.rounds import medians, ratio_of
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.transport.local import OFF

TOKENS: Final = (1024, 2048)
ROUNDS: Final = 21
_stock: Any = mlx_lm_caches  # mlx-lm is not typed


def run(lengths: tuple[int, ...] = TOKENS, rounds: int = ROUNDS) -> Mapping[str, Any]:
    """Seconds of every round by prefix length and way, and the ratios to mlx-lm's file."""
    model = llama.Model(llama.ModelArgs(**PLAIN))
    model.eval()
    mx.eval(model.parameters())
    print(f"{'tokens':<8}{'':<18}{'local':>12}{'file':>12}{'TCP':>12}{'local / file':>24}")
    return {str(tokens): _measure(model, tokens, rounds) for tokens in lengths}


def _measure(model: Any, tokens: int, rounds: int) -> Mapping[str, Any]:
    ids = np.random.default_rng(tokens).integers(0, VOCAB, tokens).tolist()
    with tempfile.TemporaryDirectory(prefix="pion-bench-") as folder:
        file = str(Path(folder) / "cache.safetensors")
        with (
            LocalServer(Path(folder) / "data", Path(folder) / "server.log") as server,
            PionPromptCache(model, port=server.port, timeout=10, held_bytes=0, store="sync") as pc,
        ):
            _stock.save_prompt_cache(file, pc.get_or_prefill(ids, "bench"))
            _await_loan(pc, ids)

            def over_tcp() -> list[Any]:
                os.environ[OFF] = "1"
                try:
                    return pc.get_or_prefill(ids, "bench")
                finally:
                    os.environ[OFF] = "0"

            ways: dict[str, Callable[[], list[Any]]] = {
                "local": lambda: pc.get_or_prefill(ids, "bench"),
                "file": lambda: _stock.load_prompt_cache(file),
                "TCP": over_tcp,
            }
            if len({append_one(model, way()) for way in ways.values()}) != 1:
                raise RuntimeError("the ways do not continue alike")
            before = pc.stats()
            seconds = _take_turns(model, ways, rounds)
            after = pc.stats()
    if after["hits_local"] - before["hits_local"] != 2 * (rounds + 1):
        raise RuntimeError(f"not everything came from the file: {after}")
    return {what: _tell(tokens, what, times) for what, times in seconds.items()}


def _await_loan(pc: PionPromptCache, ids: list[int]) -> None:
    """Until the server has made the file, a hit comes over TCP."""
    ends = time.monotonic() + 30
    while not pc.stats()["hits_local"]:
        if time.monotonic() > ends:
            raise RuntimeError(f"no file was lent: {pc.stats()}")
        pc.get_or_prefill(ids, "bench")
        time.sleep(0.1)


def _take_turns(
    model: Any, ways: Mapping[str, Callable[[], list[Any]]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of the restore alone and of restore and first append, each measured on its own."""
    seconds: dict[str, dict[str, list[float]]] = {
        what: {way: [] for way in ways} for what in ("restore", "restore + append")
    }
    order = [(what, way) for what in seconds for way in ways]
    shuffle = random.Random(1).shuffle
    for number in range(rounds + 1):
        shuffle(order)
        for what, way in order:
            started = time.perf_counter()
            cache = ways[way]()
            if what == "restore":
                mx.eval([leaf.state for leaf in cache])
            else:
                append_one(model, cache)
            if number:
                seconds[what][way].append(time.perf_counter() - started)
            del cache
    return seconds


def _tell(tokens: int, what: str, seconds: dict[str, list[float]]) -> Mapping[str, Any]:
    middle = medians(seconds)
    ratio = ratio_of(seconds["local"], seconds["file"])
    cells = "".join(f"{middle[way] * 1e3:>9.1f} ms" for way in ("local", "file", "TCP"))
    interval = f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    print(f"{tokens:<8}{what:<18}{cells}{interval:>24}", flush=True)
    return {"seconds": seconds, "local_to_file": ratio}


if __name__ == "__main__":
    run()
