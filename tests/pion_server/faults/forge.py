"""Servers within milliseconds: one process that has imported everything forks each of them.

A forged server is a process of its own that runs `pion_server.__main__.main` from the flags on;
only Python's start and the imports are spared. So hundreds of crashes fit into a minute.

    forge = Forge()
    child = forge.start(["--port", "0", "--dir", path], errors)   # as subprocess.Popen
    child.kill(); child.wait(5)
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from tests.conftest import START_TIMEOUT, ServerProcess, has_input

READY = re.compile(r"pion-server ready on (\S+):(\d+) ")


class Child:
    """A forged process with as much of `subprocess.Popen` as tests need."""

    def __init__(self, forge: Forge, pid: int, stdout: BinaryIO) -> None:
        self._forge = forge
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forge.ask({"wait": self.pid, "timeout": 0})["status"]
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            self.returncode = self._forge.ask({"wait": self.pid, "timeout": timeout})["status"]
        if self.returncode is None:
            raise subprocess.TimeoutExpired("pion-server", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forge:
    """The tests' end: asks for servers, and for how they ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        root = Path(__file__).parents[3]
        command = [sys.executable, "-m", "tests.pion_server.faults.forge", str(theirs.fileno())]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                command, cwd=root, env=environment, pass_fds=[theirs.fileno()]
            )
        self._answers = self._socket.makefile("rb")

    def start(
        self, flags: list[str], errors: Path, faults: Path | None = None, **request: Any
    ) -> Child:
        """A server with these flags; stderr is appended to `errors`, `faults` is its fault plan.

        `compact_bytes`: compact in the background from so many dead bytes on; `file_size`: no file
        may become longer.
        """
        read, write = os.pipe()
        err = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        request |= {"flags": flags, "faults": str(faults) if faults else None}
        try:
            pid = self.ask(request, [write, err])["pid"]
        finally:
            os.close(write)
            os.close(err)
        return Child(self, pid, os.fdopen(read, "rb", buffering=0))

    def ask(self, request: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], fds or [])
            answer = self._answers.readline()
        if not answer:
            raise AssertionError("the forge died")
        return cast(dict[str, Any], json.loads(answer))

    def close(self) -> None:
        """End the forge; what it still runs dies with it."""
        self._answers.close()
        self._socket.close()
        self._process.wait(10)


class ForgedServer(ServerProcess):
    """As the `server` fixture's, started by a forge; `faults` is a plan for `injection.py`."""

    def __init__(
        self,
        forge: Forge,
        directory: Path,
        flags: tuple[str, ...],
        faults: Path | None,
        **request: Any,
    ) -> None:
        self._forge = forge
        self.faults = faults
        self.request = request
        self.said = ""
        super().__init__(directory, flags, None)

    def start(self) -> None:
        """Start (again on the same port), and wait for the ready line."""
        flags = ["--port", str(self.port), "--dir", str(self.directory), *self.flags]
        self._process = cast(
            Any, self._forge.start(flags, self.errors, self.faults, **self.request)
        )
        self.said = self._read_until_ready()
        match = READY.search(self.said)
        assert match is not None
        self.host, self.port = match[1], int(match[2])

    def _read_until_ready(self) -> str:
        stdout = cast(Any, self._process).stdout
        deadline = time.monotonic() + START_TIMEOUT
        text = b""
        while not (READY.search(text.decode()) and text.endswith(b"\n")):
            left = deadline - time.monotonic()
            ready = has_input(stdout, left)
            piece = os.read(stdout.fileno(), 4096) if ready else b""
            if not piece:
                self.kill()
                raise AssertionError(f"not ready: {text!r}\n{self.errors.read_text()[-2000:]}")
            text += piece
        return text.decode()


def run_flags(forge: Forge, flags: list[str], errors: Path) -> tuple[int, str, str]:
    """Run `pion-server` with flags that make it end by itself: status, stdout, new stderr."""
    before = errors.stat().st_size if errors.exists() else 0
    child = forge.start(flags, errors)
    with child.stdout:
        said = child.stdout.read().decode()
    return child.wait(30), said, errors.read_bytes()[before:].decode()


# --- the forge's own side ------------------------------------------------------------------------


def _main(fd: int) -> None:
    from pion_server.commands.dispatch import load_commands
    from pion_server.preloading import preload

    load_commands()
    preload()
    # The rest of what a server imports while it starts.
    for name in (
        "pion_server.serving",
        "encodings.idna",
        "uvloop",
        "tests.pion_server.faults.injection",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    channel = socket.socket(fileno=fd)
    ended: dict[int, int] = {}
    running: set[int] = set()
    while True:
        request, fds = _receive(channel)
        if request is None:
            break
        if "flags" in request:
            pid = os.fork()
            if pid == 0:
                channel.close()
                _become_server(request, fds)
            for passed in fds:
                os.close(passed)
            running.add(pid)
            ended.pop(pid, None)  # an earlier one's, whose number it has now
            answer: dict[str, int | None] = {"pid": pid}
        else:
            answer = {"status": _wait(request["wait"], request["timeout"], running, ended)}
        channel.sendall(json.dumps(answer).encode() + b"\n")
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    data, fds = b"", array.array("i")
    while not data.endswith(b"\n"):
        piece, passed, _, _ = socket.recv_fds(channel, 65536, 4)
        if not piece:
            return None, []
        data += piece
        fds.extend(passed)
    return json.loads(data), list(fds)


def _wait(pid: int, timeout: float, running: set[int], ended: dict[int, int]) -> int | None:
    deadline = time.monotonic() + timeout
    while pid not in ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            running.discard(pid)
            ended[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() >= deadline:
            return None
        else:
            time.sleep(0.001)
    return ended[pid]


def _become_server(request: dict[str, Any], fds: list[int]) -> NoReturn:
    status = 70
    try:
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        for passed in fds:
            os.close(passed)
        from pion_server import housekeeping
        from pion_server.__main__ import main
        from tests.pion_server.faults.injection import install

        if request["faults"] is not None:
            install(Path(request["faults"]))
        if "file_size" in request:
            limits = (request["file_size"], resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        housekeeping.COMPACT_BYTES = request.get("compact_bytes", housekeeping.COMPACT_BYTES)
        status = main(request["flags"])
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        sys.excepthook(*cast(Any, sys.exc_info()))
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
