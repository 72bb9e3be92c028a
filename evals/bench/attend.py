"""Attention in the server: what the wire adds, what resident K/V and chosen blocks save.

Expected: QUERY (M=1, H=8, N=2048, D=64) within 1.3 times the bare MLX computation in this process
plus 150 us; one STORE and 10 QUERYs at least twice as fast as 10 QUERYBATCHes, each QUERY as small
for any prefix; at N=65,536 a query of 8 blocks of 64 at least 10 times as fast as a dense one, and
100 of 100 planted needles found. All over loopback on one connection, contestants in turns. A
query's way there and back is six wake-ups of threads, which wait for a CPU where others run: the
quiet tenth of the rounds (10th percentile) is given beside the median.

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=$(python -m pion_vllm_mlx.blas) python -m evals.bench attend
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from evals.findings import Bar, Findings, Table
from evals.needles import found_by, plant_needles
from evals.rounds import interleave, medians, ratio_of
from evals.serving import Caller, local_server

F32: TypeAlias = NDArray[np.float32]

HEADS, TOKENS, DIM = 8, 2048, 64
RATIO, MARGIN = 1.3, 150e-6
REUSE = 2.0
# The long prefix: grouped heads as small models have them, needles of a short sentence's length.
LONG_TOKENS, LONG_HEADS, LONG_KV_HEADS = 65_536, 8, 2
BLOCK, BLOCKS = 64, 8
SPARSE_RATIO = 10.0
NEEDLES = 100


def run(rounds: int = 100) -> Findings:
    """Seconds of each contestant, the ratios with their bars, bytes sent, needles found."""
    with local_server() as server:
        wire = _Wire(server.port)
        return _findings(
            {
                "rounds": rounds,
                "query": _compare_query(wire, rounds),
                "reuse": _compare_reuse(wire, max(rounds // 10, 3)),
                "query_bytes": _count_bytes(wire),
                "blocks": _compare_blocks(wire, max(rounds // 4, 3)),
            }
        )


class _Wire(Caller):
    """The commands that are measured, on one connection."""

    def store(self, sid: str, k: F32, v: F32) -> None:
        self("ATTEND.PREFIX.STORE", sid, 0, *k.shape, _blob(k), _blob(v))

    def answer(self, *words: Any) -> F32:
        return np.frombuffer(self(*words), np.float32)


def _compare_query(wire: _Wire, rounds: int) -> dict[str, Any]:
    k, v, q = _normal(1, HEADS, TOKENS, DIM), _normal(2, HEADS, TOKENS, DIM), _normal(3, HEADS, DIM)
    wire.store("bench", k, v)
    held = [mx.array(part)[None] for part in (q[:, None], k, v)]
    mx.eval(held)

    def bare() -> mx.array:
        out = mx.fast.scaled_dot_product_attention(*held, scale=DIM**-0.5)
        mx.eval(out)
        return out

    words = _query("bench", q)
    difference = float(np.max(np.abs(wire.answer(*words) - np.array(bare()).reshape(-1))))
    if difference > 1e-5:
        raise RuntimeError(f"the two attentions differ by {difference}")
    seconds = interleave(
        {"bare MLX": bare, "QUERY": lambda: wire(*words), "PING": lambda: wire("PING")},
        rounds,
    )
    allowed = [RATIO * bare_seconds + MARGIN for bare_seconds in seconds["bare MLX"]]
    quiet = _quiet(seconds)
    return {
        "seconds": seconds,
        "allowed": ratio_of(allowed, seconds["QUERY"]),
        "allowed_quiet": (RATIO * quiet["bare MLX"] + MARGIN) / quiet["QUERY"],
    }


def _compare_reuse(wire: _Wire, rounds: int) -> dict[str, Any]:
    k, v, q = _normal(1, HEADS, TOKENS, DIM), _normal(2, HEADS, TOKENS, DIM), _normal(3, HEADS, DIM)
    one_shot = "ATTEND.QUERYBATCH", HEADS, TOKENS, DIM, TOKENS, _blob(q), _blob(k), _blob(v)

    def resident() -> None:
        wire.store("reuse", k, v)
        for _ in range(10):
            wire(*_query("reuse", q))

    def resent() -> None:
        for _ in range(10):
            wire(*one_shot)

    seconds = interleave({"STORE + 10 QUERY": resident, "10 QUERYBATCH": resent}, rounds)
    return {
        "seconds": seconds,
        "gain": ratio_of(seconds["10 QUERYBATCH"], seconds["STORE + 10 QUERY"]),
    }


def _count_bytes(wire: _Wire) -> dict[int, int]:
    """Bytes of a QUERY's words by prefix length: the same, as Q is all there is to send."""
    q = _normal(3, HEADS, DIM)
    sizes = {}
    for tokens in (256, TOKENS, 8192):
        k = _normal(1, HEADS, tokens, DIM)
        wire.store("bytes", k, k)
        words = _query("bytes", q)
        wire(*words)
        sizes[tokens] = sum(
            len(word if isinstance(word, memoryview) else str(word)) for word in words
        )
    return sizes


