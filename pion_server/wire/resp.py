"""RESP requests, sans-IO: bytes in, commands out.

A request is an array of bulk strings, or one inline line. Arguments of at most `SCRATCH` bytes
come out as `bytes`; longer ones as a `memoryview` of their own buffer, filled by the caller's
`recv_into` and never copied.

    parser = RequestParser(memoryview(bytearray(SCRATCH)))
    n = sock.recv_into(parser.get_buffer())
    parser.buffer_updated(n)
    while (request := parser.next_request()) is not None: ...
"""

from __future__ import annotations

from dataclasses import dataclass

from pion_server.payload import Buffer
from pion_server.wire.inline import INLINE_LIMIT, UnbalancedQuotes, split_inline

SCRATCH = 64 * 1024
_STAR, _DOLLAR = b"*$"
# `$536870912` and its CRLF: no valid header line is longer.
_HEADER_WINDOW = 14
# Room for the small arguments of a request behind one with a large argument.
_BEHIND_LARGE = 1024
# What an argument takes beside its bytes.
_ARGUMENT = 48
# Most lengths, read without any arithmetic.
_SHORT = {b"%d" % length: length for length in range(256)}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for, in bytes and elements."""

    bulk: int = 512 * 1024 * 1024
    elements: int = 1_048_576
    request: int = 1024 * 1024 * 1024
    complaint: str = "invalid"


# Before authentication nobody needs more than HELLO with AUTH and SETNAME (the figures are Redis').
UNAUTHENTICATED = Limits(16 * 1024, 10, 64 * 1024, complaint="unauthenticated")


class ProtocolError(Exception):
    """The peer does not speak RESP, or asks for too much; the text after `ERR Protocol error: `."""


def fresh_buffer(nbytes: int) -> memoryview:
    """Memory to be filled; a large one costs nothing until it is, so a header alone is free."""
    if nbytes <= SCRATCH:
        return memoryview(bytearray(nbytes))
    import numpy as np  # a server starts without it

    return np.empty(nbytes, np.uint8).data


class _Bulk:
    """A bulk string under way, with room for the CRLF behind it."""

    __slots__ = ("filled", "length", "view")

    def __init__(self, length: int) -> None:
        self.view = fresh_buffer(length + 2)
        self.length = length
        self.filled = 0

    def take(self, n: int) -> None:
        self.filled += n
        # Looked at byte by byte: a client that counts characters, not bytes, would wait for ever.
        if self.filled > self.length and self.view[self.length] != 0x0D:
            raise ProtocolError("invalid bulk length")
        if self.filled == self.length + 2 and self.view[self.length + 1] != 0x0A:
            raise ProtocolError("invalid bulk length")

    def value(self) -> Buffer:
        body = self.view[: self.length]
        return body if self.length > SCRATCH else bytes(body)


class RequestParser:
    """One connection's request stream.

    `scratch` may be shared by all connections of a thread: nothing stays in it between calls.
    After a `ProtocolError` the stream has no meaning any more and the connection must be closed.
    """

    __slots__ = (
        "_args",
        "_bulk",
        "_data",
        "_large",
        "_missing",
        "_pos",
        "_scratch",
        "_size",
        "limits",
    )

    def __init__(self, scratch: memoryview, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._scratch = scratch
        self._data = b""
        self._pos = 0
        self._args: list[Buffer] = []
        self._missing = 0
        self._size = 0
        self._bulk: _Bulk | None = None
        self._large = False

    def get_buffer(self) -> memoryview:
        """Where the next bytes go. Call only after `next_request` has returned None."""
        if self._bulk is not None:
            return self._bulk.view[self._bulk.filled :]
        # Behind a large argument another one may come: what is read of it here is copied.
        return self._scratch[:_BEHIND_LARGE] if self._large else self._scratch

    def buffer_updated(self, n: int) -> None:
        """`n` bytes were written to the start of `get_buffer()`."""
        if self._bulk is not None:
            self._bulk.take(n)
            return
        self._large = False
        if self._data:
            self._data = self._data[self._pos :] + self._scratch[:n]
            self._pos = 0
        else:
            self._data = bytes(self._scratch[:n])

    @property
    def in_request(self) -> bool:
        """Whether the stream stands inside a request, as opposed to between two."""
        return bool(self._missing or self._pos < len(self._data))

    @property
    def held(self) -> int:
        """Bytes in memory of the request under way, about."""
        if not self._missing:
            return 0
        coming = 0 if self._bulk is None else self._bulk.length - self._bulk.filled
        return self._size + _ARGUMENT * len(self._args) - coming

    def next_request(self) -> list[Buffer] | None:
        """The next complete request, never empty; None when more bytes are needed."""
        bulk = self._bulk
        if bulk is not None:
            if bulk.filled < bulk.length + 2:
                return None
            self._large = bulk.length > SCRATCH
            self._args.append(bulk.value())
            self._missing -= 1
            self._bulk = None
        while True:
            if self._missing == 0:
                if self._args:
                    args, self._args = self._args, []
                    return args
                if self._pos == len(self._data):
                    self._data, self._pos = b"", 0
                    return None
                if self._data[self._pos] != _STAR:
                    inline = self._read_inline()
                    if inline is None:
                        return None
                    if inline:
                        return inline
                    continue
                if not self._read_count():
                    return None
                continue
            if not self._read_arguments():
                return None

    def _read_count(self) -> bool:
        """`*<n>` and CRLF; 0 and -1 ask for nothing. False when the line is not complete."""
        count = self._read_header("multibulk")
        if count is None:
            return False
        if count > self.limits.elements:
            raise ProtocolError(f"{self.limits.complaint} multibulk length")
        self._missing = max(count, 0)
        self._size = 0
        return True

    def _read_header(self, kind: str) -> int | None:
        """The number of the header line at the position, which moves past it; None: incomplete."""
        data, pos = self._data, self._pos
        eol = data.find(b"\r\n", pos, pos + _HEADER_WINDOW)
        if eol < 0:
            rest = data[pos + 1 : pos + _HEADER_WINDOW]
            digits = rest[:-1] if rest.endswith(b"\r") else rest
            if digits and _decimal(digits) is None and (digits != b"-" or kind == "bulk"):
                raise ProtocolError(f"invalid {kind} length")
            return None
        digits = data[pos + 1 : eol]
        number = _SHORT.get(digits)
        if number is None:
            number = _decimal(digits)
        if number is None or (number < 0 and kind == "bulk"):
            raise ProtocolError(f"invalid {kind} length")
        self._pos = eol + 2
        return number

    def _read_arguments(self) -> bool:
        """As many bulk strings as the data holds. False when more bytes are needed."""
        data, end, args, limits = self._data, len(self._data), self._args, self.limits
        while self._missing:
            pos = self._pos
            if pos == end:
                self._data, self._pos = b"", 0
                return False
            if data[pos] != _DOLLAR:
                raise ProtocolError(f"expected '$', got '{_shown(data[pos])}'")
            length = self._read_header("bulk")
            if length is None:
                return False
            if length > limits.bulk:
                raise ProtocolError(f"{limits.complaint} bulk length")
            self._size += length + self._pos - pos + 2
            if self._size > limits.request:
                raise ProtocolError(f"request exceeds {limits.request} bytes")
            start, stop = self._pos, self._pos + length
            if stop + 2 > end:
                self._open_bulk(length)
                return False
            if data[stop] != 0x0D or data[stop + 1] != 0x0A:
                raise ProtocolError("invalid bulk length")
            args.append(data[start:stop])
            self._pos = stop + 2
            self._missing -= 1
        return True

    def _open_bulk(self, length: int) -> None:
        """The rest of this bulk string goes straight into its own buffer."""
        bulk = _Bulk(length)
        rest = len(self._data) - self._pos
        bulk.view[:rest] = memoryview(self._data)[self._pos :]
        bulk.take(rest)
        self._bulk = bulk
        self._data, self._pos = b"", 0

    def _read_inline(self) -> list[Buffer] | None:
        """One inline command; empty for an empty line; None when the line is not complete."""
        data, pos = self._data, self._pos
        eol = data.find(b"\n", pos)
        if (len(data) if eol < 0 else eol) - pos > min(INLINE_LIMIT, self.limits.request):
            raise ProtocolError("too big inline request")
        if eol < 0:
            return None
        self._pos = eol + 1
        line = data[pos : eol - 1] if data[pos:eol].endswith(b"\r") else data[pos:eol]
        try:
            return list(split_inline(line))
        except UnbalancedQuotes:
            raise ProtocolError("unbalanced quotes in request") from None


def _decimal(digits: bytes) -> int | None:
    """A canonical decimal of at most ten digits (`-1` included), else None."""
    if digits.isdigit() and len(digits) <= 10 and (digits[0] != 0x30 or len(digits) == 1):
        return int(digits)
    return -1 if digits == b"-1" else None


def _shown(byte: int) -> str:
    return chr(byte) if 0x20 < byte < 0x7F else f"\\x{byte:02x}"
