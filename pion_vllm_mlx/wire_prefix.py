"""A stored prefix as a remote one: which of its layers the server attends to, and how.

Layers that see the whole prefix stay on the server. Windows (never more rows than the window),
recurrent state and whatever the engine cannot compute are fetched once, as a restore fetches them.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import mlx.core as mx
import numpy as np

from pion_patches.blocks import Blocks
from pion_patches.lse import attend_with_lse, merge
from pion_patches.prefix_entry import FullSlot, capture_slot
from pion_patches.remote import RemoteLost, RemoteReader
from pion_patches.split_cache import PrefixRows
from pion_vllm_mlx.attend_wire import (
    F32,
    HEAD_DIMS,
    AttendWire,
    NoSessions,
    as_f32,
    even_map,
    is_missing,
)
from pion_vllm_mlx.decode_session import DecodeSession
from pion_vllm_mlx.manifest import LeafEntry, Manifest, Rows
from pion_vllm_mlx.process_lock import ProcessLock
from pion_vllm_mlx.restore import Found, Miss
from pion_vllm_mlx.transport import Patience, ServerError
from pion_vllm_mlx.transport.binary import ColdEntry

T = TypeVar("T")

#: A suffix of more bytes than this is attended to here and merged, instead of sent each time.
_LARGEST_SUFFIX: Final = 1 << 20
#: Seconds a query is waited for: no longer than the prefill it saves took, within these.
_LEAST_WAIT, _LONGEST_WAIT = 2.0, 10.0


class NotOnTheWire(Exception):
    """No layer of a prefix can be attended to in the server; the message says why."""


@dataclass(frozen=True, slots=True)
class WireLayer:
    """A layer the server attends to: its cache's path, its layer there, the shape of its rows."""

    path: tuple[int, ...]
    layer: int
    kv_heads: int
    dim: int


def wire_layers(manifest: Manifest) -> tuple[WireLayer, ...]:
    """The layers the server can attend to; NotOnTheWire if there are none."""
    found: list[WireLayer] = []
    reasons: dict[str, None] = {}
    shapes: dict[int, tuple[int, int]] = {}
    for leaf in manifest.leaves:
        layer = _wire_layer(leaf, len(manifest.ids))
        if isinstance(layer, str):
            reasons[layer] = None
            continue
        # WARM tells layers apart by the width of a row alone.
        shape = (layer.kv_heads, layer.dim)
        if shapes.setdefault(layer.kv_heads * layer.dim, shape) == shape:
            found.append(layer)
    if not found:
        raise NotOnTheWire("; ".join(reasons) or "it has no caches")
    return tuple(found)


def _wire_layer(leaf: LeafEntry, tokens: int) -> WireLayer | str:
    """The leaf as a wire layer, or why it is none."""
    if leaf.kind not in ("KVCache", "ConcatenateKVCache"):
        return f"a {leaf.kind} is not attended to in the server"
    keys, values = leaf.keys, leaf.values
    if keys is None or values is None or keys.layer != values.layer:
        return "a layer without rows of both keys and values"
    if not keys.count == values.count == tokens:
        return "a layer with other rows than one a token"
    if keys.layout.fmt != "dense" or "raw" in (keys.store, values.store):
        return "rows the server keeps as opaque bytes"
    shape = _shape(leaf.meta.get("keys"), keys)
    if shape is None or shape != _shape(leaf.meta.get("values"), values):
        return "keys and values of different widths"
    heads, dim = shape
    if dim not in HEAD_DIMS:
        return f"head dimension {dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    return WireLayer(leaf.path, keys.layer, heads, dim)


def _shape(meta: Any, rows: Rows) -> tuple[int, int] | None:
    """Heads and head dimension that a leaf's meta gives its rows, if the two agree."""
    heads = meta.get("heads") if isinstance(meta, dict) else None
    widths = meta.get("widths") if isinstance(meta, dict) else None
    if type(heads) is not int or not isinstance(widths, list) or len(widths) != 1:
        return None
    (dim,) = widths
    agrees = type(dim) is int and dim > 0 and heads * dim == rows.layout.widths[0]
    return (heads, dim) if agrees else None


