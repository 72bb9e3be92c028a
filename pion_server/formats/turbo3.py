"""turbo3: blocks of 32 three-bit numbers.

scale = absmax / 3
u     = clamp(rha(v / s16), -4, 3) + 4
four groups of 8 numbers, each the low 3 bytes of Σ u[j] << 3j
value = (u - 4) · s16
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pion_server.formats.blocks import BlockFormat, choose_signed_codes
from pion_server.formats.floats import F32Array, U8Array
from pion_server.formats.registry import register
from pion_server.formats.scratch import Scratch

_GROUP = np.dtype({"names": ["bits"], "formats": ["V3"], "offsets": [0], "itemsize": 8})


@register
class Turbo3(BlockFormat):
    """4 + 14·D/32 bytes a row."""

    name = "turbo3"
    tag = 3
    code_bytes = 12
    full_scale = 3.0

    def _choose_codes(self, scaled: F32Array, codes: U8Array, scratch: Scratch) -> None:
        choose_signed_codes(scaled, codes, 4, scratch)

    def _read_levels(self, codes: U8Array, levels: F32Array) -> None:
        np.copyto(levels, codes)
        levels -= 4.0

    def _pack_codes(self, codes: U8Array, scratch: Scratch) -> U8Array:
        # Eight codes in the bytes of one u64: close the gaps between pairs, quads, halves.
        gapped: NDArray[np.uint64] = codes.view(np.uint64)
        words = gapped >> 5
        words |= gapped
        words &= 0x003F_003F_003F_003F
        words |= words >> 10
        words &= 0x0000_0FFF_0000_0FFF
        words |= words >> 20
        return words.view(_GROUP)["bits"].copy().view(np.uint8).reshape(-1, self.code_bytes)

    def _unpack_codes(self, packed: U8Array, scratch: Scratch) -> U8Array:
        words = np.zeros((len(packed), 4), dtype=np.uint64)
        words.view(_GROUP)["bits"] = packed.view("V3")
        words |= words << 20
        words &= 0x0000_0FFF_0000_0FFF
        words |= words << 10
        words &= 0x003F_003F_003F_003F
        words |= words << 5
        words &= 0x0707_0707_0707_0707
        return words.view(np.uint8)
