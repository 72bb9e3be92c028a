"""The record log: checksummed records, appended once, found again after any crash.

A file is a 40-byte file header and then records; an empty file is an empty log. Little-endian:

    file header   8s "PIONLOG1" | u32 version | u32 kind | 8s marker | u64 covers | u32 0 | u32 crc
    record        head + meta | body | head + meta again, its first byte changed
    head (44 B)   4s magic | 8s marker | u64 seq | u8 type | 3x | u32 meta_len | u64 body_len
                  | u32 body_crc | u32 head_crc         (CRC32C; head_crc: 40 bytes before, meta)

The head stands twice, before and after the body, so one damaged place never hides a record:
start-up falls back to the second copy. `marker` is random per store, so no stored row can pass for
a record when start-up searches for the next one behind a damaged place. Bodies are not read at
start-up; each is verified before it is first served (`Record.verify`). `covers` is, in a snapshot,
the sequence number of the last record it holds: replay of a log skips up to it, which makes a
crash between the snapshot's rename and the log's truncation harmless.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pion_server.errors import DamagedEntry, LogFailed
from pion_server.payload import Buffer
from pion_server.store.checksum import crc32c
from pion_server.store.files import StoreFile

FILE_MAGIC = b"PIONLOG1"
FILE_VERSION = 1
FILE_HEADER = struct.Struct("<8sII8sQII")
HEAD = struct.Struct("<4s8sQB3xIQII")
MAGIC, TRAILER_MAGIC = b"PREC", b"QREC"
MAX_META = 1 << 24
SCAN_WINDOW = 1 << 16
READ_CHUNK = 1 << 20
PUBLIC_MAGICS = (b"PIONVS01", b"PIONSS01")


class ForeignFile(Exception):
    """A file under one of our names that is not a Pion record log; it is left as it is."""


@dataclass(slots=True, eq=False)
class Record:
    """Where a record's body lies. Compaction moves it: `where` changes as one assignment, so a
    reader in another thread sees the old place or the new one, never a mixture."""

    seq: int
    type: int
    meta: bytes
    where: tuple[StoreFile, int]
    length: int
    crc: int
    verified: bool = False

    def verify(self) -> None:
        """Compare the whole body with its checksum once; afterwards only its presence.

        Raises DamagedEntry for a wrong checksum, a read error or a file cut short.
        """
        file, offset = self.where
        try:
            if self.verified:
                if file.size() < offset + self.length:
                    raise DamagedEntry("stored data is damaged: its file was cut short")
                return
            crc, at, end = 0, offset, offset + self.length
            while at < end:
                chunk = file.read(at, min(READ_CHUNK, end - at))
                if not chunk:
                    raise DamagedEntry("stored data is damaged: its file was cut short")
                crc = crc32c(chunk, crc)
                at += len(chunk)
        except OSError as error:
            raise DamagedEntry(f"stored data cannot be read: {error.strerror}") from error
        if crc != self.crc:
            raise DamagedEntry("stored data is damaged: checksum mismatch")
        self.verified = True

    def read(self) -> bytes:
        """The verified body."""
        self.verify()
        file, offset = self.where
        try:
            data = file.read(offset, self.length)
        except OSError as error:
            raise DamagedEntry(f"stored data cannot be read: {error.strerror}") from error
        if len(data) != self.length:
            raise DamagedEntry("stored data is damaged: its file was cut short")
        return data


@dataclass(slots=True)
class ScanReport:
    """What start-up found in one file."""

    records: int = 0
    recovered: int = 0
    lost_bytes: int = 0
    cut_at: int | None = None
    cut_bytes: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Head:
    """One parsed copy of a record's head and meta."""

    seq: int
    type: int
    meta: bytes
    body_len: int
    body_crc: int

    @property
    def size(self) -> int:
        return HEAD.size + len(self.meta)


def pack_head(magic: bytes, marker: bytes, head: Head) -> bytes:
    """Head and meta as they stand in the file."""
    fields = (marker, head.seq, head.type, len(head.meta), head.body_len, head.body_crc)
    bare = HEAD.pack(magic, *fields, 0)[:-4]
    return bare + struct.pack("<I", crc32c(bare + head.meta)) + head.meta


def pack_file_header(kind: int, marker: bytes, covers: int) -> bytes:
    bare = FILE_HEADER.pack(FILE_MAGIC, FILE_VERSION, kind, marker, covers, 0, 0)[:-4]
    return bare + struct.pack("<I", crc32c(bare))


