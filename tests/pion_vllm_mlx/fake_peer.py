"""A loopback RESP peer for fault tests: what it answers, when, and whether at all, is scripted."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import hiredis

Words = list[bytes]
#: Bytes to send; None closes the connection; a float waits that long before what follows.
Answer = bytes | Sequence[bytes | float | None] | None


class FakePeer:
    """Listens on a free port; every request goes to `answer(words)`. A context manager."""

    def __init__(self, answer: Callable[[Words], Answer], port: int = 0) -> None:
        self.answer = answer
        self.requests: list[Words] = []
        self.connections = 0
        self.closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the listener and every connection, as a killed server would."""
        self.closing.set()
        # Closing alone does not wake a thread blocked in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def commands(self, name: str) -> list[Words]:
        """The requests so far whose first word is `name`."""
        return [words for words in self.requests if words[0] == name.encode()]

    def _accept(self) -> None:
        while not self.closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            self._sockets.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        reader = hiredis.Reader()
        try:
            while data := sock.recv(1 << 20):
                reader.feed(data)
                while (words := reader.gets()) is not False:
                    self.requests.append(words)
                    if not self._send(sock, self.answer(words)):
                        return
        except OSError:
            pass
        finally:
            sock.close()
            self.gone(sock)

    def gone(self, sock: socket.socket) -> None:
        """Called when a connection has ended."""

    def _send(self, sock: socket.socket, answer: Answer) -> bool:
        for part in [answer] if answer is None or isinstance(answer, bytes) else answer:
            if part is None:
                return False
            if isinstance(part, float):
                if self.closing.wait(part):
                    return False
            else:
                sock.sendall(part)
        return True


def bulk(data: bytes | None) -> bytes:
    """A RESP bulk string, or null."""
    return b"$-1\r\n" if data is None else b"$%d\r\n%s\r\n" % (len(data), data)


def array(*elements: bytes) -> bytes:
    """A RESP array of encoded elements."""
    return b"*%d\r\n%s" % (len(elements), b"".join(elements))


def seconds_of(work: Callable[[], object]) -> float:
    """How long `work()` takes."""
    started = time.monotonic()
    work()
    return time.monotonic() - started
