"""Python values to RESP2 and RESP3 replies, sans-IO.

None → null              int → `:`               bool → `#` (RESP2 `:1`, `:0`)
str → `+` (one line)     bytes-like → `$`        float → `,` (RESP2 `$`)
list, tuple → `*`        dict → `%` (RESP2 flat `*`)
Verbatim → `=txt:` (RESP2 `$`)      Payload → `$`, streamed      CommandError → `-`
Handover → its value, a descriptor attached (never inside another value)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from pion_server.errors import CommandError
from pion_server.payload import Buffer, Handover, OpenFile, Payload

# Longer values go out from where they lie; shorter ones are cheaper copied into one piece.
_COPY_BELOW = 16 * 1024


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Text for people: `=txt:` under RESP3, a bulk string under RESP2."""

    text: str


@dataclass(frozen=True, slots=True)
class Attached:
    """Bytes that are sent together with the descriptor of an open file."""

    data: bytes
    file: OpenFile

    def __len__(self) -> int:
        return len(self.data)


Outgoing: TypeAlias = Buffer | Payload | Attached


class NoReply:
    """The command answers nothing (its connection is closed instead)."""


NO_REPLY = NoReply()


def encode(value: object, protocol: int = 2) -> list[Outgoing]:
    """The reply's pieces in order. TypeError or ValueError for what RESP cannot say."""
    if isinstance(value, Handover):
        (text,) = encode(value.value, protocol)
        assert isinstance(text, bytearray), "what goes along with a descriptor is short"
        return [Attached(bytes(text), value.file)]
    encoder = _Encoder(protocol)
    encoder.put(value)
    if encoder.text:
        encoder.pieces.append(encoder.text)
    return encoder.pieces


class _Encoder:
    __slots__ = ("pieces", "resp3", "text")

    def __init__(self, protocol: int) -> None:
        self.pieces: list[Outgoing] = []
        self.text = bytearray()
        self.resp3 = protocol >= 3

    def put(self, value: object) -> None:
        match value:
            case str():
                if "\r" in value or "\n" in value:
                    raise ValueError("a simple string is one line")
                self.text += b"+%b\r\n" % value.encode()
            case None:
                self.text += b"_\r\n" if self.resp3 else b"$-1\r\n"
            case bool():
                self.text += (
                    (b"#t\r\n" if value else b"#f\r\n") if self.resp3 else b":%d\r\n" % value
                )
            case int():
                self.text += b":%d\r\n" % value
            case bytes() | bytearray() | memoryview():
                self._put_bulk(value)
            case Payload():
                self.text += b"$%d\r\n" % value.nbytes
                self._put_piece(value)
                self.text += b"\r\n"
            case CommandError():
                self.text += b"-%b\r\n" % one_line(str(value)).encode()
            case list() | tuple():
                self._put_items(b"*%d\r\n" % len(value), value)
            case dict() if self.resp3:
                self._put_items(b"%%%d\r\n" % len(value), _flattened(value))
            case dict():
                self._put_items(b"*%d\r\n" % (2 * len(value)), _flattened(value))
            case _:
                self._put_rare(value)

    def _put_rare(self, value: object) -> None:
        if isinstance(value, float):
            text = repr(value).encode()
            self.text += b",%b\r\n" % text if self.resp3 else b"$%d\r\n%b\r\n" % (len(text), text)
        elif isinstance(value, Verbatim):
            text = value.text.encode()
            if self.resp3:
                self.text += b"=%d\r\ntxt:%b\r\n" % (len(text) + 4, text)
            else:
                self._put_bulk(text)
        else:
            raise TypeError(f"no reply can carry a {type(value).__name__}")

    def _put_bulk(self, value: Buffer) -> None:
        size = value.nbytes if isinstance(value, memoryview) else len(value)
        self.text += b"$%d\r\n" % size
        if size < _COPY_BELOW:
            self.text += value
        else:
            self._put_piece(value)
        self.text += b"\r\n"

    def _put_piece(self, piece: Outgoing) -> None:
        self.pieces += (self.text, piece)
        self.text = bytearray()

    def _put_items(self, header: bytes, items: Iterable[object]) -> None:
        self.text += header
        for item in items:
            self.put(item)


def _flattened(pairs: dict[object, object]) -> Iterable[object]:
    for key, value in pairs.items():
        yield key
        yield value


def one_line(text: str) -> str:
    """An error text that cannot break the stream: control characters become `?`."""
    return "".join(char if char.isprintable() else "?" for char in text)
