"""fp8: blocks of 32 E4M3FN bytes.

scale = absmax / 240             1 for a block of zeros
byte  = E4M3FN(v / s16), nearest even
value = e4m3 · s16
"""

from __future__ import annotations

from pion_server.formats.blocks import BlockFormat
from pion_server.formats.floats import (
    E4M3_MAX,
    F16_MAX,
    F32Array,
    U8Array,
    narrow_to_e4m3,
    widen_e4m3,
)
from pion_server.formats.registry import register
from pion_server.formats.scratch import Scratch


@register
class Fp8(BlockFormat):
    """4 + 34·D/32 bytes a row."""

    name = "fp8"
    tag = 5
    code_bytes = 32
    full_scale = 240.0
    zero_scale = 1.0

    @property
    def largest(self) -> float:
        return E4M3_MAX * F16_MAX

    def _choose_codes(self, scaled: F32Array, codes: U8Array, scratch: Scratch) -> None:
        narrow_to_e4m3(scaled, codes, scratch)

    def _read_levels(self, codes: U8Array, levels: F32Array) -> None:
        widen_e4m3(codes, levels)

    def _pack_codes(self, codes: U8Array, scratch: Scratch) -> U8Array:
        return codes

    def _unpack_codes(self, packed: U8Array, scratch: Scratch) -> U8Array:
        return packed
