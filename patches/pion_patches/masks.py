"""Attention masks cut into the columns of one part of the keys.

mlx-lm hands the attention function one mask over all keys. Attention in parts needs, for each part,
the columns that belong to it, in the grouped shape of the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class KeyMask:
    """A mask over ``total`` keys for ``rows`` queries of ``kv_heads * group`` heads.

    ``array`` is None where everything is visible or ``causal``, else boolean (True: visible) or
    additive, of shape [b, k, g, m, n] that broadcasts to [B, kv_heads, group, rows, total].
    """

    rows: int
    total: int
    array: mx.array | None = None
    causal: bool = False

    @classmethod
    def of(
        cls, mask: mx.array | str | None, rows: int, total: int, kv_heads: int, group: int
    ) -> KeyMask:
        """Read every mask form mlx-lm uses: None, ``"causal"``, boolean or additive, 1-D to 4-D.

        Causal aligns the last query with the last key. Raises `ValueError` for another string or a
        shape that does not broadcast to [B, H, rows, total].
        """
        if mask is None:
            return cls(rows, total)
        if isinstance(mask, str):
            if mask != "causal":
                raise ValueError(f"unknown attention mask {mask!r}")
            return cls(rows, total, causal=True)
        shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        batch, heads, m, n = shape if len(shape) == 4 else (0, 0, 0, 0)
        if m not in (1, rows) or n not in (1, total) or heads not in (1, kv_heads * group):
            raise ValueError(
                f"mask of shape {tuple(mask.shape)} does not broadcast to "
                f"[B, {kv_heads * group}, {rows}, {total}]"
            )
        split_heads = (1, 1) if heads == 1 else (kv_heads, group)
        return cls(rows, total, array=mask.reshape(batch, *split_heads, m, n))

    def columns(self, start: int, stop: int) -> mx.array | None:
        """The mask of keys ``start`` to ``stop``; None where every query sees all of them."""
        if self.causal:
            # Query i stands at key total - rows + i, whatever part its own key is in.
            first = self.total - self.rows
            if stop <= first + 1:
                return None
            queries = mx.arange(first, first + self.rows)[:, None]
            return queries >= mx.arange(start, stop)[None]
        if self.array is None or self.array.shape[-1] == 1:
            return self.array
        return self.array[..., start:stop]

    def part(self, start: int, stop: int) -> KeyMask:
        """The mask of keys ``start`` to ``stop`` as a mask of its own."""
        if (start, stop) == (0, self.total):
            return self
        return KeyMask(self.rows, stop - start, array=self.columns(start, stop))

    def visible_rows(self) -> mx.array | None:
        """Which queries see any key at all, with a last axis of 1; None where all do."""
        if self.total == 0:
            return mx.zeros((1, 1), dtype=mx.bool_)
        if self.causal:
            hidden = max(0, self.rows - self.total)
            return mx.arange(self.rows)[:, None] >= hidden if hidden else None
        if self.array is None:
            return None
        allowed = self.array if self.array.dtype == mx.bool_ else self.array > -mx.inf
        return mx.any(allowed, axis=-1, keepdims=True)


def apply_mask(scores: mx.array, mask: mx.array | None) -> mx.array:
    """``scores`` [B, K, G, M, n] in float32 under a boolean or additive ``mask``."""
    if mask is None:
        return scores
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, -mx.inf)
    return scores + mask.astype(mx.float32)