def _compare_blocks(wire: _Wire, rounds: int) -> dict[str, Any]:
    k, v = (_normal(seed, LONG_KV_HEADS, LONG_TOKENS, DIM) for seed in (1, 2))
    queries, answers = plant_needles(k, v, NEEDLES, LONG_HEADS)
    wire.store("long", k, v)
    head_map = bytes(h // (LONG_HEADS // LONG_KV_HEADS) for h in range(LONG_HEADS))

    def sparse(q: F32) -> F32:
        sizes = LONG_HEADS, DIM, BLOCK, BLOCKS, LONG_KV_HEADS
        return wire.answer("ATTEND.PREFIX.QUERY_SPARSE_AUTO", "long", 0, *sizes, _blob(q), head_map)

    def dense(q: F32) -> F32:
        sizes = LONG_HEADS, DIM, 0, LONG_KV_HEADS
        blobs = _blob(q), b"", b"", head_map
        return wire.answer("ATTEND.PREFIX.QUERY_FUSED", "long", 0, *sizes, *blobs)

    found = sum(found_by(sparse(q), answer) for q, answer in zip(queries, answers, strict=True))
    seconds = interleave(
        {"dense": lambda: dense(queries[0]), "blocks": lambda: sparse(queries[0])}, rounds
    )
    gain = ratio_of(seconds["dense"], seconds["blocks"])
    return {"seconds": seconds, "gain": gain, "needles_found": found}


def _findings(figures: Mapping[str, Any]) -> Findings:
    query, reuse, blocks = (figures[name] for name in ("query", "reuse", "blocks"))
    sizes = figures["query_bytes"]
    rows = [
        (f"{what}: {who}", f"{value * 1e3:,.3f} ms", f"{quiet[who] * 1e3:,.3f} ms")
        for what, seconds in (
            (f"H={HEADS}, N={TOKENS}, D={DIM}", query["seconds"]),
            ("K and V kept or sent", reuse["seconds"]),
            (f"N={LONG_TOKENS}, {BLOCKS} blocks of {BLOCK}", blocks["seconds"]),
        )
        for quiet in [_quiet(seconds)]
        for who, value in medians(seconds).items()
    ]
    ratios = [
        (f"{RATIO} bare MLX + {MARGIN * 1e6:.0f} us / QUERY", query["allowed"]),
        ("10 QUERYBATCH / STORE + 10 QUERY", reuse["gain"]),
        (f"dense / {BLOCKS} blocks of {BLOCK}", blocks["gain"]),
    ]
    tables = [
        Table("Over loopback, one connection", ("contestant", "median", "quiet tenth"), rows),
        Table(
            "Ratios, median of the rounds' own",
            ("ratio", "median", "95%"),
            [
                (name, f"{one['ratio']:.2f}x", f"{one['low']:.2f} to {one['high']:.2f}")
                for name, one in ratios
            ],
            "Bytes of a QUERY by prefix length: "
            + ", ".join(f"{tokens:,}: {count:,}" for tokens, count in sizes.items())
            + f". Needles found: {blocks['needles_found']} of {NEEDLES}.",
        ),
    ]
    wanted = (1.0, REUSE, SPARSE_RATIO)
    bars = [
        Bar(name, one["high"], least, decides=False)
        for (name, one), least in zip(ratios, wanted, strict=True)
    ]
    bars += [
        Bar(f"{ratios[0][0]}, quiet tenth", query["allowed_quiet"], 1.0, decides=False),
        Bar("bytes of a QUERY, least / most", min(sizes.values()) / max(sizes.values()), 1.0),
        Bar(f"needles found of {NEEDLES}", blocks["needles_found"], NEEDLES),
    ]
    return Findings(figures, tables, bars=bars)


def _quiet(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """The 10th percentile of every contestant's seconds."""
    return {name: float(np.percentile(values, 10)) for name, values in seconds.items()}


def _query(sid: str, q: F32) -> tuple[Any, ...]:
    return "ATTEND.PREFIX.QUERY", sid, 0, HEADS, DIM, TOKENS, _blob(q)


def _normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _blob(array: F32) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")
