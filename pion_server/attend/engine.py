"""The attention engine: requests and warm slots in, reply bytes out. Runs on its own thread only.

Everything here computes; what is held and for how long is `sessions`' business, who waits for what
`service`'s. Both lanes come through `answer`, so their replies are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pion_server import journal
from pion_server.attend import portable, sparse
from pion_server.attend.decode import Rows, Suffix
from pion_server.attend.fallback import choose_operations
from pion_server.attend.requests import (
    F32,
    BlockQuery,
    DecodeStep,
    DenseQuery,
    FusedQuery,
    OneShot,
    Query,
    SparseQuery,
)
from pion_server.attend.sessions import Key, Shape, Slot

# What MLX may keep of freed buffers for reuse: beside it, memory is what the slots hold.
_BUFFER_CACHE_BYTES = 256 << 20
# Summaries of smaller blocks are computed anew each time: kept, they would rival the keys.
_LEAST_KEPT_BLOCK = 16
_SUMMARIES_KEPT = 2


class Engine:
    """`half` keeps K and V as float16; `window` is what requests without one get (0: none).

    `grow(slot, nbytes)` is told what a slot holds beyond its K and V.
    """

    def __init__(
        self, *, half: bool, window: int, grow: Callable[[Slot, int], None] | None = None
    ) -> None:
        self.dtype = mx.float16 if half else mx.float32
        self._window = window
        self._grow = grow or (lambda slot, nbytes: None)
        self._operations = choose_operations(_complain)
        mx.set_cache_limit(_BUFFER_CACHE_BYTES)

    def allocate(
        self, key: Key, shape: Shape, generation: int = 0
    ) -> tuple[Slot, NDArray[Any], NDArray[Any]]:
        """An empty slot, and its K and V `[heads][tokens][dim]` as numpy to be filled.

        The two views share the slot's memory; any thread may write to them.
        """
        rows = _allocate(shape, self.dtype)
        nbytes = rows.keys.nbytes + rows.values.nbytes
        slot = Slot(key, shape, rows.keys, rows.values, nbytes, generation)
        return slot, rows.key_rows, rows.value_rows

    def answer(self, slot: Slot, request: Query) -> memoryview:
        """The reply's bytes: float32, as WIRE.md section 7 lays them out."""
        match request:
            case DenseQuery():
                return self._query(slot, request)
            case FusedQuery():
                return self._query_fused(slot, request)
            case SparseQuery():
                return self._query_sparse(slot, request)
            case BlockQuery():
                return self._query_blocks(slot, request)

    def step(self, slot: Slot | None, suffix: Suffix, step: DecodeStep) -> memoryview:
        """Append the step's rows; output [H_q][M][D] and log-sum-exp [H_q][M] of its queries.

        `slot` may be None where there are no queries. Raises Replay.
        """
        suffix.append(step, _allocate)
        if not step.queries.size:
            return memoryview(b"")
        assert slot is not None
        assert suffix.rows is not None
        joined = self._operations.decode(
            mx.array(step.queries),
            slot.keys,
            slot.values,
            suffix.rows.keys[:, : suffix.length],
            suffix.rows.values[:, : suffix.length],
            step.head_map,
            step.window,
        )
        mx.eval(joined)
        # Parted here: for one token, each array more costs MLX what numpy needs for all of it.
        rows = np.asarray(joined)
        parts = rows[..., :-1].reshape(-1), rows[..., -1].reshape(-1)
        return np.concatenate(parts).data.cast("B")

    def _query(self, slot: Slot, request: DenseQuery) -> memoryview:
        first = self._first(request.window, slot.shape.tokens)
        q = mx.array(request.queries)
        if q.shape[1] == 1:
            return _reply(self._operations.query_one(q[:, 0], slot.keys, slot.values, first))
        out, lse = self._operations.query_many(q, slot.keys, slot.values, first)
        return _reply(mx.concatenate([out.reshape(-1), lse.reshape(-1)]))

    def _query_fused(self, slot: Slot, request: FusedQuery) -> memoryview:
        out = self._operations.query_fused(
            mx.array(request.queries),
            slot.keys,
            slot.values,
            mx.array(request.suffix_keys),
            mx.array(request.suffix_values),
            request.head_map,
            self._first(request.window, slot.shape.tokens),
        )
        return _reply(out)

    def _query_sparse(self, slot: Slot, request: SparseQuery) -> memoryview:
        first = self._first(request.window, slot.shape.tokens)
        tokens, counts = visible_tokens(request.indices, request.counts, first, slot.shape.tokens)
        q = mx.array(request.queries)
        return _reply(self._operations.query_sparse(q, slot.keys, slot.values, tokens, counts))

    def _query_blocks(self, slot: Slot, request: BlockQuery) -> memoryview:
        total = slot.shape.tokens
        first = self._first(request.window, total)
        q = mx.array(request.queries)
        suffix = mx.array(request.suffix_keys), mx.array(request.suffix_values)
        if request.block * request.top >= total:
            out = self._operations.query_fused(
                q[:, None], slot.keys, slot.values, *suffix, request.head_map, first
            )
        else:
            summary = self._summary(slot, request.block, request.selector)
            tokens = sparse.choose_tokens(request, summary, total, first)
            out = self._operations.query_sparse_fused(
                q, slot.keys, slot.values, tokens, *suffix, request.head_map
            )
        return _reply(out)

    def answer_once(self, request: OneShot) -> memoryview:
        """QUERYBATCH: K and V come with the request and are not kept."""
        q, k, v = (mx.array(part) for part in (request.queries, request.keys, request.values))
        total = k.shape[1]
        if request.top >= total:
            return _reply(portable.query_one(q, k, v, 0))
        scores = (q[:, None] @ k.swapaxes(-1, -2))[:, 0]
        mx.eval(scores)
        best = np.argsort(-np.asarray(scores), axis=1, kind="stable")[:, : request.top]
        tokens = np.sort(best, axis=1).astype(np.int32)
        counts = np.full(len(tokens), request.top, np.int32)
        return _reply(portable.query_sparse(q, k, v, tokens, counts))

    def _first(self, window: int | None, total: int) -> int:
        """The first prefix token a window leaves visible."""
        width = self._window if window is None else window
        return max(total - width, 0) if width else 0

    def _summary(self, slot: Slot, block: int, selector: int) -> tuple[F32, ...]:
        kept = slot.summaries.pop((block, selector), None)
        if kept is None:
            kept = sparse.summarise(slot.keys, block, selector)
            if block < _LEAST_KEPT_BLOCK:
                return kept
            self._grow(slot, _nbytes(kept))
            if len(slot.summaries) >= _SUMMARIES_KEPT:
                dropped = slot.summaries.pop(next(iter(slot.summaries)))
                self._grow(slot, -_nbytes(dropped))
        slot.summaries[block, selector] = kept
        return kept


