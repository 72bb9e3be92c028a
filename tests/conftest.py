"""A real server in a child process, and a raw RESP client, for every test that wants them.

def test_something(server):
    s = server("--maxmemory", "64mb")        # started on a free port, in a directory of its own
    assert s.client().call("PING") == "PONG"
    s.kill(); s.restart()                    # SIGKILL, then the same directory again
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

READY = re.compile(r"pion-server ready on (\S+):(\d+) ")
START_TIMEOUT = 30.0

# Restores of tiny models lose to prefills of a millisecond; what a test sees must not hang on that.
os.environ["PION_PROMPT_CACHE_ALWAYS_RESTORE"] = "1"


def has_input(file: Any, seconds: float = 0) -> bool:
    """Whether something can be read, the end included; `select()` takes no number above 1,023."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(seconds, 0) * 1000))


class ReplyError(Exception):
    """An error reply; `str(error)` is its text after the `-`."""


class RawClient:
    """One connection. Simple strings come back as str, bulk strings as bytes."""

    def __init__(self, host: str, port: int, timeout: float = 30.0) -> None:
        self.socket = socket.create_connection((host, port), timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = b""

    @staticmethod
    def pack(*words: str | bytes | int) -> bytes:
        """A command as an array of bulk strings."""
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        body = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
        return b"*%d\r\n%b" % (len(parts), body)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def call(self, *words: str | bytes | int) -> Any:
        """Send one command and read its reply; an error reply is raised."""
        self.send(self.pack(*words))
        reply = self.read()
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def error(self, *words: str | bytes | int) -> str:
        """Send one command that must be refused; the text of the refusal."""
        self.send(self.pack(*words))
        reply = self.read()
        assert isinstance(reply, ReplyError), f"{words!r} was not refused: {reply!r}"
        return str(reply)

    def read(self) -> Any:
        """The next reply; an error reply is returned, not raised."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        match kind:
            case b"+":
                return rest.decode()
            case b"-":
                return ReplyError(rest.decode())
            case b":":
                return int(rest)
            case b"_":
                return None
            case b"#":
                return rest == b"t"
            case b",":
                return float(rest)
            case b"$" | b"=":
                return None if rest == b"-1" else self._exactly(int(rest) + 2)[:-2]
            case b"*":
                return [self.read() for _ in range(int(rest))]
            case b"%":
                return {self.read(): self.read() for _ in range(int(rest))}
        raise AssertionError(f"no reply starts like this: {line!r}")

    def at_end(self) -> bool:
        """Whether the server has closed its side and nothing more is to be read."""
        try:
            return not self._data and self.socket.recv(1, socket.MSG_PEEK) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()

    def _line(self) -> bytes:
        while b"\r\n" not in self._data:
            self._more(65536)
        line, _, self._data = self._data.partition(b"\r\n")
        return line

    def _exactly(self, n: int) -> bytes:
        pieces, missing = [self._data[:n]], n - len(self._data[:n])
        self._data = self._data[n:]
        while missing:
            piece = self.socket.recv(min(missing, 1 << 20))
            if not piece:
                raise EOFError(f"closed with {missing} of {n} bytes missing")
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def _more(self, n: int) -> None:
        piece = self.socket.recv(n)
        if not piece:
            raise EOFError(f"closed inside a reply; read so far {self._data[:80]!r}")
        self._data += piece


class ServerProcess:
    """A `pion-server` child. `extra` is a Python file run in it before it starts."""

    def __init__(self, directory: Path, flags: tuple[str, ...], extra: Path | None) -> None:
        self.directory = directory
        self.flags = flags
        self.extra = extra
        self.host = "127.0.0.1"
        self.port = 0
        self.errors = directory.with_name(directory.name + ".stderr")
        self._clients: list[RawClient] = []
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Start (again on the same port), and wait for the ready line."""
        launch = ["-m", "pion_server"]
        if self.extra is not None:
            code = "import runpy, sys; runpy.run_path(sys.argv.pop(1)); runpy.run_module("
            launch = ["-c", code + "'pion_server', run_name='__main__')", str(self.extra)]
        flags = ["--port", str(self.port), "--dir", str(self.directory), *self.flags]
        with self.errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *launch, *flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        self.ready_line = self._read_ready_line()
        match = READY.search(self.ready_line)
        assert match is not None
        self.host, self.port = match[1], int(match[2])

    def _read_ready_line(self) -> str:
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + START_TIMEOUT
        text = b""
        while not READY.search(text.decode()) or not text.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready = has_input(stdout, left)
            piece = os.read(stdout.fileno(), 4096) if ready else b""
            if not piece:
                self.kill()
                said = self.errors.read_text()[-2000:]
                raise AssertionError(f"the server did not get ready; it said:\n{text!r}\n{said}")
            text += piece
        return text.decode()

    def client(self, timeout: float = 30.0) -> RawClient:
        """A new raw connection, closed at the end of the test."""
        client = RawClient(self.host, self.port, timeout)
        self._clients.append(client)
        return client

    def kill(self) -> None:
        """SIGKILL, as power loss for the process."""
        self._process.kill()
        self._finish(30)

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM and wait; the exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._finish(timeout)

    def wait(self, timeout: float = 30.0) -> int:
        """Wait for the server to end by itself; the exit status."""
        return self._finish(timeout)

    def restart(self) -> None:
        """Stop it, unless it is dead already, and start it on the same port and directory."""
        if self._process.returncode is None:
            self.stop()
        self.start()

    def _finish(self, timeout: float) -> int:
        code = self._process.wait(timeout)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def close(self) -> None:
        for client in self._clients:
            client.close()
        if self._process.poll() is None:
            self._process.kill()
        self._finish(30)


def _start_servers(home: Path) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start(
        *flags: str, extra: Path | None = None, directory: Path | None = None
    ) -> ServerProcess:
        data = directory or home / f"data{len(started)}"
        data.mkdir(mode=0o700, exist_ok=True)
        process = ServerProcess(data, flags, extra)
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """`server(*flags, extra=None, directory=None)` starts a server; all end with the test."""
    yield from _start_servers(tmp_path)


@pytest.fixture(scope="module")
def module_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., ServerProcess]]:
    """As `server`, for servers that all tests of a module share."""
    yield from _start_servers(tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="module")
def shared(module_server: Callable[..., ServerProcess]) -> ServerProcess:
    """One server for all tests of a module that do not stop it; with default flags."""
    return module_server()


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """A name for a prefix that no other test has."""
    from pion_vllm_mlx import PionPromptCache

    return PionPromptCache.make_namespace(request.node.nodeid)


@pytest.fixture
def no_lane_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of one process do not hand prefixes to each other: all come from the server."""
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")


@pytest.fixture
def tiny_evals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evals run on a tiny random llama and a tokenizer of letters instead of the small model."""
    pytest.importorskip("mlx.core")
    from evals.setting import Setting
    from tests.evals.letters import LetterTokenizer
    from tests.pion_vllm_mlx.tiny import tiny_llama

    model, tokenizer = tiny_llama(3, head_dim=32), LetterTokenizer(template=True)
    # Attention that looks at few tokens and weighs much: answers depend on the prefix.
    for layer in model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(layer.self_attn, name)
            linear.weight = 8 * linear.weight
    tokenizer.eos_token_ids = {1000}
    monkeypatch.setattr(Setting, "load", lambda self: (model, tokenizer))
    text = "the boat is late. " * 200
    for module in ("texts", "tables.niah"):
        monkeypatch.setattr(f"evals.{module}.read_long_text", lambda: text)
