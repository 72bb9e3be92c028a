"""Sessions in memory: layers of extents, counts, rewind snapshots, and who was used last.

Pure bookkeeping: `vstore.py` decides what is logged. A session is one side of a prefix; the sides
`<ns>_pk` and `<ns>_pv` make a pair, and eviction takes whole pairs only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pion_server.formats import Format
from pion_server.store.rows import Extents
from pion_server.store.schema import Schema

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

K_SUFFIX, V_SUFFIX = b"_pk", b"_pv"


def namespace_of(sid: bytes) -> bytes | None:
    """The namespace whose side `sid` is, or None for a session of its own."""
    return sid[:-3] if sid.endswith((K_SUFFIX, V_SUFFIX)) and len(sid) > 3 else None


def sides(ns: bytes) -> tuple[bytes, bytes]:
    """The sids of a namespace: keys, values."""
    return ns + K_SUFFIX, ns + V_SUFFIX


@dataclass(slots=True)
class Layer:
    """`count` is the highest row end ever stored; `held` the rows without the gaps below it."""

    format: Format
    count: int = 0
    held: int = 0
    extents: Extents = ()

    @property
    def stored_bytes(self) -> int:
        return self.held * self.format.row_bytes


@dataclass(frozen=True)
class Blocks:
    """A namespace's block hash table: tokens a block, u64 hashes little-endian in token order."""

    block_size: int
    hashes: bytes

    @cached_property
    def sorted(self) -> NDArray[np.uint64]:
        """The distinct hashes in ascending order, for membership searches."""
        import numpy as np

        return np.unique(np.frombuffer(self.hashes, dtype="<u8"))

    @property
    def count(self) -> int:
        return len(self.hashes) // 8


@dataclass(slots=True)
class Session:
    """One sid: its schema and its layers."""

    sid: bytes
    index: int
    schema: Schema
    layers: dict[int, Layer] = field(default_factory=dict)
    snapshots: dict[int, dict[int, int]] = field(default_factory=dict)
    blocks: Blocks | None = None
    prefill_ms: int | None = None

    def layer(self, index: int) -> Layer:
        """The layer, made on first use; BadArgument outside the caps or the schema."""
        layer = self.layers.get(index)
        if layer is None:
            layer = Layer(self.schema.layer(index).format())
            self.layers[index] = layer
        return layer

    @property
    def num_layers(self) -> int:
        """Highest stored layer + 1; with a schema, the declared number."""
        if self.schema.heterogeneous:
            return len(self.schema.layers)
        return max((i for i, layer in self.layers.items() if layer.count), default=-1) + 1

    def rows(self, index: int) -> int:
        """Token count of a layer, 0 if nothing was stored."""
        layer = self.layers.get(index)
        return layer.count if layer else 0

    @property
    def total_rows(self) -> int:
        return sum(layer.count for layer in self.layers.values())

    @property
    def stored_bytes(self) -> int:
        return sum(layer.stored_bytes for layer in self.layers.values())

    @property
    def empty(self) -> bool:
        return not any(layer.count for layer in self.layers.values())


class SessionTable:
    """All sessions by sid, and their pairs from least to most recently used."""

    def __init__(self, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self.by_sid: dict[bytes, Session] = {}
        # A plain dict in order of age: copying its values is what an eviction costs.
        self._pairs: dict[bytes, set[bytes]] = {}
        self._used_at: dict[bytes, float] = {}
        self._next_index = 0

    def __len__(self) -> int:
        return len(self.by_sid)

    def __iter__(self) -> Iterator[Session]:
        """Least recently used pairs first: a snapshot written in this order keeps their ages."""
        return (self.by_sid[sid] for pair in self.oldest_pairs() for sid in pair)

    def get(self, sid: bytes) -> Session | None:
        return self.by_sid.get(sid)

    def add(self, sid: bytes, schema: Schema) -> Session:
        session = Session(sid, self._next_index, schema)
        self._next_index += 1
        self.by_sid[sid] = session
        self._pairs.setdefault(self._pair(sid), set()).add(sid)
        self.touch(sid)
        return session

    def remove(self, sid: bytes) -> Session | None:
        session = self.by_sid.pop(sid, None)
        if session is not None:
            pair = self._pair(sid)
            self._pairs[pair].discard(sid)
            if not self._pairs[pair]:
                del self._pairs[pair]
                self._used_at.pop(pair, None)
        return session

    def touch(self, sid: bytes) -> None:
        """Make the pair of `sid` the most recently used one."""
        pair = self._pair(sid)
        sids = self._pairs.pop(pair, None)
        if sids is not None:
            self._pairs[pair] = sids
            self._used_at[pair] = time.monotonic()

    def used_at(self, sid: bytes) -> float:
        """When the pair of `sid` was last touched, `time.monotonic` seconds; 0.0 if it is gone."""
        return self._used_at.get(self._pair(sid), 0.0)

    def oldest_pairs(self) -> Iterator[tuple[bytes, ...]]:
        """The sids of each pair as of now, least recently used first."""
        return (tuple(sorted(sids)) for sids in list(self._pairs.values()))

    @staticmethod
    def _pair(sid: bytes) -> bytes:
        ns = namespace_of(sid)
        return b"=" + sid if ns is None else b"+" + ns
