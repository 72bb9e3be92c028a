"""Replies waiting for a socket: small ones joined, large ones by reference, payloads still unmade.

Only bytes that lie in memory count in `held`. A queued `Payload` is a reference: its bytes are
produced, or sent from their file, piece by piece as the socket takes them.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Iterator

from pion_server.payload import Chunk, FileSpan, Payload
from pion_server.wire.replies import Attached, Outgoing

# What a queued object costs beside its bytes; roughly, and rather too much.
_OVERHEAD = 256
_JOIN_BELOW = 16 * 1024
_JOINED_LIMIT = 256 * 1024
_SPAN_STEP = 4 * 1024 * 1024
_MORE: int = getattr(socket, "MSG_MORE", 0)


class BrokenPayload(Exception):
    """A payload failed or lied about its length: the frame cannot be completed."""


class Outbox:
    """The reply queue of one connection. `send` never blocks."""

    __slots__ = ("_chunk", "_joined", "_left", "_offset", "_payload", "_queue", "_spool", "held")

    def __init__(self, spool: memoryview) -> None:
        """`spool` is scratch space for files that cannot be sent directly; may be shared."""
        self._queue: deque[Outgoing] = deque()
        self._joined = bytearray()
        self._payload: Iterator[Chunk] | None = None
        self._left = 0
        self._chunk: Chunk | Attached | None = None
        self._offset = 0
        self._spool = spool
        self.held = 0

    def put(self, pieces: list[Outgoing]) -> None:
        for piece in pieces:
            if isinstance(piece, Attached):
                self.held += len(piece)
            elif not isinstance(piece, Payload):
                size = len(piece)
                if size < _JOIN_BELOW:
                    self._joined += piece
                    self.held += size
                    if len(self._joined) > _JOINED_LIMIT:
                        self._close_joined()
                    continue
                self.held += size
            self._close_joined()
            self._queue.append(piece)
            self.held += _OVERHEAD

    def _close_joined(self) -> None:
        if self._joined:
            self._queue.append(self._joined)
            self.held += _OVERHEAD
            self._joined = bytearray()

    @property
    def current(self) -> int:
        """Bytes in memory of the piece being sent."""
        chunk = self._chunk
        return 0 if self._payload or chunk is None or isinstance(chunk, FileSpan) else len(chunk)

    def __bool__(self) -> bool:
        return bool(self._joined or self._queue or self._chunk is not None or self._payload)

    def send(self, sock: socket.socket, budget: int) -> bool:
        """Send what the socket takes, about `budget` bytes at most; True when nothing is left.

        Raises OSError when the peer is gone, BrokenPayload when a frame cannot be completed.
        """
        try:
            while budget > 0:
                if self._chunk is None and not self._advance():
                    return True
                budget -= self._send_chunk(sock, self._chunk)
        except (BlockingIOError, InterruptedError):
            pass
        return not self

    def _advance(self) -> bool:
        """Make the next chunk current; False when everything is sent."""
        if self._payload is not None:
            self._advance_payload(self._payload)
            return self._chunk is not None or self._advance()
        self._close_joined()
        if not self._queue:
            return False
        piece = self._queue.popleft()
        self.held -= _OVERHEAD
        if isinstance(piece, Payload):
            self._left = piece.nbytes
            try:
                self._payload = iter(piece.chunks())
            except Exception as error:
                raise BrokenPayload(f"{type(error).__name__}: {error}") from error
            return self._advance()
        self._chunk = piece
        return True

    def _advance_payload(self, payload: Iterator[Chunk]) -> None:
        try:
            chunk = next(payload, None)
        except Exception as error:
            raise BrokenPayload(f"{type(error).__name__}: {error}") from error
        if chunk is None:
            self._payload = None
            if self._left:
                raise BrokenPayload(f"a payload ended {self._left} bytes early")
            return
        if not isinstance(chunk, FileSpan):
            chunk = memoryview(chunk).cast("B")
        # Checked before the first byte goes out: surplus bytes would read as the next reply.
        self._left -= _size(chunk)
        if self._left < 0:
            raise BrokenPayload(f"a payload is {-self._left} bytes too long")
        if _size(chunk):
            self._chunk = chunk

    def _send_chunk(self, sock: socket.socket, chunk: Chunk | Attached | None) -> int:
        if isinstance(chunk, FileSpan):
            sent = self._send_span(sock, chunk)
        elif isinstance(chunk, Attached):
            sent = _send_attached(sock, chunk, self._offset)
        else:
            assert chunk is not None
            more = _MORE if self._queue or self._payload else 0
            sent = sock.send(memoryview(chunk)[self._offset :], more)
        self._offset += sent
        if self._offset == _size(chunk):
            if not isinstance(chunk, FileSpan) and self._payload is None:
                self.held -= _size(chunk)
            self._chunk = None
            self._offset = 0
        return sent

    def _send_span(self, sock: socket.socket, span: FileSpan) -> int:
        offset = span.offset + self._offset
        count = min(span.length - self._offset, _SPAN_STEP)
        sent = _send_file(sock, span, offset, count)
        if sent is None:
            try:
                got = os.preadv(
                    span.file.fileno(), [self._spool[: min(count, len(self._spool))]], offset
                )
            except OSError as error:
                raise BrokenPayload(f"reading a stored file: {error}") from error
            sent = sock.send(self._spool[:got]) if got else 0
        if sent == 0:
            raise BrokenPayload("a stored file is shorter than its index says")
        return sent

    def abandon(self) -> None:
        """Drop everything unsent and let go of files."""
        close = getattr(self._payload, "close", None)
        self._queue.clear()
        self._joined = bytearray()
        self._payload = self._chunk = None
        self.held = 0
        if close is not None:
            close()


def _send_attached(sock: socket.socket, piece: Attached, offset: int) -> int:
    """The descriptor goes with the first byte."""
    if offset:
        return sock.send(piece.data[offset:])
    number = array.array("i", [piece.file.fileno()])
    return sock.sendmsg([piece.data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, number)])


def _size(chunk: Chunk | Attached | None) -> int:
    if isinstance(chunk, FileSpan):
        return chunk.length
    return 0 if chunk is None else len(chunk)


def _send_file(sock: socket.socket, span: FileSpan, offset: int, count: int) -> int | None:
    """`os.sendfile`, or None where this file or platform cannot do it."""
    if not hasattr(os, "sendfile"):
        return None
    try:
        return os.sendfile(sock.fileno(), span.file.fileno(), offset, count)
    except (BlockingIOError, InterruptedError, ConnectionError):
        raise
    except OSError:
        # The plain read tells a failing file from one that only cannot be sent this way.
        return None
