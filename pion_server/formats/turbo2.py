"""turbo2: blocks of 32 two-bit numbers; there is no level for 0.

scale = absmax / 3
u     = clamp(rha(v / (2 · s16) + 1.5), 0, 3)
two 32-bit words, numbers 0 to 15, then 16 to 31, each Σ u[j] << 2j
value = (2u - 3) · s16
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pion_server.formats.blocks import BlockFormat, round_half_away
from pion_server.formats.floats import F32Array, U8Array
from pion_server.formats.registry import register
from pion_server.formats.scratch import Scratch


@register
class Turbo2(BlockFormat):
    """4 + 10·D/32 bytes a row."""

    name = "turbo2"
    tag = 4
    code_bytes = 8
    full_scale = 3.0

    def _choose_codes(self, scaled: F32Array, codes: U8Array, scratch: Scratch) -> None:
        # Halving is exact, so v / s16 / 2 is v / (2 · s16).
        scaled *= 0.5
        scaled += 1.5
        round_half_away(scaled, scratch)
        np.clip(scaled, 0.0, 3.0, out=scaled)
        np.trunc(scaled, out=scaled)
        np.copyto(codes, scaled, casting="unsafe")
        scaled *= 2.0
        scaled -= 3.0

    def _read_levels(self, codes: U8Array, levels: F32Array) -> None:
        np.copyto(levels, codes)
        levels *= 2.0
        levels -= 3.0

    def _pack_codes(self, codes: U8Array, scratch: Scratch) -> U8Array:
        # Four codes in the bytes of one u32 are one byte; their order is the words' own.
        gapped: NDArray[np.uint32] = codes.view(np.uint32)
        words = gapped >> 6
        words |= gapped
        words &= 0x000F_000F
        words |= words >> 12
        return words.astype(np.uint8)

    def _unpack_codes(self, packed: U8Array, scratch: Scratch) -> U8Array:
        words = packed.astype(np.uint32)
        words |= words << 12
        words &= 0x000F_000F
        words |= words << 6
        words &= 0x0303_0303
        return words.view(np.uint8)
