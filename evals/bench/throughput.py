"""Bytes a second at 1, 8 and 32 MB, beside redis-server and Valkey on the same machine.

One connection over loopback, in turns. Reading: V.FETCH … BATCH … FMT PACKED into memory that is
reused, against redis-py's GET of one value of the same bytes. Writing, acknowledged: V.STOREBATCH,
which is in a checksummed log then, against SET, which is in memory. A server that is not installed
is left out.

Expected: reading at least twice redis-py's GET from 8 MB on, which is what prefixes weigh; below,
the layers' own headers cost more than one value does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from evals.findings import NOT_MEASURED, Bar, Findings, Plot, Table
from evals.rounds import interleave, medians, ratio_of
from evals.serving import local_server, redis_server
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.transport import Command, Patience
from pion_vllm_mlx.transport.resp import RespConnection

MEGABYTES: Final = (1, 8, 32)
#: What a prefix weighs at least, for the bar.
PREFIX_MB: Final = 8
ROUNDS: Final = 11
PION: Final = "pion-server"
PEERS: Final = {"redis-server": "redis-server", "valkey-server": "valkey-server"}
_LAYERS, _DIM = 8, 256
_PATIENCE = Patience(first_byte=30, stall=30)


def run(megabytes: tuple[int, ...] = MEGABYTES, rounds: int = ROUNDS) -> Findings:
    """GB/s of every server, size and direction."""
    seconds: dict[str, dict[int, dict[str, list[float]]]] = {"read": {}, "write": {}}
    with tempfile.TemporaryDirectory(prefix="pion-bench-") as name, ExitStack() as stack:
        server = stack.enter_context(local_server())
        ports = {
            peer: stack.enter_context(redis_server(Path(name), program))
            for peer, program in PEERS.items()
        }
        versions = {peer: _version_at(port) for peer, port in ports.items() if port is not None}
        for size in megabytes:
            reads, writes = _contestants(server, ports, size)
            seconds["write"][size] = interleave(writes, rounds)
            seconds["read"][size] = interleave(reads, rounds)
            for direction, by_size in seconds.items():
                rates = {who: _rate(size, s) for who, s in medians(by_size[size]).items()}
                told = ", ".join(f"{who} {rate:.2f} GB/s" for who, rate in rates.items())
                print(f"{direction} {size:>3} MB: {told}", flush=True)
    return _findings(seconds, versions)


def _version_at(port: int) -> str:
    """Of a Redis, or of a Valkey, which tells the Redis it stands in for as well."""
    import redis

    found: Any = redis.Redis(port=port).info("server")
    return str(found.get("valkey_version", found["redis_version"]))


def _rate(megabytes: int, seconds: float) -> float:
    return megabytes * 1e6 / seconds / 1e9


def _contestants(
    server: LocalServer, ports: Mapping[str, int | None], megabytes: int
) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """What reads, and what writes, `megabytes` of random rows. All of them hold the same."""
    import redis

    row_bytes = 4 * _DIM
    rows = megabytes * 10**6 // (_LAYERS * row_bytes)
    data = np.random.default_rng(megabytes).standard_normal((_LAYERS, rows, _DIM), np.float32)
    whole = data.tobytes()
    connection = RespConnection("127.0.0.1", server.port, deadline=time.monotonic() + 5)
    sid = f"size{megabytes}_pk"
    connection.exchange([Command.of("V.CREATE", sid, _DIM, "VQUANT", "fp32")], _PATIENCE)
    stores = [
        Command.of("V.STOREBATCH", sid, layer, 0, rows, memoryview(data[layer]).cast("B"))
        for layer in range(_LAYERS)
    ]

    def store() -> None:
        if connection.exchange(stores, _PATIENCE) != ["OK"] * _LAYERS:
            raise RuntimeError("the server did not store the rows")

    store()
    memory = np.empty((_LAYERS, rows * row_bytes), np.uint8)
    words = ("V.FETCH", sid, "BATCH", 0, rows, _LAYERS, "FMT", "PACKED")
    fetch = Command(words, place=lambda layer, size: memoryview(memory[layer])[:size])

    def read() -> None:
        connection.exchange([fetch], _PATIENCE)

    read()
    if memory.tobytes() != whole:
        raise RuntimeError("what was fetched is not what was stored")
    reads: dict[str, Callable[[], object]] = {PION: read}
    writes: dict[str, Callable[[], object]] = {PION: store}
    for peer, port in ports.items():
        if port is not None:
            client: Any = redis.Redis(port=port)
            client.set("value", whole)
            reads[peer] = partial(client.get, "value")
            writes[peer] = partial(client.set, "value", whole)
    return reads, writes


def _findings(
    seconds: Mapping[str, Mapping[int, Mapping[str, list[float]]]], versions: Mapping[str, str]
) -> Findings:
    rows: list[tuple[str, str, str, str, str]] = []
    figures: dict[str, Any] = {}
    slowest: dict[str, float] = {}
    for direction, by_size in seconds.items():
        for size, by_server in by_size.items():
            middle = medians(by_server)
            for who, value in middle.items():
                told = "-"
                if who != PION:
                    ratio = ratio_of(by_server[who], by_server[PION])
                    figures[f"{direction} {size} MB, pion / {who}"] = ratio
                    told = f"{ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"
                    if size >= PREFIX_MB or len(by_size) == 1:
                        slowest[direction] = min(slowest.get(direction, 99.0), ratio["high"])
                rows.append((direction, f"{size} MB", who, f"{_rate(size, value):.2f} GB/s", told))
    peers = [f"{peer} {number}. " for peer, number in versions.items()]
    peers += [
        f"{peer}: {NOT_MEASURED}, it is not installed here. "
        for peer in PEERS
        if peer not in versions
    ]
    measured = {who for _, _, who, _, _ in rows}
    series = {
        f"{who}, {direction}": [
            (size, _rate(size, medians(by_server)[who])) for size, by_server in by_size.items()
        ]
        for direction, by_size in seconds.items()
        for who in sorted(measured)
    }
    return Findings(
        figures={"seconds": {k: {str(n): v for n, v in s.items()} for k, s in seconds.items()}}
        | {"ratios": figures, "peers": dict(versions)},
        tables=[
            Table(
                "Throughput of one connection over loopback",
                ("direction", "value", "server", "rate", "pion-server against it (95%)"),
                rows,
                "".join(peers),
            )
        ],
        plots=[Plot("rates", "Throughput by size", "megabytes", "GB/s", series)],
        bars=[
            # It holds where the 95% interval of the ratio reaches it.
            Bar("pion / redis-py GET from 8 MB on", slowest.get("read"), 2.0, decides=False),
        ],
    )
