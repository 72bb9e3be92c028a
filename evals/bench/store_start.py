"""A large store: ready again after a restart, its memory, and PING while it is saved.

Expected: with 4 GB, ready in under 2 s from the log and from the snapshot, with less than 200 MB of
anonymous memory; PING's p99 during KV.PREFIX.SAVE under 10 times its p99 at rest.

Prefixes of 64 layers, 1,024 tokens and 256 fp16 values a side: records of 512 KiB, as a client
stores them. PION_BENCH_STORE_GB says how much (default 1); needs twice that on disk. PING comes
from one connection that does nothing else. Times are of a whole new process, imports included.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evals.bench._plain_client import PlainClient, request
from evals.bench.store_memory import anonymous_mb
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.transport import Command, Patience
from pion_vllm_mlx.transport.resp import RespConnection

GIGABYTES = float(os.environ.get("PION_BENCH_STORE_GB", "1"))
LAYERS, TOKENS, DIM = 64, 1024, 256
PREFIX_BYTES = 2 * LAYERS * TOKENS * DIM * 2
STARTS = 5
PINGS_AT_REST = 5000
_PATIENCE = Patience(first_byte=120, stall=120)
_PING = request("PING")


def run() -> Mapping[str, Any]:
    """Seconds, MB and milliseconds; PING's quantiles at rest and during the SAVE."""
    prefixes = max(1, round(GIGABYTES * 1e9 / PREFIX_BYTES))
    result: dict[str, Any] = {"stored_bytes": prefixes * PREFIX_BYTES, "prefixes": prefixes}
    with tempfile.TemporaryDirectory(prefix="pion-bench-") as name:
        server = LocalServer(Path(name) / "data", Path(name) / "server.log", ("--no-auto-save",))
        with server:
            _store(server, prefixes)
            result["start from the log"] = _restarts(server)
            at_rest = _pings(server)
            during, seconds = _pings_during_save(server)
            result["save_seconds"] = seconds
            result["start from the snapshot"] = _restarts(server)
            _check(server, prefixes)
    ping = {"at rest": _quantiles(at_rest), "during SAVE": _quantiles(during)}
    result["ping_ms"] = ping
    result["ping p99 ratio"] = ping["during SAVE"]["p99"] / ping["at rest"]["p99"]
    _print(result)
    return result


def _store(server: LocalServer, prefixes: int) -> None:
    values = np.random.default_rng(3).standard_normal((TOKENS, DIM)).astype(np.float16)
    blob = values.tobytes()
    connection = RespConnection("127.0.0.1", server.port, deadline=time.monotonic() + 5)
    for number in range(prefixes):
        commands = [Command.of("KV.PREFIX.REGISTER", f"n{number}", DIM, "fp16")]
        for layer in range(LAYERS):
            for side in ("_pk", "_pv"):
                words = (f"n{number}{side}", layer, 0, TOKENS, blob, "FMT", "F16")
                commands.append(Command.of("V.STOREBATCH", *words))
        if connection.exchange(commands, _PATIENCE) != ["OK"] * len(commands):
            raise RuntimeError(f"prefix {number} was not stored")
    connection.close()


def _restarts(server: LocalServer) -> dict[str, float]:
    """Kill and start it a few times: the median seconds, and the memory of the last one."""
    seconds = []
    for _ in range(STARTS):
        server.kill()
        seconds.append(server.start())
    return {"seconds": statistics.median(seconds), "anonymous_mb": anonymous_mb(server.pid)}


def _pings(server: LocalServer) -> list[float]:
    client = PlainClient(server.port)
    seconds = [client.seconds(_PING) for _ in range(PINGS_AT_REST)]
    client.close()
    return seconds


def _pings_during_save(server: LocalServer) -> tuple[list[float], float]:
    answers: list[object] = []
    started = time.perf_counter()
    thread = threading.Thread(target=lambda: answers.append(_save(server.port)))
    client = PlainClient(server.port)
    thread.start()
    seconds = []
    while not answers:
        seconds.append(client.seconds(_PING))
    client.close()
    thread.join()
    if answers != [b"+OK\r\n"]:
        raise RuntimeError(f"SAVE answered {answers}")
    return seconds, time.perf_counter() - started


def _save(port: int) -> bytes:
    client = PlainClient(port)
    try:
        return client.call(request("KV.PREFIX.SAVE"))
    finally:
        client.close()


def _check(server: LocalServer, prefixes: int) -> None:
    info = bytes(server.command("KV.PREFIX.INFO"))  # type: ignore[arg-type]
    if b"vstore_bytes:%d\r\n" % (prefixes * PREFIX_BYTES) not in info:
        raise RuntimeError(f"rows are missing after all restarts: {info!r}")


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds, and how many there were."""
    ordered = sorted(seconds)
    found = {f"p{n}": ordered[int(len(ordered) * n / 100)] * 1e3 for n in (50, 99)}
    return found | {"max": ordered[-1] * 1e3, "count": len(ordered)}


def _print(result: Mapping[str, Any]) -> None:
    print(f"{result['stored_bytes'] / 1e9:.2f} GB in {result['prefixes']} prefixes")
    for title in ("start from the log", "start from the snapshot"):
        found = result[title]
        print(f"{title:<26}{found['seconds']:>8.2f} s{found['anonymous_mb']:>9.0f} MB RssAnon")
    print(f"{'SAVE':<26}{result['save_seconds']:>8.2f} s")
    for title, found in result["ping_ms"].items():
        quantiles = "".join(f"  {key} {found[key]:.3f} ms" for key in ("p50", "p99", "max"))
        print(f"{'PING ' + title:<26}{found['count']:>8} times{quantiles}")
    print(f"{'p99 during SAVE / at rest':<26}{result['ping p99 ratio']:>8.1f}x")
