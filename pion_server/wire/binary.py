"""The binary lane's frames, sans-IO: u16 magic CA5E, u8 command or status, u32 length, body.

Little-endian, both ways. A body that does not arrive with its header is received straight into
its own buffer; one that does is copied out of the scratch space once.

    parser = FrameParser(memoryview(bytearray(SCRATCH)))
    n = sock.recv_into(parser.get_buffer())
    parser.buffer_updated(n)
    while (frame := parser.next_request()) is not None: ...
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from pion_server.errors import ColdMiss, CommandError, Replay
from pion_server.payload import Buffer, Payload
from pion_server.wire.replies import Outgoing
from pion_server.wire.resp import Limits, ProtocolError, fresh_buffer

MAGIC = 0xCA5E
HEADER = struct.Struct("<HBI")
BODY_LIMIT = 1024 * 1024 * 1024
# Between frames no more than this is read at once: what comes with a large body's header has to be
# copied there, what follows has not.
_FIRST_READ = 16 * 1024
OK, MISS, ERROR, COLDMISS, REPLAY = range(5)
# Before authentication a longer body is read and dropped; AUTH needs far less.
UNAUTHENTICATED = Limits(bulk=16 * 1024)


class Unparsable(CommandError):
    """A body whose parts do not add up to its length; answered MISS."""


class Frame(NamedTuple):
    """One request. `body` is None for one that was too long to be kept."""

    command: int
    body: Buffer | None


class FrameParser:
    """One connection's request stream; the interface is `RequestParser`'s.

    `limits.request` bounds a body, and `limits.bulk`, if lower than that, what is kept of it: a
    longer one is read, dropped and handed out as None.
    """

    __slots__ = (
        *("_body", "_command", "_data", "_filled", "_first", "_length", "_pos", "_scratch"),
        "limits",
    )

    def __init__(self, scratch: memoryview, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._scratch = scratch
        self._data: Buffer = b""
        self._pos = 0
        self._first: Frame | None = None  # complete, not handed out yet
        self._command: int | None = None  # of the frame whose body is under way
        self._length = self._filled = 0
        self._body: memoryview | None = None  # None: it is dropped

    def get_buffer(self) -> memoryview:
        """Where the next bytes go. Call only after `next_request` has returned None."""
        if self._command is None:
            return self._scratch[:_FIRST_READ]
        if self._body is None:
            return self._scratch[: self._length - self._filled]
        return self._body[self._filled :]

    def buffer_updated(self, n: int) -> None:
        """`n` bytes were written to the start of `get_buffer()`."""
        if self._command is not None:
            self._filled += n
        elif self._pos < len(self._data):
            self._data, self._pos = bytes(self._data[self._pos :]) + self._scratch[:n], 0
        else:
            # Nothing came before: the first frame need not be copied with what is behind it.
            self._data, self._pos = self._scratch[:n], 0
            self._first = self._parse()
            self._data, self._pos = bytes(self._data[self._pos :]), 0

    @property
    def in_request(self) -> bool:
        """Whether the stream stands inside a frame, as opposed to between two."""
        return self._command is not None or self._pos < len(self._data)

    @property
    def held(self) -> int:
        """Bytes in memory of the body under way."""
        return 0 if self._body is None else self._filled

    def next_request(self) -> Frame | None:
        """The next complete frame; None when more bytes are needed."""
        if self._first is not None:
            frame, self._first = self._first, None
            return frame
        if self._command is not None:
            return self._close_body() if self._filled == self._length else None
        return self._parse()

    def _parse(self) -> Frame | None:
        """The frame that begins at the position, which moves past what is taken of it."""
        start = self._pos + HEADER.size
        if start > len(self._data):
            if self._pos == len(self._data):
                return None
            self._check_magic()
            return None
        magic, command, length = HEADER.unpack_from(self._data, self._pos)
        if magic != MAGIC:
            raise ProtocolError("bad magic")
        if length > min(BODY_LIMIT, self.limits.request):
            raise ProtocolError(f"a body of {length} bytes")
        self._pos = start
        if length > self.limits.bulk or start + length > len(self._data):
            return self._open_body(command, length)
        self._pos += length
        return Frame(command, bytes(self._data[start : self._pos]))

    def _check_magic(self) -> None:
        """Refuse a stranger at its first byte: it may never send as many as a header has."""
        begun = bytes(self._data[self._pos : self._pos + 2])
        if not MAGIC.to_bytes(2, "little").startswith(begun):
            raise ProtocolError("bad magic")

    def _open_body(self, command: int, length: int) -> Frame | None:
        """The rest of this body goes into a buffer of its own, or nowhere."""
        here = memoryview(self._data)[self._pos : self._pos + length]
        self._command, self._length, self._filled = command, length, len(here)
        if length <= self.limits.bulk:
            self._body = fresh_buffer(length)
            self._body[: len(here)] = here
        self._pos += len(here)
        return self._close_body() if self._filled == length else None

    def _close_body(self) -> Frame:
        assert self._command is not None
        frame = Frame(self._command, self._body)
        self._command = self._body = None
        return frame


def encode_frame(value: object, protocol: int = 2) -> list[Outgoing]:
    """A reply's pieces: OK with the bytes, OK alone for None, or the status of a CommandError."""
    match value:
        case bytes() | bytearray() | memoryview():
            size = value.nbytes if isinstance(value, memoryview) else len(value)
            return [HEADER.pack(MAGIC, OK, size), value]
        case Payload():
            return [HEADER.pack(MAGIC, OK, value.nbytes), value]
        case None:
            return [HEADER.pack(MAGIC, OK, 0)]
        case CommandError():
            return [HEADER.pack(MAGIC, status_of(value), 0)]
    raise TypeError(f"no frame can carry a {type(value).__name__}")


def status_of(error: CommandError) -> int:
    """What the binary lane says in place of an error text."""
    match error:
        case ColdMiss():
            return COLDMISS
        case Unparsable():
            return MISS
        case Replay():
            return REPLAY
    return ERROR
