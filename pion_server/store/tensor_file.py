"""Rows as a safetensors file that MLX maps lazily: head-major tensors, data on a page boundary.

    u64 header length | JSON header, space-padded to end on a page | data, tensor after tensor

Stored rows are `[N][H][D]`, a row a token; a tensor is `[1, H, N, D]`, so a run of rows becomes one
piece for each head. Rows are read, turned and written a few megabytes at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import xxhash

from pion_server.errors import DamagedEntry
from pion_server.formats import Format, InputType, Run
from pion_server.payload import Buffer
from pion_server.store.files import StoreFile
from pion_server.store.log import Record
from pion_server.store.rows import StoredRows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PAGE = 4096
STEP_BYTES = 4 << 20
WINDOW_BYTES = 8 << 20

U8: TypeAlias = "NDArray[np.uint8]"
ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
ITEM_BYTES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer's side: `[1, heads, N, width]` of `dtype`, named with `suffix`."""

    suffix: str
    dtype: str
    heads: int
    width: int

    @property
    def row_bytes(self) -> int:
        """Bytes one head of one row has."""
        return self.width * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a format's rows become tensors: `split` answers u8 `[n, heads, bytes]` for each part."""

    parts: tuple[Part, ...]
    split: Callable[[Run], Sequence[U8]]


def choose_layout(fmt: Format, heads: int, head_dim: int, *, stored: bool) -> Layout:
    """F16 values, or (`stored`) what the format keeps; a row of another width is one head."""
    if fmt.dim != heads * head_dim:
        heads, head_dim = 1, fmt.dim
    if not stored and fmt.native is not InputType.F16:
        return _plain("F16", heads, head_dim, lambda run: _narrow(fmt, run))
    if fmt.native is not None:
        return _plain(fmt.native.name, heads, head_dim, lambda run: _bytes(run.body))
    if fmt.name == "mlx4g32" and head_dim % 32 == 0:
        return _grouped(fmt, heads, head_dim)
    return _plain("U8", 1, fmt.packed_row_bytes, lambda run: _bytes(fmt.pack(run)))


def split_packed(fmt: Format, parts: Sequence[Part]) -> Layout:
    """The parts of PACKED rows, one after another in a row; each splits evenly among its heads.

    Raises ValueError unless they are the whole row.
    """
    widths = [part.heads * part.row_bytes for part in parts]
    if sum(widths) != fmt.packed_row_bytes:
        raise ValueError(f"parts of {sum(widths)} bytes for rows of {fmt.packed_row_bytes}")

    def split(run: Run) -> list[U8]:
        rows = _bytes(fmt.pack(run)).reshape(run.rows, -1)
        pieces, at = [], 0
        for part, width in zip(parts, widths, strict=True):
            piece = rows[:, at : at + width]
            pieces.append(piece.reshape(run.rows, part.heads, part.row_bytes))
            at += width
        return pieces

    return Layout(tuple(parts), split)


def _bytes(data: object) -> U8:
    import numpy as np  # a server starts without it

    return np.frombuffer(data, dtype=np.uint8)  # type: ignore[call-overload, no-any-return]


def _narrow(fmt: Format, run: Run) -> U8:
    import numpy as np

    with np.errstate(over="ignore"):
        return fmt.decode(run).astype(np.float16).reshape(-1).view(np.uint8)


def _plain(dtype: str, heads: int, width: int, read: Callable[[Run], U8]) -> Layout:
    part = Part("", dtype, heads, width)
    return Layout((part,), lambda run: (read(run).reshape(run.rows, heads, part.row_bytes),))