def visible_tokens(
    indices: NDArray[np.int32], counts: NDArray[np.uint32], first: int, total: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """QUERY_SPARSE's ids without those outside `[first, total)`, packed to the left.

    Returns tokens [H][T] and how many of them count for each head; the rest is filler within the
    prefix, so that nobody reads out of bounds.
    """
    most = indices.shape[1]
    asked = np.arange(most)[None] < np.minimum(counts, most)[:, None]
    seen = asked & (indices >= first) & (indices < total)
    found = seen.sum(axis=1).astype(np.int32)
    width = max(int(found.max()), 1)
    order = np.argsort(~seen, axis=1, kind="stable")[:, :width]
    packed = np.take_along_axis(indices, order, axis=1)
    filler = np.arange(width)[None] >= found[:, None]
    return np.where(filler, packed[:, :1] * (found[:, None] > 0), packed), found


def _allocate(shape: Shape, dtype: mx.Dtype = mx.float32) -> Rows:
    """K and V of zeros, for any thread to write to as numpy before they are computed with."""
    keys, values = (mx.zeros(shape, dtype) for _ in range(2))
    mx.eval(keys, values)
    return Rows(keys, values, np.asarray(keys), np.asarray(values))


def _reply(out: mx.array) -> memoryview:
    flat = out.reshape(-1)
    mx.eval(flat)
    return np.asarray(flat).data.cast("B")


def _nbytes(arrays: tuple[F32, ...]) -> int:
    return sum(array.nbytes for array in arrays)


def _complain(text: str) -> None:
    journal.complain("attention", text)
