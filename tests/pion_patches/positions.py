"""F-POS: caches whose keys and values are the absolute positions, to be read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_caches

from pion_patches.pieces import CacheImage
from tests.pion_patches.shipping import from_pieces, to_pieces

#: mlx-lm's classes; it leaves them untyped.
_classes: Any = mlx_caches
ArraysCache = _classes.ArraysCache
BatchKVCache = _classes.BatchKVCache
CacheList = _classes.CacheList
ChunkedKVCache = _classes.ChunkedKVCache
ConcatenateKVCache = _classes.ConcatenateKVCache
KVCache = _classes.KVCache
QuantizedKVCache = _classes.QuantizedKVCache
RotatingKVCache = _classes.RotatingKVCache


def rows_of(start: int, count: int, *, heads: int = 1, dim: int = 2, dtype: Any = None) -> mx.array:
    """Keys or values `[1, heads, count, dim]`: each element is its token's position."""
    positions = mx.arange(start, start + count).astype(dtype or mx.float32)
    return mx.broadcast_to(positions[None, None, :, None], (1, heads, count, dim))


def append(cache: Any, start: int, count: int, **shape: Any) -> list[int]:
    """Feed positions start.. to a cache; the positions the layer would then attend to."""
    rows = rows_of(start, count, **shape)
    keys, values = cache.update_and_fetch(rows, rows)
    seen = read(keys)
    assert read(values) == seen
    return seen


def read(tensor: mx.array) -> list[int]:
    """Positions a plain tensor `[1, H, L, D]` holds, in the order stored."""
    return integers(tensor[0, 0, :, 0])


def integers(array: mx.array) -> list[int]:
    """A vector's elements."""
    elements: Any = array.tolist()
    return [int(element) for element in elements]


def filled(cache: Any, count: int, **shape: Any) -> Any:
    """The cache after a prefill of `count` tokens in one block."""
    append(cache, 0, count, **shape)
    return cache


def one_by_one(cache: Any, start: int, count: int) -> list[int]:
    """Append tokens singly, as decoding does; the positions attended to at last."""
    seen: list[int] = []
    for position in range(start, start + count):
        seen = append(cache, position, 1)
    return seen


def offsets(caches: Sequence[Any]) -> list[int]:
    """Token counts the caches claim."""
    return [int(cache.offset) for cache in caches]


def state(*arrays: Any) -> Any:
    """An ArraysCache with these slots."""
    cache = ArraysCache(size=len(arrays))
    cache.cache = list(arrays)
    return cache


def bits(array: mx.array) -> bytes:
    """An array's bytes, to compare what equality of numbers cannot tell apart."""
    view: Any = mx.contiguous(array).view(mx.uint8)
    return bytes(memoryview(view))


def through_bytes(image: CacheImage) -> CacheImage:
    """An image after a journey as named pieces of bytes."""
    return from_pieces(to_pieces(image))
