"""fp16: rows of IEEE half-precision words."""

from __future__ import annotations

import numpy as np

from pion_server.formats.base import InputType
from pion_server.formats.floats import F32Array, U8Array, narrow_to_f16
from pion_server.formats.registry import register
from pion_server.formats.row_format import RowFormat
from pion_server.formats.scratch import Scratch


@register
class Fp16(RowFormat):
    """2·D bytes a row. F16 input keeps its bits, so bf16 words sent as F16 come back as well."""

    name = "fp16"
    tag = 2
    native = InputType.F16

    def _count_row_bytes(self) -> int:
        return 2 * self.dim

    def _encode_rows(self, values: F32Array, stored: U8Array, scratch: Scratch) -> None:
        scratch.saturated += narrow_to_f16(values, stored.view(np.float16))

    def _decode_rows(self, stored: U8Array, values: F32Array, scratch: Scratch) -> None:
        np.copyto(values, stored.view(np.float16))
