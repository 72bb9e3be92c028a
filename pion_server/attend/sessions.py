"""Which layers the attention engine holds: warm slots, the cold registry, and who was used last.

A key is (sid, layer). Warm: K and V are in memory. Cold: they were, and only shape and age are
remembered. Missing: neither. Pure bookkeeping that needs no MLX; thread-safe, as commands come on
the event loop while the memory budget demotes from the thread of whoever needs room.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from pion_server.errors import ColdMiss, NotFound
from pion_server.store.budget import Victim

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np
    from numpy.typing import NDArray

Key: TypeAlias = tuple[bytes, int]
State: TypeAlias = Literal["HIT", "COLD", "MISS"]
Source: TypeAlias = tuple[int, int]

ATTEND_SUFFIX = b"_attn"
COLD_LIMIT = 1024

_serials = itertools.count(1)


class Shape(NamedTuple):
    """K and V of one layer are `[heads][tokens][dim]` each."""

    heads: int
    tokens: int
    dim: int


@dataclass(eq=False, slots=True)
class Slot:
    """The K/V of one layer. Never changed once made: a query may go on with a replaced one.

    `generation` is the fill of the prefix whose K/V these are, 0 if nobody said. `summaries` is the
    engine thread's own: per-block figures of K by (block size, selector).
    """

    key: Key
    shape: Shape
    keys: mx.array
    values: mx.array
    nbytes: int
    generation: int = 0
    summaries: dict[tuple[int, int], tuple[NDArray[np.float32], ...]] = field(default_factory=dict)
    serial: int = field(default_factory=lambda: next(_serials))

    @property
    def source(self) -> Source:
        """Equal for slots that hold the same K/V: of one fill, or one and the same."""
        return (self.generation, 0) if self.generation else (0, self.serial)


class Cold(NamedTuple):
    """A demoted slot: what it was, and when it was last used (a count, not a time)."""

    shape: Shape
    stamp: int


class Slots:
    """At most `limit` warm slots; beyond, the least recently stored or queried turns cold."""

    def __init__(self, limit: int = 256, cold_limit: int = COLD_LIMIT) -> None:
        self.limit = limit
        self.cold_limit = cold_limit
        self.demotions = 0
        self.rehydrates = 0
        self.nbytes = 0
        self._lock = threading.Lock()
        self._warm: OrderedDict[Key, Slot] = OrderedDict()
        self._stamps: dict[Key, int] = {}
        self._cold: dict[Key, Cold] = {}
        self._layers: dict[bytes, set[int]] = {}
        self._clock = itertools.count(1)

    @property
    def warm(self) -> int:
        return len(self._warm)

    @property
    def cold(self) -> int:
        return len(self._cold)

    def state(self, key: Key) -> State:
        """What LOOKUP answers."""
        with self._lock:
            return "HIT" if key in self._warm else "COLD" if key in self._cold else "MISS"

    def shape(self, key: Key) -> Shape:
        """The shape of a warm or cold entry; NotFound if there is neither."""
        with self._lock:
            entry = self._warm.get(key) or self._cold.get(key)
        if entry is None:
            raise NotFound("session not found")
        return entry.shape

    def cold_shape(self, key: Key) -> Shape | None:
        """The shape of a cold entry."""
        with self._lock:
            entry = self._cold.get(key)
        return entry.shape if entry is not None else None

    def held_bytes(self, key: Key) -> int:
        """The bytes of a warm slot, 0 if there is none."""
        with self._lock:
            slot = self._warm.get(key)
        return slot.nbytes if slot is not None else 0

    def use(self, key: Key, generation: int = 0) -> Slot:
        """The warm slot, from now on the most recently used. Raises ColdMiss or NotFound.

        One of another fill than `generation`, if that is given, is not found.
        """
        with self._lock:
            slot = self._warm.get(key)
            if slot is not None:
                if generation not in (0, slot.generation):
                    raise NotFound(f"session not found: it is of fill {slot.generation}")
                self._touch(key)
                return slot
            if key in self._cold:
                raise ColdMiss("session evicted to cold tier (call KV.PREFIX.WARM)")
        raise NotFound("session not found")

    def put(self, slot: Slot) -> None:
        """Make `slot` the warm one of its key; a cold entry counts as rehydrated."""
        key = slot.key
        with self._lock:
            replaced = self._warm.pop(key, None)
            self.nbytes += slot.nbytes - (replaced.nbytes if replaced is not None else 0)
            self.rehydrates += self._cold.pop(key, None) is not None
            self._warm[key] = slot
            self._layers.setdefault(key[0], set()).add(key[1])
            self._touch(key)
            while len(self._warm) > self.limit:
                self._demote(next(iter(self._warm)))

    def grow(self, slot: Slot, nbytes: int) -> None:
        """Count `nbytes` more (or fewer) for a slot, unless it is gone or replaced."""
        with self._lock:
            if self._warm.get(slot.key) is slot:
                slot.nbytes += nbytes
                self.nbytes += nbytes

    def demote(self, key: Key) -> None:
        """Free a slot's memory and remember it as cold."""
        with self._lock:
            if key in self._warm:
                self._demote(key)

    def drop(self, sid: bytes, layer: int | None = None) -> int:
        """Forget one layer of `sid` or all of them, cold ones too; how many there were."""
        with self._lock:
            held = self._layers.get(sid, set())
            chosen = [one for one in held if layer in (None, one)]
            for one in chosen:
                self._forget((sid, one))
            return len(chosen)

    def victims(self, keep: bytes | None) -> Iterator[Victim]:
        """Warm slots from least to most recently used, without those of namespace `keep`."""
        with self._lock:
            slots = list(self._warm.items())
        for key, slot in slots:
            if keep is None or namespace_of(key[0]) != keep:
                yield Victim(slot.nbytes, partial(self.demote, key))

    def _touch(self, key: Key) -> None:
        self._warm.move_to_end(key)
        self._stamps[key] = next(self._clock)

    def _demote(self, key: Key) -> None:
        slot = self._warm.pop(key)
        self.nbytes -= slot.nbytes
        self.demotions += 1
        self._cold[key] = Cold(slot.shape, self._stamps.pop(key))
        if len(self._cold) > self.cold_limit:
            self._forget(min(self._cold, key=lambda other: self._cold[other].stamp))

    def _forget(self, key: Key) -> None:
        slot = self._warm.pop(key, None)
        self.nbytes -= slot.nbytes if slot is not None else 0
        self._cold.pop(key, None)
        self._stamps.pop(key, None)
        sid, layer = key
        self._layers[sid].discard(layer)
        if not self._layers[sid]:
            del self._layers[sid]


def namespace_of(sid: bytes) -> bytes:
    """The namespace whose rows an attention session mirrors: clients append `_attn`."""
    return sid[: -len(ATTEND_SUFFIX)] if sid.endswith(ATTEND_SUFFIX) else sid
