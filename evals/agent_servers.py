"""mlx_lm.server as it is and ours, each a process of its own with a real BLAS."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from evals.agent_session import ask
from pion_vllm_mlx.blas import child_environment

_START: Final = 300.0
#: What a server is asked first, so that its model is loaded and no measured request waits for it.
_WARM_UP: Final = ({"role": "user", "content": "?"},)


@contextmanager
def stock_server(model: str, log: Path) -> Iterator[int]:
    """mlx_lm.server; its port."""
    command = ["-m", "mlx_lm", "server", "--model", model]
    with _running(command, log) as port:
        yield port


@contextmanager
def our_server(model: str, log: Path, *flags: str) -> Iterator[int]:
    """``pion-vllm-mlx serve``; its port. It is killed at the end, as by a crash."""
    command = ["-m", "pion_vllm_mlx.cli", "serve", "--model", model]
    with _running([*command, *flags], log) as port:
        yield port


@contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(),
        )
    try:
        _await(process, port, log)
        ask(port, _WARM_UP)
        yield port
    finally:
        process.kill()
        process.wait()


def _await(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    said = log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"the server did not start; it said:\n{said}")


def wait_until_written(port: int) -> None:
    """Wait until our server has given everything to its pion-server."""
    import json

    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/v1/pion/stats")
        gauges = json.loads(connection.getresponse().read())["gauges"]
        connection.close()
        if not gauges["tier_bytes_waiting"]:
            return
        time.sleep(0.05)
