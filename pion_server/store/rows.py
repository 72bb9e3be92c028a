"""Where the rows of one layer lie: extents over log records.

A layer is a sorted tuple of extents that do not overlap. Changing it makes a new tuple, so a reader
that took the old one keeps a consistent view without a lock, and the log being append-only keeps
its bytes in place.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from pion_server.errors import DamagedEntry
from pion_server.formats import Format, Run
from pion_server.payload import Chunk, FileSpan, Payload
from pion_server.store.log import Record

# Of a reply made at once: a few milliseconds of work between two turns of other clients.
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

    def joins(self, other: Extent) -> bool:
        """Whether `other` lies in the same run of the same record."""
        return self.record is other.record and self.base == other.base and self.shift == other.shift


@dataclass(frozen=True, slots=True)
class Gap:
    """Rows never written, answered with zeros (`--fetch-zero-fill`, for old clients only)."""

    rows: int


Extents: TypeAlias = tuple[Extent, ...]
Piece: TypeAlias = Extent | Gap


def _start(extent: Extent) -> int:
    return extent.start


def _end(extent: Extent) -> int:
    return extent.end


def overlay(extents: Extents, new: Extents) -> Extents:
    """`extents` with the rows of `new` (adjacent, ascending) put over them."""
    if not new:
        return extents
    start, end = new[0].start, new[-1].end
    first = bisect_right(extents, start, key=_end)
    behind = bisect_left(extents, end, lo=first, key=_start)
    left: Extents = ()
    right: Extents = ()
    if first < behind:
        low, high = extents[first], extents[behind - 1]
        left = (low.clip(low.start, start),) if low.start < start else ()
        right = (high.clip(end, high.end),) if high.end > end else ()
    return (*extents[:first], *left, *new, *right, *extents[behind:])


def cut_after(extents: Extents, count: int) -> Extents:
    """Only the rows below `count`."""
    return tuple(e if e.end <= count else e.clip(0, count) for e in extents if e.start < count)


def held_between(extents: Extents, start: int, end: int) -> Iterator[Extent]:
    """The extents with rows in `[start, end)`, clipped to it."""
    for at in range(bisect_right(extents, start, key=_end), len(extents)):
        extent = extents[at]
        if extent.start >= end:
            return
        yield extent if start <= extent.start and extent.end <= end else extent.clip(start, end)


def select(extents: Extents, start: int, end: int) -> Extents | None:
    """The extents of rows `[start, end)`, clipped; None if any of those rows was never written."""
    found: list[Extent] = []
    at = start
    for extent in held_between(extents, start, end):
        if extent.start > at:
            return None
        found.append(extent)
        at = extent.end
    return tuple(found) if at == end else None


def select_filled(extents: Extents, start: int, end: int) -> tuple[Piece, ...] | None:
    """As `select`, with gaps in place of missing rows; None if not one asked row exists."""
    pieces: list[Piece] = []
    at = start
    for extent in held_between(extents, start, end):
        pieces += [Gap(extent.start - at)] if extent.start > at else []
        pieces.append(extent)
        at = extent.end
    if not pieces:
        return None
    return (*pieces, Gap(end - at)) if at < end else tuple(pieces)


def select_ids(extents: Extents, ids: Iterable[int], *, fill: bool) -> tuple[Piece, ...] | None:
    """The rows of `ids` in the order asked, neighbours together.

    None if any of them was never written; with `fill` gaps stand for those, None if all are.
    """
    pieces: list[Piece] = []
    for row in ids:
        extent = next(held_between(extents, row, row + 1), None)
        last = pieces[-1] if pieces else None
        if extent is None and not fill:
            return None
        if extent is None:
            pieces.append(Gap(1))
        elif isinstance(last, Extent) and last.end == row and last.joins(extent):
            pieces[-1] = replace(last, end=row + 1)
        else:
            pieces.append(extent)
    return tuple(pieces) if any(isinstance(piece, Extent) for piece in pieces) else None


def count_rows(pieces: Iterable[Piece]) -> int:
    return sum(piece.rows for piece in pieces)


class StoredRows:
    """A consistent view of some rows of one layer, in the order asked, to be sent or decoded."""

    def __init__(self, format: Format, pieces: tuple[Piece, ...]) -> None:  # noqa: A002
        self.format = format
        self.pieces = pieces
        self.extents = tuple(piece for piece in pieces if isinstance(piece, Extent))
        self.rows = count_rows(pieces)
        self.filled = len(self.extents) < len(pieces)

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
        width = self.format.packed_row_bytes
        if self.format.header_bytes == 0:
            spans = self._joined_spans()
            return Payload(self.rows * width, lambda: self._span_chunks(spans))
        return Payload(self.rows * width, self._packed_chunks)

    def decoded(self) -> Payload:
        """Rows as float32, `rows * dim * 4` bytes."""
        return Payload(self.rows * self.format.dim * 4, self._decoded_chunks)

    def runs(self, rows_at_once: int) -> Iterator[Run | Gap]:
        """The rows in order, in runs of at most `rows_at_once` rows read from the file."""
        for piece in self.pieces:
            if isinstance(piece, Gap):
                yield piece
                continue
            for start in range(piece.start, piece.end, rows_at_once):
                part = piece.clip(start, start + rows_at_once)
                yield Run(part.header, part.read(self.format.row_bytes), part.rows)

    def _span_chunks(self, spans: list[FileSpan | int]) -> Iterator[Chunk]:
        # A generator of this object holds its records: what is being sent is not given back.
        yield from _with_zeros(spans)

    def _packed_chunks(self) -> Iterator[Chunk]:
        width = self.format.packed_row_bytes
        for run in self.runs(max(1, DECODE_BYTES // width)):
            if isinstance(run, Gap):
                yield from _zeros(run.rows * width)
            else:
                yield self.format.pack(run)

    def _decoded_chunks(self) -> Iterator[Chunk]:
        import numpy as np

        width = self.format.dim * 4
        for run in self.runs(max(1, DECODE_BYTES // width)):
            if isinstance(run, Gap):
                yield from _zeros(run.rows * width)
            else:
                yield np.ascontiguousarray(self.format.decode(run)).data.cast("B")

    def _joined_spans(self) -> list[FileSpan | int]:
        """Places in files, neighbours joined; a number stands for as many zero bytes."""
        joined: list[FileSpan | int] = []
        for piece in self.pieces:
            if isinstance(piece, Gap):
                joined.append(piece.rows * self.format.row_bytes)
                continue
            span = piece.span(self.format.row_bytes)
            last = joined[-1] if joined else None
            if (
                isinstance(last, FileSpan)
                and last.file is span.file
                and last.offset + last.length == span.offset
            ):
                joined[-1] = FileSpan(last.file, last.offset, last.length + span.length)
            else:
                joined.append(span)
        return joined


def _with_zeros(spans: list[FileSpan | int]) -> Iterator[Chunk]:
    for span in spans:
        if isinstance(span, int):
            yield from _zeros(span)
        else:
            yield span


def _zeros(nbytes: int) -> Iterator[Chunk]:
    block = bytes(min(nbytes, DECODE_BYTES))
    for start in range(0, nbytes, DECODE_BYTES):
        yield block[: nbytes - start]
