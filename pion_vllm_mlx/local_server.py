"""A pion-server of one's own: a child process on a free port, for demos and measurements."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pion_vllm_mlx.late_signals import signals_later
from pion_vllm_mlx.transport import Argument, Command, Patience, Reply, ServerError
from pion_vllm_mlx.transport.resp import RespConnection

# Whole, up to the space behind the port: half of a number must not pass for one.
_READY = re.compile(r"pion-server ready on \S+:(\d+) ")


class ServerDidNotStart(RuntimeError):
    """The child ended or stayed silent; the message carries the end of its output."""


class LocalServer:
    """Starts on entry, is gone on exit. `kill` and `start` in between keep port and data.

    directory: the data directory, created by the server.
    log: a file that receives everything the server prints.
    flags: further flags of ``pion-server``.
    env: its environment instead of this process's.
    password: what clients have to know; it is handed over in the environment, which `ps` hides.
    tied: the server ends in order when this process is killed, too.
    """

    def __init__(
        self,
        directory: Path,
        log: Path,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        port: int = 0,
        password: str | None = None,
        tied: bool = False,
    ) -> None:
        self.directory = directory
        self.log = log
        self.port = port
        self._flags = tuple(flags)
        self._env = env
        self._password = password
        self._tied = tied
        self._process: subprocess.Popen[bytes] | None = None

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

    @property
    def pid(self) -> int:
        """The running server's process id."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def start(self, patience: float = 15.0) -> float:
        """Start and wait until it is ready; returns the seconds that took.

        The first start takes any free port, a later one the same again. Raises ServerDidNotStart
        when the child ends or is not ready within `patience` seconds.
        """
        arguments = ["-p", str(self.port), "--dir", str(self.directory), *self._flags]
        started = time.monotonic()
        module = "pion_vllm_mlx.tied_server" if self._tied else "pion_server"
        secret = {} if self._password is None else {"PION_REQUIREPASS": self._password}
        try:
            with self.log.open("wb") as log, signals_later():
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-m", module, *arguments],
                    # Never written to: its end of the pipe tells a tied server that we are gone.
                    stdin=subprocess.PIPE if self._tied else subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**(self._env or os.environ), **secret},
                    # Ctrl-C in a terminal is for us, who may still have something to store.
                    start_new_session=self._tied,
                )
            while not (ready := _READY.search(self.log.read_text(errors="replace"))):
                if self._process.poll() is not None or time.monotonic() - started > patience:
                    output = self.log.read_text(errors="replace")[-2000:].strip()
                    raise ServerDidNotStart(f"pion-server did not start; it said:\n{output}")
                time.sleep(0.005)
        except BaseException:
            self.kill()
            raise
        self.port = int(ready[1])
        return time.monotonic() - started

    def command(self, *words: Argument) -> Reply:
        """One command on a connection of its own. Raises TransportError or ServerError."""
        connection = RespConnection(
            "127.0.0.1", self.port, password=self._password, deadline=time.monotonic() + 2
        )
        try:
            (reply,) = connection.exchange([Command(words)], Patience(first_byte=10))
        finally:
            connection.close()
        if isinstance(reply, ServerError):
            raise reply
        return reply

    def kill(self) -> None:
        """SIGKILL: no chance to save anything. Without effect on a server that is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait for an orderly end; SIGKILL after ten seconds."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
