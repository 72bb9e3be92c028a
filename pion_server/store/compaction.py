"""SAVE and compaction: a new snapshot and a short log, without stopping anybody.

1. `Compaction(...)` under the writer lock: the live state is frozen (references only).
2. `write()` in a thread: the snapshot goes to `<path>.tmp` and is flushed.
3. `catch_up()` in the same thread: records appended meanwhile are copied to a new log.
4. `finish()` under the writer lock: the last few records, then both renames, snapshot first.
A crash anywhere leaves the old pair or, between the renames, the new snapshot with the old log,
whose records up to the snapshot's `covers` are skipped at start-up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pion_server.errors import DamagedEntry
from pion_server.store.checksum import crc32c
from pion_server.store.files import StoreFile, sync_directory
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


@dataclass(frozen=True, slots=True)
class Part:
    """`length` bytes at `offset` of a record's body."""

    record: Record
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Item:
    """One record for the snapshot; `adopt` is told where its body lies once it counts.

    A damaged item has no body and a checksum no body has: reading it stays an error.
    """

    type: int
    meta: bytes
    parts: list[Part | bytes]
    adopt: Callable[[Record], None] | None = None
    damaged: bool = False


def whole_item(type_: int, meta: bytes, record: Record, adopt: Callable[[Record], None]) -> Item:
    """A record's body as it is, or a damaged item if it fails its checksum."""
    try:
        record.verify()
    except DamagedEntry:
        return Item(type_, meta, [], adopt, damaged=True)
    return Item(type_, meta, [Part(record, 0, record.length)], adopt)


class Compaction:
    """One run of it over one log. `abandon()` is safe at any point before `finish()` returned."""

    def __init__(self, log: RecordLog, snapshot: Path, items: Iterable[Item]) -> None:
        self._log = log
        self._items = items
        self._path = snapshot
        self._tmp = snapshot.with_name(snapshot.name + ".tmp")
        self.covers = log.seq
        self._moved: list[tuple[Record, int]] = []
        self._new_log: StoreFile | None = None
        self._new_end = 0
        self._adopted: list[tuple[Callable[[Record], None], Record]] = []
        self._file: StoreFile | None = None
        self.bytes_written = 0
        log.tail = []

    def write(self) -> None:
        """Write and flush the snapshot file; raises OSError with nothing changed."""
        self._tmp.unlink(missing_ok=True)
        file = StoreFile.open(self._tmp, truncate=True)
        marker = self._log.marker
        at = file.write([pack_file_header(self._log.kind, marker, self.covers)], 0)
        for item in self._items:
            head_size = len(pack_head(MAGIC, marker, Head(0, 0, item.meta, 0, 0)))
            crc, end = int(item.damaged), at + head_size
            for part in item.parts:
                crc, end = _copy(part, file, end, crc)
            length = end - at - head_size
            head = Head(self.covers, item.type, item.meta, length, crc)
            file.write([pack_head(MAGIC, marker, head)], at)
            file.write([pack_head(TRAILER_MAGIC, marker, head)], end)
            if item.adopt is not None:
                record = Record(head.seq, item.type, item.meta, (file, at + head_size), length, crc)
                self._adopted.append((item.adopt, record))
            at = end + head_size
        file.sync()
        self._file, self.bytes_written = file, at

    def publish_copy(self, target: Path) -> None:
        """Rename the snapshot to `target` and change nothing else (SAVE to another path)."""
        self._log.tail = None
        os.replace(self._tmp, target)
        sync_directory(target.parent)

    def catch_up(self) -> None:
        """Copy what was appended since the freeze into the new log, while writers go on."""
        while self._log.tail:
            self._copy_tail()

    def _copy_tail(self) -> None:
        tail, self._log.tail = self._log.tail or [], []
        if not tail:
            return
        if self._new_log is None:
            self._new_log = self._open_log()
            header = pack_file_header(self._log.kind, self._log.marker, 0)
            self._new_end = self._new_log.write([header], 0)
        for record, start, total in tail:
            file, body = record.where
            shift = body - start
            at = self._new_end
            for offset in range(0, total, READ_CHUNK):
                data = file.read(start + offset, min(READ_CHUNK, total - offset))
                self._new_log.write([data], at + offset)
            self._moved.append((record, at + shift))
            self._new_end += total

    def _open_log(self) -> StoreFile:
        if self._log.path is None:
            return StoreFile.anonymous(self._log.directory)
        return StoreFile.open(self._log_tmp(self._log.path), truncate=True)

    @staticmethod
    def _log_tmp(path: Path) -> Path:
        return path.with_name(path.name + ".tmp")

    def finish(self) -> None:
        """Put both files into place. The writer lock is held; readers go on meanwhile."""
        self._copy_tail()
        log = self._log
        if self._new_log is None:
            self._new_log, self._new_end = self._open_log(), 0
        self._new_log.sync()
        os.replace(self._tmp, self._path)
        sync_directory(self._path.parent)
        if log.path is not None:
            os.replace(self._log_tmp(log.path), log.path)
            sync_directory(log.path.parent)
        log.tail = None
        log.replace(self._new_log, self._new_end, len(self._moved))
        log.snapshot_bytes = self.bytes_written
        for record, body in self._moved:
            record.where = (self._new_log, body)
        for adopt, record in self._adopted:
            adopt(record)

    def abandon(self) -> None:
        """Forget everything; the old snapshot and log stand as they were."""
        self._log.tail = None
        with contextlib.suppress(OSError):
            self._tmp.unlink(missing_ok=True)
            if self._log.path is not None:
                self._log_tmp(self._log.path).unlink(missing_ok=True)


def _copy(part: Part | bytes, target: StoreFile, at: int, crc: int) -> tuple[int, int]:
    if isinstance(part, bytes):
        return crc32c(part, crc), at + target.write([part], at)
    file, body = part.record.where
    for offset in range(part.offset, part.offset + part.length, READ_CHUNK):
        length = min(READ_CHUNK, part.offset + part.length - offset)
        data = file.read(body + offset, length)
        if len(data) != length:
            raise OSError(f"{file.path.name} was cut short while it was copied")
        crc = crc32c(data, crc)
        at += target.write([data], at)
    return crc, at
