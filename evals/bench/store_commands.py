"""Storing 8 MB against a bare receive-and-write loop; MEMBERSHIP and LOOKUP against PING.

Expected: V.STOREBATCH of 8 MB at 0.6 times the bare loop's throughput or more; MEMBERSHIP of 1,562
in 1,562 hashes within 4 times PING's p50; LOOKUP's p50 with 10,000 prefixes within 1.2 times that
with 100. Everything interleaved, over loopback, one connection each; the bare loop is a process
that receives the same bytes into a reused buffer, appends them to a file and answers `+OK`.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from evals.bench._plain_client import PlainClient, request
from evals.rounds import interleave, medians
from pion_vllm_mlx.local_server import LocalServer

DIM = 1024
BLOCK = 8 << 20
STORES = 40
HASHES = 1562
FEW, MANY = 100, 10_000
ROUNDS, CALLS, WARM_UP = 30, 200, 20

_BARE = """
import os, socket, sys
size = int(sys.argv[1])
file = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    buffer, end = memoryview(bytearray(size)), 0
    with connection:
        while True:
            got = 0
            while got < size:
                n = connection.recv_into(buffer[got:])
                if not n:
                    sys.exit()
                got += n
            end += os.pwrite(file, buffer, end)
            connection.sendall(b"+OK\\r\\n")
"""


def run() -> Mapping[str, Any]:
    """Medians in seconds and the three ratios."""
    with tempfile.TemporaryDirectory(prefix="pion-bench-") as name:
        storing = _storing(Path(name))
        asking = _asking(Path(name))
    ratios = {
        "store / bare loop (throughput)": storing["bare loop"] / storing["V.STOREBATCH fp32"],
        "MEMBERSHIP / PING (p50)": asking["MEMBERSHIP"] / asking["PING"],
        "LOOKUP 10,000 / 100 (p50)": asking[f"LOOKUP of {MANY}"] / asking[f"LOOKUP of {FEW}"],
    }
    for title, seconds in storing.items():
        print(f"{title:<32}{seconds * 1e3:>9.2f} ms{BLOCK / seconds / 1e9:>8.2f} GB/s")
    for title, seconds in asking.items():
        print(f"{title:<32}{seconds * 1e6:>9.1f} us")
    for title, ratio in ratios.items():
        print(f"{title:<32}{ratio:>9.2f}x")
    return {"seconds": storing | asking, "ratios": ratios}


def _storing(folder: Path) -> dict[str, float]:
    rows = BLOCK // (4 * DIM)
    values = np.random.default_rng(4).standard_normal((rows, DIM), dtype=np.float32).tobytes()
    server = LocalServer(folder / "storing", folder / "storing.log", ("--no-auto-save",))
    with server, _bare_loop(folder / "bare") as bare:
        client = PlainClient(server.port)
        contestants: dict[str, Callable[[], object]] = {"bare loop": lambda: bare.call(values)}
        for fmt in ("fp32", "fp16", "int8"):
            client.call(request("V.CREATE", fmt, DIM, "VQUANT", fmt))
            command = request("V.STOREBATCH", fmt, 0, 0, rows, values)
            contestants[f"V.STOREBATCH {fmt}"] = lambda data=command: client.call(data)  # type: ignore[misc]
        return medians(interleave(contestants, STORES))


@contextmanager
def _bare_loop(path: Path) -> Iterator[PlainClient]:
    command = [sys.executable, "-c", _BARE, str(BLOCK), str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield PlainClient(int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()


def _asking(folder: Path) -> dict[str, float]:
    """The p50 of each, of single calls; all clients take turns every few calls."""
    servers = {
        count: LocalServer(
            folder / f"asking{count}", folder / f"asking{count}.log", ("--vstore-sessions", "20000")
        )
        for count in (FEW, MANY)
    }
    with servers[FEW], servers[MANY]:
        clients = {count: PlainClient(server.port) for count, server in servers.items()}
        for count, client in clients.items():
            for number in range(count):
                client.call(request("KV.PREFIX.REGISTER", f"n{number}", 64, "fp16"))
        draw = random.Random(7)
        hashes = np.array([draw.getrandbits(64) for _ in range(HASHES)], "<u8")
        table = hashes.tobytes()
        blocks = ("BLOCKS", 16, HASHES, table)
        clients[FEW].call(request("KV.PREFIX.REGISTER", "table", 64, "fp16", *blocks))
        probes = hashes[draw.sample(range(HASHES), HASHES)].tobytes()
        member = request("KV.PREFIX.MEMBERSHIP", "table", HASHES, probes)
        times: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for count, client in clients.items():
                names = [f"n{draw.randrange(count)}" for _ in range(CALLS)]
                calls = [request("KV.PREFIX.LOOKUP", name) for name in names]
                times.setdefault(f"LOOKUP of {count}", []).extend(_each(client, calls))
            for title, data in (("PING", request("PING")), ("MEMBERSHIP", member)):
                times.setdefault(title, []).extend(_each(clients[FEW], [data] * CALLS))
        return {title: statistics.median(seconds) for title, seconds in times.items()}


def _each(client: PlainClient, calls: list[bytes]) -> list[float]:
    """Seconds of each call; the first few wake a server that others kept waiting."""
    return [client.seconds(call) for call in calls][WARM_UP:]