class _Window:
    """Sequential reads through one window, so that a scan costs one read per 64 KiB or record."""

    def __init__(self, file: StoreFile) -> None:
        self._file = file
        self._base = 0
        self._data = b""

    def read(self, offset: int, length: int) -> bytes:
        start = offset - self._base
        if start < 0 or start + length > len(self._data):
            self._base, self._data = offset, self._file.read(offset, max(length, SCAN_WINDOW))
            start = 0
        return self._data[start : start + length]


class LogReader:
    """Reads one file's records at start-up, past any damage, without touching the file."""

    def __init__(self, file: StoreFile, kind: int) -> None:
        self.file = file
        self.report = ScanReport()
        self.size = file.size()
        self.covers = 0
        self.marker = b""
        self._window = _Window(file)
        if self.size:
            self._read_file_header(kind)

    def _read_file_header(self, kind: int) -> None:
        raw = self._window.read(0, FILE_HEADER.size)
        if len(raw) == FILE_HEADER.size:
            magic, version, found_kind, marker, covers, _, crc = FILE_HEADER.unpack(raw)
            if magic == FILE_MAGIC and crc == crc32c(raw[:-4]):
                if version != FILE_VERSION or found_kind != kind:
                    raise ForeignFile(
                        f"{self.file.path.name}: format version {version} kind {found_kind}, "
                        f"this server reads version {FILE_VERSION} kind {kind}"
                    )
                self.marker, self.covers = marker, covers
                return
        # The header is damaged or the file is not ours: the first record tells which.
        first = self._window.read(FILE_HEADER.size, HEAD.size)
        marker = first[4:12]
        if len(first) == HEAD.size and first[:4] == MAGIC:
            self.marker = marker
            if self._head_at(FILE_HEADER.size, MAGIC) is not None:
                self.report.notes.append("file header damaged, marker taken from the first record")
                return
        if self.size <= FILE_HEADER.size and FILE_MAGIC.startswith(raw[:8]):
            self.report.notes.append("file header torn")
            self.marker = b""
            return
        public = " (it looks like the public Pion server's)" if raw[:8] in PUBLIC_MAGICS else ""
        raise ForeignFile(
            f"{self.file.path.name} is not a pion-server record log{public}; "
            "move it away or choose another --dir"
        )

    def _head_at(self, offset: int, magic: bytes) -> Head | None:
        raw = self._window.read(offset, HEAD.size)
        if len(raw) < HEAD.size or raw[:4] != magic:
            return None
        _, marker, seq, type_, meta_len, body_len, body_crc, crc = HEAD.unpack(raw)
        if marker != self.marker or meta_len > MAX_META:
            return None
        meta = self._window.read(offset + HEAD.size, meta_len)
        if len(meta) != meta_len or crc32c(raw[:-4] + meta) != crc:
            return None
        return Head(seq, type_, meta, body_len, body_crc)

    def _resync(self, offset: int) -> tuple[int, bytes] | None:
        """The next place behind `offset` that holds a valid head copy of either kind."""
        at = offset
        overlap = 4 + len(self.marker) - 1
        while at < self.size:
            data = self.file.read(at, READ_CHUNK)
            if len(data) <= overlap:
                return None
            found = data.find(self.marker)
            while found >= 0:
                place = at + found - 4
                if place >= offset:
                    for magic in (MAGIC, TRAILER_MAGIC):
                        if self._head_at(place, magic) is not None:
                            return place, magic
                found = data.find(self.marker, found + 1)
            at += len(data) - overlap
        return None

    def records(self) -> Iterator[Record]:
        """Every record that can be trusted, in file order; fills in `report`."""
        if not self.marker:
            if self.size:
                self.report.cut_at, self.report.cut_bytes = 0, self.size
            return
        at = FILE_HEADER.size
        while at < self.size:
            head = self._head_at(at, MAGIC)
            end = at + 2 * head.size + head.body_len if head else 0
            if head and end <= self.size:
                record = self._found(head, at + head.size)
                if self._is_closed(end, head) or not self._is_torn(record, end):
                    yield record
                    at = end
                    continue
                self.report.records -= 1
                self.report.cut_at, self.report.cut_bytes = at, self.size - at
                return
            nearest = self._resync(at + 1)
            if nearest is None:
                self.report.cut_at, self.report.cut_bytes = at, self.size - at
                return
            place, magic = nearest
            if magic == MAGIC:
                self.report.lost_bytes += place - at
                at = place
                continue
            trailer = self._head_at(place, TRAILER_MAGIC)
            start = place - trailer.body_len - trailer.size if trailer else -1
            if trailer and start >= at:
                self.report.lost_bytes += start - at
                self.report.recovered += 1
                yield self._found(trailer, start + trailer.size)
            else:
                self.report.lost_bytes += place - at
            at = place + (trailer.size if trailer else 1)

    def _is_closed(self, end: int, head: Head) -> bool:
        """Whether the second head copy, or a record behind it, shows the record to be whole."""
        return (
            self._head_at(end - head.size, TRAILER_MAGIC) == head
            or self._head_at(end, MAGIC) is not None
        )

    def _is_torn(self, record: Record, end: int) -> bool:
        """A last record without its second head copy and with a wrong body was never finished."""
        try:
            record.verify()
        except DamagedEntry:
            return self._resync(end) is None
        return False

    def _found(self, head: Head, body: int) -> Record:
        self.report.records += 1
        place = (self.file, body)
        return Record(head.seq, head.type, head.meta, place, head.body_len, head.body_crc)


