"""LMCacheRemoteBackend: chunks by key in the keyspace, several at a time, never an exception.

A chunk is a hash of two fields, its description and its bytes: both are there or neither, and the
bytes go from the caller's memory to the log's file and back without a copy in between. Its name has
a prefix, so that strings which other connectors keep under the same key are not in its way.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, TypeAlias

from pion_vllm_mlx.transport import (
    Buffer,
    Command,
    Patience,
    Reply,
    ServerError,
    TransportError,
)
from pion_vllm_mlx.transport.address import find_server
from pion_vllm_mlx.transport.endpoint import Endpoint
from pion_vllm_mlx.transport.tls import Tls, client_context

log = logging.getLogger("pion_lmcache")

#: `room(description, nbytes)`: the memory a chunk is read into, or None to leave it.
Room: TypeAlias = Callable[[bytes, int], memoryview | None]

PREFIX: Final = "lmcache:"
_DESCRIPTION: Final = "d"
_BYTES: Final = "b"
# Commands of one pipeline: a batch of thousands is cut, so that replies never pile up.
_BATCH: Final = 64
_LARGEST_DESCRIPTION: Final = 1 << 16


class LMCacheRemoteBackend:
    """Chunks kept in a server's keyspace; every failure is a miss, told once in the log.

    `connections` calls go on at once; others wait. `timeout` is seconds: for the first byte of an
    answer and for each pause within it. While the server does not answer, calls fail at once.
    """

    def __init__(
        self,
        host: str | None = None,
        port: int | None = None,
        *,
        user: str | None = None,
        password: str | None = None,
        tls: Tls = None,
        connections: int = 4,
        timeout: float = 10.0,
        connect_timeout: float = 2.0,
    ) -> None:
        address = find_server(host, port, user, password, tls)
        first = Endpoint(
            address.host,
            address.port,
            username=address.username,
            password=address.password,
            connect_timeout=connect_timeout,
            tls=client_context(address.tls),
        )
        self._lanes: queue.LifoQueue[Endpoint] = queue.LifoQueue()
        self._all = [first, *(first.twin() for _ in range(connections - 1))]
        for lane in reversed(self._all):
            self._lanes.put(lane)
        self._patience = Patience(first_byte=timeout, stall=timeout)

    def contains(self, key: str) -> bool:
        """Whether the chunk is there; if so, it stays for the next ten seconds at least."""
        return self.contains_many([key])[0]

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """The same for each key."""
        replies = self._exchange([Command.of("EXISTS", PREFIX + key) for key in keys])
        return [reply == 1 for reply in replies]

    def put(self, key: str, data: Buffer, description: bytes = b"") -> bool:
        """Keep a chunk; whether it was acknowledged, and so survives the server's death."""
        return self.put_many([(key, data, description)])[0]

    def put_many(self, chunks: Sequence[tuple[str, Buffer, bytes]]) -> list[bool]:
        """The same for each (key, data, description)."""
        commands = [
            Command.of("HSET", PREFIX + key, _DESCRIPTION, description, _BYTES, data)
            for key, data, description in chunks
        ]
        return [isinstance(reply, int) for reply in self._exchange(commands)]

    def get(self, key: str) -> bytes | None:
        """A chunk's bytes, None if it is not there."""
        held: list[bytearray] = []

        def room(description: bytes, nbytes: int) -> memoryview:
            held.append(bytearray(nbytes))
            return memoryview(held[0])

        return bytes(held[0]) if self.get_into([key], [room])[0] else None

    def get_into(self, keys: Sequence[str], rooms: Sequence[Room]) -> list[bool]:
        """Read chunks into memory that `rooms` name, one for each key; which of them are whole."""
        readings = [_Reading(room) for room in rooms]
        replies = self._exchange(
            [
                Command.of("HMGET", PREFIX + key, _DESCRIPTION, _BYTES, place=reading.place)
                for key, reading in zip(keys, readings, strict=True)
            ]
        )
        return [reading.whole(reply) for reading, reply in zip(readings, replies, strict=True)]

    def remove_many(self, keys: Sequence[str]) -> list[bool]:
        """Forget chunks; which of them were there."""
        return [
            reply == 1
            for reply in self._exchange([Command.of("DEL", PREFIX + key) for key in keys])
        ]

    def keys(self, pattern: str = "*") -> list[str]:
        """The keys of all chunks that match a glob pattern."""
        found: list[str] = []
        cursor: Any = b"0"
        while True:
            words = ("SCAN", cursor, "MATCH", PREFIX + pattern, "COUNT", 1000, "TYPE", "hash")
            (reply,) = self._exchange([Command(words)])
            if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], list):
                return found
            names = [_text(name) for name in reply[1]]
            found += [name.removeprefix(PREFIX) for name in names]
            cursor = _text(reply[0]).encode()
            if cursor in (b"0", b""):
                return found

    def ping(self) -> bool:
        """Whether the server answers."""
        return self._exchange([Command.of("PING")]) == ["PONG"]

    def close(self) -> None:
        """Close the connections; a later call opens them again."""
        for lane in self._all:
            lane.close()

    @contextmanager
    def _lane(self) -> Iterator[Endpoint]:
        lane = self._lanes.get()
        try:
            yield lane
        finally:
            self._lanes.put(lane)

    def _exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """Their replies; None in the place of each that there is none for."""
        replies: list[Reply] = []
        bounds = [*range(0, len(commands), _BATCH), len(commands)]
        try:
            with self._lane() as lane:
                for start, end in pairwise(bounds):
                    replies += lane.exchange(commands[start:end], self._patience)
        except TransportError as error:
            log.debug("a miss: %s", error)
        for reply in replies:
            if isinstance(reply, ServerError):
                log.warning("the server refused a chunk: %s", reply)
                break
        return replies + [None] * (len(commands) - len(replies))


def _text(reply: Reply) -> str:
    return bytes(reply).decode("utf-8", "replace") if isinstance(reply, (bytes, bytearray)) else ""


class _Reading:
    """One chunk on its way: its description comes first and says what memory it goes into."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._description: memoryview | None = None
        self._target: memoryview | None = None

    def place(self, index: int, nbytes: int) -> memoryview | None:
        if index == 0 and nbytes <= _LARGEST_DESCRIPTION:
            self._description = memoryview(bytearray(nbytes))
            return self._description
        if index != 1 or self._description is None:
            return None
        try:
            target = self._room(bytes(self._description), nbytes)
        except Exception as error:
            # The description is somebody else's, say. The bytes must be read all the same.
            log.warning("a miss: no room for a chunk: %r", error)
            return None
        if target is not None and len(target) == nbytes:
            self._target = target
        return self._target

    def whole(self, reply: Reply) -> bool:
        """Whether both fields came, the bytes into their memory."""
        return (
            self._target is not None
            and isinstance(reply, list)
            and len(reply) == 2
            and reply[1] is not None
        )
