"""The server an eval runs against: one of its own, or one that is there."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pion_vllm_mlx.blas import child_environment
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.transport import Command, Patience, ServerError
from pion_vllm_mlx.transport.resp import RespConnection

#: As the design starts it. What of this is a default here is accepted all the same.
SERVER_FLAGS = ("--kvcache", "--metal-attention", "-w", "1")


@contextmanager
def local_server(*flags: str) -> Iterator[LocalServer]:
    """A fresh server on a free port; gone with its data at the end of the block.

    Its attention engine has a real BLAS, however this process came by its own.
    """
    with tempfile.TemporaryDirectory(prefix="pion-eval-") as name:
        folder = Path(name)
        with LocalServer(
            folder / "data", folder / "server.log", flags, child_environment()
        ) as server:
            yield server


class Caller:
    """One connection for single commands; error replies are raised. Closed with its object."""

    def __init__(self, port: int) -> None:
        self._connection = RespConnection("127.0.0.1", port, deadline=time.monotonic() + 5)

    def __call__(self, *words: Any) -> Any:
        patience = Patience(first_byte=120, stall=60)
        (reply,) = self._connection.exchange([Command(words)], patience)
        if isinstance(reply, ServerError):
            raise reply
        return reply


@contextmanager
def server_port(port: int | None, *flags: str) -> Iterator[int]:
    """`port` itself, or that of a server of one's own."""
    if port is not None:
        yield port
        return
    with local_server(*flags) as server:
        yield server.port


def run_name() -> str:
    """A name no other run has: on a server that is not ours, its prefixes are ours."""
    return f"eval-{os.urandom(8).hex()}"


@contextmanager
def redis_server(folder: Path, program: str = "redis-server") -> Iterator[int | None]:
    """The port of a Redis (or valkey-server) that keeps nothing; None where none is installed."""
    found = shutil.which(program)
    if found is None:
        print(f"no {program} installed: left out")
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([found, *flags], stdout=subprocess.DEVNULL)
    try:
        _wait_for_port(port)
        yield port
    finally:
        process.kill()
        process.wait()


def _wait_for_port(port: int) -> None:
    ends = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.02)
        else:
            return
