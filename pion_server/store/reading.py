"""Reading a log or snapshot at start-up, past any damage, without touching the file."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pion_server.errors import DamagedEntry
from pion_server.store.checksum import crc32c
from pion_server.store.files import StoreFile
from pion_server.store.log import (
    FILE_HEADER,
    FILE_MAGIC,
    FILE_VERSION,
    HEAD,
    MAGIC,
    MAX_META,
    READ_CHUNK,
    TRAILER_MAGIC,
    ForeignFile,
    Head,
    Record,
)

SCAN_WINDOW = 1 << 16
PAGE = 4096
PUBLIC_MAGICS = (b"PIONVS01", b"PIONSS01")


@dataclass(slots=True)
class ScanReport:
    """What start-up found in one file."""

    records: int = 0
    recovered: int = 0
    half_closed: int = 0
    lost_bytes: int = 0
    cut_at: int | None = None
    cut_bytes: int = 0
    notes: list[str] = field(default_factory=list)


class _Window:
    """Reads through one window: a scan costs one read per 64 KiB of small records, or one page per
    large one, whose body is skipped."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._base = 0
        self._data = b""

    def read(self, offset: int, length: int) -> bytes:
        start = offset - self._base
        if start < 0 or start + length > len(self._data):
            skipped = not 0 <= start <= len(self._data)
            size = PAGE if skipped else SCAN_WINDOW
            self._base, self._data = offset, self._read(offset, max(length, size))
            start = 0
        return self._data[start : start + length]


class LogReader:
    """Reads one file's records at start-up, past any damage, without touching the file."""

    def __init__(self, file: StoreFile, kind: int, *, grows: bool = True) -> None:
        """`grows`: a log, whose end a power loss may leave as zeros, and not a snapshot."""
        self.file = file
        self.kind = kind
        self._grows = grows
        self.report = ScanReport()
        self.size = file.size()
        self.covers = 0
        self.marker = b""
        self._unreadable: set[int] = set()
        self._window = _Window(self._read)
        if self.size:
            self._read_file_header(kind)

    def _read(self, offset: int, length: int) -> bytes:
        """Bytes of the file. Zeros stand for pages that the disk fails to read: damage as any."""
        try:
            return self.file.read(offset, length)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        pieces, at, end = [], offset, min(offset + length, self.size)
        while at < end:
            step = min(PAGE - at % PAGE, end - at)
            try:
                pieces.append(self.file.read(at, step))
            except OSError:
                self._unreadable.add(at // PAGE)
                pieces.append(bytes(step))
            at += step
        return b"".join(pieces)

    def _read_file_header(self, kind: int) -> None:
        raw = self._window.read(0, FILE_HEADER.size)
        if 0 in self._unreadable:
            raise OSError(
                errno.EIO,
                "the disk cannot read its beginning; copy the directory to another disk and run "
                "pion-server --repair on the copy",
                str(self.file.path),
            )
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
        # The header is damaged or the file is not ours: the first record found tells which.
        found = self._first_head()
        if found is not None:
            # All records of a snapshot carry the number that its header has as `covers`.
            self.covers = found.seq
            self.report.notes.append("file header damaged, marker taken from a record")
            return
        self.marker = b""
        if self.size <= FILE_HEADER.size and FILE_MAGIC.startswith(raw[:8]):
            self.report.notes.append("file header torn")
            return
        if self._grows and self._is_blank():
            self.report.notes.append("nothing but zeros")
            return
        public = " (it looks like the public Pion server's)" if raw[:8] in PUBLIC_MAGICS else ""
        raise ForeignFile(
            f"{self.file.path.name} is not a pion-server record log{public}; "
            "move it away or choose another --dir"
        )

    def _first_head(self) -> Head | None:
        """The first valid head in the file, whatever its marker, which becomes ours."""
        for at, data in self._chunks(0, HEAD.size):
            place = data.find(MAGIC[1:])
            while place >= 0:
                magic, self.marker = data[place - 1 : place + 3], data[place + 3 : place + 11]
                if place and magic in (MAGIC, TRAILER_MAGIC):
                    head = self._head_at(at + place - 1, magic)
                    if head is not None:
                        return head
                place = data.find(MAGIC[1:], place + 1)
        return None

    def _is_blank(self) -> bool:
        return not any(data.strip(b"\0") for _, data in self._chunks(0, 0))

    def _chunks(self, at: int, overlap: int) -> Iterator[tuple[int, bytes]]:
        """The file from `at` on, piece by piece, each beginning `overlap` bytes early."""
        while at < self.size:
            data = self._read(at, READ_CHUNK)
            if len(data) <= overlap:
                return
            yield at, data
            at += len(data) - overlap

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
        for at, data in self._chunks(offset, 4 + len(self.marker) - 1):
            found = data.find(self.marker)
            while found >= 0:
                place = at + found - 4
                if place >= offset:
                    for magic in (MAGIC, TRAILER_MAGIC):
                        if self._head_at(place, magic) is not None:
                            return place, magic
                found = data.find(self.marker, found + 1)
        return None

    def records(self) -> Iterator[Record]:
        """Every record that can be trusted, in file order; fills in `report`."""
        self.file.expect_jumps(True)
        try:
            yield from self._records()
        finally:
            self.file.expect_jumps(False)

    def _records(self) -> Iterator[Record]:
        if not self.marker:
            if self.size:
                self._end_at(0)
            return
        at = FILE_HEADER.size
        while at < self.size:
            head = self._head_at(at, MAGIC)
            end = at + 2 * head.size + head.body_len if head else 0
            if head and end <= self.size:
                record = self._found(head, at + head.size)
                if not self._is_closed(at, end, head):
                    if self._head_at(end, MAGIC) is None and self._is_torn(record, end):
                        self.report.records -= 1
                        return self._end_at(at)
                    self.report.half_closed += 1
                yield record
                at = end
                continue
            nearest = self._resync(at + 1)
            if nearest is None:
                return self._end_at(at)
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

    def _end_at(self, at: int) -> None:
        """No record is found from `at` on. What the disk failed to read may still be one, so
        that is passed over and never cut; a file header alone is cut with the rest."""
        lost = self.size - at
        if any(page >= at // PAGE for page in self._unreadable):
            self.report.lost_bytes += lost
        else:
            at = at if at > FILE_HEADER.size else 0
            self.report.cut_at, self.report.cut_bytes = at, lost

    def _is_closed(self, at: int, end: int, head: Head) -> bool:
        """Whether the second head copy stands where it should; equal bytes need no checksum."""
        first = self._window.read(at, head.size)
        second = self._window.read(end - head.size, head.size)
        fields, meta = slice(4, HEAD.size - 4), slice(HEAD.size, None)
        same = first[fields] == second[fields] and first[meta] == second[meta]
        return same and second[:4] == TRAILER_MAGIC

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