class WirePrefix:
    """One fill of a prefix on one server: a `RemotePrefix`.

    `rehydrate` makes the server's slots again, after checking that it still holds this fill;
    `still_held` only checks. Every query says which fill it means, or is followed by that check,
    so that one that was replaced under its name never answers. `restore` gives ordinary caches of
    the prefix, whatever it takes. `tell(error)` hears once why the wire was given up.
    """

    def __init__(
        self,
        wire: AttendWire,
        sid: bytes,
        found: Found,
        layers: tuple[WireLayer, ...],
        *,
        rehydrate: Callable[[], None],
        still_held: Callable[[], bool],
        restore: Callable[[], list[Any]],
        tell: Callable[[Exception], None],
        blocks: Blocks | None = None,
    ) -> None:
        self.wire = wire
        self.sid = sid
        self.found = found
        self.layers = {one.layer: one for one in layers}
        self.blocks = blocks
        self.is_lost = False
        self._rehydrate = rehydrate
        self._still_held = still_held
        self._restore = restore
        self._tell = tell
        self._rows: dict[int, PrefixRows] | None = None
        self._lock = ProcessLock()
        wait = min(max(found.manifest.prefill_ms / 1000, _LEAST_WAIT), _LONGEST_WAIT)
        self.patience = Patience(first_byte=wait, stall=2.0, total=wait + 10.0)
        # Suffixes of requests that are over: nothing may be sent from within a finalizer.
        self._finished: deque[DecodeSession] = deque()

    @property
    def tokens(self) -> int:
        return len(self.found.manifest.ids)

    def open(self) -> RemoteReader:
        return WireReader(self)

    def open_session(self, reader: WireReader) -> DecodeSession:
        """The suffix of one request in the server; those of requests that are over are closed."""
        while self._finished:
            self._finished.popleft().close()
        fill = self.found.gen
        session = self.wire.open_session(self.sid, self.tokens, self.patience, fill)
        weakref.finalize(reader, self._finished.append, session).atexit = False
        return session

    def rows(self, layer: int) -> PrefixRows:
        """The rows of a layer: kept in process, fetched, or computed again, once for all layers."""
        with self._lock:
            if self._rows is None:
                caches = self._restore()
                self._rows = dict(self._captured(caches))
                mx.eval([(one.keys, one.values) for one in self._rows.values()])
            return self._rows[layer]

    def ask(self, query: Callable[[], T], *, names_fill: bool = True) -> T:
        """What `query` returns; raises RemoteLost when this prefix is not to be had there.

        Slots that were demoted, or went with a restart, are made again and the query is put once
        more: everything else that goes wrong is final. `names_fill`: the query says which fill it
        means.
        """
        if self.is_lost:
            raise RemoteLost("given up before")
        try:
            try:
                answer = query()
            except ColdEntry:
                self._rehydrate()
                answer = query()
            except ServerError as error:
                if not is_missing(error):
                    raise
                self._rehydrate()
                answer = query()
            # Slots go when another fill begins: what was held afterwards has answered.
            if not names_fill and not self._still_held():
                raise Miss("changed", "stored anew or dropped")
        except NoSessions:
            raise
        except Exception as error:
            # Whatever it is, whoever generates has done nothing wrong.
            self.is_lost = True
            self._tell(error)
            raise RemoteLost(str(error)) from error
        return answer

    def _captured(self, caches: list[Any]) -> Iterator[tuple[int, PrefixRows]]:
        for one in self.layers.values():
            slot = capture_slot(_at(caches, one.path), self.tokens)
            assert isinstance(slot, FullSlot)
            yield one.layer, slot.rows


