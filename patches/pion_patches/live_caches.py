"""Prompt caches in use: how many tokens they hold, and the same cache of fewer tokens.

Nothing here copies rows: a shorter cache is slices of the longer one's arrays, and MLX copies an
array when one of its users writes to it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from .cache_rebuild import flatten


def leaves_of(cache: Sequence[Any]) -> list[Any]:
    """The caches of a list, those inside a CacheList one by one."""
    return [leaf for _, leaf in flatten(cache)]


def regroup(like: Sequence[Any], leaves: Iterator[Any]) -> list[Any]:
    """A list nested as `like`, of the given leaves in the order of `leaves_of`."""
    group: Any = CacheList  # not typed
    return [
        group(*regroup(item.caches, leaves)) if type(item) is CacheList else next(leaves)
        for item in like
    ]


def has_rows(leaf: Any) -> bool:
    """Whether a leaf keeps one row a token, so that any shorter prefix can be cut from it."""
    return type(leaf) in (KVCache, QuantizedKVCache)


def is_unused(leaf: Any) -> bool:
    """Whether a cache that counts its tokens has never been written to."""
    return getattr(leaf, "offset", None) == 0 and getattr(leaf, "keys", None) is None


def counts_of(leaves: Sequence[Any]) -> set[int]:
    """The token counts of the leaves that count; caches of layers without any are left out."""
    counted = (leaf.offset for leaf in leaves if not is_unused(leaf) and hasattr(leaf, "offset"))
    # A batch counts in an array: it is nobody's cache here, and no number equals -1.
    return {offset if type(offset) is int else -1 for offset in counted}


def shorten(leaf: Any, tokens: int) -> Any | None:
    """A leaf of the first `tokens` tokens, the caller's own, or None if that state is gone.

    A window that has not wrapped yet still has all its rows in order.
    """
    if is_unused(leaf) or getattr(leaf, "offset", None) == tokens:
        return copy.deepcopy(leaf)
    if type(leaf) is KVCache and 0 < tokens < leaf.offset:
        short: Any = type(leaf)()
    elif type(leaf) is QuantizedKVCache and 0 < tokens < leaf.offset:
        short = type(leaf)(group_size=leaf.group_size, bits=leaf.bits)
    elif type(leaf) is RotatingKVCache and 0 < tokens < leaf.offset <= leaf.max_size:
        short = type(leaf)(leaf.max_size, leaf.keep)
        short._idx = tokens
    else:
        return None
    short.keys, short.values = _head(leaf.keys, tokens), _head(leaf.values, tokens)
    short.offset = tokens
    return short


def arrays_of(value: Any) -> Iterator[mx.array]:
    """Every array inside caches, lists, tuples and dictionaries."""
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, dict):
        yield from arrays_of(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays_of(item)
    elif hasattr(value, "__dict__"):
        yield from arrays_of(vars(value))


def _head(side: Any, tokens: int) -> Any:
    """The first rows of an array [B, H, N, D], or of each part of a quantised side."""
    if isinstance(side, list | tuple):
        return tuple(part[..., :tokens, :] for part in side)
    return side[..., :tokens, :]