def _grouped(fmt: Format, heads: int, head_dim: int) -> Layout:
    """mlx4g32: a row is all codes, all scales, all biases."""
    parts = (
        Part(".codes", "U32", heads, head_dim // 8),
        Part(".scales", "F16", heads, head_dim // 32),
        Part(".biases", "F16", heads, head_dim // 32),
    )
    return split_packed(fmt, parts)


@dataclass(frozen=True, slots=True)
class Side:
    """One layer of keys or values: its name (`k.0`), its rows and their layout.

    `checksum`: the xxh3-64 (hex) that its rows have as PACKED bytes, where somebody knows it.
    `room`: rows of zeros that each head has behind its rows, for whoever appends to them.
    """

    name: str
    rows: StoredRows
    layout: Layout
    checksum: str | None = None
    room: int = 0

    @property
    def length(self) -> int:
        """Rows a head has in the file."""
        return self.rows.rows + self.room

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.heads * self.length * part.row_bytes for part in self.layout.parts)


@dataclass(frozen=True, slots=True)
class StateBlob:
    """Recurrent state as one U8 tensor: its name, the record that holds it, xxh3-64 (hex)."""

    name: str
    record: Record
    checksum: str


@dataclass(frozen=True, slots=True)
class BlockSums:
    """One checksum for each block of `rows` rows of all sides together, the last one maybe shorter.

    xxh3-64 (hex) of the block's PACKED bytes, one side after another in the order of the file.
    """

    rows: int
    sums: tuple[str, ...]


class _BlockHashes:
    """What the blocks of the rows written so far come to."""

    def __init__(self, blocks: BlockSums) -> None:
        self._rows = blocks.rows
        self._expected = blocks.sums
        self._hashers = [xxhash.xxh3_64() for _ in blocks.sums]

    def update(self, first: int, rows: int, packed: Buffer) -> None:
        """Take `rows` rows of one side, of which `first` is the first."""
        data = memoryview(packed).cast("B")
        width = len(data) // rows
        at = first
        while at < first + rows:
            end = min(at - at % self._rows + self._rows, first + rows)
            part = data[(at - first) * width : (end - first) * width]
            self._hashers[at // self._rows].update(part)
            at = end

    def compare(self) -> None:
        """Raises DamagedEntry unless all blocks are what they were when they were stored."""
        for block, (hasher, expected) in enumerate(zip(self._hashers, self._expected, strict=True)):
            _compare(hasher.hexdigest(), expected, f"block {block}")


class TensorFile:
    """A file still to be written: its header, and where each tensor goes."""

    def __init__(
        self,
        sides: Sequence[Side],
        blobs: Sequence[StateBlob] = (),
        blocks: BlockSums | None = None,
    ) -> None:
        """`blocks`: checksums in the place of those of the sides."""
        self.sides = sides
        self.blobs = blobs
        self._blocks = blocks
        self._places: list[list[int]] = []
        entries: dict[str, object] = {}
        at = 0
        for side in sides:
            places = []
            for part in side.layout.parts:
                end = at + part.heads * side.length * part.row_bytes
                entries[side.name + part.suffix] = {
                    "dtype": part.dtype,
                    "shape": [1, part.heads, side.length, part.width],
                    "data_offsets": [at, end],
                }
                places.append(at)
                at = end
            self._places.append(places)
        for blob in blobs:
            end = at + blob.record.length
            entries[blob.name] = {
                "dtype": "U8",
                "shape": [blob.record.length],
                "data_offsets": [at, end],
            }
            self._places.append([at])
            at = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        padded = -(8 + len(text)) % PAGE + len(text)
        self.header = padded.to_bytes(8, "little") + text.ljust(padded)
        self.data_bytes = at

    @property
    def nbytes(self) -> int:
        """Length of the whole file."""
        return len(self.header) + self.data_bytes

    def write(self, file: StoreFile) -> None:
        """Write everything; raises OSError, and DamagedEntry for bytes that fail their checksum."""
        window, start = _Window(file), len(self.header)
        window.open(0, start)
        window.write(self.header, 0)
        hashes = None if self._blocks is None else _BlockHashes(self._blocks)
        for side, places in zip(self.sides, self._places, strict=False):
            if side.checksum is None and hashes is None:
                side.rows.verify()
            window.open(start + places[0], side.nbytes)
            self._write_side(window, side, places, hashes)
        if hashes is not None:
            hashes.compare()
        for blob, (place,) in zip(self.blobs, self._places[len(self.sides) :], strict=True):
            data = blob.record.read()
            _compare(xxhash.xxh3_64_hexdigest(data), blob.checksum, blob.name)
            window.open(start + place, len(data))
            window.write(data, start + place)
        window.close()

    def _write_side(
        self, window: _Window, side: Side, places: list[int], hashes: _BlockHashes | None
    ) -> None:
        import numpy as np

        parts, done = side.layout.parts, 0
        digest = xxhash.xxh3_64()
        row_bytes = max(side.rows.format.dim * 4, side.rows.format.packed_row_bytes)
        for run in side.rows.runs(max(1, STEP_BYTES // row_bytes)):
            assert isinstance(run, Run), "rows with gaps are refused before"
            if side.checksum is not None:
                digest.update(side.rows.format.pack(run))
            if hashes is not None:
                hashes.update(done, run.rows, side.rows.format.pack(run))
            for part, place, piece in zip(parts, places, side.layout.split(run), strict=True):
                by_head = np.ascontiguousarray(piece.transpose(1, 0, 2))
                for head in range(part.heads):
                    offset = self._offset(side, part, place, head, done)
                    window.write(by_head[head].reshape(-1).data, offset)
            done += run.rows
        for part, place in zip(parts, places, strict=True):
            zeros = bytes(side.room * part.row_bytes)
            for head in range(part.heads):
                window.write(zeros, self._offset(side, part, place, head, done))
        if side.checksum is not None:
            _compare(digest.hexdigest(), side.checksum, side.name)

    def _offset(self, side: Side, part: Part, place: int, head: int, row: int) -> int:
        return len(self.header) + place + (head * side.length + row) * part.row_bytes


class _Window:
    """Pieces in any order within what was opened, written to the file in long runs.

    The longer the writes, the larger the pages that the file's cache is made of, and the faster it
    is read. What is larger than a window goes to the file piece by piece.
    """

    def __init__(self, file: StoreFile) -> None:
        self._file = file
        self._start = 0
        self._memory = bytearray()

    def open(self, offset: int, nbytes: int) -> None:
        """The next `nbytes` come, at `offset`, where the ones before end; those are complete."""
        if len(self._memory) + nbytes > WINDOW_BYTES:
            self.close()
        if not self._memory:
            self._start = offset
        if nbytes <= WINDOW_BYTES:
            self._memory += bytes(nbytes)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Put `data` where it belongs."""
        at = offset - self._start
        if at + len(data) <= len(self._memory):
            self._memory[at : at + len(data)] = data
        else:
            self._file.write([data], offset)

    def close(self) -> None:
        """Everything opened has come."""
        self._file.write([self._memory], self._start)
        self._memory = bytearray()


def _compare(found: str, expected: str, name: str) -> None:
    if found != expected:
        raise DamagedEntry(
            f"stored data is damaged: {name} does not have the checksum it came with"
        )
