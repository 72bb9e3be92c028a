"""RESP2 over one blocking socket, written for large replies and large requests.

A bulk is received straight into its final memory and a blob is sent from where it lies, so the
cost of a prefix is the kernel's copy. Whatever goes wrong, a timeout or a cancellation included,
closes the connection: no reply can ever be taken for the answer to another command.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from ssl import SSLContext
from typing import Final

from pion_vllm_mlx.transport import (
    Argument,
    Buffer,
    Command,
    Patience,
    Place,
    ProtocolError,
    Refused,
    Reply,
    ServerError,
    Status,
    Unavailable,
)
from pion_vllm_mlx.transport.channel import Channel, seconds_left
from pion_vllm_mlx.transport.tls import open_channel, open_socket

#: Arguments above this are sent from where they lie; smaller ones are joined.
_OWN_CHUNK: Final = 16 << 10
_CHUNKS_A_CALL: Final = 64
#: Bytes to begin a system call with, and those that are made ahead of a full socket.
_ONE_CALL: Final = 256 << 10
_MADE_AHEAD: Final = 4 << 20
_READ_AHEAD: Final = 64 << 10
_LARGEST_BULK: Final = 512 << 20
_LARGEST_ARRAY: Final = 1 << 20
_LONGEST_LINE: Final = 64 << 10
_DEEPEST: Final = 8


class RespConnection:
    """One connection to a server: `exchange` pipelines, then reads as many replies.

    Not thread-safe, and of no use after an error or a fork (`usable`).
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        deadline: float,
        username: str | None = None,
        password: str | None = None,
        tls: SSLContext | None = None,
    ) -> None:
        """Connect, and authenticate if there is a password, before `deadline` (monotonic).

        Raises Unavailable, ProtocolError, or Refused for a password the server does not take.
        """
        self._pid = os.getpid()
        #: Whether `abort` ended it, and not the server.
        self.aborted = False
        self._tls = tls
        self._buffer = bytearray(_READ_AHEAD)
        self._start = self._end = 0
        self._socket: socket.socket | None = self._open(host, port, deadline)
        if password is not None:
            words = ("AUTH", password) if username is None else ("AUTH", username, password)
            left = seconds_left(deadline, "to authenticate")
            (reply,) = self.exchange([Command(words)], Patience(left, left, left))
            if reply != "OK":
                self.close()
                raise Refused(f"AUTH: {reply!s}")

    def _open(self, host: str, port: int, deadline: float) -> socket.socket:
        return open_socket(host, port, deadline, self._tls)

    def _channel(self, sock: socket.socket, patience: Patience) -> Channel:
        return open_channel(sock, patience)

    @property
    def usable(self) -> bool:
        """Open, and opened by this process."""
        return self._socket is not None and not self.aborted and self._pid == os.getpid()

    def close(self) -> None:
        """Close the socket; safe to repeat."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def abort(self) -> None:
        """End an exchange that runs in another thread, which then closes the connection."""
        self.aborted = True
        if (sock := self._socket) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def exchange(self, commands: Sequence[Command], patience: Patience) -> list[Reply]:
        """Send all commands, read all replies; see `Lane.exchange`. Any error closes."""
        with self._use(patience) as channel:
            if channel.has_input():
                raise Unavailable("connection closed by the server, or out of step")
            self._send(channel, request_chunks(commands))
            return self._replies(channel, [command.place for command in commands])

    @contextlib.contextmanager
    def _use(self, patience: Patience) -> Iterator[Channel]:
        """The socket under the deadlines of one exchange; whatever goes wrong closes it."""
        if self._socket is None:
            raise Unavailable("connection is closed")
        try:
            yield self._channel(self._socket, patience)
        except OSError as error:
            self.close()
            raise Unavailable(f"connection lost: {error}") from error
        except BaseException:
            # Cancelled or interrupted between request and reply: the stream is out of step.
            self.close()
            raise

    def _replies(self, channel: Channel, places: Sequence[Place | None]) -> list[Reply]:
        if self._start == self._end:
            channel.await_first_byte()
        replies = [self._reply(channel, place, 0, 0) for place in places]
        if self._start != self._end:
            raise ProtocolError("more replies than commands")
        return replies

    def _send(self, channel: Channel, chunks: Iterator[memoryview]) -> None:
        """Write everything; take in early replies meanwhile, so that neither side can block.

        While the kernel has no room the next chunks are made, a few of them.
        """
        waiting: deque[memoryview] = deque()
        held, wanted, more = 0, _ONE_CALL, True
        while more or waiting:
            while more and held < wanted:
                chunk = next(chunks, None)
                more = chunk is not None
                if chunk is not None:
                    waiting.append(chunk)
                    held += len(chunk)
            sent = channel.send(list(islice(waiting, _CHUNKS_A_CALL)))
            if sent is None:
                if more and held < _MADE_AHEAD:
                    wanted = held + 1
                elif channel.wait_to_write(self._end < len(self._buffer)):
                    self._fill(channel)
                continue
            held, wanted = held - sent, _ONE_CALL
            while waiting and sent >= len(waiting[0]):
                sent -= len(waiting.popleft())
            if sent:
                waiting[0] = waiting[0][sent:]

    def _reply(self, channel: Channel, place: Place | None, index: int, depth: int) -> Reply:
        line = self._line(channel)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return Status(rest.decode("utf-8", "replace"))
        if kind == b"-":
            return ServerError(rest.decode("utf-8", "replace"))
        if kind == b":":
            return _integer(rest)
        if kind == b"$":
            length = _length(rest, _LARGEST_BULK)
            return None if length is None else self._bulk(channel, length, place, index)
        if kind == b"*":
            count = _length(rest, _LARGEST_ARRAY)
            if count is None:
                return None
            if depth >= _DEEPEST:
                raise ProtocolError("replies nested too deeply")
            return [self._reply(channel, place, element, depth + 1) for element in range(count)]
        raise ProtocolError(f"unknown reply type {kind!r}")

    def _bulk(self, channel: Channel, length: int, place: Place | None, index: int) -> Buffer:
        target = place(index, length) if place is not None else None
        body: bytearray | None = None
        if target is None:
            body = bytearray(length)
            target = memoryview(body)
        elif len(target) != length:
            raise ProtocolError(f"room for {len(target)} bytes, {length} announced")
        ready = min(length, self._end - self._start)
        target[:ready] = memoryview(self._buffer)[self._start : self._start + ready]
        self._start += ready
        while ready < length:
            ready += channel.receive_into(target[ready:])
        if self._exactly(channel, 2) != b"\r\n":
            raise ProtocolError("bulk longer than announced")
        return target if body is None else body

    def _line(self, channel: Channel) -> bytes:
        searched = self._start
        while (at := self._buffer.find(b"\r\n", searched, self._end)) < 0:
            if self._end - self._start > _LONGEST_LINE - 2:
                raise ProtocolError("reply line too long")
            searched = max(self._start, self._end - 1)
            moved = self._start
            self._fill(channel)
            if self._start != moved:
                searched -= moved
        line = bytes(self._buffer[self._start : at])
        self._start = at + 2
        return line

    def _exactly(self, channel: Channel, count: int) -> bytes:
        while self._end - self._start < count:
            self._fill(channel)
        taken = bytes(self._buffer[self._start : self._start + count])
        self._start += count
        return taken

    def _fill(self, channel: Channel) -> None:
        """Receive at least one byte behind what is buffered, making room at the end first."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            held = self._end - self._start
            self._buffer[:held] = self._buffer[self._start : self._end]
            self._start, self._end = 0, held
        self._end += channel.receive_into(memoryview(self._buffer)[self._end :])


def request_chunks(commands: Iterable[Command]) -> Iterator[memoryview]:
    """The request as buffers, each made when it is asked for; blobs are referred to, not copied."""
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command.words)
        for word in command.words:
            view = _encode(word)
            small += b"$%d\r\n" % len(view)
            if len(view) > _OWN_CHUNK:
                yield memoryview(small)
                yield view
                small = bytearray()
            else:
                small += view
            small += b"\r\n"
    yield memoryview(small)


def _encode(word: Argument) -> memoryview:
    if isinstance(word, str):
        return memoryview(word.encode())
    if isinstance(word, int):
        return memoryview(b"%d" % word)
    view = memoryview(word() if callable(word) else word)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _integer(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 19:
        raise ProtocolError(f"bad integer {text[:32]!r}")
    return int(text)


def _length(text: bytes, largest: int) -> int | None:
    """A canonical length; None for -1 (null)."""
    if text == b"-1":
        return None
    length = _integer(text)
    if not 0 <= length <= largest or text != b"%d" % length:
        raise ProtocolError(f"bad length {text[:32]!r}")
    return length
