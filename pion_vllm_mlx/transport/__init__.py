"""How the client reaches a server: one file a lane, and what all lanes share.

TransportError              the exchange failed as a whole; its connection is closed
├── Unavailable             no connection: the server counts as gone for a while
│   └── TimedOut            a deadline passed
├── GivenUp                 its reader no longer wants the answer; the server is all right
├── ProtocolError           what came back is not RESP, or does not fit what was asked
└── Refused                 the server wants another password
ServerError                 one command's error reply; a value, not raised, inside a pipeline
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
#: A callable makes its bytes when their turn has come to be sent, while others are on their way.
Argument: TypeAlias = Buffer | str | int | Callable[[], Buffer]

#: `place(index, nbytes)` names the memory a bulk of a reply is read into: a writable view of
#: exactly `nbytes`, or None for a new buffer. `index` counts the elements of an array reply.
Place: TypeAlias = Callable[[int, int], memoryview | None]


class TransportError(Exception):
    """The exchange failed as a whole; nothing of it can be used."""


class Unavailable(TransportError):
    """The server cannot be reached, went away, or missed a deadline."""


class TimedOut(Unavailable):
    """The server missed a deadline: asking again would only wait as long again."""


class GivenUp(TransportError):
    """The transfer goes on too slowly to be worth its end."""


class ProtocolError(TransportError):
    """The peer's bytes are no well-formed answer."""


class Refused(TransportError):
    """The server does not accept this client's credentials."""


class ServerError(Exception):
    """An error reply; `str(error)` is the line after `-`, `code` its first word."""

    @property
    def code(self) -> str:
        """The first word, such as `ERR`, `OOM`, `STALE`."""
        return str(self).partition(" ")[0]


class Status(str):
    """A status reply such as `OK`, told apart from a bulk by its type."""

    __slots__ = ()


Reply: TypeAlias = "int | Status | Buffer | ServerError | list[Reply] | None"


@dataclass(frozen=True, slots=True)
class Command:
    """One request, and where large parts of its reply go."""

    words: tuple[Argument, ...]
    place: Place | None = None

    @classmethod
    def of(cls, *words: Argument, place: Place | None = None) -> Command:
        """`Command.of("V.FETCH", sid, …)`."""
        return cls(words, place)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait, in seconds: for the first byte, between bytes, and for the whole answer.

    `first_byte` runs from the moment the request is written. `stall` bounds each pause while
    bytes flow, in both directions. `total` bounds the exchange from its start. `watch` is told the
    number of bytes of each receipt; once it answers False the exchange ends with GivenUp.
    """

    first_byte: float = 0.25
    stall: float = 2.0
    total: float = 600.0
    watch: Callable[[int], bool] | None = None


class Lane(Protocol):
    """A way to one server. An exchange is all or nothing, and thread-safe."""

    @property
    def available(self) -> bool:
        """False while the lane leaves its server alone after a failure."""

    def exchange(
        self, commands: Sequence[Command], patience: Patience, *, retry: bool = True
    ) -> list[Reply]:
        """Send `commands` as one pipeline and return their replies in order.

        `retry=False` for commands that only make sense on the connection that sent the ones
        before, such as the writes of a fill. Raises TransportError when the exchange fails as a
        whole. Error replies are values.
        """

    def twin(self) -> Lane:
        """Another lane to the same server, which shares what is known of its outages."""

    def close(self) -> None:
        """Let go of the connection; a later exchange may open a new one."""
