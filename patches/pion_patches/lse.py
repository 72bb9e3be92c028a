"""Attention with its log-sum-exp, in float32, and the merge of attention over disjoint keys.

For one query with scores s over keys j, attention over a subset A of the keys is
``o_A = sum_A exp(s_j - l_A) v_j`` with ``l_A = log sum_A exp(s_j)``. Attention over two disjoint
subsets together is ``(exp(l_A) o_A + exp(l_B) o_B) / (exp(l_A) + exp(l_B))``: the online softmax of
Milakov and Gimelshein (arXiv:1805.02867), as FlashAttention (arXiv:2205.14135) uses it. A sink is a
logit that takes part in the denominator and has no value, so it may be added once, in the merge.

``mx.fast.scaled_dot_product_attention`` returns no log-sum-exp, and recovering it from sinks or an
extra key loses up to 1e-2; so the scores are explicit here, a tile of keys at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .masks import KeyMask, apply_mask

TILE_BYTES = 16 << 20


def attend_with_lse(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    tile: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Attention over ``keys`` and the log-sum-exp of its scores.

    ``queries`` [B, H, M, D]; ``keys`` [B or 1, K, N, D] and ``values`` [B or 1, K, N, Dv] with K
    dividing H, never repeated. ``mask`` as in `KeyMask.of`. ``tile`` bounds how many keys are
    scored at once (by default as many as keep a tile's scores and casts near 16 MiB).

    Returns ``out`` [B, H, M, Dv] and ``lse`` [B, H, M], both float32. A query that sees no key has
    ``out`` 0 and ``lse`` -inf; one that holds NaN has NaN in its own rows only.
    """
    batch, heads, rows, _ = queries.shape
    kv_heads, total, width = keys.shape[1], keys.shape[2], values.shape[3]
    folded = fold_queries(queries, kv_heads, scale)
    key_mask = KeyMask.of(mask, rows, total, kv_heads, heads // kv_heads)
    out, lse = attend_folded(folded, keys, values, key_mask, 0, tile)
    return out.reshape(batch, heads, rows, width), lse.reshape(batch, heads, rows)


def merge(
    parts: Sequence[tuple[mx.array, mx.array]], sinks: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Attention over the union of disjoint sets of keys, from each set's ``(out, lse)``.

    ``out`` [B, H, M, Dv] and ``lse`` [B, H, M] as `attend_with_lse` returns them; ``sinks`` [H]
    joins the denominator here and nowhere else. Sets a query sees nothing of (``lse`` -inf) weigh
    nothing; a query that sees nothing at all gets 0 and -inf (with sinks: 0 and its sink).
    """
    lses = [lse.astype(mx.float32) for _, lse in parts]
    if sinks is not None:
        lses.append(mx.broadcast_to(sinks.astype(mx.float32)[None, :, None], lses[0].shape))
    top = lses[0]
    for lse in lses[1:]:
        top = mx.maximum(top, lse)
    safe = _finite_or_zero(top)
    weights = [mx.exp(lse - safe) for lse in lses]
    denominator = sum(weights[1:], weights[0])
    total = sum(
        (w[..., None] * out for (out, _), w in zip(parts[1:], weights[1:], strict=False)),
        weights[0][..., None] * parts[0][0],
    )
    divisor = mx.where(denominator == 0, 1.0, denominator)
    return total / divisor[..., None], safe + mx.log(denominator)


def fold_queries(queries: mx.array, kv_heads: int, scale: float) -> mx.array:
    """[B, H, M, D] to scaled float32 [B, K, G*M, D]: one matrix product per key/value head.

    Raises `ValueError` unless ``kv_heads`` divides H.
    """
    batch, heads, rows, width = queries.shape
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key/value heads")
    scaled = queries.astype(mx.float32) * scale
    return scaled.reshape(batch, kv_heads, heads // kv_heads * rows, width)


def score(folded: mx.array, keys: mx.array, mask: mx.array | None, rows: int) -> mx.array:
    """Masked float32 scores [B, K, G*M, N] of ``folded`` queries against ``keys``."""
    scores = folded @ keys.astype(mx.float32).swapaxes(-1, -2)
    if mask is None:
        return scores
    batch, kv_heads, all_rows, total = scores.shape
    grouped = scores.reshape(batch, kv_heads, all_rows // rows, rows, total)
    return apply_mask(grouped, mask).reshape(scores.shape)


def attend_folded(
    folded: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: KeyMask,
    start: int,
    tile: int | None = None,
) -> tuple[mx.array, mx.array]:
    """`attend_with_lse` on folded queries, over keys that are columns ``start…`` of ``mask``.

    Returns ``out`` [B, K, G*M, Dv] and ``lse`` [B, K, G*M].
    """
    batch, kv_heads, all_rows, _ = folded.shape
    count = keys.shape[2]
    # Accumulators: largest score so far, sum of exp(score - top), and its weighted values.
    top = mx.full((batch, kv_heads, all_rows, 1), -mx.inf)
    denominator = mx.zeros(top.shape)
    total = mx.zeros((batch, kv_heads, all_rows, values.shape[3]))
    step = tile or _tile_keys(batch * all_rows, keys, values)
    for begin in range(0, count, step):
        end = min(begin + step, count)
        columns = mask.columns(start + begin, start + end)
        # A tile waits for the one before it; else MLX may hold the scores of all tiles at once.
        [waiting] = mx.depends([folded], [total, denominator])
        scores = score(waiting, keys[..., begin:end, :], columns, mask.rows)
        new_top = mx.maximum(top, mx.max(scores, axis=-1, keepdims=True))
        safe = _finite_or_zero(new_top)
        weights = mx.exp(scores - safe)
        decay = mx.exp(top - safe)
        denominator = denominator * decay + mx.sum(weights, axis=-1, keepdims=True)
        total = total * decay + weights @ values[..., begin:end, :].astype(mx.float32)
        top = new_top
    out = hide_rows(total / denominator, mask.part(start, start + count))
    return out, (top + mx.log(denominator)).squeeze(-1)


def hide_rows(out: mx.array, mask: KeyMask) -> mx.array:
    """Zero the rows of ``out`` [B, K, G*M, Dv] whose query sees nothing.

    The mask decides, not the scores: a row whose scores are not finite stays NaN, so that a broken
    query never looks like a padded one.
    """
    visible = mask.visible_rows()
    if visible is None:
        return out
    batch, kv_heads, all_rows, width = out.shape
    grouped = out.reshape(batch, kv_heads, all_rows // mask.rows, mask.rows, width)
    return mx.where(visible, grouped, 0.0).reshape(out.shape)


def _finite_or_zero(top: mx.array) -> mx.array:
    return mx.where(top == -mx.inf, 0.0, top)


def _tile_keys(rows: int, keys: mx.array, values: mx.array) -> int:
    """How many keys fit `TILE_BYTES`: scores, their exponentials, and float32 casts of K and V."""
    per_key = 4 * keys.shape[1] * (3 * rows + keys.shape[3] + values.shape[3])
    return max(64, TILE_BYTES // per_key)
