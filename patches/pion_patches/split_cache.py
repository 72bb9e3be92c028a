"""Caches of one request on top of a prefix that many requests share.

A split cache stands where mlx-lm expects a ``KVCache`` or a ``RotatingKVCache``: the prefix's rows
are read where they are, the request's own rows grow in a stock ``KVCache`` behind them. It is used
through the patched attention function (see `attention`), since what it hands out is a split handle.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models import base, cache

from .split import SplitRows

Rows = mx.array | SplitRows

# Rows a sliding window keeps beyond itself, so that drafted tokens can be taken back.
TRIM_SLACK = 64

_base: Any = base  # mlx-lm is not typed
_cache: Any = cache


class PrefixTrimError(ValueError):
    """A trim would cut into rows other requests read, or rows that are gone; nothing changed."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PrefixRows:
    """Rows of one layer that end at token ``end``: [B or 1, K, n, D] and [B or 1, K, n, Dv].

    Evaluated, never written to, and shared: copies of a split cache keep the same object.
    """

    keys: mx.array
    values: mx.array
    end: int

    @property
    def start(self) -> int:
        return self.end - int(self.keys.shape[2])

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixRows:
        return self


class SharedRows(Protocol):
    """What a split cache reads of a prefix: a `PrefixRows`, or what stands for one."""

    @property
    def keys(self) -> mx.array: ...

    @property
    def values(self) -> mx.array: ...

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


class SplitCache:
    """What the kinds of split cache share: the request's own rows after those of a prefix."""

    def __init__(self, prefix: SharedRows) -> None:
        self.prefix: SharedRows = prefix
        self.suffix: Any = _cache.KVCache()
        self.attended = 0

    def __copy__(self) -> Any:
        # A shallow copy would share the own rows, and two requests would write to them.
        return copy.deepcopy(self)

    @property
    def offset(self) -> int:
        """Tokens in the cache, the prefix included: the position of the next one."""
        return self.prefix.end + int(self.suffix.offset)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of this request's own rows; the shared prefix is counted where it is held."""
        return int(self.suffix.nbytes)

    @property
    def state(self) -> tuple[mx.array, ...]:
        """Prefix keys and values, then this request's keys and values once there are any."""
        shared = (self.prefix.keys, self.prefix.values)
        return (*shared, *self._own_rows()) if self.suffix.offset else shared

    @state.setter
    def state(self, state: tuple[mx.array, ...]) -> None:
        self._set_rows(state)

    def _set_rows(self, state: tuple[mx.array, ...]) -> None:
        keys, values, *own = state
        self.prefix = PrefixRows(keys, values, self.prefix.end)
        self.suffix = _cache.KVCache()
        if own:
            self.suffix.update_and_fetch(*own)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens; only this request's own can go.

        Raises `PrefixTrimError` for more, where stock caches would silently trim less.
        """
        if n > self.suffix.offset:
            raise PrefixTrimError(
                f"cannot trim {n} tokens: only {self.suffix.offset} came after the shared prefix "
                f"of {self.prefix.end}; rebuild an ordinary cache to cut into a prefix"
            )
        return int(self.suffix.trim(n))

    def _count_attend(self) -> None:
        self.attended += 1

    def _all_rows(self) -> tuple[mx.array, mx.array]:
        """Prefix and own rows joined: a copy of both, the prefix once for each of the batch."""
        shared: tuple[mx.array, mx.array] = (self.prefix.keys, self.prefix.values)
        if not self.suffix.offset:
            return shared
        keys, values = (
            mx.concatenate([mx.broadcast_to(rows, (own.shape[0], *rows.shape[1:])), own], axis=2)
            for rows, own in zip(shared, self._own_rows(), strict=True)
        )
        return keys, values

    def _own_rows(self) -> tuple[mx.array, mx.array]:
        # Named attributes: `state` and `keys_and_values` differ between mlx-lm 0.31 and 0.32.
        end = self.suffix.offset
        return self.suffix.keys[..., :end, :], self.suffix.values[..., :end, :]

    def _join(self, prefix_from: int, suffix_from: int) -> tuple[Rows, Rows]:
        """Rows from token ``prefix_from`` of the prefix and row ``suffix_from`` of the suffix."""
        own_keys, own_values = self._own_rows()
        own_keys, own_values = own_keys[..., suffix_from:, :], own_values[..., suffix_from:, :]
        skip = prefix_from - self.prefix.start
        if skip >= self.prefix.keys.shape[2]:
            return own_keys, own_values
        keys, values = self.prefix.keys, self.prefix.values
        if skip > 0:
            keys, values = keys[..., skip:, :], values[..., skip:, :]
        return SplitRows((keys, own_keys), self._count_attend), SplitRows((values, own_values))


class SplitKVCache(SplitCache):
    """In place of a ``KVCache``: every query sees the whole prefix."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Rows, Rows]:
        """Append ``keys`` [B, K, M, D] and ``values``; return all rows so far as split handles."""
        self.suffix.update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Rows, Rows]:
        return self._join(self.prefix.start, 0)

    def to_plain(self) -> Any:
        """An ordinary ``KVCache`` with the same rows, to save, quantise or batch."""
        plain = _cache.KVCache()
        plain.update_and_fetch(*self._all_rows())
        return plain

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm passes these by name)
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Any:
        """The stock mask for ``N`` more tokens, over all keys, the prefix's included."""
        return _cache.create_attention_mask(
            N, offset=self.offset, return_array=return_array, window_size=window_size
        )


