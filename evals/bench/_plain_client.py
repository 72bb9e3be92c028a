"""The least a client can do: one prepared request, one short reply, timed."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from pion_vllm_mlx.transport import Argument


def request(*words: Argument) -> bytes:
    """A command as it goes over the wire."""
    parts = [w if isinstance(w, bytes) else str(w).encode() for w in words]
    bulks = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n%b" % (len(parts), bulks)


class PlainClient:
    """One connection; every reply is short enough to come in one piece."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, data: bytes) -> bytes:
        """Send one request and read its reply; RuntimeError for an error reply."""
        self._socket.sendall(data)
        reply = self._socket.recv(65536)
        if not reply.endswith(b"\r\n") or reply.startswith(b"-"):
            raise RuntimeError(f"{data[:60]!r} was answered {reply[:200]!r}")
        return reply

    def seconds(self, data: bytes) -> float:
        """How long one `call` takes."""
        started = time.perf_counter()
        self.call(data)
        return time.perf_counter() - started

    def caller(self, data: bytes, times: int) -> Callable[[], None]:
        """A function that calls so many times."""

        def run() -> None:
            for _ in range(times):
                self.call(data)

        return run

    def close(self) -> None:
        self._socket.close()
