"""Cache pieces as stored bytes, and back: what a row of an attention leaf is on the wire.

A piece leaves as PACKED rows of its V-store format, from MLX's own memory where nothing has to be
encoded, and is received into MLX's memory, where a lossless format needs no further copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np
import xxhash

from pion_patches.pieces import NATIVE_FORMAT, RowLayout, RowPiece, dtype_named, join_parts
from pion_server.formats import Format, InputType, Run, make_format
from pion_vllm_mlx.manifest import Rows

_INPUT: Final = {
    "float16": InputType.F16,
    "bfloat16": InputType.BF16,
    "float32": InputType.F32,
}
#: Half of what f16 can hold, whose range is the smallest of all: no number below may overflow.
_NEAR_F16_MAX: Final = 32752.0
#: What rounds to infinity when it is read: halfway from the largest number to the next.
_TOO_LARGE: Final = {
    InputType.F16: 65520.0,
    InputType.BF16: 2.0**128 - 2.0**119,
    InputType.F32: float("inf"),
}


def row_format(store: str, layout: RowLayout) -> Format:
    """The V-store format `store` for such rows. Raises ValueError if it cannot hold them."""
    if store == layout.store_format:
        fmt = make_format(store, layout.store_dim)
        if fmt.packed_row_bytes != layout.row_bytes:
            raise ValueError(f"rows of {layout.row_bytes} bytes are not {fmt!r}")
        return fmt
    if layout.fmt != "dense" or layout.dtypes[0] not in _INPUT or store == "raw":
        raise ValueError(f"{layout.fmt} rows cannot be stored as {store}")
    return make_format(store, layout.widths[0])


def is_lossless(rows: Rows) -> bool:
    """Whether reading the stored rows gives the very bits that were stored."""
    if rows.store == rows.layout.store_format:
        return True
    return rows.store == "fp32" and rows.layout.dtypes[0] in NATIVE_FORMAT


def pack_piece(piece: RowPiece, fmt: Format) -> memoryview:
    """All rows of a piece as PACKED bytes of `fmt`; see `pack_rows`."""
    return pack_rows(piece.views(), piece.layout, piece.rows, fmt)


def pack_rows(views: Sequence[memoryview], layout: RowLayout, rows: int, fmt: Format) -> memoryview:
    """All rows of a piece as PACKED bytes of `fmt`; the very memory where nothing is encoded.

    `views`: the bytes of each part, `RowPiece.views`. MLX is not used, so any thread may do it.
    `fmt` as `row_format` gives it for this layout.

    Raises ValueError for numbers an encoding would turn into quite others: NaN and infinities,
    those beyond its largest number, and those that would be read as infinite.
    """
    data = join_parts(views, layout, rows)
    if fmt.name == layout.store_format:
        return data
    given = _INPUT[layout.dtypes[0]]
    run = fmt.encode(data, rows, given)
    if fmt.name != "fp32":  # which holds every number of every other type
        _refuse_losses(data, given, fmt, run)
    return memoryview(fmt.pack(run))


def _refuse_losses(data: memoryview, given: InputType, fmt: Format, run: Run) -> None:
    largest = _largest(data, given)
    if not np.isfinite(largest):
        raise ValueError(f"{fmt.name} keeps no NaN and no infinity")
    if run.saturated:
        raise ValueError(f"{fmt.name} overflows on these numbers")
    if largest > _NEAR_F16_MAX and not np.abs(fmt.decode(run)).max() < _TOO_LARGE[given]:
        raise ValueError(f"{fmt.name} overflows on these numbers")


def _largest(data: memoryview, given: InputType) -> float:
    """The largest magnitude; NaN or infinity where there is one."""
    # Magnitudes are ordered as their words are, infinity above all numbers, NaN above it.
    if given is InputType.F32:
        word = (np.frombuffer(data, np.uint32) & 0x7FFFFFFF).max()
        return float(word.view(np.float32))
    word = (np.frombuffer(data, np.uint16) & 0x7FFF).max()
    if given is InputType.F16:
        return float(word.view(np.float16))
    return float((word.astype(np.uint32) << np.uint32(16)).view(np.float32))


#: Bytes. Fresh memory is filled soon after it was cleared, and clearing it overlaps with receiving.
_OPENED_AT_ONCE: Final = 4 << 20


class Landing:
    """Where one piece's PACKED rows arrive: memory of an MLX array that becomes the piece."""

    def __init__(self, rows: Rows) -> None:
        """Raises ValueError for rows that no format of their description can hold."""
        self.rows = rows
        self.format = row_format(rows.store, rows.layout)
        self.nbytes = rows.count * self.format.packed_row_bytes
        self._bytes: mx.array | None = None
        self._intact: bool | None = None
        self._piece: RowPiece | None = None
        self.view: memoryview | None = None

    @staticmethod
    def open(landings: Sequence[Landing]) -> None:
        """Allocate the memory of several pieces at once."""
        arrays = [mx.zeros((landing.nbytes,), dtype=mx.uint8) for landing in landings]
        mx.eval(arrays)
        for landing, array in zip(landings, arrays, strict=True):
            landing._bytes, landing.view = array, memoryview(cast(Any, array))

    def adopt(self, array: mx.array) -> None:
        """Take u8 `[nbytes]` that somebody else has read and checked."""
        self._bytes = array

    def expect(self) -> None:
        """Bytes are about to arrive, for the first time or again."""
        self._intact = self._piece = None

    def finish(self) -> None:
        """Everything has arrived: check it and decode it, while the next one is on its way."""
        if not self.is_intact():
            return
        with contextlib.suppress(ValueError):  # raised again where somebody asks for the piece
            self._piece = self.piece()
            if not self._is_memory:
                mx.eval(self._piece.parts)

    def is_intact(self) -> bool:
        """Whether what arrived has the checksum it was stored with; looked at once."""
        if self._intact is None and self.view is not None:
            self._intact = xxhash.xxh3_64_hexdigest(self.view) == self.rows.checksum
        return bool(self._intact)

    @property
    def _is_memory(self) -> bool:
        """Whether the piece is the very memory the rows arrive in."""
        layout = self.rows.layout
        return self.rows.store == layout.store_format and len(layout.widths) == 1

    def piece(self) -> RowPiece:
        """The rows as arrays, decoded unless their format keeps the very bits."""
        if self._piece is not None:
            return self._piece
        if self._bytes is None:
            raise ValueError("nothing has arrived")
        data = self._bytes
        layout, count = self.rows.layout, self.rows.count
        if self.rows.store != layout.store_format:
            runs = self.format.unpack(memoryview(cast(Any, data)), count)
            values = mx.array(np.concatenate([self.format.decode(run) for run in runs]))
            return RowPiece((values.astype(dtype_named(layout.dtypes[0])),), layout.fmt)
        if self._is_memory:
            part = data.view(dtype_named(layout.dtypes[0]))
            return RowPiece((part.reshape(count, layout.widths[0]),), layout.fmt)
        table = data.reshape(count, layout.row_bytes)
        columns = mx.split(table, np.cumsum(layout.part_bytes)[:-1].tolist(), axis=1)
        return RowPiece(
            tuple(
                mx.contiguous(column).view(dtype_named(dtype))
                for column, dtype in zip(columns, layout.dtypes, strict=True)
            ),
            layout.fmt,
        )


def _a_few(landings: Sequence[Landing]) -> Sequence[Landing]:
    """The first one, and those after it that are opened with it."""
    count = nbytes = 0
    for landing in landings:
        nbytes += landing.nbytes
        if count and nbytes > _OPENED_AT_ONCE:
            break
        count += 1
    return landings[:count]


def places_of(landings: Sequence[Landing]) -> Callable[[int, int], memoryview | None]:
    """Where each bulk of a reply goes, in order; one of another length gets no place.

    When one begins the one before it is complete: it is checked and decoded then, while it is
    still in the processor's cache and the next one is on its way.

    Memory is taken when a bulk announces the right length, for it and a few more: a manifest alone,
    whatever it claims, costs none.
    """

    def place(index: int, nbytes: int) -> memoryview | None:
        if index >= len(landings) or landings[index].nbytes != nbytes:
            return None
        if landings[index].view is None:
            Landing.open(_a_few(landings[index:]))
        if index:
            landings[index - 1].finish()
        landings[index].expect()
        return landings[index].view

    return place
