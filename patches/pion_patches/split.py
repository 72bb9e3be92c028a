"""Keys and values in parts: a handle a cache can return instead of one joined array.

A prefix many requests share stays where it is; only a request's own rows are its own. The handle
travels through the model in place of an array and meets the patched attention function, which calls
`pion_attend`. It has what models ask of keys on the way there (`shape`, `dtype`, `astype`) and
nothing else: a model that computes with it elsewhere fails loudly instead of silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from .lse import attend_folded, fold_queries, hide_rows, merge, score
from .masks import KeyMask

# Up to this many bytes of scores and float32 casts, one softmax over all parts' scores beats
# merging their outputs: fewer, larger operations (measured on the CPU; same mathematics).
JOINT_BYTES = 64 << 20


class SplitRows:
    """Rows [B, K, N_i, D] in order, to be read as their concatenation [B, K, sum N_i, D].

    A part's batch may be 1 where another's is B: all requests of the batch share it.
    ``on_attend`` is called each time the attention of these keys is asked for.
    """

    __slots__ = ("_on_attend", "parts")

    def __init__(
        self, parts: tuple[mx.array, ...], on_attend: Callable[[], None] | None = None
    ) -> None:
        self.parts = parts
        self._on_attend = on_attend

    @property
    def shape(self) -> tuple[int, int, int, int]:
        first = self.parts[0].shape
        batch = max(part.shape[0] for part in self.parts)
        return batch, first[1], sum(part.shape[2] for part in self.parts), first[3]

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> mx.Dtype:
        return self.parts[0].dtype

    def astype(self, dtype: mx.Dtype) -> SplitRows:
        return SplitRows(tuple(part.astype(dtype) for part in self.parts), self._on_attend)

    def pion_attend(
        self,
        queries: mx.array,
        values: SplitRows,
        *,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Exact attention of ``queries`` [B, H, M, D] over these keys, in the queries' dtype.

        Raises `TypeError` where ``values`` are not split like the keys, `ValueError` for a mask
        that does not fit.
        """
        if not isinstance(getattr(values, "parts", None), tuple):
            raise TypeError(f"split keys need split values, not {type(values).__name__}")
        if self._on_attend is not None:
            self._on_attend()
        pairs = [(k, v) for k, v in zip(self.parts, values.parts, strict=True) if k.shape[2]]
        return attend_parts(
            queries, pairs or [(self.parts[0], values.parts[0])], scale, mask, sinks
        )


def attend_parts(
    queries: mx.array,
    parts: list[tuple[mx.array, mx.array]],
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of ``queries`` [B, H, M, D] over consecutive parts of keys and values.

    ``parts`` are pairs [B or 1, K, N_i, D], [B or 1, K, N_i, Dv]; ``mask`` and ``sinks`` as in
    mlx-lm, the mask over all keys in order. Computes in float32 and returns [B, H, M, Dv] in the
    promoted dtype of queries and values. Queries that see nothing get 0.
    """
    batch, heads, rows, _ = queries.shape
    kv_heads = parts[0][0].shape[1]
    total = sum(keys.shape[2] for keys, _ in parts)
    folded = fold_queries(queries, kv_heads, scale)
    key_mask = KeyMask.of(mask, rows, total, kv_heads, heads // kv_heads)
    attend = _attend_joint if _joint_bytes(folded, parts, total) <= JOINT_BYTES else _attend_merged
    out = attend(folded, parts, key_mask, sinks)
    # Different float types promote to float32, as in MLX itself.
    dtype = queries.dtype if queries.dtype == parts[0][1].dtype else mx.float32
    return out.reshape(batch, heads, rows, -1).astype(dtype)


def _attend_joint(
    folded: mx.array,
    parts: list[tuple[mx.array, mx.array]],
    mask: KeyMask,
    sinks: mx.array | None,
) -> mx.array:
    """One softmax over the scores of every part; keys and values are never joined."""
    bounds = _bounds(parts)
    scores = [
        score(folded, keys, mask.columns(*bound), mask.rows)
        for (keys, _), bound in zip(parts, bounds, strict=True)
    ]
    if sinks is not None:
        scores.append(_sink_column(sinks, folded, mask.rows))
    weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1, precise=True)
    outs = [
        weights[..., start:stop] @ values.astype(mx.float32)
        for (_, values), (start, stop) in zip(parts, bounds, strict=True)
    ]
    return hide_rows(sum(outs[1:], outs[0]), mask)


def _attend_merged(
    folded: mx.array,
    parts: list[tuple[mx.array, mx.array]],
    mask: KeyMask,
    sinks: mx.array | None,
) -> mx.array:
    """Each part in tiles with its log-sum-exp, then the merge: memory stays bounded."""
    attended = [
        attend_folded(folded, keys, values, mask, start)
        for (keys, values), (start, _) in zip(parts, _bounds(parts), strict=True)
    ]
    if sinks is None:
        return merge(attended)[0]
    # Folded rows run through (group, query) for each key/value head, which makes head and row one
    # axis: give every folded row its own "head" and the sinks line up.
    batch, kv_heads, all_rows, _ = folded.shape
    per_row = _sink_column(sinks, folded[:1], mask.rows).reshape(-1)
    flat = [
        (out.reshape(batch, kv_heads * all_rows, 1, -1), lse.reshape(batch, -1, 1))
        for out, lse in attended
    ]
    return merge(flat, per_row)[0].reshape(batch, kv_heads, all_rows, -1)


def _sink_column(sinks: mx.array, folded: mx.array, rows: int) -> mx.array:
    """``sinks`` [H] as a column [B, K, G*M, 1] beside the scores of ``folded`` queries."""
    batch, kv_heads, all_rows, _ = folded.shape
    per_head = sinks.astype(mx.float32).reshape(1, kv_heads, all_rows // rows, 1)
    spread = mx.broadcast_to(per_head, (batch, kv_heads, all_rows // rows, rows))
    return spread.reshape(batch, kv_heads, all_rows, 1)


def _bounds(parts: list[tuple[mx.array, mx.array]]) -> list[tuple[int, int]]:
    bounds, start = [], 0
    for keys, _ in parts:
        bounds.append((start, start + keys.shape[2]))
        start += keys.shape[2]
    return bounds


def _joint_bytes(folded: mx.array, parts: list[tuple[mx.array, mx.array]], total: int) -> int:
    """Float32 bytes `_attend_joint` holds at once: scores, and casts where rows are narrower."""
    batch, kv_heads, all_rows, _ = folded.shape
    scores = 4 * batch * kv_heads * all_rows * total
    casts = sum(4 * array.size for pair in parts for array in pair if array.dtype != mx.float32)
    return scores + casts
