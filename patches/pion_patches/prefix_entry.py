"""A computed prefix held in this process: what it is made of, and new caches on top of it.

Attention slots become shared rows; recurrent and chunked slots, whose state is small and changes in
place, become copies of their own for each request. A slot of any other class raises `CannotSplit`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import cache

from .split_cache import PrefixRows, SplitKVCache, SplitWindowCache

_cache: Any = cache  # mlx-lm is not typed


class CannotSplit(Exception):
    """A cache or model whose attention cannot be split; use the cache rebuild instead."""


class PrefixMismatch(ValueError):
    """A prefix does not belong to the model or token count it was asked for."""


class Slot(Protocol):
    """One slot of a cache list: opens a request's own cache on top of what is held."""

    def open(self) -> Any: ...

    def arrays(self) -> list[mx.array]: ...


@dataclass(frozen=True, slots=True)
class FullSlot:
    """Attention over the whole prefix."""

    rows: PrefixRows

    def open(self) -> SplitKVCache:
        return SplitKVCache(self.rows)

    def arrays(self) -> list[mx.array]:
        return [self.rows.keys, self.rows.values]


@dataclass(frozen=True, slots=True)
class WindowSlot:
    """Attention over a sliding window: the last ``window - 1`` rows of the prefix."""

    rows: PrefixRows
    window: int

    def open(self) -> SplitWindowCache:
        return SplitWindowCache(self.rows, self.window)

    def arrays(self) -> list[mx.array]:
        return [self.rows.keys, self.rows.values]


@dataclass(frozen=True, slots=True)
class CopiedSlot:
    """State that each request gets a copy of; MLX copies bytes when one of them writes."""

    held: Any

    def open(self) -> Any:
        return copy.deepcopy(self.held)

    def arrays(self) -> list[mx.array]:
        state: Any = tree_flatten(self.held.state)
        return [value for _, value in state if isinstance(value, mx.array)]


@dataclass(frozen=True, slots=True)
class SlotList:
    """The slots of a ``CacheList``."""

    slots: tuple[Slot, ...]

    def open(self) -> Any:
        return _cache.CacheList(*(slot.open() for slot in self.slots))

    def arrays(self) -> list[mx.array]:
        return [array for slot in self.slots for array in slot.arrays()]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixEntry:
    """The K/V and state of ``tokens`` prefix tokens, evaluated, shared by every cache opened.

    ``model`` refers weakly to the module that computed it: the entry fits that one only.
    """

    model: weakref.ref[Any]
    tokens: int
    slots: tuple[Slot, ...]
    nbytes: int

    def open(self) -> list[Any]:
        """A fresh cache list for one request; costs no copy of the prefix's rows."""
        return [slot.open() for slot in self.slots]


def capture_prefix(model: Any, prompt_cache: Sequence[Any], tokens: int) -> PrefixEntry:
    """Hold ``prompt_cache``, filled by ``model`` with exactly ``tokens`` tokens, as a prefix.

    Rows are copied out of the caches' padded buffers and evaluated, so any thread may use them and
    the caches stay the caller's. A cache that is itself split becomes a longer prefix.

    Raises `CannotSplit` for a cache class that cannot be split, `PrefixMismatch` for a cache that
    holds another number of tokens or none at all.
    """
    try:
        slots = tuple(capture_slot(one, tokens) for one in prompt_cache)
    except CannotSplit as error:
        raise CannotSplit(f"{model_name(model)}: {error}") from None
    arrays = [array for slot in slots for array in slot.arrays()]
    if not any(isinstance(leaf, FullSlot | WindowSlot) for leaf in _leaves(slots)):
        raise CannotSplit(
            f"{model_name(model)}: no attention cache to split; use the cache rebuild instead"
        )
    mx.eval(arrays)
    return PrefixEntry(weakref.ref(model), tokens, slots, sum(a.nbytes for a in arrays))


def model_name(model: Any) -> str:
    """``mlx_lm.models.llama.Model``: how a refusal names the model."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def capture_slot(one: Any, tokens: int) -> Slot:
    """Hold one cache of exactly ``tokens`` tokens, lazily; see `capture_prefix`."""
    if isinstance(one, SplitKVCache | SplitWindowCache):
        one = one.to_plain()
    kind = type(one)
    if kind is _cache.CacheList:
        return SlotList(tuple(capture_slot(inner, tokens) for inner in one.caches))
    if kind in (_cache.KVCache, _cache.ConcatenateKVCache):
        _require_tokens(one, tokens)
        return FullSlot(_own(one.keys, one.values, slice(0, tokens), tokens))
    if kind is _cache.RotatingKVCache and one.keep == 0:
        _require_tokens(one, tokens)
        return WindowSlot(_window_rows(one, tokens), one.max_size)
    if kind in (_cache.ArraysCache, _cache.ChunkedKVCache, _cache.RotatingKVCache):
        if kind is not _cache.ArraysCache:
            _require_tokens(one, tokens)
        return CopiedSlot(copy.deepcopy(one))
    raise CannotSplit(
        f"a {kind.__name__} cannot be split from a shared prefix (KVCache, RotatingKVCache, "
        "CacheList, ArraysCache and ChunkedKVCache can); use the cache rebuild instead"
    )


def _require_tokens(one: Any, tokens: int) -> None:
    if one.offset != tokens or one.keys is None:
        raise PrefixMismatch(
            f"the {type(one).__name__} holds {one.offset} tokens, not the {tokens} of the prefix"
        )


def _window_rows(ring: Any, tokens: int) -> PrefixRows:
    """The last ``max_size - 1`` rows of a ``RotatingKVCache`` in the order of their tokens."""
    length, index = ring.keys.shape[2], ring._idx
    keys, values = ring.keys, ring.values
    if index < length:
        wrapped = index < ring.offset
        keys, values = (
            mx.concatenate([a[..., index:, :], a[..., :index, :]], axis=2)
            if wrapped
            else a[..., :index, :]
            for a in (keys, values)
        )
    count = keys.shape[2]
    kept = min(count, tokens, ring.max_size - 1)
    return _own(keys, values, slice(count - kept, count), tokens)


def _own(keys: mx.array, values: mx.array, rows: slice, end: int) -> PrefixRows:
    """Contiguous copies of some rows, so that no padded buffer is kept alive by them."""
    return PrefixRows(mx.contiguous(keys[..., rows, :]), mx.contiguous(values[..., rows, :]), end)


def _leaves(slots: Sequence[Slot]) -> list[Slot]:
    flat: list[Slot] = []
    for slot in slots:
        flat += _leaves(slot.slots) if isinstance(slot, SlotList) else [slot]
    return flat
