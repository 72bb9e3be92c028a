"""bf16_rope_fp8_body: the leading `rope` numbers of a row as bf16 words, the rest as fp8 blocks.

For caches whose rows carry a rotary part beside a compressed body. A row is `rope` words (nearest
even), then the blocks of fp8 without its norm.
"""

from __future__ import annotations

import numpy as np

from pion_server.formats.floats import F32Array, U8Array, narrow_to_bf16, widen_bf16
from pion_server.formats.fp8 import Fp8
from pion_server.formats.registry import register
from pion_server.formats.scratch import Scratch


@register
class Bf16RopeFp8Body(Fp8):
    """2·rope + 34·(D - rope)/32 bytes a row."""

    name = "bf16_rope_fp8_body"
    tag = 6
    takes_rope = True

    def _describe_row(self) -> np.dtype[np.void]:
        body = self._describe_blocks(self.dim - self.rope)
        return np.dtype([("rope", "<u2", (self.rope,)), body])

    def _encode_rows(self, values: F32Array, stored: U8Array, scratch: Scratch) -> None:
        rows = stored.view(self._layout)[:, 0]
        narrow_to_bf16(values[:, : self.rope], rows["rope"], scratch)
        body = scratch.array("body", (len(values), self.dim - self.rope), np.float32)
        np.copyto(body, values[:, self.rope :])
        self._encode_blocks(body, rows, scratch)

    def _decode_rows(self, stored: U8Array, values: F32Array, scratch: Scratch) -> None:
        rows = stored.view(self._layout)[:, 0]
        widen_bf16(rows["rope"], values[:, : self.rope])
        body = scratch.array("body", (len(rows), self.dim - self.rope), np.float32)
        self._decode_blocks(rows, body, scratch)
        values[:, self.rope :] = body
