"""SAVE and compaction: a new snapshot and a short log, without stopping anybody.

1. `Compaction(...)` under the writer lock: the live state is frozen (references only).
2. `write()` in a thread: the snapshot goes to `<path>.tmp` and is flushed.
3. `catch_up()` in the same thread: records appended meanwhile are copied to a new log.
4. `finish()` under the writer lock: the last few records, then both renames, snapshot first.
5. `Frozen.adopt()` under the writer lock, again and again for a moment: the index, whose records
   lie in the old files until then, is pointed at the new ones.
6. `take_apart()` in a thread: what all this has gathered goes piece by piece.
A crash anywhere leaves the old pair or, between the renames, the new snapshot with the old log,
whose records up to the snapshot's `covers` are skipped at start-up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pion_server.errors import DamagedEntry
from pion_server.store.checksum import crc32c
from pion_server.store.files import StoreFile, closer, sync_directory
from pion_server.store.log import (
    MAGIC,
    READ_CHUNK,
    TRAILER_MAGIC,
    Head,
    Record,
    RecordLog,
    pack_file_header,
    pack_head,
)

# Rounds of copying new records beside the writers, before the last one stops them.
CATCH_UPS = 8


@dataclass(frozen=True, slots=True)
class Part:
    """`length` bytes at `offset` of a record's body."""

    record: Record
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Item:
    """One record for the snapshot; `placed` is told where its body lies in the new file, which
    counts only once the compaction has finished.

    `instead` makes the items to write when a part proves damaged while it is copied. A damaged
    item has no body and a checksum no body has: reading it stays an error.
    """

    type: int
    meta: bytes
    parts: list[Part | bytes]
    placed: Callable[[Record], None] | None = None
    instead: Callable[[], Iterable[Item]] | None = None
    damaged: bool = False


def whole_item(type_: int, meta: bytes, record: Record, placed: Callable[[Record], None]) -> Item:
    """A record's body as it is, or a damaged item if it fails its checksum."""

    def damaged() -> list[Item]:
        return [Item(type_, meta, [], placed, damaged=True)]

    return Item(type_, meta, [Part(record, 0, record.length)], placed, damaged)


class Frozen(Protocol):
    """A store's live state at one moment; made under the writer lock, in any thread."""

    def items(self) -> Iterator[Item]:
        """What the snapshot holds; read in a thread, it touches nothing that may change."""

    def adopt(self) -> Iterator[None]:
        """Point the live index at the snapshot's copies, a little at each step. The writer lock
        is held during a step; between two of them there may be writes of any kind."""

    def take_apart(self) -> None:
        """Let go of everything, piece by piece."""


def drain(pile: list[Any] | dict[Any, Any]) -> None:
    """Empty it piece by piece: freed as a whole, a million objects stop all threads at once."""
    remove = pile.popitem if isinstance(pile, dict) else pile.pop
    while pile:
        remove()


