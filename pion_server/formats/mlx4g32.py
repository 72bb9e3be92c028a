"""mlx4g32: the affine 4-bit groups of 32 that `mx.dequantize(bits=4, group_size=32)` reads.

row    [u32 packed[D/8]][f16 scales[D/32]][f16 biases[D/32]]; number e in word e/8, bits 4·(e%8)
scale  = (hi - lo) / 15, 1e-8 if not positive
s      = f16(scale), finite: rounded before the codes are chosen
b      = f16(lo), finite
q      = clamp(floor((v - b) / s + 0.5), 0, 15)
value  = q · s + b
Where s rounds to 0, s is 1 and the codes are 0: every number reads as b.
"""

from __future__ import annotations

import numpy as np

from pion_server.formats.blocks import BLOCK, bound_values, reduce_blocks
from pion_server.formats.floats import F16_MAX, F32Array, U8Array
from pion_server.formats.registry import register
from pion_server.formats.row_format import RowFormat
from pion_server.formats.scratch import Scratch


@register
class Mlx4g32(RowFormat):
    """5·D/8 bytes a row."""

    name = "mlx4g32"
    tag = 7
    block = BLOCK

    def __init__(self, dim: int, rope: int = 0) -> None:
        super().__init__(dim, rope)
        groups = (dim // BLOCK,)
        self._layout = np.dtype(
            [("packed", "u1", (dim // 2,)), ("scales", "<f2", groups), ("biases", "<f2", groups)]
        )

    def _count_row_bytes(self) -> int:
        return self.dim // 2 + 2 * 2 * (self.dim // BLOCK)

    def _encode_rows(self, values: F32Array, stored: U8Array, scratch: Scratch) -> None:
        groups = np.ascontiguousarray(values).reshape(-1, BLOCK)
        low, high = reduce_blocks(np.minimum, groups), reduce_blocks(np.maximum, groups)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            scratch.saturated += int(np.count_nonzero(np.isnan(groups)))
            groups = bound_values(groups)
            low, high = reduce_blocks(np.minimum, groups), reduce_blocks(np.maximum, groups)
        # Adding +0.0 makes the bias independent of the order in which ±0.0 were compared.
        biases = np.clip(low + np.float32(0), -F16_MAX, F16_MAX).astype(np.float16)
        scales = (high - low) / np.float32(15)
        clipped = (np.abs(low) > F16_MAX) | (scales > F16_MAX)
        scales[scales <= 0] = 1e-8
        scales = np.minimum(scales, np.float32(F16_MAX)).astype(np.float16)
        flat = scales == 0
        scales[flat] = 1

        steps = groups - biases.astype(np.float32)[:, None]
        steps /= scales.astype(np.float32)[:, None]
        steps += 0.5
        if clipped.any():
            beyond = steps[clipped]
            scratch.saturated += int(np.count_nonzero((beyond < 0) | (beyond >= 16)))
        # Clamped from below, the conversion's truncation is the floor.
        codes = np.clip(steps, 0.0, 15.0, out=steps).astype(np.uint8)
        codes[flat] = 0

        rows = stored.view(self._layout)[:, 0]
        rows["packed"] = _pack_nibbles(codes).reshape(len(values), -1)
        rows["scales"] = scales.reshape(len(values), -1)
        rows["biases"] = biases.reshape(len(values), -1)

    def _decode_rows(self, stored: U8Array, values: F32Array, scratch: Scratch) -> None:
        rows = stored.view(self._layout)[:, 0]
        groups = values.reshape(-1, BLOCK)
        np.copyto(groups, _unpack_nibbles(rows["packed"]).reshape(-1, BLOCK))
        groups *= rows["scales"].astype(np.float32).reshape(-1, 1)
        groups += rows["biases"].astype(np.float32).reshape(-1, 1)


def _pack_nibbles(codes: U8Array) -> U8Array:
    """Neighbours share a byte, the even one in its lower half: the bytes of little-endian words."""
    pairs = codes.view(np.uint16)
    return (pairs | pairs >> 4).astype(np.uint8)


def _unpack_nibbles(packed: U8Array) -> U8Array:
    pairs = packed.astype(np.uint16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return pairs.view(np.uint8)
