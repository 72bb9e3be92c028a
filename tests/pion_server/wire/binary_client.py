"""One raw connection to the binary lane, for tests."""

from __future__ import annotations

import socket
import struct

import numpy as np
from numpy.typing import NDArray

PING, AUTH, QUERY_FUSED = 0xFF, 0x37, 0x24
OK, MISS, ERROR, COLDMISS = range(4)


def pack(command: int, body: bytes = b"") -> bytes:
    """A request frame."""
    return b"\x5e\xca" + struct.pack("<BI", command, len(body)) + body


def fused_body(
    sid: bytes,
    layer: int,
    q: NDArray[np.float32],
    sk: NDArray[np.float32],
    sv: NDArray[np.float32],
    head_map: bytes,
    window: int | None = None,
) -> bytes:
    """The body of 0x24, q [H_q][M][D], sk and sv [H_kv][S][D]."""
    heads, rows, dim = q.shape
    sizes = struct.pack("<HHHHII", layer, heads, dim, sk.shape[0], rows, sk.shape[1])
    blobs = q.tobytes() + sk.tobytes() + sv.tobytes() + head_map
    tail = b"" if window is None else struct.pack("<I", window)
    return struct.pack("<H", len(sid)) + sid + sizes + blobs + tail


class BinaryClient:
    """`call` sends one frame and reads its reply as (status, body)."""

    def __init__(self, host: str, port: int, timeout: float = 60.0) -> None:
        self.socket = socket.create_connection((host, port), timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, command: int, body: bytes = b"") -> tuple[int, bytes]:
        self.socket.sendall(pack(command, body))
        return self.read()

    def read(self) -> tuple[int, bytes]:
        magic, status, length = struct.unpack("<HBI", self._exactly(7))
        assert magic == 0xCA5E
        return status, self._exactly(length)

    def at_end(self) -> bool:
        """Whether the server has closed its side and nothing more is to be read."""
        try:
            return self.socket.recv(1, socket.MSG_PEEK) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, n: int) -> bytes:
        data = bytearray()
        while len(data) < n:
            piece = self.socket.recv(min(n - len(data), 1 << 20))
            if not piece:
                raise EOFError(f"closed with {n - len(data)} of {n} bytes missing")
            data += piece
        return bytes(data)