class SplitWindowCache(SplitCache):
    """In place of a ``RotatingKVCache``: a query at position p sees positions p - window < j <= p.

    Keeps rows in order instead of in a ring: the last rows of the prefix, then the request's own,
    whose front is dropped once it is out of every later query's sight. Hands out exactly the
    columns a full ring would hold, so the stock masks fit.
    """

    def __init__(self, prefix: PrefixRows, window: int) -> None:
        super().__init__(prefix)
        self.window = window
        self._dropped = 0
        self._last_rows = 0

    @property
    def offset(self) -> int:
        return self.prefix.end + self._dropped + int(self.suffix.offset)

    def size(self) -> int:
        return min(self.offset, self.window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Rows, Rows]:
        """Append ``keys`` [B, K, M, D] and ``values``; return what the M new queries can see."""
        self._drop_front()
        self.suffix.update_and_fetch(keys, values)
        self._last_rows = keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Rows, Rows]:
        oldest = self._oldest_seen(self.offset - self._last_rows)
        own_start = self.prefix.end + self._dropped
        return self._join(max(oldest, self.prefix.start), max(0, oldest - own_start))

    def to_plain(self) -> Any:
        """An ordinary ``RotatingKVCache`` that the same tokens are in sight of."""
        keys, values = self._all_rows()
        if self._dropped:  # then the rows kept of the prefix are long out of sight
            keys, values = self._own_rows()
        kept = min(self.offset, self.window - 1)
        skip = keys.shape[2] - kept
        plain = _cache.RotatingKVCache(max_size=self.window)
        plain.keys, plain.values = keys[..., skip:, :], values[..., skip:, :]
        plain.offset, plain._idx = self.offset, kept
        return plain

    def make_mask(
        self,
        N: int,  # noqa: N803
        window_size: int | None = None,
        return_array: bool = False,
    ) -> Any:
        """The stock mask for ``N`` more tokens over the columns the update will return."""
        window = window_size or self.window
        before = self.offset - self._oldest_seen(self.offset)
        if N == 1:
            if before < window:
                return None
            return mx.arange(before + 1) > before - window
        if before + N > window or return_array:
            return _base.create_causal_mask(N, before, window_size=window)
        return "causal"

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens while the window before them is still complete.

        `TRIM_SLACK` tokens always can go, once this request has that many. Says that it is
        trimmable and raises, since mlx-lm silently skips the trim of a cache that says it is not.
        """
        if self._dropped and self.suffix.offset - n < self.window - 1:
            raise PrefixTrimError(
                f"cannot trim {n} tokens: rows before the sliding window of {self.window} are gone"
            )
        return super().trim(n)

    @property
    def state(self) -> tuple[mx.array, ...]:
        return (*super().state, mx.array([self._dropped, self._last_rows]))

    @state.setter
    def state(self, state: tuple[mx.array, ...]) -> None:
        *rows, counts = state
        self._set_rows(tuple(rows))
        self._dropped, self._last_rows = int(counts[0]), int(counts[1])

    def _oldest_seen(self, position: int) -> int:
        """The first position a query at ``position`` sees."""
        return max(0, position - self.window + 1)

    def _drop_front(self) -> None:
        # Copying the tail costs about a window of rows, so it happens once in a window of tokens.
        keep = self.window - 1 + TRIM_SLACK
        if self.suffix.offset < keep + self.window:
            return
        keys, values = self._own_rows()
        self._dropped += int(self.suffix.offset) - keep
        self.suffix = _cache.KVCache()
        self.suffix.update_and_fetch(keys[..., -keep:, :], values[..., -keep:, :])


def plain_prompt_cache(prompt_cache: Sequence[Any]) -> list[Any]:
    """Ordinary mlx-lm caches with what split ones hold, and copies of the others."""
    return [_plain(one) for one in prompt_cache]


def _plain(one: Any) -> Any:
    if isinstance(one, SplitKVCache | SplitWindowCache):
        return one.to_plain()
    if type(one) is _cache.CacheList:
        return _cache.CacheList(*(_plain(inner) for inner in one.caches))
    return copy.deepcopy(one)
