"""mlx_lm.server as it is and ours, each a process of its own with a real BLAS."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

from pion_vllm_mlx.blas import child_environment

_START: Final = 300.0


class AgentServer:
    """A server on a free port, from `with` to the end of its block. `log`: what it says."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = command
        self._log = log
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it and wait until it says that it is well."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *self._command, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(),
            )
        deadline = time.monotonic() + _START
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._is_well():
                return
            time.sleep(0.1)
        said = self._log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the server did not start; it said:\n{said}")

    def kill(self) -> None:
        """SIGKILL, as by a crash of the machine: to it and to the pion-server it has started."""
        processes = self.processes()
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, 10)
        self._process.wait()

    def processes(self) -> list[psutil.Process]:
        """Its process and those it has started."""
        try:
            one = psutil.Process(self._process.pid)
            return [one, *one.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def resident_bytes(self) -> int:
        """Memory of its own process."""
        return int(self.processes()[0].memory_info().rss)

    def wait_until_written(self) -> None:
        """Wait until everything is given to the pion-server; for ours only."""
        while self._get("/v1/pion/stats")["gauges"]["tier_bytes_waiting"]:
            time.sleep(0.05)

    def _is_well(self) -> bool:
        try:
            return bool(self._get("/health"))
        except (OSError, http.client.HTTPException):
            return False

    def _get(self, path: str) -> Any:
        """The JSON of an answer; None unless it is a success."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return json.loads(response.read()) if response.status == 200 else None
        finally:
            connection.close()


def stock_server(model: str, log: Path) -> AgentServer:
    """mlx_lm.server; it loads its model with the first request."""
    return AgentServer(["-m", "mlx_lm", "server", "--model", model], log)


def our_server(model: str, log: Path, *flags: str) -> AgentServer:
    """``pion-vllm-mlx serve``."""
    command = ["-m", "pion_vllm_mlx.cli", "serve", "--model", model]
    return AgentServer([*command, *flags], log)
