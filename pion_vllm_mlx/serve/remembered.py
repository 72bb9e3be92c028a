"""Conversations by the response they led to, for `previous_response_id`, in memory and in Pion.

Each response keeps what its own turn added, and the name of the one before. In Pion that is a
string `pion-response:<id>`, and its size and last use a member of the sorted set `pion-responses`;
a server with tenants keeps those of each apart.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from pion_vllm_mlx.transport import Command, Lane, Patience, ServerError, TransportError

log = logging.getLogger("pion_vllm_mlx")

_KEY: Final = b"pion-response:"
_USES: Final = b"pion-responses"
#: A request waits for these; what has not come by then is not there.
_SHORT: Final = Patience(first_byte=0.5, stall=0.5, total=2.0)
_MOST_TURNS: Final = 1 << 14

Message = dict[str, Any]


class Unknown(LookupError):
    """No response of that name is kept."""

    def __init__(self, response: str) -> None:
        super().__init__(f"Previous response with id {response!r} not found.")


@dataclass(frozen=True, slots=True)
class Turn:
    """What a response added to the conversation of the response `previous`, "" for none."""

    messages: list[Message]
    previous: str = ""

    def encode(self) -> bytes:
        return json.dumps({"previous": self.previous, "messages": self.messages}).encode()

    @classmethod
    def decode(cls, blob: bytes) -> Turn:
        """Raises ValueError for anything else."""
        match json.loads(blob):
            case {"messages": list() as messages, "previous": str() as previous}:
                return cls(messages, previous)
        raise ValueError("no turn")


class Shelf:
    """The turns in Pion. Every method raises TransportError when it is gone or refuses."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Every response there is and its bytes, the longest unused first."""
        (members,) = self._exchange(Command.of("ZRANGE", _USES, 0, -1))
        for member in members if isinstance(members, list) else ():
            name, _, size = bytes(member).partition(b" ")
            if size.isdigit():
                yield name.decode("ascii", "replace"), int(size)

    def get(self, response: str) -> Turn | None:
        """A turn, or None."""
        (blob,) = self._exchange(Command.of("GET", _KEY + response.encode()))
        try:
            return Turn.decode(bytes(blob)) if isinstance(blob, bytes | bytearray) else None
        except ValueError:
            return None

    def put(self, response: str, blob: bytes) -> None:
        self._exchange(Command.of("SET", _KEY + response.encode(), blob), _use(response, len(blob)))

    def touch(self, used: list[tuple[str, int]]) -> None:
        """Responses and their bytes, in the order they are to leave."""
        self._exchange(*(_use(name, size, at * 1e-6) for at, (name, size) in enumerate(used)))

    def drop(self, gone: list[tuple[str, int]]) -> None:
        keys = [_KEY + name.encode() for name, _ in gone]
        members = [b"%s %d" % (name.encode(), size) for name, size in gone]
        self._exchange(Command.of("DEL", *keys), Command.of("ZREM", _USES, *members))

    def _exchange(self, *commands: Command) -> list[Any]:
        replies = self._lane.exchange(commands, _SHORT)
        for reply in replies:
            if isinstance(reply, ServerError):
                raise TransportError(str(reply))
        return list(replies)


class Remembered:
    """`most_bytes` of turns, the longest unused forgotten first. Thread-safe.

    What `shelf` holds from before counts and is found. Without one, or while it is gone, turns are
    kept in memory alone.
    """

    def __init__(self, most_bytes: int = 64 << 20, shelf: Shelf | None = None) -> None:
        self._most = most_bytes
        self._shelf = shelf
        self._lock = threading.Lock()
        self._turns: dict[str, Turn] = {}
        #: Every response known and its bytes, the longest unused first.
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._is_read = shelf is None
        self._is_told = False

    def keep(self, response: str, messages: list[Message], previous: str = "") -> None:
        """Remember what a turn added; one that is larger than all there is room for is not kept."""
        turn = Turn(messages, previous)
        blob = turn.encode()
        if len(blob) > self._most:
            return
        with self._lock:
            self._read_sizes()
            self._turns[response] = turn
            self._sizes[response] = len(blob)
            gone = list(self._surplus())
            if self._shelf is None:
                return
            try:
                self._shelf.put(response, blob)
                if gone:
                    self._shelf.drop(gone)
            except TransportError as error:
                self._tell(error)

    def recall(self, response: str) -> list[Message]:
        """The conversation a response ends. Raises Unknown, also where a turn of it is gone."""
        with self._lock:
            self._read_sizes()
            chain: list[str] = []
            at = response
            while at:
                if at in chain or len(chain) == _MOST_TURNS:
                    raise Unknown(response)
                chain.append(at)
                at = self._turn(at, response).previous
            # The beginning of a conversation leaves after its end: without it all is lost.
            for name in chain:
                self._sizes.move_to_end(name)
            if self._shelf is not None:
                try:
                    self._shelf.touch([(name, self._sizes[name]) for name in chain])
                except TransportError as error:
                    self._tell(error)
            return [message for name in reversed(chain) for message in self._turns[name].messages]

    def _turn(self, name: str, asked: str) -> Turn:
        turn = self._turns.get(name)
        if turn is None and self._shelf is not None:
            try:
                turn = self._shelf.get(name)
            except TransportError as error:
                self._tell(error)
            if turn is not None:
                self._turns[name] = turn
                self._sizes.setdefault(name, len(turn.encode()))
        if turn is None:
            raise Unknown(asked)
        return turn

    def _read_sizes(self) -> None:
        """What was there before this process."""
        if self._is_read or self._shelf is None:
            return
        try:
            before = dict(self._shelf.sizes())
        except TransportError as error:
            self._tell(error)
            return
        self._sizes = OrderedDict(before | self._sizes)
        self._is_read = True

    def _surplus(self) -> Iterator[tuple[str, int]]:
        total = sum(self._sizes.values())
        while total > self._most:
            name, size = self._sizes.popitem(last=False)
            self._turns.pop(name, None)
            total -= size
            yield name, size

    def _tell(self, error: TransportError) -> None:
        if not self._is_told:
            self._is_told = True
            log.warning("responses are kept in memory only for now: %s", error)


def _use(response: str, size: int, later: float = 0.0) -> Command:
    member = b"%s %d" % (response.encode(), size)
    return Command.of("ZADD", _USES, repr(time.time() + later), member)
