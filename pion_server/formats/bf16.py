"""bf16: rows of bfloat16 words, the upper halves of f32."""

from __future__ import annotations

import numpy as np

from pion_server.formats.base import InputType
from pion_server.formats.floats import F32Array, U8Array, narrow_to_bf16, widen_bf16
from pion_server.formats.registry import register
from pion_server.formats.row_format import RowFormat
from pion_server.formats.scratch import Scratch


@register
class Bf16(RowFormat):
    """2·D bytes a row."""

    name = "bf16"
    tag = 8
    native = InputType.BF16

    def _count_row_bytes(self) -> int:
        return 2 * self.dim

    def _encode_rows(self, values: F32Array, stored: U8Array, scratch: Scratch) -> None:
        narrow_to_bf16(values, stored.view(np.uint16), scratch)

    def _decode_rows(self, stored: U8Array, values: F32Array, scratch: Scratch) -> None:
        widen_bf16(stored.view(np.uint16), values)