class RecordLog:
    """The file that takes new records, and the counters a server reports of it.

    One writer at a time; the caller sees to that. Sequence numbers are never reused.
    """

    def __init__(self, path: Path | None, directory: Path, kind: int) -> None:
        self.path = path
        self.kind = kind
        self.directory = directory
        self.marker = os.urandom(8)
        self.seq = 0
        self.appended = 0
        self.replayed = 0
        self.max_bytes: int | None = None
        self.snapshot_bytes = 0
        self.disk_bytes: Callable[[], int] = lambda: self.end + self.snapshot_bytes
        self.failed: str | None = None
        self.tail: list[tuple[Record, int, int]] | None = None
        self._unsynced = False
        self.file = StoreFile.open(path) if path else StoreFile.anonymous(directory)
        self.end = 0

    @property
    def durable(self) -> bool:
        """Whether anything survives the process at all."""
        return self.path is not None

    def start_from(self, reader: LogReader, last_seq: int) -> None:
        """Go on appending where `reader` stopped: cut its torn tail, keep its marker."""
        report = reader.report
        self.seq = max(self.seq, last_seq)
        if reader.marker:
            self.marker = reader.marker
        self.end = reader.size
        if report.cut_at is not None:
            self.end = report.cut_at
            self.file.truncate(self.end)
            self.file.sync()

    def append(self, type_: int, meta: bytes, body: Sequence[Buffer] = ()) -> Record:
        """Append one record; it is with the kernel when this returns.

        Raises LogFailed (disk full, over --max-disk, I/O error, an earlier failed fsync) with the
        file as it was before.
        """
        if self.failed:
            raise LogFailed(f"the log failed earlier and takes no more writes: {self.failed}")
        length = sum(len(memoryview(part).cast("B")) for part in body)
        crc = 0
        for part in body:
            crc = crc32c(part, crc)
        head = Head(self.seq + 1, type_, meta, length, crc)
        lead = pack_head(MAGIC, self.marker, head)
        if self.end == 0:
            lead = pack_file_header(self.kind, self.marker, 0) + lead
        trail = pack_head(TRAILER_MAGIC, self.marker, head)
        total = len(lead) + length + len(trail)
        if self.max_bytes is not None and self.disk_bytes() + total > self.max_bytes:
            raise LogFailed(
                f"--max-disk: {self.disk_bytes()} of {self.max_bytes} bytes used, "
                f"{total} more needed"
            )
        start = self.end
        try:
            self.file.write([lead, *body, trail], start)
        except OSError as error:
            self._undo(start, error)
            raise LogFailed(f"cannot write to the log: {error.strerror or error}") from error
        self.seq += 1
        self.appended += 1
        self.end = start + total
        self._unsynced = True
        record = Record(head.seq, type_, meta, (self.file, start + len(lead)), length, crc)
        if self.tail is not None:
            first = start + len(lead) - head.size
            self.tail.append((record, first, total - (first - start)))
        return record

    def _undo(self, start: int, cause: OSError) -> None:
        try:
            self.file.truncate(start)
        except OSError:
            self.failed = f"{cause.strerror}, and the torn record could not be cut off"

    def sync(self) -> None:
        """Flush to stable storage. A failure is final: what the kernel dropped is unknown."""
        if self.failed:
            raise LogFailed(f"the log failed earlier and takes no more writes: {self.failed}")
        if not self._unsynced or not self.durable:
            return
        self._unsynced = False
        try:
            self.file.sync()
        except OSError as error:
            self.failed = f"fsync: {error.strerror}"
            raise LogFailed(f"fsync failed: {error.strerror}") from error

    def replace(self, file: StoreFile, end: int, records: int) -> None:
        """Continue in a new file of `records` records that already stands under this log's path."""
        self.file, self.end = file, end
        self.appended = records
