"""A prefix whose keys and values somebody else holds: queries go there, attention comes back.

What "there" is does not matter here: whoever implements `RemotePrefix` answers queries over the
prefix, and hands over its rows should the model need them after all. The request's own rows stay in
an ordinary cache. A holder that can no longer answer raises `RemoteLost`; the request then goes on
with the rows, in this process, and nobody who generates notices.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models import cache

from .lse import attend_with_lse, merge
from .masks import KeyMask
from .prefix_entry import PrefixEntry, Slot, SlotList, capture_slot
from .split import attend_parts
from .split_cache import PrefixRows, SplitKVCache

_cache: Any = cache  # mlx-lm is not typed


class RemoteLost(Exception):
    """The holder of a prefix cannot answer, now or for good; its rows have to be had elsewhere."""


class RemoteReader(Protocol):
    """One request's way to a remote prefix. A deep copy belongs to a copy of the request.

    Queries are float32, evaluated or not, and scaled so that the holder's own 1/sqrt(D) makes them
    right. Both methods raise `RemoteLost`.
    """

    def attend(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, need_lse: bool
    ) -> tuple[mx.array, mx.array | None]:
        """Attention of ``queries`` [H, M, D] over the prefix and own rows [K, S, D], causally.

        The queries are the last M of the S own tokens. Returns [H, M, D] and, if ``need_lse``, the
        log-sum-exp [H, M], both float32.
        """

    def attend_prefix(self, layer: int, queries: mx.array) -> tuple[mx.array, mx.array]:
        """Attention of ``queries`` [K, R, D] over the whole prefix: [K, R, D] and [K, R]."""


class RemotePrefix(Protocol):
    """A prefix of ``tokens`` tokens held elsewhere."""

    @property
    def tokens(self) -> int: ...

    def open(self) -> RemoteReader:
        """A way to it for one request."""

    def rows(self, layer: int) -> PrefixRows:
        """The rows of a layer in this process, evaluated, wherever they come from."""


class RemoteRows:
    """Rows of one layer that are elsewhere until somebody asks for ``keys`` or ``values``.

    Stands where a `PrefixRows` stands; all caches opened on the prefix share one.
    """

    def __init__(self, remote: RemotePrefix, layer: int, kv_heads: int, dim: int) -> None:
        self.remote = remote
        self.layer = layer
        self.kv_heads = kv_heads
        self.dim = dim
        self._rows: PrefixRows | None = None
        self._lock = threading.Lock()

    @property
    def end(self) -> int:
        return self.remote.tokens

    @property
    def start(self) -> int:
        return 0

    @property
    def is_here(self) -> bool:
        """Whether the rows have been brought into this process."""
        return self._rows is not None

    @property
    def keys(self) -> mx.array:
        return self._here().keys

    @property
    def values(self) -> mx.array:
        return self._here().values

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteRows:
        return self

    def _here(self) -> PrefixRows:
        with self._lock:
            if self._rows is None:
                self._rows = self.remote.rows(self.layer)
            return self._rows


class RemoteKVCache(SplitKVCache):
    """In place of a ``KVCache`` whose first rows are a remote prefix.

    Bring a `reader` before the first update (`RemoteEntry.open` does).
    """

    prefix: RemoteRows

    def __init__(self, prefix: RemoteRows, reader: RemoteReader | None = None) -> None:
        super().__init__(prefix)
        self.reader = reader or prefix.remote.open()

    @property
    def state(self) -> tuple[mx.array, ...]:
        """This request's keys and values, once there are any: mlx-lm evaluates it at each chunk."""
        return self._own_rows() if self.suffix.offset else ()

    @state.setter
    def state(self, state: tuple[mx.array, ...]) -> None:
        self.suffix = _cache.KVCache()
        # What the holder may remember of the rows before is about others.
        self.reader = self.prefix.remote.open()
        if state:
            self.suffix.update_and_fetch(*state)

    def keys_and_values(self) -> tuple[Any, Any]:
        if self.prefix.is_here:
            return super().keys_and_values()
        own_keys, own_values = self._own_rows()
        keys = RemoteKeys(self.prefix, self.reader, own_keys, self._count_attend)
        return keys, RemoteValues(self.prefix, own_values)


class _Remote:
    """Rows [B, K, N + S, D]: N of a remote prefix, and ``own`` [B, K, S, D]."""

    def __init__(self, prefix: RemoteRows, own: mx.array) -> None:
        self.prefix = prefix
        self.own = own

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, count, dim = self.own.shape
        return batch, heads, self.prefix.end + count, dim

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> mx.Dtype:
        return self.own.dtype


class RemoteValues(_Remote):
    """The values that go with `RemoteKeys`."""

    def astype(self, dtype: mx.Dtype) -> RemoteValues:
        return RemoteValues(self.prefix, self.own.astype(dtype))


