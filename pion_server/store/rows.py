"""Where the rows of one layer lie: extents over log records.

A layer is a sorted tuple of extents that do not overlap. Changing it makes a new tuple, so a reader
that took the old one keeps a consistent view without a lock, and the log being append-only keeps
its bytes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from pion_server.errors import DamagedEntry
from pion_server.formats import Format, Run
from pion_server.payload import Chunk, FileSpan, Payload
from pion_server.store.log import Record

DECODE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Rows `[start, end)` of a layer; row r is row `r - base` of the record's body run.

    `shift` is where that run begins inside the body (int8 stores several runs in one record),
    `header` the run's header. A lost extent (`record is None`) answers every read with an error.
    """

    record: Record | None
    header: bytes
    base: int
    shift: int
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start

    def clip(self, start: int, end: int) -> Extent:
        return replace(self, start=max(self.start, start), end=min(self.end, end))

    def span(self, row_bytes: int) -> FileSpan:
        """The bytes of these rows in the file."""
        if self.record is None:
            raise DamagedEntry("stored data is damaged: these rows were lost")
        file, body = self.record.where
        offset = body + self.shift + (self.start - self.base) * row_bytes
        return FileSpan(file, offset, self.rows * row_bytes)

    def read(self, row_bytes: int) -> bytes:
        """The stored bytes of these rows."""
        if self.record is None:
            raise DamagedEntry("stored data is damaged: these rows were lost")
        file, body = self.record.where
        length = self.rows * row_bytes
        data = file.read(body + self.shift + (self.start - self.base) * row_bytes, length)
        if len(data) != length:
            raise DamagedEntry("stored data is damaged: its file was cut short")
        return data


Extents = tuple[Extent, ...]


def overlay(extents: Extents, new: Extents) -> Extents:
    """`extents` with the rows of `new` (adjacent, ascending) put over them."""
    if not new:
        return extents
    start, end = new[0].start, new[-1].end
    if not extents or extents[-1].end <= start:
        return extents + new
    before = [e if e.end <= start else e.clip(0, start) for e in extents if e.start < start]
    after = [e if e.start >= end else e.clip(end, e.end) for e in extents if e.end > end]
    return (*before, *new, *after)


def cut_after(extents: Extents, count: int) -> Extents:
    """Only the rows below `count`."""
    return tuple(e if e.end <= count else e.clip(0, count) for e in extents if e.start < count)


def select(extents: Extents, start: int, end: int) -> Extents | None:
    """The extents of rows `[start, end)`, clipped; None if any of those rows was never written."""
    found: list[Extent] = []
    at = start
    for extent in extents:
        if extent.end <= at:
            continue
        if extent.start > at:
            return None
        piece = extent.clip(at, end)
        found.append(piece)
        at = piece.end
        if at >= end:
            return tuple(found)
    return None


def count_rows(extents: Extents) -> int:
    return sum(extent.rows for extent in extents)


class StoredRows:
    """A consistent view of some rows of one layer, in the order asked, to be sent or decoded."""

    filled = False

    def __init__(self, format: Format, extents: Extents) -> None:  # noqa: A002
        self.format = format
        self.extents = extents
        self.rows = count_rows(extents)

    @property
    def unverified_bytes(self) -> int:
        """Bytes that `verify` will have to read."""
        records = {id(e.record): e.record for e in self.extents if e.record is not None}
        return sum(r.length for r in records.values() if not r.verified)

    def verify(self) -> None:
        """Check every record these rows lie in; raises DamagedEntry."""
        seen: set[int] = set()
        for extent in self.extents:
            if extent.record is None:
                raise DamagedEntry("stored data is damaged: these rows were lost")
            if id(extent.record) not in seen:
                seen.add(id(extent.record))
                extent.record.verify()

    def packed(self) -> Payload:
        """The stored bytes; formats with a run header interleave it row by row."""
        size = self.rows * self.format.packed_row_bytes
        if self.format.header_bytes == 0:
            spans = self._joined_spans()
            return Payload(size, lambda: iter(spans))
        return Payload(size, lambda: (self.format.pack(run) for run in self._runs()))

    def decoded(self) -> Payload:
        """Rows as float32, `rows * dim * 4` bytes."""
        return Payload(self.rows * self.format.dim * 4, self._decoded_chunks)

    def _decoded_chunks(self) -> Iterator[Chunk]:
        for run in self._runs():
            yield np.ascontiguousarray(self.format.decode(run)).data.cast("B")

    def _joined_spans(self) -> list[Chunk]:
        joined: list[FileSpan] = []
        for extent in self.extents:
            span = extent.span(self.format.row_bytes)
            last = joined[-1] if joined else None
            if last and last.file is span.file and last.offset + last.length == span.offset:
                joined[-1] = FileSpan(last.file, last.offset, last.length + span.length)
            else:
                joined.append(span)
        return list(joined)

    def _runs(self) -> Iterator[Run]:
        """The rows in pieces of about a megabyte of stored bytes, read from the file."""
        step = max(1, DECODE_BYTES // max(self.format.row_bytes, 1))
        for extent in self.extents:
            for start in range(extent.start, extent.end, step):
                piece = extent.clip(start, start + step)
                yield Run(piece.header, piece.read(self.format.row_bytes), piece.rows)


class ZeroFilledRows(StoredRows):
    """Rows with zeros where none were ever written (`--fetch-zero-fill`, for old clients only)."""

    filled = True

    def __init__(self, format: Format, extents: Extents, start: int, end: int) -> None:  # noqa: A002
        super().__init__(format, extents)
        self._start, self._end = start, end

    def packed(self) -> Payload:
        """Only for fp16, whose zero row is zero bytes."""
        return self._with_gaps(self.format.row_bytes, StoredRows.packed)

    def decoded(self) -> Payload:
        return self._with_gaps(self.format.dim * 4, StoredRows.decoded)

    def _with_gaps(self, width: int, payload: Callable[[StoredRows], Payload]) -> Payload:
        def chunks() -> Iterator[Chunk]:
            at = self._start
            for extent in self.extents:
                yield bytes((extent.start - at) * width)
                yield from payload(StoredRows(self.format, (extent,))).chunks()
                at = extent.end
            yield bytes((self._end - at) * width)

        return Payload((self._end - self._start) * width, chunks)


def select_filled(format: Format, extents: Extents, start: int, end: int) -> StoredRows | None:  # noqa: A002
    """As `select`, gaps answered with zeros; None if no asked row exists at all."""
    found = select(extents, start, end)
    if found is not None:
        return StoredRows(format, found)
    held = tuple(e.clip(start, end) for e in extents if e.start < end and e.end > start)
    return ZeroFilledRows(format, held, start, end) if held else None
