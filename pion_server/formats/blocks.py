"""Rows of blocks of 32 numbers, each block with a scale of its own.

    row    [f32 norm2][block 0][block 1]…
    block  [f16 s16][codes]

`s16` is the block's scale rounded to f16 and clamped to f16's normal range; the codes are chosen
against it, since it is what a reader multiplies with. norm2 is the sum of the squared values read
with the *unrounded* scale; nothing reads it.
"""

from __future__ import annotations

import abc
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pion_server.formats.floats import (
    F16_MAX,
    F16_SMALLEST_NORMAL,
    F32_MAX,
    F32Array,
    U8Array,
)
from pion_server.formats.row_format import RowFormat
from pion_server.formats.scratch import Scratch

BLOCK = 32

RowRecords: TypeAlias = NDArray[np.void]


def bound_values(values: F32Array) -> F32Array:
    """A copy with NaN as 0 and ±inf as the largest finite f32 of that sign."""
    return np.nan_to_num(values, nan=0.0, posinf=F32_MAX, neginf=-F32_MAX)


def count_nonfinite(values: F32Array) -> int:
    """How many numbers `bound_values` replaces."""
    return values.size - int(np.count_nonzero(np.isfinite(values)))


def reduce_blocks(ufunc: np.ufunc, blocks: F32Array) -> F32Array:
    """`ufunc` (maximum, minimum) over each row of contiguous `[n, 32]`, as `[n]`; NaN spreads."""
    # reduceat over the flat array is several times faster than a reduction along a short axis.
    reduced: F32Array = ufunc.reduceat(blocks.reshape(-1), np.arange(0, blocks.size, BLOCK))
    return reduced


def bound_blocks(blocks: F32Array, largest: float, scratch: Scratch) -> tuple[F32Array, F32Array]:
    """The blocks with non-finite numbers replaced, where there are any, and each one's absmax.

    Counts as saturated what is not within ±`largest`.
    """
    magnitudes = scratch.array("blocks", blocks.shape, np.float32)
    peaks = reduce_blocks(np.maximum, np.abs(blocks, out=magnitudes))
    if not peaks.max() <= largest:  # nor is NaN
        scratch.saturated += blocks.size - int(np.count_nonzero(magnitudes <= largest))
        blocks = bound_values(blocks)
        peaks = reduce_blocks(np.maximum, np.abs(blocks, out=magnitudes))
    return blocks, peaks


def round_half_away(values: F32Array, scratch: Scratch) -> None:
    """Make each v, in place, what truncates to rha(v): v + 0.5 from 0 upwards, v - 0.5 below."""
    halves = scratch.array("halves", values.shape, np.uint32)
    np.bitwise_and(values.view(np.uint32), 0x80000000, out=halves)
    halves |= 0x3F000000
    values += halves.view(np.float32)


def choose_signed_codes(scaled: F32Array, codes: U8Array, half: int, scratch: Scratch) -> None:
    """clamp(rha(v), -half, half - 1) + half into `codes`; `scaled` is used up."""
    round_half_away(scaled, scratch)
    # Clamped first: a number far outside would not survive the conversion to a byte.
    np.clip(scaled, -float(half), float(half - 1), out=scaled)
    np.trunc(scaled, out=scaled)
    signed = codes.view(np.int8)
    np.copyto(signed, scaled, casting="unsafe")
    signed += half


