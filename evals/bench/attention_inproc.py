"""Shared prefix in process: first token, decode speed and memory against vanilla caches.

Expected, on SmolLM2-135M in float32: time to first token at most 1.05 times that of a copy.deepcopy
of a held vanilla KVCache (256, 1,024 and 2,048 tokens), decoding at 1,024 tokens within 3% of
vanilla, and eight requests on a 1,024-token prefix in the memory of one prefix. The two ways take
turns, token by token, so that other load meets both; a ratio is the median over such pairs.

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=$(python -m pion_vllm_mlx.blas) \
        python -m evals.bench attention_inproc
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache

from pion_patches.attention import pion_attention_patch
from pion_patches.inproc import InprocStore
from pion_patches.prefix_cache import make_pion_prompt_cache
from pion_patches.prefix_entry import capture_prefix
from pion_vllm_mlx.small_model import load_small_model

TTFT_RATIO, DECODE_RATIO = 1.05, 1.03
_LENGTHS = (256, 1024, 2048)
_SUFFIX, _DECODED, _ROUNDS, _REQUESTS = 16, 12, 7, 8
_stock: Any = cache  # mlx-lm is not typed


def run(lengths: tuple[int, ...] = _LENGTHS, rounds: int = _ROUNDS) -> Mapping[str, Any]:
    """Measure, print the table, return the figures by prefix length and the memory of 8."""
    model, _ = load_small_model()
    figures = {}
    print(f"{'tokens':>6} {'TTFT vanilla':>13} {'split':>8} {'ratio':>6}", end="")
    print(f" {'decode vanilla':>15} {'split':>8} {'ratio':>6}   (ms, {rounds} rounds)")
    with pion_attention_patch():
        for length in lengths:
            bench = _PrefixBench(model, length)
            figures[str(length)] = one = bench.measure(rounds)
            print(
                f"{length:>6} {one['ttft_vanilla_ms']:>13.1f} {one['ttft_split_ms']:>8.1f}"
                f" {one['ttft_ratio']:>6.3f} {one['decode_vanilla_ms']:>15.2f}"
                f" {one['decode_split_ms']:>8.2f} {one['decode_ratio']:>6.3f}",
                flush=True,
            )
            if length == 1024:
                figures["memory"] = memory = bench.measure_memory()
    if "memory" in figures:
        print(
            f"memory of {_REQUESTS} requests on 1,024 tokens, {_SUFFIX} own tokens each:"
            f" {memory['split_mib']:.1f} MiB split, {memory['vanilla_mib']:.1f} MiB vanilla"
            f" (one prefix: {memory['prefix_mib']:.1f} MiB)"
        )
    return {"bars": {"ttft": TTFT_RATIO, "decode": DECODE_RATIO}, **figures}


class _PrefixBench:
    """A prefix of random tokens, held both as a vanilla cache and as a shared prefix."""

    def __init__(self, model: Any, length: int) -> None:
        self.model, self.length = model, length
        rng = np.random.default_rng(length)
        self.suffix = mx.array(rng.integers(0, 40_000, (1, _SUFFIX)))
        self.held = _stock.make_prompt_cache(model)
        model(mx.array(rng.integers(0, 40_000, (1, length))), cache=self.held)
        mx.eval([layer.state for layer in self.held])
        store = InprocStore()
        store.hold("bench", capture_prefix(model, self.held, length))
        self.prompt_cache = SimpleNamespace(_mlx_prefix_kv=store)
        self.open_split()  # the first one asks whether the model can be split; later ones know

    def open_vanilla(self) -> list[Any]:
        copied: list[Any] = copy.deepcopy(self.held)
        return copied

    def open_split(self) -> list[Any]:
        return make_pion_prompt_cache(self.model, "bench", self.prompt_cache, self.length)

    def measure(self, rounds: int) -> dict[str, float]:
        """Medians over rounds; the two ways alternate request by request and token by token."""
        first: list[dict[str, float]] = []
        decode: list[dict[str, float]] = []
        ways: dict[str, Callable[[], list[Any]]]
        ways = {"vanilla": self.open_vanilla, "split": self.open_split}
        for number in range(rounds + 1):
            order = list(ways) if number % 2 else list(ways)[::-1]
            made, said, seconds = {}, {}, {}
            for name in order:
                started = time.perf_counter()
                made[name] = ways[name]()
                said[name] = [self._next(self.suffix, made[name])]
                seconds[name] = time.perf_counter() - started
            first.append(seconds)
            for _ in range(_DECODED):
                decode.append({name: self._decode(said[name], made[name]) for name in order})
                order.reverse()
            assert said["vanilla"] == said["split"], "the two ways answered differently"
        del first[0], decode[:_DECODED]  # the warm-up round
        figures = {}
        for label, pairs in (("ttft", first), ("decode", decode)):
            for name in ways:
                figures[f"{label}_{name}_ms"] = statistics.median(p[name] for p in pairs) * 1e3
            figures[f"{label}_ratio"] = statistics.median(p["split"] / p["vanilla"] for p in pairs)
        return figures

    def _decode(self, said: list[int], made: list[Any]) -> float:
        started = time.perf_counter()
        said.append(self._next(mx.array([[said[-1]]]), made))
        return time.perf_counter() - started

    def _next(self, tokens: mx.array, made: list[Any]) -> int:
        return int(np.array(mx.argmax(self.model(tokens, cache=made)[0, -1])))

    def measure_memory(self) -> dict[str, float]:
        figures = {}
        for name, make in (("vanilla", self.open_vanilla), ("split", self.open_split)):
            mx.clear_cache()
            before = mx.get_active_memory()
            requests = [make() for _ in range(_REQUESTS)]
            for made in requests:
                self._next(self.suffix, made)
                mx.eval([layer.state for layer in made])
            mx.clear_cache()
            figures[f"{name}_mib"] = (mx.get_active_memory() - before) / 2**20
            del requests
        entry = self.prompt_cache._mlx_prefix_kv["bench"]
        figures["prefix_mib"] = entry.nbytes / 2**20
        # Both ways leave the held prefix itself out of the difference; count it in once.
        for name in ("vanilla", "split"):
            figures[f"{name}_mib"] += figures["prefix_mib"]
        return figures


if __name__ == "__main__":
    run()
