"""The doors of a real server with trouble in front of them: one proxy a lane, descriptors included.

with Doors(server) as doors:            # a server started with `--unixsocket`
    PionPromptCache(model, port=doors.port)
    doors.fault = half                  # from now on, for what the server says
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

#: What becomes of some bytes of the server's: pieces to pass on; a number waits so many seconds,
#: None ends the connection.
Fault = Callable[[bytes], Sequence[bytes | float | None]]
_STEP = 1 << 16


def half(data: bytes) -> Sequence[bytes | float | None]:
    """Half a reply, then the end."""
    return [data[: len(data) // 2], None]


def trickle(data: bytes) -> Sequence[bytes | float | None]:
    """One kilobyte a second."""
    pieces: list[bytes | float | None] = []
    for start in range(0, len(data), 100):
        pieces += [data[start : start + 100], 0.1]
    return pieces


def silent(data: bytes) -> Sequence[bytes | float | None]:
    """Nothing, for ever."""
    return [60.0, None]


def wrong_length(data: bytes) -> Sequence[bytes | float | None]:
    """Each announced length is one too large: of bulks, and of a lent file."""
    lines = data.split(b"\r\n")
    for at, line in enumerate(lines):
        if line[:1] in (b"$", b":") and line[1:].isdigit() and int(line[1:]) > 64:
            lines[at] = line[:1] + b"%d" % (int(line[1:]) + 1)
    return [b"\r\n".join(lines)]


class Doors:
    """Proxies before the TCP port and the Unix socket of `server`, whose path it was told.

    `fault`: None, or what happens to the server's bytes on all connections. `met`: how many
    pieces of each lane it happened to.
    """

    def __init__(self, server: Any, path: Path) -> None:
        self.fault: Fault | None = None
        self.met = {"tcp": 0, "local": 0}
        self._sockets: list[socket.socket] = []
        # The server goes on listening at the socket, whatever its name is.
        behind = path.with_suffix(".behind")
        path.rename(behind)
        tcp = socket.create_server(("127.0.0.1", 0))
        local = socket.socket(socket.AF_UNIX)
        local.bind(str(path))
        local.listen()
        self.port = int(tcp.getsockname()[1])
        self._listeners = (tcp, local)
        self._listen("tcp", tcp, lambda: socket.create_connection(("127.0.0.1", server.port)))
        self._listen("local", local, lambda: _connected(behind))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for sock in (*self._listeners, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _listen(
        self, lane: str, listener: socket.socket, connect: Callable[[], socket.socket]
    ) -> None:
        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                try:
                    server = connect()
                except OSError:
                    client.close()
                    continue
                self._sockets += [client, server]
                for work in (self._pass_on, self._pass_back):
                    threading.Thread(target=work, args=(lane, client, server), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def _pass_on(self, lane: str, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(_STEP):
                server.sendall(data)
        _end(client, server)

    def _pass_back(self, lane: str, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, files = (
                    socket.recv_fds(server, _STEP, 8)[:2]
                    if lane == "local"
                    else (server.recv(_STEP), [])
                )
                if not data:
                    break
                fault = self.fault
                self.met[lane] += fault is not None
                for piece in [data] if fault is None else fault(data):
                    if piece is None:
                        raise OSError
                    if isinstance(piece, float):
                        time.sleep(piece)
                    elif files:
                        socket.send_fds(client, [piece], files)
                        files = _closed(files)
                    else:
                        client.sendall(piece)
        _end(client, server)


def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    return sock


def _closed(files: Sequence[int]) -> list[int]:
    for fd in files:
        os.close(fd)
    return []


def _end(*sockets: socket.socket) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