class RemoteKeys(_Remote):
    """Keys that carry their own attention: over there for the prefix, or here once it is lost."""

    def __init__(
        self,
        prefix: RemoteRows,
        reader: RemoteReader,
        own: mx.array,
        on_attend: Callable[[], None],
    ) -> None:
        super().__init__(prefix, own)
        self._reader = reader
        self._on_attend = on_attend

    def astype(self, dtype: mx.Dtype) -> RemoteKeys:
        return RemoteKeys(self.prefix, self._reader, self.own.astype(dtype), self._on_attend)

    def pion_attend(
        self,
        queries: mx.array,
        values: RemoteValues,
        *,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Exact attention of ``queries`` [B, H, M, D] over all rows, in the queries' dtype.

        Raises `TypeError` where ``values`` are no remote ones, `ValueError` for a mask that does
        not fit.
        """
        if not isinstance(values, RemoteValues):
            raise TypeError(f"remote keys need remote values, not {type(values).__name__}")
        self._on_attend()
        rows, total = queries.shape[2], self.shape[2]
        kv_heads, heads = self.own.shape[1], queries.shape[1]
        seen = KeyMask.of(mask, rows, total, kv_heads, heads // kv_heads)
        if not self.prefix.is_here and _shows_all(seen, self.prefix.end):
            try:
                out = self._attend_there(queries, values.own, scale, seen, sinks)
            except RemoteLost:
                pass  # the rows below are had from wherever they still are
            else:
                same = queries.dtype == self.own.dtype
                return out.astype(queries.dtype if same else mx.float32)
        parts = [(self.prefix.keys, self.prefix.values), (self.own, values.own)]
        return attend_parts(queries, parts, scale, mask, sinks)

    def _attend_there(
        self,
        queries: mx.array,
        own_values: mx.array,
        scale: float,
        seen: KeyMask,
        sinks: mx.array | None,
    ) -> mx.array:
        batch, heads, rows, dim = queries.shape
        layer, count = self.prefix.layer, self.prefix.end
        scaled = queries.astype(mx.float32) * (scale * math.sqrt(dim))
        if batch == 1 and (seen.causal or (rows == 1 and seen.array is None)):
            out, lse = self._reader.attend(
                layer, scaled[0], self.own[0], own_values[0], sinks is not None
            )
            if lse is None:
                return out[None]
            return merge([(out[None], lse[None])], sinks)[0]
        # All rows of the batch read one prefix: to the holder they are more queries of a head.
        kv_heads = self.own.shape[1]
        folded = scaled.reshape(batch, kv_heads, -1, dim).swapaxes(0, 1)
        out, lse = self._reader.attend_prefix(layer, folded.reshape(kv_heads, -1, dim))
        prefix_part = (
            out.reshape(kv_heads, batch, -1, dim).swapaxes(0, 1).reshape(queries.shape),
            lse.reshape(kv_heads, batch, -1).swapaxes(0, 1).reshape(batch, heads, rows),
        )
        own_part = attend_with_lse(
            queries, self.own, own_values, scale=scale, mask=_own_mask(seen, count)
        )
        return merge([prefix_part, own_part], sinks)[0]


def _shows_all(mask: KeyMask, count: int) -> bool:
    """Whether every query sees all of the first ``count`` keys, which is all a holder can do."""
    columns = mask.columns(0, count)
    if columns is None:
        return True
    if columns.dtype == mx.bool_:
        return bool(mx.all(columns).item())
    return bool(mx.all(columns == 0).item())


def _own_mask(mask: KeyMask, start: int) -> mx.array | str | None:
    """The mask of the keys from ``start`` on, as mlx-lm forms one."""
    if mask.causal:
        return "causal"
    columns = mask.columns(start, mask.total)
    if columns is None:
        return None
    batch, kv_heads, group, rows, count = columns.shape
    return columns.reshape(batch, kv_heads * group, rows, count)


@dataclass(frozen=True, slots=True)
class RemoteSlot:
    """A slot of a cache list whose rows are elsewhere."""

    rows: RemoteRows

    def open(self) -> RemoteKVCache:
        return RemoteKVCache(self.rows)

    def arrays(self) -> list[mx.array]:
        return []


@dataclass(frozen=True, slots=True, eq=False)
class RemoteEntry(PrefixEntry):
    """A prefix of which some slots are elsewhere; the others are held as in any `PrefixEntry`."""

    remote: RemotePrefix

    @classmethod
    def of(
        cls, model: Any, tokens: int, slots: tuple[Slot, ...], remote: RemotePrefix
    ) -> RemoteEntry:
        """An entry for ``model`` of `remote_slots`; evaluates what is held here."""
        arrays = [array for slot in slots for array in slot.arrays()]
        mx.eval(arrays)
        nbytes = sum(array.nbytes for array in arrays)
        return cls(weakref.ref(model), tokens, slots, nbytes, remote)

    def open(self) -> list[Any]:
        caches = PrefixEntry.open(self)
        # All layers of a request share a reader: the holder may keep state for each request.
        reader = self.remote.open()
        for one in _remote_caches(caches):
            one.reader = reader
        return caches


def remote_slots(
    template: Sequence[Any],
    remote: Mapping[tuple[int, ...], RemoteRows],
    local: Mapping[tuple[int, ...], Any],
    tokens: int,
) -> tuple[Slot, ...]:
    """Slots for a model's empty caches: ``remote`` rows or filled ``local`` caches, by path.

    A path is the place in the cache list, then the places inside each CacheList. Raises
    `CannotSplit` or `PrefixMismatch` for a local cache that cannot be shared.
    """

    def slot(item: Any, path: tuple[int, ...]) -> Slot:
        if path in remote:
            return RemoteSlot(remote[path])
        if type(item) is _cache.CacheList:
            inner = enumerate(item.caches)
            return SlotList(tuple(slot(one, (*path, place)) for place, one in inner))
        return capture_slot(local[path], tokens)

    return tuple(slot(item, (place,)) for place, item in enumerate(template))


def _remote_caches(caches: Sequence[Any]) -> Iterator[RemoteKVCache]:
    for one in caches:
        if isinstance(one, RemoteKVCache):
            yield one
        elif type(one) is _cache.CacheList:
            yield from _remote_caches(one.caches)
