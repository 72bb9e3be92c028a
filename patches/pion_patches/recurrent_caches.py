"""Caches of recurrent and private layers, as arrays for one blob a cache.

Such state exists only at the token where it was captured. Meta: `offset`, that token count, which
the arrays themselves do not tell.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .cache_class import CacheClass, Misfit, Taken, Unsound, check_count, count_of, integer
from .pieces import ITEMSIZE, Leaf, dtype_name

#: Arrays of deepseek_v41's LayerCache, in stored order.
_LAYER_ARRAYS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")
_DEEPSEEK = "mlx_lm.models.deepseek_v41"


def _copies(arrays: tuple[mx.array | None, ...]) -> tuple[mx.array | None, ...]:
    """Copies of one sequence's state; raises Unsound for a batch or a dtype no blob holds."""
    for array in arrays:
        if array is None:
            continue
        if array.ndim == 0 or array.shape[0] != 1:
            raise Unsound(f"state is {tuple(array.shape)}, not one sequence")
        if dtype_name(array) not in ITEMSIZE:
            raise Unsound(f"no state has dtype {dtype_name(array)}")
    return tuple(None if array is None else own(array) for array in arrays)


def own(array: mx.array) -> mx.array:
    """An array object of one's own, compact. MLX copies shared memory when one of them is written
    to; what must not be shared is the object, since ``a[...] = b`` changes that in place."""
    return mx.contiguous(array)


def _own(leaf: Leaf, count: int) -> list[mx.array | None]:
    """The leaf's arrays as the caller's own; raises Misfit unless there are `count` of them."""
    if leaf.keys is not None or leaf.values is not None or len(leaf.arrays) != count:
        raise Misfit(f"{len(leaf.arrays)} arrays, not {count}")
    for array in leaf.arrays:
        if array is not None and (array.ndim == 0 or array.shape[0] != 1):
            raise Misfit(f"state is {tuple(array.shape)}, not one sequence")
    return [None if array is None else own(array) for array in leaf.arrays]


def take_arrays(cache: Any, tokens: int) -> Taken:
    """ArraysCache: its slots, None where unused. A right-padded batch leaves wrong state behind."""
    if getattr(cache, "left_padding", None) is not None or cache.lengths is not None:
        raise Unsound("captured in the midst of a padded batch")
    slots = tuple(cache.cache)
    if tokens and all(slot is None for slot in slots):
        raise Unsound(f"no state was captured at {tokens} tokens")
    return Taken({"offset": tokens}, arrays=_copies(slots))


def give_arrays(template: Any, leaf: Leaf, tokens: int, room: int) -> Any:
    """A new ArraysCache with the template's number of slots."""
    check_count(leaf.meta, tokens)
    made = type(template)(size=len(template.cache))
    made.cache = _own(leaf, len(template.cache))
    if tokens and all(slot is None for slot in made.cache):
        raise Misfit(f"no state at {tokens} tokens")
    return made


def take_layer(cache: Any, tokens: int) -> Taken:
    """deepseek_v41's LayerCache: its window, compressed groups, index keys and open group.

    Meta adds `window_size`.
    """
    meta = {"offset": count_of(cache, tokens), "window_size": int(cache.window_size)}
    if tokens and cache.window is None:
        raise Unsound(f"no window at {tokens} tokens")
    return Taken(meta, arrays=_copies(tuple(getattr(cache, name) for name in _LAYER_ARRAYS)))


def give_layer(template: Any, leaf: Leaf, tokens: int, room: int) -> Any:
    """A new LayerCache of the template's window."""
    check_count(leaf.meta, tokens)
    if integer(leaf.meta, "window_size", 0, 1 << 30) != template.window_size:
        raise Misfit(f"window_size {leaf.meta['window_size']}, not {template.window_size}")
    made = type(template)(template.window_size)
    for name, array in zip(_LAYER_ARRAYS, _own(leaf, len(_LAYER_ARRAYS)), strict=True):
        setattr(made, name, array)
    if tokens and made.window is None:
        raise Misfit(f"no window at {tokens} tokens")
    made.offset = tokens
    return made


def register() -> None:
    """Make these classes known."""
    arrays = ("ArraysCache", "ArraysCache", "recurrent", take_arrays, give_arrays)
    CacheClass("mlx_lm.models.cache", *arrays).register()
    layer = ("LayerCache", "deepseek_v41.LayerCache", "opaque", take_layer, give_layer)
    CacheClass(_DEEPSEEK, *layer).register()
