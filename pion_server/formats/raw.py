"""raw: rows of bytes whose meaning only the client knows."""

from __future__ import annotations

from typing import NoReturn

from pion_server.formats.base import Format, InputType, Run
from pion_server.formats.floats import F32Array
from pion_server.formats.registry import register
from pion_server.payload import Buffer


@register
class Raw(Format):
    """`dim` bytes a row, for caches quantised in another way than ours. PACKED is the only form."""

    name = "raw"
    tag = 10

    def encode(self, blob: Buffer, count: int, input: InputType) -> Run:  # noqa: A002
        """Raises ValueError: opaque rows are no numbers."""
        self._refuse()

    def decode(self, run: Run) -> F32Array:
        """Raises ValueError: opaque rows are no numbers."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError("raw rows have no numbers: only FMT PACKED stores and fetches them")

    def _count_row_bytes(self) -> int:
        return self.dim
