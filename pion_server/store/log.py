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

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pion_server.errors import DamagedEntry, LogFailed
from pion_server.payload import Buffer
from pion_server.store.checksum import crc32c
from pion_server.store.files import StoreFile, sync_directory, whole_pages

FILE_MAGIC = b"PIONLOG1"
FILE_VERSION = 1
FILE_HEADER = struct.Struct("<8sII8sQII")
HEAD = struct.Struct("<4s8sQB3xIQII")
MAGIC, TRAILER_MAGIC = b"PREC", b"QREC"
MAX_META = 1 << 24
READ_CHUNK = 1 << 20
# Smaller dead bodies wait for a SAVE.
WORTH_A_HOLE = 1 << 14
# Bodies from this size on have blocks reserved for them first.
WORTH_RESERVING = 1 << 17
# Under --max-disk: left for records without a body, such as those of evictions.
DISK_RESERVE = 1 << 16


class DiskFull(LogFailed):
    """No room on the disk, or under --max-disk, for `needed` bytes."""

    def __init__(self, text: str, needed: int) -> None:
        super().__init__(text)
        self.needed = needed


class ForeignFile(Exception):
    """A file under one of our names that is not a Pion record log; it is left as it is."""


@dataclass(slots=True, eq=False)
class Record:
    """Where a record's body lies. Compaction moves it: `where` changes as one assignment, so a
    reader in another thread sees the old place or the new one, never a mixture.

    `owned`: a store's index refers to it. When that and all replies under way let go of it, its
    body is dead; of other records the body may be needed again at start-up.
    """

    seq: int
    type: int
    meta: bytes
    where: tuple[StoreFile, int]
    length: int
    crc: int
    owned: bool = False
    _trusted: object = None

    def __del__(self) -> None:
        if self.owned and self.pages:
            file, offset = self.where
            file.dead.append((offset, self.length))

    @property
    def pages(self) -> int:
        """The bytes of the whole pages in the body, which can be given back; 0 for a small one."""
        if self.length < WORTH_A_HOLE:
            return 0
        start, end = whole_pages(self.where[1], self.length)
        return end - start

    @property
    def verified(self) -> bool:
        """Whether the body, where it lies now, was compared with its checksum."""
        return self._trusted is self.where[0].trust

    def verify(self, *, afresh: bool = False) -> None:
        """Compare the whole body with its checksum once (or again); otherwise only its presence.

        Raises DamagedEntry for a wrong checksum, a read error or a file cut short.
        """
        file, offset = self.where
        trust = file.trust
        try:
            if self._trusted is trust and not afresh:
                if file.size() < offset + self.length:
                    file.doubt()
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
            self.distrust()
            raise DamagedEntry("stored data is damaged: checksum mismatch")
        self._trusted = trust

    def distrust(self) -> None:
        """Forget that the body was verified."""
        self._trusted = None

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
        self.snapshot: StoreFile | None = None
        self.covers = 0
        self.disk_bytes: Callable[[], int] = lambda: self.end + self.snapshot_bytes
        self.make_room: Callable[[int, bytes | None], bool] = lambda nbytes, keep: False
        self.failed: str | None = None
        self.tail: list[tuple[Record, int, int]] | None = None
        self._unsynced = False
        self._sync_lock = threading.Lock()
        self.file = StoreFile.open(path) if path else StoreFile.anonymous(directory)
        # Where the next record goes, and the file's length: it differs while room is reserved, or
        # when somebody else changed it.
        self.end = self._size = 0

    @property
    def snapshot_bytes(self) -> int:
        """Length of the snapshot, 0 if there is none."""
        return self.snapshot.size() if self.snapshot is not None else 0

    @property
    def durable(self) -> bool:
        """Whether anything survives the process at all."""
        return self.path is not None

    def start_from(self, marker: bytes, last_seq: int, end: int) -> None:
        """Go on appending at `end`, behind record `last_seq`; what stands there is cut off."""
        self.seq = max(self.seq, last_seq)
        self.marker = marker or self.marker
        self.end = self._size = end
        # What an earlier process acknowledged may still be in the kernel only.
        self._unsynced = True
        if self.file.size() > end:
            self.file.truncate(end)
        elif self.durable:
            self.file.release_reserved()

    def append(self, type_: int, meta: bytes, body: Sequence[Buffer] = ()) -> Record:
        """Append one record; it is with the kernel when this returns.

        Raises LogFailed (disk full, over --max-disk, I/O error, an earlier failed fsync) with the
        file as it was before.
        """
        self._check_file()
        if len(meta) > MAX_META:
            raise LogFailed(f"a record's description of {len(meta)} bytes exceeds {MAX_META}")
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
        self._check_limit(total, DISK_RESERVE if length else 0)
        start = self.end
        if length >= WORTH_RESERVING and self.max_bytes is None:
            self.file.reserve(start, start + total)
        try:
            self.file.write([lead, *body, trail], start)
        except OSError as error:
            self._undo(start, error)
            raise self._refusal(error, total) from error
        self.seq += 1
        self.appended += 1
        self.end = start + total
        self._size = max(self._size, self.end)
        self._unsynced = True
        record = Record(head.seq, type_, meta, (self.file, start + len(lead)), length, crc)
        if self.tail is not None:
            first = start + len(lead) - head.size
            self.tail.append((record, first, total - (first - start)))
        return record

    def append_or_evict(
        self, type_: int, meta: bytes, body: Sequence[Buffer], keep: bytes | None
    ) -> Record:
        """As `append`; for want of room, once more after others than namespace `keep` have gone."""
        try:
            return self.append(type_, meta, body)
        except DiskFull as full:
            if not self.make_room(full.needed, keep):
                raise
        return self.append(type_, meta, body)

    @contextmanager
    def room_for(self, nbytes: int, keep: bytes | None) -> Iterator[None]:
        """Raises LogFailed unless a body of `nbytes` will fit; evicts as `append_or_evict`.

        For writes of two records: the first must not be made if there is no room for the second.
        """
        try:
            self._reserve(nbytes)
        except DiskFull as full:
            if not self.make_room(full.needed, keep):
                raise
            self._reserve(nbytes)
        try:
            yield
        finally:
            if self._size > self.end:
                self.file.truncate(self.end)
                self._size = self.end

    def _reserve(self, nbytes: int) -> None:
        self._check_file()
        self._check_limit(nbytes, DISK_RESERVE)
        if not nbytes or not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(self.file.fileno(), self.end, nbytes)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return
            self._undo(self.end, error)
            raise self._refusal(error, nbytes) from error
        self._size = self.end + nbytes

    def _check_limit(self, nbytes: int, reserve: int) -> None:
        if self.max_bytes is None:
            return
        # Room reserved here is what this record goes into.
        used = self.disk_bytes() - max(0, self._size - self.end)
        limit = self.max_bytes - min(reserve, self.max_bytes // 16)
        if used + nbytes > limit:
            text = f"--max-disk {self.max_bytes}: {used} bytes used, {nbytes} more needed"
            raise DiskFull(text, used + nbytes - limit)

    @staticmethod
    def _refusal(error: OSError, nbytes: int) -> LogFailed:
        text = f"cannot write to the log: {error.strerror or error}"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return DiskFull(text, nbytes) if full else LogFailed(text)

    def _check_file(self) -> None:
        """Notice a file that somebody else removed (writes would be lost) or changed in length."""
        status = os.fstat(self.file.fileno())
        if self.durable and status.st_nlink == 0 and not self.failed:
            self.failed = f"{self.file.path.name} was removed"
        if self.failed:
            raise LogFailed(f"the log failed earlier and takes no more writes: {self.failed}")
        if status.st_size != self._size:
            # Cut short, then written on: what was verified may be a hole of zeros by now.
            self.file.doubt()
            self._size = status.st_size

    def _undo(self, start: int, cause: OSError) -> None:
        try:
            self.file.truncate(start)
            self._size = start
        except OSError:
            self.failed = f"{cause.strerror}, and the torn record could not be cut off"

    def sync(self) -> None:
        """Flush to stable storage all that was appended before this call.

        A failure is final: what the kernel dropped is unknown.
        """
        with self._sync_lock:
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
        """Continue in a new file of `records` records that already stands under this log's path.

        If the directory cannot be flushed, the name may not survive: the log fails.
        """
        self.file, self.end, self._size = file, end, end
        self.appended = records
        if self.path is not None:
            try:
                sync_directory(self.path.parent)
            except OSError as error:
                self.failed = f"fsync of its directory: {error.strerror}"
                raise
