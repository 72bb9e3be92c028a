"""Very many small records: PING while they are saved, and for a second after.

Expected: no PING during KV.PREFIX.SAVE above 20 ms on a quiet machine. 10,000 prefixes of 10
layers, 16 tokens and 16 fp16 values a side are 200,000 records of half a kilobyte: the time goes
into bookkeeping, which the interpreter does in one thread at a time. Compare PING at rest, which
says what the machine adds. PION_BENCH_PREFIXES sets their number.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.bench._plain_client import PlainClient, request
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.transport import Command, Patience
from pion_vllm_mlx.transport.resp import RespConnection

PREFIXES = int(os.environ.get("PION_BENCH_PREFIXES", "10000"))
LAYERS, TOKENS, DIM = 10, 16, 16
SAVES = 2
AT_REST_SECONDS, AFTER_SECONDS = 5.0, 1.0
_AT_ONCE = 200
_PATIENCE = Patience(first_byte=120, stall=120)
_PING = request("PING")


def run() -> Mapping[str, Any]:
    """Milliseconds: quantiles of PING at rest and around each SAVE, and the SAVEs' seconds."""
    flags = ("--no-auto-save", "--vstore-sessions", str(2 * PREFIXES))
    result: dict[str, Any] = {"records": PREFIXES * LAYERS * 2}
    with (
        tempfile.TemporaryDirectory(prefix="pion-bench-") as name,
        LocalServer(Path(name) / "data", Path(name) / "server.log", flags) as server,
    ):
        _store(server)
        result["at rest"] = _quantiles(_pings(server, _for_seconds(AT_REST_SECONDS)))
        result["SAVE"] = [_save(server) for _ in range(SAVES)]
    print(f"{result['records']} records")
    for title, found in (("at rest", result["at rest"]), *(("SAVE", f) for f in result["SAVE"])):
        figures = "  ".join(f"{key} {value:.3f}" for key, value in found.items())
        print(f"{'PING, ' + title:<16}{figures} ms")
    return result


def _store(server: LocalServer) -> None:
    connection = RespConnection("127.0.0.1", server.port, deadline=time.monotonic() + 5)
    blob = os.urandom(TOKENS * DIM * 2)
    for first in range(0, PREFIXES, _AT_ONCE):
        commands = []
        for number in range(first, min(first + _AT_ONCE, PREFIXES)):
            commands.append(Command.of("KV.PREFIX.REGISTER", f"n{number}", DIM, "fp16"))
            for layer in range(LAYERS):
                for side in ("_pk", "_pv"):
                    words = (f"n{number}{side}", layer, 0, TOKENS, blob, "FMT", "F16")
                    commands.append(Command.of("V.STOREBATCH", *words))
        if set(connection.exchange(commands, _PATIENCE)) != {"OK"}:
            raise RuntimeError(f"prefixes from {first} on were not stored")
    connection.close()


def _for_seconds(seconds: float) -> threading.Event:
    over = threading.Event()
    threading.Timer(seconds, over.set).start()
    return over


def _pings(server: LocalServer, over: threading.Event) -> list[float]:
    client = PlainClient(server.port)
    seconds = []
    while not over.is_set():
        seconds.append(client.seconds(_PING))
    client.close()
    return seconds


def _save(server: LocalServer) -> Mapping[str, float]:
    over = threading.Event()
    took: list[float] = []

    def save() -> None:
        client = PlainClient(server.port)
        took.append(client.seconds(request("KV.PREFIX.SAVE")))
        client.close()
        # What a SAVE leaves behind may be cleared away after its answer.
        time.sleep(AFTER_SECONDS)
        over.set()

    thread = threading.Thread(target=save)
    thread.start()
    pings = _pings(server, over)
    thread.join()
    return {"save": took[0] * 1e3, **_quantiles(pings)}


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    found = {f"p{share:g}": ordered[int(len(ordered) * share / 100)] for share in (50, 99, 99.9)}
    return {key: value * 1e3 for key, value in (found | {"max": ordered[-1]}).items()}
