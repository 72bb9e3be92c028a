"""The attention operations in plain MLX, on whatever device it has (see `operations`).

Keys are scored a tile at a time, so that memory stays bounded, and tiles are joined by the online
softmax of Milakov and Gimelshein (arXiv:1805.02867): for scores s over a set of keys, keep their
maximum t, d = sum exp(s - t) and o = sum exp(s - t) v; two sets join after rescaling both to the
larger t. The attention is o / d, its log-sum-exp t + ln d. K and V are never repeated: query heads
that share a kv head are rows of one matrix product.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

# Scores, their exponentials, gathered and widened K and V of one tile together.
TILE_BYTES = 64 << 20
_LEAST_TILE = 64
_LOWEST = float(np.finfo(np.float32).min)


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
    return attend(_scaled(q)[:, None], prefix_tiles(k, v, first, 1))[:, 0]


def query_many(q: mx.array, k: mx.array, v: mx.array, first: int) -> tuple[mx.array, mx.array]:
    """sdpa_batched_q; see `Operations`."""
    top, denominator, total = _accumulate(_scaled(q), prefix_tiles(k, v, first, q.shape[1]))
    return total / denominator, (top + mx.log(denominator))[..., 0]


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

    def part(folded: mx.array, kv: slice | None) -> mx.array:
        rows = folded.shape[1]
        prefix = prefix_tiles(_heads(k, kv), _heads(v, kv), first, rows)
        suffix = suffix_tiles(_heads(suffix_k, kv), _heads(suffix_v, kv), many, rows)
        return attend(folded, itertools.chain(prefix, suffix))

    return _by_kv_head(q, head_map, k.shape[0], part)


def decode(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    suffix_k: mx.array,
    suffix_v: mx.array,
    head_map: NDArray[np.int32],
    window: int,
) -> mx.array:
    """Prefix and suffix by position, in one softmax; see `Operations`."""
    many, total = q.shape[1], k.shape[1]
    asked = total + suffix_k.shape[1] - many

    def part(folded: mx.array, kv: slice | None) -> mx.array:
        queries = Queries(asked, many, folded.shape[1], window)
        tiles = itertools.chain.from_iterable(
            placed_tiles(_heads(keys, kv), _heads(values, kv), at, queries)
            for at, keys, values in ((0, k, v), (total, suffix_k, suffix_v))
        )
        top, denominator, weighted = _accumulate(folded, tiles)
        return mx.concatenate([weighted / denominator, top + mx.log(denominator)], axis=-1)

    return _by_kv_head(q, head_map, k.shape[0], part)


def query_sparse(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    tokens: NDArray[np.int32],
    counts: NDArray[np.int32],
) -> mx.array:
    """sdpa_q1_sparse; see `Operations`."""
    seen = np.arange(tokens.shape[1])[None] < counts[:, None]
    out = attend(_scaled(q)[:, None], _listed_tiles(k, v, _flat(tokens, k), 1, seen))[:, 0]
    return mx.where(mx.array(counts[:, None] > 0), out, 0.0)


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
    flat = _flat(tokens[None], k)

    def part(folded: mx.array, kv: slice | None) -> mx.array:
        rows = folded.shape[1]
        prefix = _listed_tiles(k, v, flat if kv is None else flat[kv], rows)
        suffix = suffix_tiles(_heads(suffix_k, kv), _heads(suffix_v, kv), 1, rows)
        return attend(folded, itertools.chain(prefix, suffix))

    return _by_kv_head(q[:, None], head_map, k.shape[0], part)[:, 0]


def attend(q: mx.array, tiles: Iterable[Tile]) -> mx.array:
    """Attention of scaled queries [B][R][D] over all tiles, as q.

    Each row must see a key of the first tile.
    """
    _, denominator, total = _accumulate(q, tiles)
    return total / denominator


def _accumulate(q: mx.array, tiles: Iterable[Tile]) -> tuple[mx.array, mx.array, mx.array]:
    """t and d [B][R][1] and o [B][R][D] of the online softmax over all tiles."""
    state: tuple[mx.array, mx.array, mx.array] | None = None
    pending = 0
    for tile in tiles:
        scores = q @ tile.keys.astype(mx.float32).swapaxes(-1, -2)
        if tile.mask is None:
            highest = mx.max(scores, axis=-1, keepdims=True)
        else:
            scores = mx.where(tile.mask, scores, -mx.inf)
            # A row may see no key of this tile: its exponentials must be 0, not NaN.
            highest = mx.maximum(mx.max(scores, axis=-1, keepdims=True), _LOWEST)
        if state is not None:
            highest = mx.maximum(state[0], highest)
        weights = mx.exp(scores - highest)
        summed = mx.sum(weights, axis=-1, keepdims=True)
        weighted = weights @ tile.values.astype(mx.float32)
        if state is not None:
            decay = mx.exp(state[0] - highest)
            summed = state[1] * decay + summed
            weighted = state[2] * decay + weighted
        state = highest, summed, weighted
        pending += 2 * scores.nbytes
        if pending > TILE_BYTES // 2:
            # Or MLX would hold the scores of all tiles at once.
            mx.eval(state)
            pending = 0
    assert state is not None
    return state


def prefix_tiles(k: mx.array, v: mx.array, first: int, rows: int) -> Iterator[Tile]:
    """The prefix from token `first` on, in tiles fit for that many query rows."""
    copied = 0 if k.dtype == mx.float32 else 2 * k.shape[2]
    for start, end in _spans(first, k.shape[1], k.shape[0] * (2 * rows + copied)):
        yield Tile(k[:, start:end], v[:, start:end])


def suffix_tiles(k: mx.array, v: mx.array, many: int, rows: int) -> Iterator[Tile]:
    """A suffix [B][S][D] as M = `many` queries a head see it, `rows` = g * M of them together."""
    return placed_tiles(k, v, 0, Queries(max(k.shape[1] - many, 0), many, rows))


class Queries(NamedTuple):
    """Where M = `many` queries a head stand: from position `at` on, `rows` = g * M of them.

    They see what is not behind them, at most `window` positions with their own (0: all).
    """

    at: int
    many: int
    rows: int
    window: int = 0


def placed_tiles(k: mx.array, v: mx.array, at: int, queries: Queries) -> Iterator[Tile]:
    """Keys [B][n][D] that stand from position `at` on, as those queries see them."""
    first, last, window = queries.at, queries.at + queries.many - 1, queries.window
    begin = max(first - window + 1 - at, 0) if window else 0
    copied = 0 if k.dtype == mx.float32 else 2 * k.shape[2]
    stop = min(last + 1 - at, k.shape[1])
    for start, end in _spans(begin, stop, k.shape[0] * (2 * queries.rows + copied)):
        mask = None
        later, gone = at + end - 1 > first, window and at + start <= last - window
        if later or gone:
            here = (mx.arange(queries.rows) % queries.many + first)[:, None]
            tokens = mx.arange(at + start, at + end)[None]
            mask = tokens <= here
            if gone:
                mask = mask & (tokens > here - window)
            mask = mask[None]
        yield Tile(k[:, start:end], v[:, start:end], mask)


def _listed_tiles(
    k: mx.array,
    v: mx.array,
    flat: NDArray[np.int32],
    rows: int,
    seen: NDArray[np.bool_] | None = None,
) -> Iterator[Tile]:
    """Rows `flat` [B][T], as `_flat` counts them, of K and V; `seen` [B][T] says which count."""
    dim = k.shape[-1]
    keys, values = k.reshape(-1, dim), v.reshape(-1, dim)
    for start, end in _spans(0, flat.shape[1], flat.shape[0] * 2 * (rows + dim)):
        at = mx.array(flat[:, start:end])
        mask = mx.array(seen[:, None, start:end]) if seen is not None else None
        yield Tile(mx.take(keys, at, axis=0), mx.take(values, at, axis=0), mask)


def _flat(tokens: NDArray[np.int32], k: mx.array) -> NDArray[np.int32]:
    """Tokens [H or 1][T] as rows [H][T] of K with its heads one after the other."""
    heads, total, _ = k.shape
    return tokens + np.arange(heads, dtype=np.int32)[:, None] * np.int32(total)


def _scaled(q: mx.array) -> mx.array:
    return q * (1.0 / math.sqrt(q.shape[-1]))


def _heads(tensor: mx.array, kv: slice | None) -> mx.array:
    return tensor if kv is None else tensor[kv]


def _spans(start: int, end: int, floats: int) -> Iterator[tuple[int, int]]:
    """`[start, end)` in steps that stay near `TILE_BYTES` at that many floats a key."""
    step = max(_LEAST_TILE, TILE_BYTES // (4 * floats))
    for at in range(start, end, step):
        yield at, min(at + step, end)


def _by_kv_head(
    q: mx.array,
    head_map: NDArray[np.int32],
    kv_heads: int,
    part: Callable[[mx.array, slice | None], mx.array],
) -> mx.array:
    """Fold q [H_q][M][D] by kv head, let `part` answer the folds, put the heads back in order.

    `part` takes scaled queries [B][g * M][D] and which B kv heads they read (None: all of them),
    and answers as many rows, of any width.
    """
    _, many, dim = q.shape
    groups = _groups(head_map.tobytes(), kv_heads)
    scaled = _scaled(q)
    if groups.order is not None:
        scaled = mx.take(scaled, groups.order, axis=0)
    if groups.even:
        out = part(scaled.reshape(kv_heads, -1, dim), None)
    else:
        parts = mx.split(scaled, groups.cuts)
        out = mx.concatenate(
            [
                _unfold(part(one.reshape(1, -1, dim), slice(kv, kv + 1)), many)
                for kv, one in zip(groups.read, parts, strict=True)
            ]
        )
    out = _unfold(out, many)
    return out if groups.back is None else mx.take(out, groups.back, axis=0)


def _unfold(rows: mx.array, many: int) -> mx.array:
    """Rows [B][g * M][W] as [B * g][M][W]."""
    return rows.reshape(-1, many, rows.shape[-1])


class _Groups(NamedTuple):
    """`order` sorts query heads by the kv head they read, `back` undoes it (None: sorted already).

    `even`: each kv head is read by as many. Else sorted heads split at `cuts` read one of `read`.
    """

    order: mx.array | None
    back: mx.array | None
    even: bool
    read: list[int]
    cuts: list[int]


@functools.lru_cache(maxsize=64)
def _groups(head_map: bytes, kv_heads: int) -> _Groups:
    mapped = np.frombuffer(head_map, np.int32)
    shares = np.bincount(mapped, minlength=kv_heads)
    read = np.flatnonzero(shares)
    order = back = None
    if np.any(np.diff(mapped) < 0):
        sorting = np.argsort(mapped, kind="stable").astype(np.int32)
        order, back = mx.array(sorting), mx.array(np.argsort(sorting).astype(np.int32))
    even = bool(np.all(shares == shares[0]))
    return _Groups(order, back, even, read.tolist(), np.cumsum(shares[read])[:-1].tolist())
