"""Fetching a 24 MB prefix, against redis-py GET from a redis-server and a bare receive loop.

Expected: V.FETCH BATCH FMT PACKED at least twice redis-py's throughput for the same bytes, and
at least 0.8 times a loop that only receives. The prefix is one side of SmolLM2's K/V for 1,024
tokens in float32: 30 layers of 192 values. Everybody speaks TCP over loopback on one connection;
only we and the bare loop receive into memory that is reused, redis-py has no way to.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from evals.findings import Bar, Findings, Table
from evals.rounds import interleave, medians, ratio_of
from evals.serving import redis_server
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.transport import Command, Patience
from pion_vllm_mlx.transport.resp import RespConnection

LAYERS, TOKENS, DIM = 30, 1024, 192
LAYER_BYTES = TOKENS * DIM * 4
TOTAL = LAYERS * LAYER_BYTES
ROUNDS = 15
BARE: Final = "bare recv_into"
GET: Final = "redis-py GET, one value"
#: At least so many times the other's bytes a second.
_LEAST: Final = {BARE: 0.8, GET: 2.0}

_SOURCE = """
import socket, sys
block = bytes(range(256)) * (int(sys.argv[2]) // 256)
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    with connection:
        while connection.recv(1):
            for _ in range(int(sys.argv[1])):
                connection.sendall(block)
"""


def run(rounds: int = ROUNDS) -> Findings:
    """Seconds by way and round, and the ratios; without a redis-server that half is left out."""
    rows = np.random.default_rng(1).standard_normal((LAYERS, TOKENS, DIM), dtype=np.float32)
    with tempfile.TemporaryDirectory(prefix="pion-bench-") as name:
        folder = Path(name)
        server = LocalServer(folder / "data", folder / "server.log")
        with server, bare_source(LAYERS, LAYER_BYTES) as bare, redis_server(folder) as redis_port:
            contestants = {"pion": _fetch_with_pion(server, rows), BARE: bare}
            if redis_port is not None:
                contestants |= _redis_contestants(redis_port, rows)
            seconds = interleave(contestants, rounds)
    return _findings(seconds)


def _findings(seconds: Mapping[str, list[float]]) -> Findings:
    ratios = {way: ratio_of(seconds[way], seconds["pion"]) for way in seconds if way != "pion"}
    told = {
        way: f"{one['ratio']:.2f}x ({one['low']:.2f} to {one['high']:.2f})"
        for way, one in ratios.items()
    }
    table = Table(
        f"{TOTAL / 1e6:.0f} MB into memory that is reused, but by redis-py",
        ("way", "median", "rate", "pion / this (95%)"),
        [
            (way, f"{middle * 1e3:.1f} ms", f"{TOTAL / middle / 1e9:.2f} GB/s", told.get(way))
            for way, middle in medians(seconds).items()
        ],
    )
    # A bar holds where the interval of the ratio reaches it.
    bars = [
        Bar(f"bytes a second, pion / {way}", ratios[way]["high"], least, decides=False)
        for way, least in _LEAST.items()
        if way in ratios
    ]
    figures = {"bytes": TOTAL, "seconds": dict(seconds), "ratios": ratios}
    return Findings(figures, [table], bars=bars)


def _fetch_with_pion(server: LocalServer, rows: np.ndarray[Any, Any]) -> Any:
    connection = RespConnection("127.0.0.1", server.port, deadline=time.monotonic() + 5)
    patience = Patience(first_byte=30, stall=30)
    create = Command.of("V.CREATE", "bench_pk", DIM, "VQUANT", "fp32")
    stores = [
        Command.of("V.STOREBATCH", "bench_pk", layer, 0, TOKENS, memoryview(rows[layer]).cast("B"))
        for layer in range(LAYERS)
    ]
    replies = connection.exchange([create, *stores], patience)
    if replies[1:] != ["OK"] * LAYERS:
        raise RuntimeError(f"the server did not store the prefix: {replies}")
    memory = np.empty((LAYERS, LAYER_BYTES), np.uint8)
    words = ("V.FETCH", "bench_pk", "BATCH", 0, TOKENS, LAYERS, "FMT", "PACKED")
    fetch_command = Command(words, place=lambda layer, size: memoryview(memory[layer])[:size])

    def fetch() -> None:
        connection.exchange([fetch_command], patience)

    fetch()
    if memory.tobytes() != rows.tobytes():
        raise RuntimeError("what was fetched is not what was stored")
    return fetch


def _redis_contestants(port: int, rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    import redis

    client = redis.Redis(port=port)
    keys = [f"layer{layer}" for layer in range(LAYERS)]
    client.set("whole", rows.tobytes())
    for key, layer in zip(keys, rows, strict=True):
        client.set(key, layer.tobytes())

    def get_layers() -> None:
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(key)
        pipeline.execute()

    return {
        GET: lambda: client.get("whole"),
        "redis-py GET, 30 pipelined": get_layers,
    }


@contextmanager
def bare_source(blocks: int, block_bytes: int) -> Iterator[Callable[[], None]]:
    """A function that receives so many blocks from another process and does nothing else.

    They come over loopback TCP, into memory that is reused; block_bytes is a multiple of 256.
    """
    total = blocks * block_bytes
    command = [sys.executable, "-c", _SOURCE, str(blocks), str(block_bytes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        memory = memoryview(bytearray(total))
        with socket.create_connection(("127.0.0.1", port)) as connection:

            def receive() -> None:
                connection.sendall(b".")
                got = 0
                while got < total:
                    got += connection.recv_into(memory[got:])

            yield receive
    finally:
        process.kill()
        process.wait()
