"""fp32: rows of IEEE single-precision words."""

from __future__ import annotations

import numpy as np

from pion_server.formats.base import InputType, Run
from pion_server.formats.floats import F32Array, U8Array
from pion_server.formats.registry import register
from pion_server.formats.row_format import RowFormat
from pion_server.formats.scratch import Scratch


@register
class Fp32(RowFormat):
    """4·D bytes a row."""

    name = "fp32"
    tag = 9
    native = InputType.F32

    def decode(self, run: Run) -> F32Array:
        """The body itself as f32 `[rows, dim]`, not copied: writable only if the body is."""
        self._check_run(run)
        return np.frombuffer(run.body, dtype=np.float32).reshape(run.rows, self.dim)

    def _count_row_bytes(self) -> int:
        return 4 * self.dim

    def _encode_rows(self, values: F32Array, stored: U8Array, scratch: Scratch) -> None:
        stored.view(np.float32)[...] = values

    def _decode_rows(self, stored: U8Array, values: F32Array, scratch: Scratch) -> None:
        np.copyto(values, stored.view(np.float32))
