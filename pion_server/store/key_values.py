"""What a key of the keyspace holds: bytes in memory or in the log, hashes, sorted sets."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from pion_server.errors import DamagedEntry
from pion_server.payload import FileSpan
from pion_server.store.log import Record

# Values of this many bytes and more stay in the log file and are sent from there.
LARGE: Final = 1 << 14
# Roughly what a key, and what an element of it, costs beside its bytes; names stand twice on disk.
KEY_OVERHEAD: Final = 128
ELEMENT_OVERHEAD: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """A value lying in a record's body; who holds it keeps the record and its file."""

    record: Record
    offset: int
    length: int

    @property
    def verified(self) -> bool:
        """Whether the bytes, where they lie now, were compared with their checksum."""
        return self.record.verified

    def span(self) -> FileSpan:
        """The verified bytes as a place in their file. Raises DamagedEntry."""
        self.record.verify()
        if self.offset + self.length > self.record.length:
            raise DamagedEntry("stored data is damaged: it was lost when a snapshot was written")
        file, body = self.record.where
        return FileSpan(file, body + self.offset, self.length)

    def read(self) -> bytes:
        """The verified bytes in memory. Raises DamagedEntry."""
        span = self.span()
        file = self.record.where[0]
        try:
            data = file.read(span.offset, span.length)
        except OSError as error:
            raise DamagedEntry(f"stored data cannot be read: {error.strerror}") from error
        if len(data) != self.length:
            raise DamagedEntry("stored data is damaged: its file was cut short")
        return data


Value: TypeAlias = bytes | Slice


def value_length(value: Value) -> int:
    """Its bytes, wherever they lie."""
    return value.length if isinstance(value, Slice) else len(value)


def value_bytes(value: Value) -> bytes:
    """The value in memory. Raises DamagedEntry."""
    return value.read() if isinstance(value, Slice) else value


class SortedSet:
    """Members with scores, ordered by (score, member bytes)."""

    __slots__ = ("_order", "scores")

    def __init__(self) -> None:
        self.scores: dict[bytes, float] = {}
        self._order: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self.scores)

    def set(self, member: bytes, score: float) -> None:
        """Add a member, or move it to another score."""
        self.discard(member)
        self.scores[member] = score
        insort(self._order, (score, member))

    def discard(self, member: bytes) -> None:
        """Remove a member if it is there."""
        score = self.scores.pop(member, None)
        if score is not None:
            del self._order[bisect_left(self._order, (score, member))]

    def range(self, first: int, last: int, *, reverse: bool = False) -> list[tuple[float, bytes]]:
        """The elements of ranks `first` to `last`, both included; negative ones count from the
        end, as in Redis."""
        size = len(self._order)
        first = max(first + size if first < 0 else first, 0)
        last = min(last + size if last < 0 else last, size - 1)
        if first > last:
            return []
        if reverse:
            return self._order[size - 1 - last : size - first][::-1]
        return self._order[first : last + 1]

    def items(self) -> list[tuple[float, bytes]]:
        """All elements in order; a list of the caller's own."""
        return list(self._order)

    def copy(self) -> SortedSet:
        """One of its own, with the same elements."""
        other = SortedSet()
        other.scores, other._order = dict(self.scores), list(self._order)
        return other


Hash: TypeAlias = dict[bytes, Value]
Data: TypeAlias = Value | Hash | SortedSet


@dataclass(slots=True, eq=False)
class Entry:
    """A key's value and what is known of it.

    `number`: counted up with each new key, the order of SCAN. `nbytes`: what it counts for.
    `expires_at`: milliseconds since the epoch. `leased_until`: monotonic seconds.
    """

    data: Data
    number: int
    nbytes: int
    expires_at: int | None = None
    leased_until: float = 0.0

    @property
    def type(self) -> str:
        """As TYPE calls it."""
        return type_name(self.data)

    def slices(self) -> Iterator[Slice]:
        """Its values that lie in the log."""
        values: Iterable[Value] = ()
        if isinstance(self.data, dict):
            values = self.data.values()
        elif not isinstance(self.data, SortedSet):
            values = (self.data,)
        return (value for value in values if isinstance(value, Slice))


def type_name(data: Data) -> str:
    """`string`, `hash` or `zset`."""
    if isinstance(data, dict):
        return "hash"
    return "zset" if isinstance(data, SortedSet) else "string"


def element_size(name: bytes, length: int) -> int:
    """What a field, or with length 0 a member, counts for."""
    return 2 * len(name) + length + ELEMENT_OVERHEAD


def key_size(key: bytes, length: int = 0) -> int:
    """What a key counts for, a string's bytes included."""
    return 2 * len(key) + length + KEY_OVERHEAD