class WireReader:
    """One request's queries to a `WirePrefix`.

    Its own tokens stay in the server too, so that a step sends only what is new. A server that
    keeps none is sent all of them each time, or, where they are many, only the queries.
    """

    def __init__(self, prefix: WirePrefix) -> None:
        self._prefix = prefix
        self._session: DecodeSession | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteReader:
        # What the server keeps is one request's; a copy goes its own way.
        return self._prefix.open()

    def attend(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, need_lse: bool
    ) -> tuple[mx.array, mx.array | None]:
        """See `RemoteReader.attend`."""
        wire, blocks = self._prefix.wire, self._prefix.blocks
        mx.eval(queries, keys, values)
        if blocks is not None and queries.shape[1] == 1 and not need_lse:
            return self._ask_blocks(layer, queries, keys, values, blocks), None
        if wire.keeps_suffixes:
            try:
                return self._step(layer, queries, keys, values)
            except NoSessions:
                wire.keeps_suffixes = False
        if need_lse or 8 * keys.size > _LARGEST_SUFFIX:
            return self._attend_and_merge(layer, queries, keys, values)
        return self._ask_fused(layer, queries, keys, values), None

    def attend_prefix(self, layer: int, queries: mx.array) -> tuple[mx.array, mx.array]:
        """See `RemoteReader.attend_prefix`."""
        mx.eval(queries)
        asked, prefix = as_f32(queries), self._prefix
        # Window 0, said aloud: the server may have a default of its own.
        rest = 0, prefix.patience, prefix.found.gen
        out, lse = prefix.ask(lambda: prefix.wire.query(prefix.sid, layer, asked, *rest))
        return mx.array(out), mx.array(lse)

    def _step(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        if self._session is None:
            self._session = self._prefix.open_session(self)
        session, wire = self._session, self._prefix.wire
        asked, length = as_f32(queries), keys.shape[1]
        head_map = even_map(len(asked), keys.shape[0])

        def rows(start: int) -> tuple[F32, F32]:
            return _rows_from(keys, start), _rows_from(values, start)

        out, lse = self._prefix.ask(
            lambda: wire.step(session, layer, asked, length, rows, head_map)
        )
        return mx.array(out), mx.array(lse)

    def _ask_fused(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array
    ) -> mx.array:
        prefix, head_map = self._prefix, even_map(queries.shape[0], keys.shape[0])
        asked = as_f32(queries), as_f32(keys), as_f32(values)
        out = prefix.ask(
            lambda: prefix.wire.query_fused(
                prefix.sid, layer, *asked, head_map, 0, prefix.patience
            ),
            names_fill=False,  # the frame has no room for it
        )
        return mx.array(out)

    def _ask_blocks(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, blocks: Blocks
    ) -> mx.array:
        prefix, head_map = self._prefix, even_map(queries.shape[0], keys.shape[0])
        asked = as_f32(queries[:, 0]), as_f32(keys), as_f32(values)
        best = (blocks.size, blocks.count)
        out = prefix.ask(
            lambda: prefix.wire.query_sparse_auto_fused(
                *(prefix.sid, layer, *asked, best, head_map),
                window=0,
                selector=blocks.selector,
                patience=prefix.patience,
                fill=prefix.found.gen,
            )
        )
        return mx.array(out)[:, None]

    def _attend_and_merge(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The prefix there and the own rows here: what is sent does not grow with the suffix."""
        heads, rows, dim = queries.shape
        folded = queries.reshape(keys.shape[0], -1, dim)
        out, lse = self.attend_prefix(layer, folded)
        there = out.reshape(1, heads, rows, dim), lse.reshape(1, heads, rows)
        scale = 1 / math.sqrt(dim)
        here = attend_with_lse(queries[None], keys[None], values[None], scale=scale, mask="causal")
        out, lse = merge([there, here])
        return out[0], lse[0]


def _rows_from(side: mx.array, start: int) -> F32:
    """Rows [K, start.., D] of an evaluated [K, S, D]."""
    if side.dtype == mx.float32:
        return as_f32(np.asarray(side)[:, start:])
    return as_f32(side[:, start:])


def _at(caches: list[Any], path: tuple[int, ...]) -> Any:
    one = caches[path[0]]
    for place in path[1:]:
        one = one.caches[place]
    return one
