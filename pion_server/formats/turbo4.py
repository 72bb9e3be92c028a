"""turbo4: blocks of 32 four-bit numbers.

scale = absmax / 7               1 for a block of zeros
u     = clamp(rha(v / s16), -8, 7) + 8
byte i (0..15) = u[i] | u[i + 16] << 4
value = (u - 8) · s16
"""

from __future__ import annotations

import numpy as np

from pion_server.formats.blocks import BlockFormat, choose_signed_codes
from pion_server.formats.floats import F32Array, U8Array
from pion_server.formats.registry import register
from pion_server.formats.scratch import Scratch


@register
class Turbo4(BlockFormat):
    """4 + 18·D/32 bytes a row."""

    name = "turbo4"
    tag = 1
    code_bytes = 16
    full_scale = 7.0
    zero_scale = 1.0

    def _choose_codes(self, scaled: F32Array, codes: U8Array, scratch: Scratch) -> None:
        choose_signed_codes(scaled, codes, 8, scratch)

    def _read_levels(self, codes: U8Array, levels: F32Array) -> None:
        np.copyto(levels, codes)
        levels -= 8.0

    def _pack_codes(self, codes: U8Array, scratch: Scratch) -> U8Array:
        # Eight codes at a time, column by column: one long loop each instead of one a block.
        words = codes.view(np.uint64)
        packed = scratch.array("packed", (len(codes), 2), np.uint64)
        for column in (0, 1):
            np.left_shift(words[:, column + 2], 4, out=packed[:, column])
            packed[:, column] |= words[:, column]
        return packed.view(np.uint8)

    def _unpack_codes(self, packed: U8Array, scratch: Scratch) -> U8Array:
        words = packed.view(np.uint64)
        codes = scratch.array("codes", (len(packed), 4), np.uint64)
        for column in (0, 1):
            codes[:, column] = words[:, column]
            np.right_shift(words[:, column], 4, out=codes[:, column + 2])
        codes &= 0x0F0F_0F0F_0F0F_0F0F
        return codes.view(np.uint8)
