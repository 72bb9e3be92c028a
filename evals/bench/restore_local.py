"""Restoring on the server's own machine: the local lane against mlx-lm's load_prompt_cache.

Expected: at most 1.1 times mlx-lm's file, both for the restore alone (from the call to evaluated
arrays) and with the first append of one token. TCP beside it: to evaluated arrays at least 0.6
times the bytes a second of a loop that only receives. A random model of SmolLM2-135M's cache
shapes, 30 plain layers, with few other weights. Everybody takes turns in one process, in another
order each round; files are in the page cache. Ratios are medians of the rounds' own ratios with
their 95% interval.
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

from evals.bench.fetch_throughput import BARE, bare_source
from evals.bench.restore_tcp import PLAIN, VOCAB, append_one
from evals.findings import Bar, Findings, Table
from evals.rounds import interleave, medians, ratio_of
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.transport.local import OFF

TOKENS: Final = (1024, 2048)
ROUNDS: Final = 21
#: Of K or V and one layer: 3 heads of 64 float32.
ROW_BYTES: Final = 3 * 64 * 4
RATE: Final = "bytes a second, TCP to evaluated arrays / bare recv_into"
_stock: Any = mlx_lm_caches  # mlx-lm is not typed


def run(lengths: tuple[int, ...] = TOKENS, rounds: int = ROUNDS) -> Findings:
    """Seconds of every round by prefix length and way, and the ratios to mlx-lm's file."""
    model = llama.Model(llama.ModelArgs(**PLAIN))
    model.eval()
    mx.eval(model.parameters())
    return _findings({tokens: _measure(model, tokens, rounds) for tokens in lengths})


def _measure(model: Any, tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by what is done and by way; the last, TCP against the bare loop, in MLX arrays."""
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
            seconds = take_turns(model, ways, rounds)
            after = pc.stats()

            def evaluate_over_tcp() -> None:
                mx.eval([leaf.state for leaf in over_tcp()])

            blocks = 2 * len(pc.get_or_prefill(ids, "bench"))
            with bare_source(blocks, tokens * ROW_BYTES) as bare:
                seconds[RATE] = interleave({"TCP": evaluate_over_tcp, BARE: bare}, rounds)
    if after["hits_local"] - before["hits_local"] != 2 * (rounds + 1):
        raise RuntimeError(f"not everything came from the file: {after}")
    return seconds


def _await_loan(pc: PionPromptCache, ids: list[int]) -> None:
    """Until the server has made the file, a hit comes over TCP."""
    ends = time.monotonic() + 30
    while not pc.stats()["hits_local"]:
        if time.monotonic() > ends:
            raise RuntimeError(f"no file was lent: {pc.stats()}")
        pc.get_or_prefill(ids, "bench")
        time.sleep(0.1)


def take_turns(
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


def _findings(seconds: Mapping[int, Mapping[str, Mapping[str, list[float]]]]) -> Findings:
    restored, received, bars = [], [], []
    ratios: dict[str, dict[str, float]] = {}
    for tokens, by_what in seconds.items():
        for what, times in by_what.items():
            middle = {way: f"{value * 1e3:.1f} ms" for way, value in medians(times).items()}
            if what == RATE:
                ratio = ratio_of(times[BARE], times["TCP"])
                received.append((tokens, middle["TCP"], middle[BARE], _interval(ratio)))
                bar = Bar(f"{tokens} tokens, {what}", ratio["high"], 0.6, decides=False)
            else:
                ratio = ratio_of(times["local"], times["file"])
                local, file, tcp = middle["local"], middle["file"], middle["TCP"]
                restored.append((tokens, what, local, file, tcp, _interval(ratio)))
                title = f"{tokens} tokens, {what}: file / local"
                bar = Bar(title, 1 / ratio["low"], 1 / 1.1, decides=False)
            bars.append(bar)
            ratios[f"{tokens}, {what}"] = ratio
    return Findings(
        {"seconds": seconds, "ratios": ratios},
        [
            Table(
                "One process, from the call to evaluated arrays, or to those of one token more",
                ("tokens", "what", "local lane", "mlx-lm's file", "TCP", "local / file (95%)"),
                restored,
            ),
            Table(
                "The same bytes over TCP: to evaluated arrays, and only received",
                ("tokens", "TCP, evaluated", BARE, "bytes a second, TCP / bare (95%)"),
                received,
            ),
        ],
        bars=bars,
    )


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
