"""GET and SET of LMCache's chunk sizes, beside redis-server, by the same client.

One connection over loopback, in turns, into memory that is reused. Ours has a SET in a checksummed
log when it answers, Redis in memory.

Expected: GET not slower than Redis' from 8 MB on; SET is what a copy into the log's file costs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from evals.findings import NOT_MEASURED, Bar, Findings, Table
from evals.rounds import interleave, medians, ratio_of
from evals.serving import local_server, redis_server
from pion_vllm_mlx.transport import Command, Patience
from pion_vllm_mlx.transport.resp import RespConnection

MEGABYTES: Final = (1, 8, 32)
ROUNDS: Final = 11
#: Keys written in turn, so that a SET is seldom the one before.
KEYS: Final = 3
_PATIENCE = Patience(first_byte=30, stall=30)


def run(megabytes: tuple[int, ...] = MEGABYTES, rounds: int = ROUNDS) -> Findings:
    """GB/s of both servers, and the ratio of their times."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="pion-bench-") as name,
        local_server() as server,
        redis_server(Path(name)) as redis,
    ):
        ports = {"pion-server": server.port} | ({} if redis is None else {"redis-server": redis})
        for size in megabytes:
            connections = {who: _connect(port) for who, port in ports.items()}
            blob = np.random.default_rng(size).bytes(size * 10**6)
            for direction, make in (("SET", _setter), ("GET", _getter)):
                calls = {who: make(one, blob) for who, one in connections.items()}
                seconds = interleave(calls, rounds)
                rates = {w: f"{len(blob) / s / 1e9:.2f} GB/s" for w, s in medians(seconds).items()}
                told = NOT_MEASURED
                if redis is not None:
                    ratio = ratio_of(seconds["redis-server"], seconds["pion-server"])
                    figures[f"{direction} {size} MB, pion / redis"] = ratio
                    told = f"{ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"
                cells = (rates.get(who, NOT_MEASURED) for who in ("pion-server", "redis-server"))
                rows.append((direction, f"{size} MB", *cells, told))
                print(*rows[-1], flush=True)
    large = [f["high"] for n, f in figures.items() if n.startswith("GET") and n[4:6] != "1 "]
    return Findings(
        figures=figures,
        tables=[
            Table(
                "The keyspace, one connection over loopback",
                ("command", "value", "pion-server", "redis-server", "pion against it (95%)"),
                rows,
            )
        ],
        bars=[
            Bar("pion / redis GET from 8 MB on", min(large, default=None), 1.0, decides=False),
        ],
    )


def _connect(port: int) -> RespConnection:
    return RespConnection("127.0.0.1", port, deadline=time.monotonic() + 5)


def _setter(connection: RespConnection, blob: bytes) -> Callable[[], object]:
    turn = [0]

    def write() -> None:
        turn[0] += 1
        key = f"chunk{turn[0] % KEYS}"
        if connection.exchange([Command.of("SET", key, blob)], _PATIENCE) != ["OK"]:
            raise RuntimeError("the server did not store the value")

    return write


def _getter(connection: RespConnection, blob: bytes) -> Callable[[], object]:
    memory = np.empty(len(blob), np.uint8)
    get = Command.of("GET", "chunk1", place=lambda index, size: memory.data[:size])

    def read() -> None:
        connection.exchange([get], _PATIENCE)

    read()
    if memory.tobytes() != blob:
        raise RuntimeError("what was read is not what was stored")
    return read
