"""What took long: the last slow commands of one user, as SLOWLOG tells them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pion_server.errors import printable
from pion_server.payload import Buffer
from pion_server.wire.connection import Connection

MOST_ENTRIES = 128
_MOST_WORDS = 32
_LONGEST_WORD = 128
# Their arguments are passwords.
_SECRET = ("AUTH", "HELLO")


@dataclass(frozen=True, slots=True)
class Entry:
    """One command: when it ended (Unix time), how long it took, its words escaped and cut."""

    number: int
    ended_at: int
    microseconds: int
    words: tuple[str, ...]
    address: str
    client: str


class SlowLog:
    """The last `MOST_ENTRIES` slow commands; `total` counts all there ever were."""

    __slots__ = ("entries", "total")

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=MOST_ENTRIES)
        self.total = 0

    def note(
        self, connection: Connection, name: str, args: Sequence[Buffer], seconds: float
    ) -> None:
        """Keep a command that took so long; of its arguments, what fits a line."""
        words = (name, "(redacted)") if name in _SECRET else (name, *_shown(args))
        address, client = connection.address, connection.name
        took = int(seconds * 1e6)
        self.entries.append(Entry(self.total, int(time.time()), took, words, address, client))
        self.total += 1


def _shown(args: Sequence[Buffer]) -> list[str]:
    if len(args) < _MOST_WORDS:
        return [_word(arg) for arg in args]
    shown = [_word(arg) for arg in args[: _MOST_WORDS - 2]]
    return [*shown, f"... ({len(args) - len(shown)} more arguments)"]


def _word(arg: Buffer) -> str:
    more = len(arg) - _LONGEST_WORD
    text = printable(arg[:_LONGEST_WORD], _LONGEST_WORD)[:_LONGEST_WORD]
    return f"{text}... ({more} more bytes)" if more > 0 else text
