"""Strict numerics: bytes a prefix takes in each format, and the server's attention against float64.

Expected: bytes held are those the formats promise (at rows of 1,024 mlx4g32 takes 640, fp16 2,048);
attention in the server is within 1e-5 of numpy's float64 softmax at the shapes
the design measures, cosine 1.0000.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from evals.serving import SERVER_FLAGS, Caller, local_server
from pion_server.attend import reference
from pion_vllm_mlx.local_server import LocalServer

DIM, TOKENS, LAYERS = 1024, 512, 2
VQUANTS: Final = ("fp32", "fp16", "int8", "fp8", "mlx4g32", "turbo4", "turbo3", "turbo2")
#: Heads, tokens, head dimension, queries a head.
SHAPES: Final = ((8, 2048, 64, 1), (8, 2048, 128, 1), (8, 2048, 64, 16), (4, 1024, 256, 3))
MOST_DIFFERENCE: Final = 1e-5


def run() -> Mapping[str, Any]:
    """Print both tables and return their figures; raises RuntimeError where numbers are wrong."""
    with local_server(*SERVER_FLAGS) as server:
        figures = {"memory": _measure_memory(server), "attention": _measure_attention(server)}
    worst = max(one["difference"] for one in figures["attention"].values())
    if worst > MOST_DIFFERENCE:
        raise RuntimeError(f"attention differs from float64 by {worst}")
    return figures


def _measure_memory(server: LocalServer) -> dict[str, dict[str, float]]:
    rows = np.random.default_rng(1).standard_normal((TOKENS, DIM)).astype(np.float32).tobytes()
    held: dict[str, float] = {}
    for vquant in VQUANTS:
        before = _bytes_held(server)
        server.command("KV.PREFIX.REGISTER", vquant, DIM, vquant)
        for side in ("pk", "pv"):
            for layer in range(LAYERS):
                server.command("V.STOREBATCH", f"{vquant}_{side}", layer, 0, TOKENS, rows)
        held[vquant] = (_bytes_held(server) - before) / (2 * LAYERS * TOKENS)
    figures = {
        vquant: {"row_bytes": size, "saved": held["fp16"] / size} for vquant, size in held.items()
    }
    print(f"{'format':<10}{'bytes a row':>12}{'to fp16':>9}   (rows of {DIM})")
    for vquant, one in figures.items():
        print(f"{vquant:<10}{one['row_bytes']:>12.1f}{one['saved']:>9.2f}")
    return figures


def _bytes_held(server: LocalServer) -> int:
    reply: Any = server.command("KV.PREFIX.INFO")
    lines = bytes(reply).decode().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["vstore_bytes"])


def _measure_attention(server: LocalServer) -> dict[str, dict[str, float]]:
    figures = {}
    print(f"\n{'H, N, D, M':<20}{'difference':>12}{'cosine':>10}")
    call = Caller(server.port)
    for number, (heads, tokens, dim, queries) in enumerate(SHAPES):
        random = np.random.default_rng(number)
        k, v = (random.standard_normal((heads, tokens, dim), np.float32) for _ in "kv")
        q = random.standard_normal((heads, queries, dim), np.float32)
        sid = f"strict{number}"
        blobs = k.tobytes(), v.tobytes()
        call("ATTEND.PREFIX.STORE", sid, 0, heads, tokens, dim, *blobs)
        words = ("ATTEND.PREFIX.QUERY", sid, 0, heads, dim, tokens, q.tobytes())
        reply = np.frombuffer(call(*words), np.float32)
        out = reply[: q.size].reshape(q.shape)
        wanted, _ = reference.query(q, k, v)
        name = f"{heads}, {tokens}, {dim}, {queries}"
        figures[name] = {
            "difference": float(np.abs(out - wanted).max()),
            "cosine": float(reference.cosine(out, wanted)),
        }
        one = figures[name]
        print(f"{name:<20}{one['difference']:>12.1e}{one['cosine']:>10.6f}")
    return figures
