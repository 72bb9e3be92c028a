"""Many queries of attention in one request against one request each, and rehydration.

Expected: QUERY with M queries a head answers the same as M requests, and sooner (the design has
22.9 ms against 754, 32.9 times, at Llama-3.2-3B's shape on Apple Silicon). KV.PREFIX.WARM brings
demoted layers back from stored rows; after it a query costs what it did before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from evals.rounds import interleave, medians
from evals.serving import SERVER_FLAGS, Caller, local_server
from pion_vllm_mlx.local_server import LocalServer

#: Llama-3.2-3B: 8 key-value heads of 128; queries a head, prefix tokens.
HEADS, DIM, QUERIES, TOKENS = 8, 128, 64, 1024
#: Llama-3.2-1B, as the design rehydrates it: 16 layers, 8 heads of 64.
LAYERS, WARM_DIM, WARM_TOKENS = 16, 64, 1024
ROUNDS: Final = 5


def run() -> Mapping[str, Any]:
    """Seconds of both ways and their ratio; seconds of WARM."""
    with local_server(*SERVER_FLAGS) as server:
        batched = _compare_batched(server)
    with local_server(*SERVER_FLAGS, "--sdpa-slots", str(LAYERS)) as server:
        return {"batched": batched, "rehydrate": _measure_warm(server)}


def _compare_batched(server: LocalServer) -> dict[str, Any]:
    call = Caller(server.port)
    k, v = (_normal(seed, HEADS, TOKENS, DIM) for seed in (1, 2))
    q = _normal(3, HEADS, QUERIES, DIM)
    call("ATTEND.PREFIX.STORE", "m", 0, HEADS, TOKENS, DIM, k.tobytes(), v.tobytes())

    def ask(queries: Any) -> Any:
        words = ("ATTEND.PREFIX.QUERY", "m", 0, HEADS, DIM, TOKENS, queries.tobytes())
        reply = np.frombuffer(call(*words), np.float32)
        return reply[: queries.size].reshape(queries.shape)

    def one_each() -> Any:
        return np.concatenate([ask(q[:, m : m + 1].copy()) for m in range(QUERIES)], axis=1)

    difference = float(np.abs(ask(q) - one_each()).max())
    if difference > 1e-5:
        raise RuntimeError(f"the two ways differ by {difference}")
    seconds = interleave({"one request": lambda: ask(q), "one each": one_each}, ROUNDS)
    middle = medians(seconds)
    ratio = middle["one each"] / middle["one request"]
    print(
        f"{QUERIES} queries, H={HEADS} N={TOKENS} D={DIM}: one request"
        f" {middle['one request'] * 1e3:.1f} ms, one each {middle['one each'] * 1e3:.1f} ms,"
        f" {ratio:.1f}x; largest difference {difference:.1e}"
    )
    return {"seconds": seconds, "ratio": ratio, "difference": difference}


def _measure_warm(server: LocalServer) -> dict[str, Any]:
    call = Caller(server.port)
    width = HEADS * WARM_DIM
    call("KV.PREFIX.REGISTER", "w", width, "fp16")
    for layer in range(LAYERS):
        for side in ("pk", "pv"):
            rows = _normal(layer, WARM_TOKENS, width).tobytes()
            call("V.STOREBATCH", f"w_{side}", layer, 0, WARM_TOKENS, rows)
    small = _normal(9, 1, 8, 32).tobytes()
    q = _normal(3, HEADS, WARM_DIM).tobytes()
    seconds: dict[str, list[float]] = {"WARM": [], "QUERY": []}
    for _ in range(ROUNDS):
        for slot in range(LAYERS):  # pushes all layers out
            call("ATTEND.PREFIX.STORE", "other", slot, 1, 8, 32, small, small)
        started = time.perf_counter()
        made = int(call("KV.PREFIX.WARM", "w", HEADS, WARM_DIM))
        seconds["WARM"].append(time.perf_counter() - started)
        if made != LAYERS:
            raise RuntimeError(f"{made} of {LAYERS} layers came back")
        started = time.perf_counter()
        call("ATTEND.PREFIX.QUERY", "w", 0, HEADS, WARM_DIM, WARM_TOKENS, q)
        seconds["QUERY"].append(time.perf_counter() - started)
    middle = medians(seconds)
    print(
        f"WARM of {LAYERS} layers, {WARM_TOKENS} tokens: {middle['WARM'] * 1e3:.0f} ms,"
        f" a query behind it {middle['QUERY'] * 1e3:.2f} ms"
    )
    return {"seconds": seconds}


def _normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


if __name__ == "__main__":
    run()
