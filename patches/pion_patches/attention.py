"""Attention for mlx-lm: a cache that brings its own attention uses it, all else stays stock.

`install_pion_attention_patch` exchanges the body of mlx-lm's one attention function (see `seam`).
From then on keys that are a split handle (see `split`) are attended part by part and merged; any
other call runs mlx-lm's original body, bit for bit.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import mlx.core as mx
import mlx_lm

from . import seam
from ._patch import Patch, PatchConflict, require_version

MLX_LM_LOW, MLX_LM_BELOW = "0.31.3", "0.33"


class AttentionPatch(Patch):
    """mlx-lm's ``scaled_dot_product_attention``, made to ask the keys for their own attention."""

    name: ClassVar[str] = "attention"

    def check(self) -> None:
        require_version("mlx-lm", mlx_lm.__version__, MLX_LM_LOW, MLX_LM_BELOW)
        seam.check_bound()
        for function in seam.find_seams():
            if seam.is_exchanged(function):
                self._check_protocol(function)
            else:
                seam.check_seam(function)

    def is_installed(self) -> bool:
        function = seam.current_seam()
        return function is not None and seam.is_exchanged(function)

    def apply(self) -> None:
        wrappers = seam.find_wrappers()
        # More than one where `mlx_lm.models.base` was reloaded: older models hold the older one.
        for function in seam.find_seams():
            if not seam.is_exchanged(function):
                seam.exchange(function, wrappers)

    def revert(self) -> None:
        exchanged = [f for f in seam.find_seams() if seam.is_exchanged(f)]
        for function in exchanged:
            self._check_protocol(function)
            seam.check_restorable(function)
        for function in exchanged:
            seam.restore(function)

    @staticmethod
    def _check_protocol(function: Any) -> None:
        found = vars(function)[seam.STATE]["protocol"]
        if found != seam.PROTOCOL:
            raise PatchConflict(
                f"another copy of pion_patches with seam protocol {found} is installed; "
                f"this copy speaks {seam.PROTOCOL}"
            )


PATCH = AttentionPatch()


def install_pion_attention_patch() -> None:
    """Let split prompt caches work with every mlx-lm model, imported before or after.

    A second call does nothing. Raises `UnsupportedVersion` (found, required) for an mlx-lm outside
    the tested range or with another signature, `PatchConflict` where another patch hides the
    function; nothing is changed then.
    """
    PATCH.install()


def uninstall_pion_attention_patch() -> None:
    """Restore mlx-lm's own attention. A second call does nothing.

    Raises `PatchConflict`, with nothing changed, where somebody wrapped over the patch since.
    """
    PATCH.uninstall()


def is_installed() -> bool:
    """Say whether the patch is in force in this process, whichever copy of us installed it."""
    return PATCH.is_installed()


def pion_attention_patch() -> AbstractContextManager[None]:
    """Install for a ``with`` block; what was installed before it stays installed after."""
    return PATCH.installed()


def pion_scaled_dot_product_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """What the patched function does, callable directly, installed or not.

    ``queries`` [B, H, M, D]; ``keys`` and ``values`` either plain (array or quantised tuple) or
    the split handles of a split cache; ``mask`` None, ``"causal"``, or an array over all keys
    (prefix included) that broadcasts to [B, H, M, N]; ``sinks`` [H]. Returns [B, H, M, Dv].
    """
    attend = getattr(keys, "pion_attend", None)
    if attend is not None:
        out: mx.array = attend(queries, values, scale=scale, mask=mask, sinks=sinks)
        return out
    base = importlib.import_module(seam.BASE)
    stock: mx.array = base.scaled_dot_product_attention(
        queries, keys, values, cache, scale, mask, sinks
    )
    return stock
