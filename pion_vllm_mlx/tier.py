"""Which storage format each piece of a prefix gets, and which stored ones are good enough."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Final

from pion_patches.pieces import RowLayout
from pion_server.formats import format_names
from pion_vllm_mlx.manifest import Manifest, Rows
from pion_vllm_mlx.pieces import is_lossless, row_format

log = logging.getLogger("pion_vllm_mlx")

#: Formats `vquant` may name; `raw` and `bf16_rope_fp8_body` need more than a name.
NAMED: Final = tuple(name for name in format_names() if name not in ("raw", "bf16_rope_fp8_body"))


@dataclass(frozen=True, slots=True)
class Tier:
    """A storage policy.

    `vquant="auto"` keeps every bit of the model's own K/V; a named format is used for K and V of
    every layer or, with `boundary_protect=N`, for V of all but the first and last N layers, the
    rest being fp16 (`protect_dtype="float16"`) or the model's dtype (`"auto"`).
    """

    vquant: str = "auto"
    boundary_protect: int = 0
    protect_dtype: str = "float16"

    def __post_init__(self) -> None:
        """Raise ValueError for a policy that means nothing."""
        if self.vquant != "auto" and self.vquant not in NAMED:
            raise ValueError(f"vquant {self.vquant!r} is not auto or one of {', '.join(NAMED)}")
        if type(self.boundary_protect) is not int or self.boundary_protect < 0:
            raise ValueError("boundary_protect is a number of layers, 0 or more")
        if self.boundary_protect and self.vquant == "auto":
            raise ValueError("vquant='auto' stores every layer losslessly: nothing to protect")
        if self.protect_dtype not in ("auto", "float16"):
            raise ValueError("protect_dtype is 'auto' or 'float16'")

    def store_for(self, side: str, layer: int, layers: int, layout: RowLayout) -> str:
        """The V-store format of one piece: side "keys" or "values", layer `layer` of `layers`."""
        native = layout.store_format
        if self.vquant == "auto" or layout.fmt != "dense":
            return native
        store = self.vquant
        if self.boundary_protect:
            edge = min(layer, layers - 1 - layer)
            if side == "keys" or edge < self.boundary_protect:
                store = native if self.protect_dtype == "auto" else "fp16"
        try:
            row_format(store, layout)
        except ValueError as reason:
            # A width that is no multiple of the format's block: this piece stays as it is.
            _tell_once(str(reason), native)
            return native
        return store

    def accepts(self, side: str, layer: int, layers: int, rows: Rows) -> bool:
        """Whether a stored piece may be used: lossless, or what this policy would have stored."""
        return is_lossless(rows) or rows.store == self.store_for(side, layer, layers, rows.layout)

    def refused(self, manifest: Manifest) -> Rows | None:
        """The first piece of a stored prefix that may not be used, or None if all may."""
        layers = sum(1 for leaf in manifest.leaves if leaf.keys or leaf.values)
        for side, rows in manifest.pieces():
            if not self.accepts(side, rows.layer, layers, rows):
                return rows
        return None


@functools.cache
def _tell_once(reason: str, native: str) -> None:
    """One warning for a format and width: larger than asked for is worth knowing, once."""
    log.warning("rows are stored as %s instead: %s", native, reason)