class Compaction:
    """One run of it over one log. `abandon()` is safe at any point before `finish()` returned."""

    def __init__(self, log: RecordLog, snapshot: Path, frozen: Frozen) -> None:
        self._log = log
        self.frozen = frozen
        self._path = snapshot
        self._tmp = snapshot.with_name(snapshot.name + ".tmp")
        self.covers = log.seq
        # Writers append to it while it is copied from, so it only grows until `finish`.
        self._tail: list[tuple[Record, int, int]] = []
        self._moved: list[tuple[Record, int]] = []
        self._new_log: StoreFile | None = None
        self._new_end = 0
        self._file: StoreFile | None = None
        log.tail = self._tail

    def write(self) -> None:
        """Write and flush the snapshot file; raises OSError with nothing changed."""
        self._tmp.unlink(missing_ok=True)
        file = StoreFile.open(self._tmp, truncate=True)
        at = file.write([pack_file_header(self._log.kind, self._log.marker, self.covers)], 0)
        for item in self.frozen.items():
            at = self._write_item(file, at, item)
        file.sync()
        self._file = file

    def _write_item(self, file: StoreFile, at: int, item: Item) -> int:
        marker = self._log.marker
        body = at + len(pack_head(MAGIC, marker, Head(0, 0, item.meta, 0, 0)))
        crc, end = int(item.damaged), body
        try:
            for part in item.parts:
                crc, end = _copy(part, file, end, crc)
        except DamagedEntry:
            if item.instead is None:
                raise
            for sound in item.instead():
                at = self._write_item(file, at, sound)
            return at
        head = Head(self.covers, item.type, item.meta, end - body, crc)
        file.write([pack_head(MAGIC, marker, head)], at)
        file.write([pack_head(TRAILER_MAGIC, marker, head)], end)
        if item.placed is not None:
            item.placed(Record(head.seq, item.type, item.meta, (file, body), head.body_len, crc))
        return end + head.size

    def ignore_new_records(self) -> None:
        """A copy needs none of those appended while it is written."""
        self._log.tail = None

    def publish_copy(self) -> None:
        """Rename the snapshot into place and change nothing else (SAVE to another path)."""
        os.replace(self._tmp, self._path)
        sync_directory(self._path.parent)

    def catch_up(self) -> None:
        """Copy what was appended since the freeze into the new log, while writers go on."""
        for _ in range(CATCH_UPS):
            if not self._copy_tail():
                break
        if self._new_log is not None:
            self._new_log.sync()

    def _copy_tail(self) -> bool:
        """Copy the records not copied yet; whether there were any."""
        tail = self._tail[len(self._moved) :]
        if not tail:
            return False
        if self._new_log is None:
            self._new_log = self._open_log()
            header = pack_file_header(self._log.kind, self._log.marker, 0)
            self._new_end = self._new_log.write([header], 0)
        for record, start, total in tail:
            file, body = record.where
            for offset in range(0, total, READ_CHUNK):
                length = min(READ_CHUNK, total - offset)
                data = _read(file, start + offset, length)
                self._new_log.write([data], self._new_end + offset)
            self._moved.append((record, self._new_end + body - start))
            self._new_end += total
        return True

    def _open_log(self) -> StoreFile:
        if self._log.path is None:
            return StoreFile.anonymous(self._log.directory)
        return StoreFile.open(self._log_tmp(self._log.path), truncate=True)

    @staticmethod
    def _log_tmp(path: Path) -> Path:
        return path.with_name(path.name + ".tmp")

    def finish(self) -> None:
        """Put both files into place. The writer lock is held; readers go on meanwhile.

        OSError before the log's rename: the old log goes on, with either snapshot. After it there
        is no way back, the new files are the store.
        """
        log = self._log
        closer.start()
        if self._copy_tail() or self._new_log is None:
            self._new_log = self._new_log or self._open_log()
            self._new_log.sync()
        os.replace(self._tmp, self._path)
        log.snapshot, log.covers = self._file, self.covers
        sync_directory(self._path.parent)
        if log.path is not None:
            os.replace(self._log_tmp(log.path), log.path)
        log.tail = None
        for record, body in self._moved:
            record.where = (self._new_log, body)
        log.replace(self._new_log, self._new_end, len(self._moved))

    def take_apart(self) -> None:
        """Let go of all that was gathered, when it counts or is abandoned."""
        self._tail, self._moved, tail, moved = [], [], self._tail, self._moved
        for pile in (tail, moved):
            drain(pile)
        self._file = self._new_log = None
        self.frozen.take_apart()

    def abandon(self) -> None:
        """Forget everything; the old snapshot and log stand as they were."""
        self._log.tail = None
        with contextlib.suppress(OSError):
            self._tmp.unlink(missing_ok=True)
            if self._log.path is not None:
                self._log_tmp(self._log.path).unlink(missing_ok=True)


def _read(file: StoreFile, at: int, length: int) -> bytes:
    data = file.read(at, length)
    if len(data) != length:
        raise OSError(f"{file.path.name} was cut short while it was copied")
    return data


def _copy(part: Part | bytes, target: StoreFile, at: int, crc: int) -> tuple[int, int]:
    """Append a part to the body under way; its checksum and end. DamagedEntry: nothing to copy.

    The copy gets a new checksum, so what it is made from must agree with its own right now: what
    was verified when it was first served may have been damaged since.
    """
    if isinstance(part, bytes):
        return crc32c(part, crc), at + target.write([part], at)
    record = part.record
    whole = part.length == record.length
    if not whole:
        record.verify(afresh=True)
    file, body = record.where
    own = 0
    for offset in range(part.offset, part.offset + part.length, READ_CHUNK):
        length = min(READ_CHUNK, part.offset + part.length - offset)
        try:
            data = _read(file, body + offset, length)
        except OSError as error:
            raise DamagedEntry(str(error)) from error
        crc, own = crc32c(data, crc), crc32c(data, own) if whole else own
        at += target.write([data], at)
    if whole and own != record.crc:
        record.distrust()
        raise DamagedEntry("stored data is damaged: checksum mismatch")
    return crc, at
