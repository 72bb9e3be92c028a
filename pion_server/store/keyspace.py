"""The keyspace: strings, hashes and sorted sets under plain keys, as Redis clients know them.

One writer at a time (the caller sees to that); readers may come from any thread. A command first
gathers a `Change`, then `commit` makes room for it, logs it as one record and applies it: refused
or failed, it changed nothing, and replayed it is there as a whole or not at all.

Values of `key_values.LARGE` bytes and more stay in the log file: memory holds their place, and
they are sent from there.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, zip_longest
from typing import Any

from pion_server.errors import BadArgument, DamagedEntry
from pion_server.payload import Buffer
from pion_server.store.budget import MemoryBudget, Victim
from pion_server.store.checksum import crc32c
from pion_server.store.entries import RecordType, load_meta
from pion_server.store.key_changes import Change, load_operations, value_lengths
from pion_server.store.key_values import (
    LARGE,
    Data,
    Entry,
    Slice,
    SortedSet,
    Value,
    element_size,
    key_size,
    value_length,
)
from pion_server.store.log import Record, RecordLog
from pion_server.store.scan_order import ScanOrder

# How long a key that EXISTS said is there is not evicted.
LEASE_SECONDS = 10.0
# How many keys are looked at before all of them are.
FIRST_VICTIMS = 64
# Names stand in a record's metadata, which is bounded.
MAX_NAME = 1 << 16


class Keyspace:
    """All keys of one worker, evicted one by one, least recently used first."""

    def __init__(
        self,
        log: RecordLog,
        *,
        budget: MemoryBudget | None = None,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log = log
        self.lock = threading.RLock()
        self.stored_bytes = 0
        self.evictions = 0
        self.expirations = 0
        self.expiring = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._order = ScanOrder(self._number_of)
        # (when, key), cleaned only now and then: what an entry says counts.
        self._due: list[tuple[int, bytes]] = []
        self._writing: set[bytes] = set()
        self._wall_clock = wall_clock
        self._clock = clock
        self._budget = budget or MemoryBudget()
        self._budget.add_source(lambda: self.stored_bytes, self._victims)

    # --- looking -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def now(self) -> int:
        """Milliseconds since the epoch."""
        return int(self._wall_clock() * 1000)

    def find(self, key: bytes) -> Entry | None:
        """What `key` holds, not touching its age; None if it holds nothing, or not any more."""
        entry = self._entries.get(key)
        if entry is None or (entry.expires_at is not None and entry.expires_at <= self.now()):
            return None
        return entry

    def get(self, key: bytes) -> Entry | None:
        """As `find`; the key becomes the most recently used."""
        with self.lock:
            entry = self.find(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def promise(self, key: bytes) -> bool:
        """Whether the key is there; if so, it is not evicted for LEASE_SECONDS."""
        entry = self.get(key)
        if entry is None:
            return False
        entry.leased_until = self._clock() + LEASE_SECONDS
        return True

    def names(self) -> list[bytes]:
        """All keys that have not expired."""
        with self.lock:
            return [key for key in self._entries if self.find(key) is not None]

    def scan(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """The next keys in the order of SCAN, about `count` of them, and the next cursor."""
        with self.lock:
            following, keys = self._order.after(cursor, count)
            return following, [key for key in keys if self.find(key) is not None]

    def _number_of(self, key: bytes) -> int | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.number

    # --- changing ----------------------------------------------------------------------------

    def commit(self, change: Change) -> None:
        """Log what a command does, and do it.

        Raises OutOfMemory with nothing changed, LogFailed, BadArgument for an oversized name.
        """
        if not change:
            return
        self._writing = _checked(change)
        try:
            self._budget.reserve(self._growth(change), own=self._victims)
            record = self.log.append_or_evict(RecordType.KEYS, change.meta(), change.values, None)
        finally:
            self._writing = set()
        self._apply(change.operations, _placed(record, change.values))

    def forget_expired(self) -> None:
        """Let go of keys whose time is up; no record says so, their own do.

        A write like others: between a command's look at a key and its change nothing may go.
        """
        now = self.now()
        with self.lock:
            while self._due and self._due[0][0] <= now:
                at, key = heapq.heappop(self._due)
                entry = self._entries.get(key)
                if entry is not None and entry.expires_at == at:
                    self._forget(key)
                    self.expirations += 1

    def _growth(self, change: Change) -> int:
        """By how many bytes, at most, a change makes the keyspace larger."""
        more = 0
        for code, *rest in change.operations:
            if code not in ("s", "h", "z"):
                continue
            key, old = rest[0], self._entries.get(rest[0])
            if code == "s":
                more += key_size(key, rest[1]) - (old.nbytes if old else 0)
                continue
            fresh, elements = rest[1], rest[2]
            held: Any = {}
            if fresh or old is None:
                more += key_size(key) - (old.nbytes if old else 0)
            else:
                held = old.data.scores if isinstance(old.data, SortedSet) else old.data
            for name, value in elements:
                if code == "h":
                    more += element_size(name, value)
                    more -= element_size(name, value_length(held[name])) if name in held else 0
                elif name not in held:
                    more += element_size(name, 0)
        return more

    def _victims(self, keep: bytes | None) -> Iterator[Victim]:
        now = self._clock()
        for key in self._oldest():
            entry = self._entries.get(key)
            if entry is not None and entry.leased_until <= now and key not in self._writing:
                yield Victim(entry.nbytes, partial(self._evict, key), partial(self._records, key))

    def _records(self, key: bytes) -> set[Record]:
        """Looked up when asked for: a victim that held on to them would keep their bytes alive."""
        entry = self._entries.get(key)
        return {one.record for one in entry.slices()} if entry is not None else set()

    def _oldest(self) -> Iterator[bytes]:
        """Keys, least recently used first; a store that is full asks at every write, for few."""
        for start, end in ((0, FIRST_VICTIMS), (FIRST_VICTIMS, None)):
            with self.lock:
                keys = list(islice(self._entries, start, end))
            yield from keys

    def _evict(self, key: bytes) -> None:
        if key not in self._entries:
            return
        change = Change()
        change.delete(key)
        self.log.append(RecordType.KEYS, change.meta())
        self._forget(key)
        self.evictions += 1

    # --- applying ----------------------------------------------------------------------------

    def replay(self, record: Record) -> None:
        """Apply one logged record at start-up."""
        if record.type == RecordType.KEYS:
            meta = load_meta(record.meta)
            operations = load_operations(meta)
            values = _replayed(record, value_lengths(operations), meta.get("c", ()))
            self._apply(operations, values)

    def _apply(self, operations: Iterable[Sequence[Any]], values: Iterator[Value]) -> None:
        with self.lock:
            for code, *rest in operations:
                if code == "f":
                    self._forget_all()
                else:
                    self._apply_one(code, rest[0], rest[1:], values)

    def _apply_one(self, code: str, key: bytes, rest: list[Any], values: Iterator[Value]) -> None:
        if code == "d":
            self._forget(key)
        elif code == "s":
            value = next(values)
            self._put(key, value, key_size(key, value_length(value)), rest[1])
        elif code == "x":
            self._expire(self._entries[key], key, rest[0])
        elif code in ("h", "z"):
            empty: Data = {} if code == "h" else SortedSet()
            if rest[0]:
                self._put(key, empty, key_size(key), None)
            entry = self._entries[key]
            self._put_elements(entry, rest[1], values)
            self._entries.move_to_end(key)
        else:
            self._remove_elements(self._entries[key], rest[0])

    def _put(self, key: bytes, data: Data, nbytes: int, expires_at: int | None) -> None:
        entry = self._entries.get(key)
        if entry is None:
            number = self._order.add(key, len(self._entries))
            entry = self._entries[key] = Entry(data, number, 0)
        self.stored_bytes += nbytes - entry.nbytes
        entry.data, entry.nbytes = data, nbytes
        self._expire(entry, key, expires_at)
        self._entries.move_to_end(key)

    def _put_elements(
        self, entry: Entry, elements: Iterable[Sequence[Any]], values: Iterator[Value]
    ) -> None:
        data, more = entry.data, 0
        for name, number in elements:
            if isinstance(data, SortedSet):
                more += 0 if name in data.scores else element_size(name, 0)
                data.set(name, number)
            else:
                fields = _as_hash(data)
                old = fields.get(name)
                more += element_size(name, number)
                more -= 0 if old is None else element_size(name, value_length(old))
                fields[name] = next(values)
        self._resize(entry, more)

    def _remove_elements(self, entry: Entry, names: Iterable[bytes]) -> None:
        data, less = entry.data, 0
        for name in names:
            if isinstance(data, SortedSet):
                less += element_size(name, 0) if name in data.scores else 0
                data.discard(name)
            else:
                old = _as_hash(data).pop(name, None)
                less += 0 if old is None else element_size(name, value_length(old))
        self._resize(entry, -less)

    def _resize(self, entry: Entry, more: int) -> None:
        entry.nbytes += more
        self.stored_bytes += more

    def _expire(self, entry: Entry, key: bytes, expires_at: int | None) -> None:
        self.expiring += (expires_at is not None) - (entry.expires_at is not None)
        entry.expires_at = expires_at
        if expires_at is None:
            return
        heapq.heappush(self._due, (expires_at, key))
        if len(self._due) > 2 * self.expiring + 1024:
            held = self._entries.items()
            self._due = [(e.expires_at, k) for k, e in held if e.expires_at is not None]
            heapq.heapify(self._due)

    def _forget(self, key: bytes) -> None:
        with self.lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self.stored_bytes -= entry.nbytes
                self.expiring -= entry.expires_at is not None

    def _forget_all(self) -> None:
        self._entries = OrderedDict()
        self._order.clear()
        self._due = []
        self.stored_bytes = self.expiring = 0

    # --- saving ------------------------------------------------------------------------------

    def held(self) -> list[tuple[bytes, Entry]]:
        """Every key, least recently used first."""
        with self.lock:
            return list(self._entries.items())

    def adopt(self, key: bytes, field: bytes | None, old: Slice, new: Slice) -> None:
        """`new` is a copy of `old` and takes its place, if that is still there."""
        with self.lock:
            entry = self._entries.get(key)
            if entry is None:
                return
            if field is None and entry.data is old:
                entry.data = new
            elif field is not None and isinstance(entry.data, dict):
                if entry.data.get(field) is not old:
                    return
                entry.data[field] = new
            else:
                return
            new.record.owned = True


def _as_hash(data: Data) -> dict[bytes, Value]:
    if not isinstance(data, dict):
        raise TypeError("a record of fields belongs to no hash")
    return data


def _checked(change: Change) -> set[bytes]:
    """The keys of a change, no name of which is too long."""
    for code, *rest in change.operations:
        names = [rest[0]] if rest else []
        if code in ("h", "z"):
            names += [name for name, _ in rest[2]]
        if names and max(map(len, names)) > MAX_NAME:
            raise BadArgument(f"a key, field or member has more than {MAX_NAME} bytes")
    return change.keys()


def _placed(record: Record, values: Iterable[Buffer]) -> Iterator[Value]:
    """The values of a record just written: small ones in memory, the others where they lie."""
    buffers = list(values)
    record.owned = bool(buffers) and min(map(len, buffers)) >= LARGE
    offset = 0
    for buffer in buffers:
        length = len(buffer)
        yield bytes(buffer) if length < LARGE else Slice(record, offset, length)
        offset += length


def _replayed(record: Record, lengths: list[int], sums: Sequence[int | None]) -> Iterator[Value]:
    """The same at start-up. Small values that are damaged stay where they are: to read one is an
    error. Where a body is not whole, `sums` tell which of them are."""
    smallest = min(lengths, default=LARGE)
    body, whole = b"", True
    if smallest < LARGE:
        try:
            body = record.read()
        except DamagedEntry:
            whole = False
            file, start = record.where
            with suppress(OSError):
                body = file.read(start, record.length)
    # Small values have no copy but this record's: its bytes are never given back.
    record.owned = smallest >= LARGE and bool(lengths)
    offset = 0
    for length, expected in zip_longest(lengths, sums[: len(lengths)]):
        value = body[offset : offset + length] if length < LARGE else b""
        if length >= LARGE or not (whole or crc32c(value) == expected):
            yield Slice(record, offset, length)
        else:
            yield value
        offset += length
