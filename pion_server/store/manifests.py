"""Manifests and fills: which prefixes are complete, and who is writing one (KV.PREFIX.META).

A manifest is an opaque blob written last; whoever finds one knows that every piece it names was
stored before it. Any later write from outside the fill removes it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pion_server.errors import BadArgument, Stale
from pion_server.store.entries import RecordType, dump_meta
from pion_server.store.log import Record, RecordLog

MAX_MANIFEST = 4 << 20
LEASE_SECONDS = 30.0


@dataclass(slots=True)
class Manifest:
    """The blob lies in the log; `gen` is the fill that wrote it."""

    gen: int
    record: Record


@dataclass(slots=True)
class Fill:
    """A lease on writing one namespace, held by one connection."""

    gen: int
    owner: object
    deadline: float


class Manifests:
    """Every manifest and open fill of one worker. The caller sees to one writer at a time."""

    def __init__(
        self,
        log: RecordLog,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._clock = clock
        self._now = now
        self.by_ns: dict[bytes, Manifest] = {}
        self._fills: dict[bytes, Fill] = {}
        self.last_gen = 0
        self._step, self._residue = 1, 0
        # Called with each namespace whose manifest or fill has come or gone.
        self.on_change: list[Callable[[bytes], None]] = []

    def number_by(self, step: int, residue: int) -> None:
        """From now on generations are `residue` modulo `step`: those of others never equal them."""
        self._step, self._residue = step, residue

    def fill(self, ns: bytes) -> Fill | None:
        """The open fill of `ns`; an expired lease is no fill."""
        fill = self._fills.get(ns)
        if fill is not None and fill.deadline <= self._clock():
            self._fills.pop(ns, None)
            return None
        return fill

    def begin(self, ns: bytes, owner: object) -> int:
        """Open a fill and remove the manifest; 0 if another connection's fill is open."""
        fill = self.fill(ns)
        if fill is not None and fill.owner is not owner:
            return 0
        # By the clock, so that a store begun anew does not give out the old one's again.
        gen = max(self.last_gen + 1, int(self._now() * 1e6))
        gen += (self._residue - gen) % self._step
        self._log.append(RecordType.FILL, dump_meta({"n": ns, "g": gen}))
        self.last_gen = gen
        self.by_ns.pop(ns, None)
        self._fills[ns] = Fill(gen, owner, self._clock() + LEASE_SECONDS)
        self._changed(ns)
        return gen

    def set(self, ns: bytes, gen: int, blob: bytes | bytearray | memoryview) -> None:
        """Store the manifest and end the fill; Stale if `gen` is not the open fill's."""
        if len(blob) > MAX_MANIFEST:
            raise BadArgument(f"manifest of {len(blob)} bytes exceeds {MAX_MANIFEST}")
        self.require(ns, gen)
        record = self._log.append(RecordType.MANIFEST, dump_meta({"n": ns, "g": gen}), [blob])
        self.by_ns[ns] = Manifest(gen, record)
        self._fills.pop(ns, None)
        self._changed(ns)

    def abort(self, ns: bytes, gen: int) -> None:
        """End the fill if `gen` is its generation; no effect otherwise."""
        fill = self.fill(ns)
        if fill is not None and fill.gen == gen:
            self._fills.pop(ns, None)
            self._changed(ns)

    def get(self, ns: bytes) -> tuple[int, bytes] | None:
        """Generation and blob; DamagedEntry if the blob fails its checksum."""
        manifest = self.by_ns.get(ns)
        return (manifest.gen, manifest.record.read()) if manifest else None

    def require(self, ns: bytes | None, gen: int | None) -> None:
        """Refuse a write whose generation is not the open fill's; renew the lease otherwise."""
        if gen is None:
            return
        fill = self.fill(ns) if ns is not None else None
        if fill is None or fill.gen != gen:
            raise Stale(f"generation {gen} is not the current fill of this namespace")
        fill.deadline = self._clock() + LEASE_SECONDS

    def removed_by(self, ns: bytes | None, gen: int | None) -> bool:
        """Whether a write to `ns` with this generation would remove a manifest."""
        return gen is None and ns in self.by_ns

    def written(self, ns: bytes | None, gen: int | None, owner: object) -> None:
        """Note a write to `ns` about to happen. Without the current generation the manifest goes,
        and with it a fill of another connection."""
        if ns is None or gen is not None:
            return
        if ns in self.by_ns:
            self._log.append(RecordType.UNMANIFEST, dump_meta({"n": ns}))
            self.by_ns.pop(ns, None)
        fill = self.fill(ns)
        if fill is not None and fill.owner is not owner:
            self._fills.pop(ns, None)
            self._changed(ns)

    def forget(self, ns: bytes, owner: object) -> bool:
        """Drop what is held of `ns` (the caller logs it); whether a manifest was among it."""
        fill = self.fill(ns)
        if fill is not None and fill.owner is not owner:
            self._fills.pop(ns, None)
        had_manifest = self.by_ns.pop(ns, None) is not None
        self._changed(ns)
        return had_manifest

    def disconnect(self, owner: object) -> None:
        """End the fills of a closed connection."""
        # A copy: a write of another connection may end a fill in its thread meanwhile.
        for ns, fill in list(self._fills.items()):
            if fill.owner is owner:
                self._fills.pop(ns, None)
                self._changed(ns)

    def _changed(self, ns: bytes) -> None:
        for notify in self.on_change:
            notify(ns)

    def replay(self, type_: int, ns: bytes, gen: int, record: Record) -> None:
        """Apply one logged record at start-up."""
        self.last_gen = max(self.last_gen, gen)
        if type_ == RecordType.MANIFEST:
            self.by_ns[ns] = Manifest(gen, record)
        else:
            self.by_ns.pop(ns, None)
