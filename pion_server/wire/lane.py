"""What tells the clients of one port from those of another: their protocol, and who answers it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from pion_server.errors import CommandError
from pion_server.payload import Buffer
from pion_server.wire import binary
from pion_server.wire.connection import Connection
from pion_server.wire.replies import Outgoing, encode
from pion_server.wire.resp import UNAUTHENTICATED, Limits, RequestParser

Answer: TypeAlias = object | Coroutine[Any, Any, object]

# Seconds half a request may stay silent, and replies untaken: clients give up after as long.
_SILENCE = 60.0


class Service(Protocol):
    """What the wire serves. It knows no command; the service knows no socket."""

    def connected(self, connection: Connection) -> None:
        """A client is there. Sets `connection.authenticated`."""

    def execute(self, connection: Connection, request: list[Buffer]) -> Answer:
        """A reply value (see `replies`), or a coroutine of one. Never raises."""

    def execute_frame(self, connection: Connection, frame: binary.Frame) -> Answer:
        """The same for the binary lane: bytes, None or a CommandError."""

    def disconnected(self, connection: Connection) -> None:
        """The client is gone."""


class Parser(Protocol):
    """Bytes in, requests out; see `resp.RequestParser`."""

    limits: Limits

    def get_buffer(self) -> memoryview: ...

    def buffer_updated(self, n: int) -> None: ...

    def next_request(self) -> Any: ...

    @property
    def in_request(self) -> bool: ...

    @property
    def held(self) -> int:
        """Bytes in memory of the incomplete request."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One protocol. `encode(value, version)` makes a reply; `refuse(text)` a last one, or none.

    `silence`: seconds after which an incomplete request of which nothing more comes, or replies of
    which nothing more is taken, end the connection.
    """

    make_parser: Callable[[memoryview, Limits], Parser]
    execute: Callable[[Connection, Any], Answer]
    encode: Callable[[object, int], list[Outgoing]]
    refuse: Callable[[str], list[Outgoing]]
    limits: Limits
    unauthenticated: Limits
    too_many_clients: bytes = b""
    silence: float = _SILENCE


def resp_lane(service: Service, max_request: int, silence: float = _SILENCE) -> Lane:
    """RESP2 and RESP3; `max_request` bytes."""
    return Lane(
        make_parser=RequestParser,
        execute=service.execute,
        encode=encode,
        refuse=lambda text: encode(CommandError(f"Protocol error: {text}")),
        limits=Limits(request=max_request),
        unauthenticated=UNAUTHENTICATED,
        too_many_clients=b"-ERR max number of clients reached\r\n",
        silence=silence,
    )


def binary_lane(service: Service, max_request: int, silence: float = _SILENCE) -> Lane:
    """Frames. A broken one closes without a word: its sender could not tell it from a reply."""
    return Lane(
        make_parser=binary.FrameParser,
        execute=service.execute_frame,
        encode=binary.encode_frame,
        refuse=lambda text: [],
        limits=Limits(bulk=binary.BODY_LIMIT, request=max_request),
        unauthenticated=binary.UNAUTHENTICATED,
        silence=silence,
    )
