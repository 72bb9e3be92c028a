"""A gigabyte of rows: the server's memory while it holds them, and its start-up on them.

Expected: anonymous memory (RssAnon) under 400 MB with 1 GiB stored, fetched and saved; ready in
under 2 s on that store, from its log after SIGKILL and from its snapshot after KV.PREFIX.SAVE.
Sixteen prefixes of 64 layers, 1,024 tokens and 256 float32 values. Needs 2 GB of disk.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.transport import Command, Patience
from pion_vllm_mlx.transport.resp import RespConnection

PREFIXES, LAYERS, TOKENS, DIM = 16, 64, 1024, 256
LAYER_BYTES = TOKENS * DIM * 4
TOTAL = PREFIXES * LAYERS * LAYER_BYTES
_PATIENCE = Patience(first_byte=60, stall=60)


def run() -> Mapping[str, Any]:
    """Memory in MB and times in seconds, step by step."""
    layer = np.random.default_rng(2).standard_normal((TOKENS, DIM), dtype=np.float32)
    memory: dict[str, float] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="pion-bench-") as name:
        server = LocalServer(Path(name) / "data", Path(name) / "server.log")
        with server:
            memory["empty"] = anonymous_mb(server.pid)
            seconds["store 1 GiB"] = _timed(lambda: _store_all(server, layer))
            memory["stored"] = anonymous_mb(server.pid)
            seconds["fetch 1 GiB"] = _timed(lambda: _fetch_all(server, layer))
            memory["fetched"] = anonymous_mb(server.pid)
            server.kill()
            seconds["start from the log"] = server.start()
            memory["started from the log"] = anonymous_mb(server.pid)
            _fetch_all(server, layer)
            seconds["save"] = _timed(lambda: server.command("KV.PREFIX.SAVE"))
            memory["saved"] = anonymous_mb(server.pid)
            server.kill()
            seconds["start from the snapshot"] = server.start()
            memory["started from the snapshot"] = anonymous_mb(server.pid)
            _fetch_all(server, layer)
    for title, figures, unit in (("anonymous memory", memory, "MB"), ("time", seconds, "s")):
        print(title)
        for step, value in figures.items():
            print(f"  {step:<28}{value:>10.2f} {unit}")
    return {"stored_bytes": TOTAL, "anonymous_mb": memory, "seconds": seconds}


def anonymous_mb(pid: int) -> float:
    """Memory that is no page cache: what the process itself allocated, RssAnon on Linux."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        # Elsewhere the nearest figure a user may read without privileges.
        return float(psutil.Process(pid).memory_info().rss / 1e6)
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024 / 1e6


def _timed(step: Any) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _store_all(server: LocalServer, layer: np.ndarray[Any, Any]) -> None:
    connection = RespConnection("127.0.0.1", server.port, deadline=time.monotonic() + 5)
    blob = memoryview(layer.data).cast("B")
    for number in range(PREFIXES):
        sid = f"bench{number}_pk"
        commands = [Command.of("V.CREATE", sid, DIM, "VQUANT", "fp32")]
        commands += [Command.of("V.STOREBATCH", sid, i, 0, TOKENS, blob) for i in range(LAYERS)]
        replies = connection.exchange(commands, _PATIENCE)
        if replies[1:] != ["OK"] * LAYERS:
            raise RuntimeError(f"the server did not store {sid}: {replies}")
    connection.close()


def _fetch_all(server: LocalServer, layer: np.ndarray[Any, Any]) -> None:
    connection = RespConnection("127.0.0.1", server.port, deadline=time.monotonic() + 5)
    memory = np.empty((LAYERS, TOKENS, DIM), np.float32)
    for number in range(PREFIXES):
        memory.fill(0)
        words = ("V.FETCH", f"bench{number}_pk", "BATCH", 0, TOKENS, LAYERS, "FMT", "PACKED")
        command = Command(words, place=lambda i, size: memoryview(memory[i].data).cast("B")[:size])
        connection.exchange([command], _PATIENCE)
        if not (memory == layer).all():
            raise RuntimeError(f"bench{number}_pk came back changed")
    connection.close()