class BlockFormat(RowFormat):
    """A format of scaled blocks: a subclass says how 32 scaled numbers become codes."""

    block = BLOCK
    code_bytes: ClassVar[int]
    """Bytes of a block's codes."""
    full_scale: ClassVar[float]
    """A block's scale is its absmax divided by this."""
    zero_scale: ClassVar[float] = 0.0
    """The scale of a block of zeros, before clamping."""

    @property
    def largest(self) -> float:
        """The largest number that has a code: scales end with f16."""
        return self.full_scale * F16_MAX

    def __init__(self, dim: int, rope: int = 0) -> None:
        super().__init__(dim, rope)
        self._layout = self._describe_row()

    def _count_row_bytes(self) -> int:
        return self._describe_row().itemsize

    def _describe_row(self) -> np.dtype[np.void]:
        return np.dtype([("norm2", "<f4"), self._describe_blocks(self.dim)])

    def _describe_blocks(self, width: int) -> tuple[str, list[tuple[str, str]], tuple[int]]:
        # Codes are one opaque item a block: numpy moves them at once, not byte by byte.
        block = [("scale", "<f2"), ("codes", f"V{self.code_bytes}")]
        return "blocks", block, (width // BLOCK,)

    def _encode_rows(self, values: F32Array, stored: U8Array, scratch: Scratch) -> None:
        rows = stored.view(self._layout)[:, 0]
        scales, levels = self._encode_blocks(values, rows, scratch)
        squares = np.einsum("ij,ij->i", levels, levels).astype(np.float64)
        squares *= scales.astype(np.float64) ** 2
        norms = squares.reshape(len(values), -1).sum(axis=1)
        rows["norm2"] = np.minimum(norms, F32_MAX)

    def _encode_blocks(
        self, values: F32Array, rows: RowRecords, scratch: Scratch
    ) -> tuple[F32Array, F32Array]:
        """Fill `rows["blocks"]`; return each block's unrounded scale and levels `[n, 32]`."""
        blocks, peaks = bound_blocks(values.reshape(-1, BLOCK), self.largest, scratch)
        scales: F32Array = peaks / np.float32(self.full_scale)
        scales[scales == 0] = self.zero_scale
        s16 = np.clip(scales, F16_SMALLEST_NORMAL, F16_MAX).astype(np.float16)
        scaled = scratch.array("blocks", blocks.shape, np.float32)
        np.divide(blocks, s16.astype(np.float32)[:, None], out=scaled)
        codes = scratch.array("codes", blocks.shape, np.uint8)
        self._choose_codes(scaled, codes, scratch)
        packed = self._pack_codes(codes, scratch).view(f"V{self.code_bytes}")
        rows["blocks"]["scale"] = s16.reshape(len(values), -1)
        rows["blocks"]["codes"] = packed.reshape(len(values), -1)
        return scales, scaled

    def _decode_rows(self, stored: U8Array, values: F32Array, scratch: Scratch) -> None:
        self._decode_blocks(stored.view(self._layout)[:, 0], values, scratch)

    def _decode_blocks(self, rows: RowRecords, values: F32Array, scratch: Scratch) -> None:
        """Read `rows["blocks"]` into contiguous `values` `[n, width]`."""
        blocks = values.reshape(-1, BLOCK)
        packed = scratch.array("packed", (len(blocks), self.code_bytes), np.uint8)
        items = packed.view(f"V{self.code_bytes}")
        np.copyto(items.reshape(len(rows), -1), rows["blocks"]["codes"])
        codes = self._unpack_codes(packed, scratch)
        self._read_levels(codes, blocks)
        blocks *= rows["blocks"]["scale"].astype(np.float32).reshape(-1, 1)

    @abc.abstractmethod
    def _choose_codes(self, scaled: F32Array, codes: U8Array, scratch: Scratch) -> None:
        """Fill `codes`, one a byte, for finite `scaled` = v / s16 `[n, 32]`.

        Leaves in `scaled` what each code stands for in units of the scale, up to its sign.
        """

    @abc.abstractmethod
    def _read_levels(self, codes: U8Array, levels: F32Array) -> None:
        """Fill `levels` with what each code stands for, in units of the scale."""

    @abc.abstractmethod
    def _pack_codes(self, codes: U8Array, scratch: Scratch) -> U8Array:
        """`[n, 32]` codes as `[n, code_bytes]`, contiguous."""

    @abc.abstractmethod
    def _unpack_codes(self, packed: U8Array, scratch: Scratch) -> U8Array:
        """`[n, code_bytes]`, contiguous, as `[n, 32]` codes."""
