"""The attention operations in plain MLX, on whatever device it has (see `operations`).

Keys are scored a tile at a time, so that memory stays bounded, and tiles are joined by the online
softmax of Milakov and Gimelshein (arXiv:1805.02867): for scores s over a set of keys, keep their
maximum t, d = sum exp(s - t) and o = sum exp(s - t) v; two sets join after rescaling both to the
larger t. The attention is o / d, its log-sum-exp t + ln d. K and V are never repeated: query heads
that share a kv head are rows of one matrix product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

# Scores, their exponentials, gathered and widened K and V of one tile together.
TILE_BYTES = 64 << 20
_LEAST_TILE = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """Some keys and values [B][n][D], and what of their scores [B][R][n] counts (None: all)."""

    keys: mx.array
    values: mx.array
    mask: mx.array | None = None


def query_one(q: mx.array, k: mx.array, v: mx.array, first: int) -> mx.array:
    """sdpa_q1; see `Operations`."""
    if k.dtype == mx.float32:
        # No log-sum-exp is asked for, so MLX's own fused kernel may do it where there is one.
        scale = 1.0 / math.sqrt(q.shape[-1])
        keys, values = k[None, :, first:], v[None, :, first:]
        out = mx.fast.scaled_dot_product_attention(q[None, :, None], keys, values, scale=scale)
        return out[0, :, 0]
    out, _ = query_many(q[:, None], k, v, first)
    return out[:, 0]


def query_many(q: mx.array, k: mx.array, v: mx.array, first: int) -> tuple[mx.array, mx.array]:
    """sdpa_batched_q; see `Operations`."""
    return attend(_scaled(q), prefix_tiles(k, v, first, q.shape[1]))


def query_fused(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    suffix_k: mx.array,
    suffix_v: mx.array,
    head_map: NDArray[np.int32],
    first: int,
) -> mx.array:
    """sdpa_batched_q_fused; see `Operations`."""
    many = q.shape[1]

    def part(folded: mx.array, kv: slice) -> mx.array:
        tiles = prefix_tiles(k[kv], v[kv], first, folded.shape[1])
        own = suffix_tiles(suffix_k[kv], suffix_v[kv], many, folded.shape[1])
        return attend(folded, [*tiles, *own])[0]

    return _by_kv_head(q, head_map, k.shape[0], part)


def query_sparse(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    tokens: NDArray[np.int32],
    counts: NDArray[np.int32],
) -> mx.array:
    """sdpa_q1_sparse; see `Operations`."""
    heads, most = tokens.shape
    total = k.shape[1]
    rows = tokens + np.arange(heads, dtype=np.int32)[:, None] * np.int32(total)
    seen = np.arange(most)[None] < counts[:, None]

    def tiles() -> Iterator[Tile]:
        for start, end in _spans(0, most, k, rows=1, gathered=True):
            mask = mx.array(seen[:, None, start:end])
            at = mx.array(rows[:, start:end])
            yield Tile(_gather(k, at), _gather(v, at), mask)

    out, _ = attend(_scaled(q[:, None]), tiles())
    return mx.where(mx.array(counts[:, None] > 0), out[:, 0], 0.0)


def query_sparse_fused(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    tokens: NDArray[np.int32],
    suffix_k: mx.array,
    suffix_v: mx.array,
    head_map: NDArray[np.int32],
) -> mx.array:
    """sdpa_q1_sparse_fused; see `Operations`."""
    heads, total, _ = k.shape
    rows = tokens[None] + np.arange(heads, dtype=np.int32)[:, None] * np.int32(total)

    def part(folded: mx.array, kv: slice) -> mx.array:
        many = folded.shape[1]

        def tiles() -> Iterator[Tile]:
            for start, end in _spans(0, len(tokens), k[kv], many, gathered=True):
                at = mx.array(rows[kv, start:end])
                yield Tile(_gather(k, at), _gather(v, at))
            yield from suffix_tiles(suffix_k[kv], suffix_v[kv], 1, many)

        return attend(folded, tiles())[0]

    return _by_kv_head(q[:, None], head_map, heads, part)[:, 0]


def attend(q: mx.array, tiles: Iterator[Tile] | Sequence[Tile]) -> tuple[mx.array, mx.array]:
    """Attention of scaled queries [B][R][D] over all tiles: output [B][R][D], log-sum-exp [B][R].

    Each row must see a key of the first tile.
    """
    top = denominator = total = mx.array(0.0)
    for number, tile in enumerate(tiles):
        scores = q @ tile.keys.astype(mx.float32).swapaxes(-1, -2)
        if tile.mask is not None:
            scores = mx.where(tile.mask, scores, -mx.inf)
        highest = mx.max(scores, axis=-1, keepdims=True)
        if number:
            # Evaluated here, or MLX would hold the scores of all tiles at once.
            mx.eval(top, denominator, total)
            highest = mx.maximum(top, highest)
        weights = mx.exp(scores - highest)
        summed = mx.sum(weights, axis=-1, keepdims=True)
        weighted = weights @ tile.values.astype(mx.float32)
        if number:
            decay = mx.exp(top - highest)
            summed = denominator * decay + summed
            weighted = total * decay + weighted
        top, denominator, total = highest, summed, weighted
    return total / denominator, (top + mx.log(denominator))[..., 0]


def prefix_tiles(k: mx.array, v: mx.array, first: int, rows: int) -> Iterator[Tile]:
    """The prefix from token `first` on, in tiles fit for that many query rows."""
    for start, end in _spans(first, k.shape[1], k, rows):
        yield Tile(k[:, start:end], v[:, start:end])


def suffix_tiles(k: mx.array, v: mx.array, many: int, rows: int) -> Iterator[Tile]:
    """A suffix [B][S][D] as M = `many` queries a head see it, `rows` = g * M of them together."""
    total = k.shape[1]
    offset = max(total - many, 0)
    seen = mx.arange(rows) % many + offset
    for start, end in _spans(0, total, k, rows):
        mask = None
        if end > offset + 1:
            mask = (mx.arange(start, end)[None] <= seen[:, None])[None]
        yield Tile(k[:, start:end], v[:, start:end], mask)


def _scaled(q: mx.array) -> mx.array:
    return q * (1.0 / math.sqrt(q.shape[-1]))


def _spans(
    start: int, end: int, k: mx.array, rows: int, gathered: bool = False
) -> Iterator[tuple[int, int]]:
    """`[start, end)` cut so that a tile of each piece stays near `TILE_BYTES`."""
    heads, _, dim = k.shape
    copied = 2 * dim if gathered or k.dtype != mx.float32 else 0
    step = max(_LEAST_TILE, TILE_BYTES // (4 * heads * (2 * rows + copied)))
    for at in range(start, end, step):
        yield at, min(at + step, end)


def _gather(tensor: mx.array, rows: mx.array) -> mx.array:
    """Rows [B][T], counted over all heads, of a tensor [H][N][D] → [B][T][D]."""
    return mx.take(tensor.reshape(-1, tensor.shape[-1]), rows, axis=0)


def _by_kv_head(
    q: mx.array,
    head_map: NDArray[np.int32],
    kv_heads: int,
    part: Callable[[mx.array, slice], mx.array],
) -> mx.array:
    """Fold q [H_q][M][D] by kv head, let `part` answer the folds, put the heads back in order.

    `part` takes scaled queries [B][g * M][D] and which B kv heads they read, and answers as many.
    """
    _, many, dim = q.shape
    scaled = _scaled(q)
    order, groups = _groups(head_map.tobytes(), kv_heads)
    if order is not None:
        scaled = mx.take(scaled, order, axis=0)
    outs, at = [], 0
    for kv, share in groups:
        count = kv.stop - kv.start
        folded = scaled[at : at + count * share].reshape(count, share * many, dim)
        outs.append(part(folded, kv).reshape(count * share, many, dim))
        at += count * share
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
    return out if order is None else mx.take(out, mx.argsort(order), axis=0)


@functools.lru_cache(maxsize=64)
def _groups(
    head_map: bytes, kv_heads: int
) -> tuple[mx.array | None, tuple[tuple[slice, int], ...]]:
    """The order that sorts query heads by kv head (None: sorted already), and who shares what.

    One group where every kv head has as many readers, else one for each kv head that is read.
    """
    mapped = np.frombuffer(head_map, np.int32)
    order = np.argsort(mapped, kind="stable")
    shares: list[int] = np.bincount(mapped, minlength=kv_heads).tolist()
    groups = tuple((slice(kv, kv + 1), share) for kv, share in enumerate(shares) if share)
    if len(set(shares)) == 1:
        groups = ((slice(0, kv_heads), shares[0]),)
    is_sorted = bool(np.all(order == np.arange(len(order))))
    return (None if is_sorted else mx.array(order.astype(np.int32))), groups
