"""Recurrent state (SSM.PREFIX.*): opaque blobs by (sid, layer), in a log of their own."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

from pion_server.errors import OutOfMemory
from pion_server.payload import Buffer
from pion_server.store.budget import MemoryBudget, Victim
from pion_server.store.compaction import Item, drain, whole_item
from pion_server.store.entries import RecordType, dump_meta, load_meta, name_bytes
from pion_server.store.log import Record, RecordLog
from pion_server.store.manifests import Manifests


class SsmStore:
    """All recurrent state of one worker; evicted by whole sid, least recently used first.

    `limit` is `--ssm-budget` in bytes (None: only the shared memory budget counts). The state of a
    namespace that `pinned` names is never evicted.
    """

    def __init__(
        self,
        log: RecordLog,
        manifests: Manifests,
        *,
        limit: int | None = None,
        budget: MemoryBudget | None = None,
        pinned: Callable[[bytes], bool] = lambda ns: False,
    ) -> None:
        self.log = log
        self.lock = threading.RLock()
        self.limit = limit
        self.stored_bytes = 0
        self.evictions = 0
        # Called with each sid that state was stored under or dropped from.
        self.on_change: list[Callable[[bytes], None]] = []
        self._manifests = manifests
        self._pinned = pinned
        self._by_sid: OrderedDict[bytes, dict[int, Record]] = OrderedDict()
        self._used_at: dict[bytes, float] = {}
        self._budget = budget or MemoryBudget()
        self._budget.add_source(lambda: self.stored_bytes, self._victims)

    def __len__(self) -> int:
        return len(self._by_sid)

    def store(
        self, sid: bytes, layer: int, blob: Buffer, *, gen: int | None = None, owner: object
    ) -> None:
        """Keep `blob` under (sid, layer), replacing what was there.

        Raises Stale for a wrong generation, OutOfMemory (nothing evicted) if it cannot fit into the
        budget, LogFailed.
        """
        self._manifests.require(sid, gen)
        size = len(memoryview(blob).cast("B"))
        old = self._by_sid.get(sid, {}).get(layer)
        more = size - (old.length if old else 0)
        chosen = self._choose_victims(sid, more)
        self._budget.reserve(more, sid)
        for victim in chosen:
            victim.evict()
        meta = dump_meta({"s": sid, "l": layer})
        with ExitStack() as room:
            if self._manifests.removed_by(sid, gen):
                room.enter_context(self.log.room_for(size, sid))
            self._manifests.written(sid, gen, owner)
            record = self.log.append_or_evict(RecordType.STATE, meta, [blob], sid)
        self._apply(sid, layer, record)
        self._changed(sid)

    def _choose_victims(self, sid: bytes, more: int) -> list[Victim]:
        """Whom to evict so that `more` bytes of `sid` fit under the limit; OutOfMemory if none."""
        if self.limit is None:
            return []
        excess = self.stored_bytes + more - self.limit
        chosen: list[Victim] = []
        for victim in self._victims(sid) if excess > 0 else ():
            if excess <= 0:
                break
            chosen.append(victim)
            excess -= victim.nbytes
        if excess > 0:
            raise OutOfMemory(
                f"{more} bytes more of this state do not fit into --ssm-budget {self.limit}"
            )
        return chosen

    def fetch(self, sid: bytes, layer: int) -> Record | None:
        """The record holding the blob, None if there is none; touches the sid."""
        with self.lock:
            layers = self._by_sid.get(sid)
            if layers is None:
                return None
            self._touch(sid)
            return layers.get(layer)

    def touch(self, sid: bytes) -> None:
        """It is used, by another way than `fetch`."""
        with self.lock:
            if sid in self._by_sid:
                self._touch(sid)

    def _touch(self, sid: bytes) -> None:
        self._by_sid.move_to_end(sid)
        self._used_at[sid] = time.monotonic()

    def holds(self, sid: bytes) -> bool:
        """Whether it has any state; does not touch it."""
        return sid in self._by_sid

    def held(self) -> list[tuple[bytes, int, float]]:
        """Each sid with its bytes and when it was last touched; least recently used first."""
        with self.lock:
            return [
                (sid, sum(record.length for record in layers.values()), self._used_at[sid])
                for sid, layers in self._by_sid.items()
            ]

    def drop(self, sid: bytes, layer: int | None = None, *, owner: object) -> None:
        """Forget one layer, or all of them; nothing happens if there is nothing."""
        layers = self._by_sid.get(sid)
        if layers is None or (layer is not None and layer not in layers):
            return
        self._manifests.written(sid, None, owner)
        self._log_drop(sid, layer)

    def drop_with_prefix(self, ns: bytes) -> None:
        """Forget the state of a namespace whose manifest went with it."""
        if ns in self._by_sid:
            self._log_drop(ns, None)

    def _log_drop(self, sid: bytes, layer: int | None) -> None:
        self.log.append(RecordType.STATE_DROP, dump_meta({"s": sid, "l": layer}))
        self._apply_drop(sid, layer)
        self._changed(sid)

    def _changed(self, sid: bytes) -> None:
        for notify in self.on_change:
            notify(sid)

    def _evict(self, sid: bytes) -> None:
        if sid not in self._by_sid:  # gone with its prefix, which was evicted first
            return
        self._manifests.written(sid, None, None)
        self._log_drop(sid, None)
        self.evictions += 1

    def _victims(self, keep: bytes | None) -> Iterator[Victim]:
        with self.lock:
            held = list(self._by_sid.items())
        for sid, layers in held:
            if sid != keep and not self._pinned(sid):
                size = sum(record.length for record in layers.values())
                yield Victim(size, partial(self._evict, sid), layers.values)

    def _apply(self, sid: bytes, layer: int, record: Record) -> None:
        with self.lock:
            layers = self._by_sid.setdefault(sid, {})
            old = layers.get(layer)
            record.owned = True
            self.stored_bytes += record.length - (old.length if old else 0)
            layers[layer] = record
            self._touch(sid)

    def _apply_drop(self, sid: bytes, layer: int | None) -> None:
        with self.lock:
            layers = self._by_sid.get(sid, {})
            for index in [layer] if layer is not None else list(layers):
                record = layers.pop(index, None)
                self.stored_bytes -= record.length if record else 0
            if not layers:
                self._by_sid.pop(sid, None)
                self._used_at.pop(sid, None)

    def replay(self, record: Record) -> None:
        """Apply one logged record at start-up."""
        meta = load_meta(record.meta)
        sid = name_bytes(meta["s"])
        if record.type == RecordType.STATE:
            self._apply(sid, int(meta["l"]), record)
        elif record.type == RecordType.STATE_DROP:
            self._apply_drop(sid, meta["l"])

    def freeze(self) -> SsmFreeze:
        """Everything held now, to be written out; damaged blobs stay damaged."""
        with self.lock:
            held = [(sid, layer, r) for sid, ls in self._by_sid.items() for layer, r in ls.items()]
        return SsmFreeze(self, held)

    def adopt(self, sid: bytes, layer: int, old: Record, new: Record) -> None:
        """`new` is a copy of `old` and takes its place, if that is still there."""
        with self.lock:
            layers = self._by_sid.get(sid)
            if layers is not None and layers.get(layer) is old:
                new.owned = True
                layers[layer] = new


class SsmFreeze:
    """All state at one moment, as `compaction.Frozen`."""

    def __init__(self, store: SsmStore, held: list[tuple[bytes, int, Record]]) -> None:
        self._store = store
        self._held = held
        self._copies: list[Record] = []

    def items(self) -> Iterator[Item]:
        for sid, layer, record in self._held:
            meta = dump_meta({"s": sid, "l": layer})
            yield whole_item(RecordType.STATE, meta, record, self._copies.append)

    def adopt(self) -> Iterator[None]:
        for (sid, layer, old), new in zip(self._held, self._copies, strict=True):
            self._store.adopt(sid, layer, old, new)
            yield

    def take_apart(self) -> None:
        drain(self._held)
        drain(self._copies)
