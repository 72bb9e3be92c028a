"""The V-store: sessions of rows over a record log, with everything a prefix has beside rows.

One writer at a time (the caller sees to that); readers may come from any thread at any moment. A
write is checked, then logged, then applied, in that order: refused or failed, it changed nothing.
`owner` is the connection that writes: it tells a fill's own writes from others'.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from pion_server.errors import BadArgument, NotFound
from pion_server.formats import Format, InputType
from pion_server.payload import Buffer
from pion_server.store.budget import MemoryBudget, Victim
from pion_server.store.entries import RecordType, dump_meta
from pion_server.store.log import Record, RecordLog
from pion_server.store.manifests import Manifests
from pion_server.store.rows import (
    Extent,
    Extents,
    StoredRows,
    count_rows,
    cut_after,
    held_between,
    overlay,
    select,
    select_filled,
    select_ids,
)
from pion_server.store.schema import MAX_ROWS, Schema
from pion_server.store.sessions import Blocks, Session, SessionTable, namespace_of, sides

MAX_SNAPSHOTS = 16
# Miss counters kept; beyond, the one longest untouched starts again at 1.
MAX_ADMISSIONS = 65_536
# Names one DROP record lists: the metadata of a record is bounded, the names of a command hardly.
DROPS_A_RECORD = 1000


class StateStore(Protocol):
    """What the V-store asks of the recurrent-state store: to forget a namespace's state."""

    def drop_with_prefix(self, ns: bytes) -> None: ...


class VStore:
    """All sessions, manifests, block tables, pins and expiry times of one worker."""

    def __init__(
        self,
        log: RecordLog,
        *,
        max_sessions: int = 256,
        budget: MemoryBudget | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.log = log
        self.lock = threading.RLock()
        self.table = SessionTable(max_sessions)
        self.manifests = Manifests(log)
        self.budget = budget or MemoryBudget()
        self.budget.add_source(lambda: self.stored_bytes, self._victims)
        self.ssm: StateStore | None = None
        self.on_change: list[Callable[[bytes], None]] = []
        # Called with each namespace somebody dropped or that expired; not on eviction.
        self.on_drop: list[Callable[[bytes], None]] = []
        self.pins: set[bytes] = set()
        self.expiry: dict[bytes, float] = {}
        self.admissions: OrderedDict[bytes, int] = OrderedDict()
        self.stored_bytes = 0
        self.evictions = 0
        # Numbers of stored rows that their format could not hold, see `formats.Run`.
        self.saturated_values = 0
        self._wall_clock = wall_clock
        self._next_snapshot = 1

    # --- looking -----------------------------------------------------------------------------

    def session(self, sid: bytes) -> Session:
        """The session, not touching its age; NotFound if there is none."""
        session = self.table.get(sid)
        if session is None:
            raise NotFound("session not found")
        return session

    def holds(self, ns: bytes) -> bool:
        """Whether a side or a manifest of `ns` is held."""
        return any(self.table.get(s) for s in sides(ns)) or ns in self.manifests.by_ns

    def lookup(self, ns: bytes) -> Session | None:
        """The K side if the prefix is a hit (both sides held, no fill open); touches both."""
        with self.lock:
            k, v = (self.table.get(sid) for sid in sides(ns))
            if k is None or v is None or self.manifests.fill(ns) is not None:
                return None
            self.table.touch(k.sid)
            return k

    def rows(
        self, sid: bytes, layer: int, start: int, end: int, *, fill: bool = False
    ) -> StoredRows | None:
        """Rows `[start, end)` of one layer; None if any of them was never written.

        `fill`: zeros for those, None only if not one exists.
        """
        with self.lock:
            session = self.session(sid)
            self.table.touch(sid)
            held = session.layers.get(layer)
            if held is None:
                return None
            found = (select_filled if fill else select)(held.extents, start, end)
            return None if found is None else StoredRows(held.format, found)

    def rows_by_id(
        self, sid: bytes, layer: int, ids: Sequence[int], *, fill: bool = False
    ) -> StoredRows | None:
        """As `rows`, for the rows of `ids` in the order asked."""
        with self.lock:
            session = self.session(sid)
            self.table.touch(sid)
            held = session.layers.get(layer)
            found = select_ids(held.extents, ids, fill=fill) if held else None
            return StoredRows(held.format, found) if held and found is not None else None

    # --- sessions ----------------------------------------------------------------------------

    def create(self, sid: bytes, schema: Schema, owner: object) -> int:
        """V.CREATE: make or keep one session and return its index."""
        session = self.table.get(sid)
        if session is not None and session.schema == schema:
            self.table.touch(sid)
            return session.index
        if session is not None and not session.empty:
            raise BadArgument("session exists with another format")
        ns = namespace_of(sid)
        self._make_slots(0 if session else 1, ns)
        if session is not None or ns in self.manifests.by_ns:
            self.manifests.written(ns, None, owner)
        self._log_sessions([(sid, schema)], replaced=[sid] if session else [])
        return self.session(sid).index

    def register(
        self,
        ns: bytes,
        schemas: tuple[Schema, Schema],
        *,
        blocks: Blocks | None = None,
        prefill_ms: int | None = None,
        owner: object,
    ) -> None:
        """KV.PREFIX.REGISTER: both sides, kept if they fit, recreated empty if they do not."""
        wanted = list(zip(sides(ns), schemas, strict=True))
        held = [self.table.get(sid) for sid, _ in wanted]
        unfit = [
            s
            for s, (_, schema) in zip(held, wanted, strict=True)
            if s is not None and s.schema != schema
        ]
        if any(not s.empty for s in unfit):
            unfit = [s for s in held if s is not None]
        replaced = [s.sid for s in unfit]
        missing = [w for w in wanted if w[0] in replaced or self.table.get(w[0]) is None]
        self._make_slots(len(missing) - len(replaced), ns)
        k_sid = wanted[0][0]
        if missing:
            if replaced or ns in self.manifests.by_ns:
                self.manifests.written(ns, None, owner)
            self._log_sessions(missing, replaced, (k_sid, blocks) if blocks else None)
        elif blocks is not None:
            meta = {"s": k_sid, "b": blocks.block_size}
            self.log.append(RecordType.BLOCKS, dump_meta(meta), [blocks.hashes])
        with self.lock:
            k_side = self.session(k_sid)
            if blocks is not None:
                k_side.blocks = blocks if blocks.count else None
            k_side.prefill_ms = prefill_ms
            self.table.touch(k_sid)

    def _log_sessions(
        self,
        made: list[tuple[bytes, Schema]],
        replaced: list[bytes],
        table: tuple[bytes, Blocks] | None = None,
    ) -> None:
        """One record for all of it: a crash or a full disk leaves everything or nothing."""
        meta: dict[str, Any] = {"s": [[sid, schema.to_json()] for sid, schema in made]}
        meta |= {"x": replaced} if replaced else {}
        meta |= {"b": [table[0], table[1].block_size]} if table else {}
        self.log.append(RecordType.CREATE, dump_meta(meta), [table[1].hashes] if table else [])
        with self.lock:
            for sid in replaced:
                self.remove(sid)
            for sid, schema in made:
                self.table.add(sid, schema)
        for sid, _ in made:
            self._changed(sid)

    def _make_slots(self, wanted: int, keep: bytes | None) -> None:
        """Evict least recently used pairs until `wanted` more sessions fit under the cap."""
        excess = len(self.table) + wanted - self.table.max_sessions
        chosen: list[tuple[bytes, ...]] = []
        for pair in self._oldest_pairs() if excess > 0 else ():
            if excess <= 0:
                break
            if self._evictable(pair, keep):
                chosen.append(pair)
                excess -= len(pair)
        if excess > 0:
            raise BadArgument(
                f"failed: no free slots, all {self.table.max_sessions} sessions are held or pinned"
            )
        for pair in chosen:
            self._evict(pair)

    # --- rows --------------------------------------------------------------------------------

    def store(
        self,
        sid: bytes,
        layer: int,
        start: int,
        count: int,
        blob: Buffer,
        *,
        input: InputType | None = InputType.F32,  # noqa: A002
        gen: int | None = None,
        owner: object,
    ) -> None:
        """V.STOREBATCH: rows `[start, start + count)`; `input` None means PACKED rows."""
        ns = namespace_of(sid)
        session = self.session(sid)
        if start + count > MAX_ROWS:
            raise BadArgument(f"start+count {start + count} exceeds {MAX_ROWS} rows")
        spec = session.schema.layer(layer)
        held = session.layers.get(layer)
        fmt = held.format if held else spec.format()
        width = fmt.packed_row_bytes if input is None else fmt.input_row_bytes(input)
        if input is not None and fmt.name == "raw":
            raise BadArgument("raw rows are stored with FMT PACKED only")
        if len(blob) != count * width:
            raise BadArgument(
                f"V.STOREBATCH: blob size {len(blob)} is not {count} rows of {width} bytes"
            )
        self.manifests.require(ns, gen)
        try:
            runs = fmt.unpack(blob, count) if input is None else [fmt.encode(blob, count, input)]
        except ValueError as error:
            raise BadArgument(f"V.STOREBATCH: {error}") from error
        shapes = [(run.rows, run.header) for run in runs]
        meta = rows_meta(sid, layer, start, shapes, fmt)
        covered = count_rows(held_between(held.extents, start, start + count)) if held else 0
        self.budget.reserve((count - covered) * fmt.row_bytes, ns or sid)
        bodies = [run.body for run in runs]
        with ExitStack() as room:
            if self.manifests.removed_by(ns, gen):
                room.enter_context(self.log.room_for(count * fmt.row_bytes, ns))
            self.manifests.written(ns, gen, owner)
            record = self.log.append_or_evict(RecordType.ROWS, meta, bodies, ns or sid)
        self.apply_rows(session, layer, rows_extents(record, start, shapes, fmt.row_bytes))
        self.saturated_values += sum(run.saturated for run in runs)
        self._changed(sid)

    def apply_rows(self, session: Session, layer: int, new: Extents) -> None:
        """Put logged rows into the index, and touch their session."""
        with self.lock:
            held = session.layer(layer)
            start, end = new[0].start, new[-1].end
            more = end - start - count_rows(held_between(held.extents, start, end))
            held.extents = overlay(held.extents, new)
            held.count = max(held.count, end)
            held.held += more
            self.stored_bytes += more * held.format.row_bytes
            self.table.touch(session.sid)

    # --- dropping ----------------------------------------------------------------------------

    def drop_sessions(self, sids: Iterable[bytes], owner: object) -> int:
        """V.DROP: raw sids; the number of sessions dropped."""
        held = [sid for sid in dict.fromkeys(sids) if self.table.get(sid)]
        for at in range(0, len(held), DROPS_A_RECORD):
            leaving = held[at : at + DROPS_A_RECORD]
            touched = [ns for ns in dict.fromkeys(map(namespace_of, leaving)) if ns is not None]
            for ns in touched:
                self.manifests.written(ns, None, owner)
            going = set(leaving)
            # A prefix of which nothing is left takes its pin and its expiry time with it.
            gone = [ns for ns in touched if going.issuperset(self._sides_held(ns))]
            self._log_drop(leaving, gone, owner)
        return len(held)

    def _sides_held(self, ns: bytes) -> list[bytes]:
        return [sid for sid in sides(ns) if self.table.get(sid)]

    def drop_prefixes(self, names: Iterable[bytes], owner: object) -> int:
        """KV.PREFIX.DROP: the number of namespaces of which anything was held."""
        asked = list(dict.fromkeys(names))
        held = [ns for ns in asked if self.holds(ns)]
        for at in range(0, len(held), DROPS_A_RECORD):
            leaving = held[at : at + DROPS_A_RECORD]
            sids = [sid for ns in leaving for sid in self._sides_held(ns)]
            self._log_drop(sids, leaving, owner)
        for ns in asked:
            for notify in self.on_drop:
                notify(ns)
        return len(held)

    def _log_drop(self, sids: Sequence[bytes], names: Sequence[bytes], owner: object) -> None:
        self.log.append(RecordType.DROP, dump_meta({"s": sids, "n": names}))
        self.apply_drop(sids, names, owner)

    def apply_drop(self, sids: Sequence[bytes], names: Sequence[bytes], owner: object) -> None:
        """Forget sessions and what their namespaces have; the caller has logged it."""
        for sid in sids:
            self.remove(sid)
        for ns in names:
            had_manifest = self.manifests.forget(ns, owner)
            self.pins.discard(ns)
            self.expiry.pop(ns, None)
            if had_manifest and self.ssm is not None:
                self.ssm.drop_with_prefix(ns)
        for sid in sids:
            self._changed(sid)

    def remove(self, sid: bytes) -> None:
        """Forget a session; the caller has logged it."""
        with self.lock:
            session = self.table.remove(sid)
            if session is not None:
                self.stored_bytes -= session.stored_bytes

    def _evictable(self, pair: tuple[bytes, ...], keep: bytes | None) -> bool:
        owner = namespace_of(pair[0]) or pair[0]
        return owner != keep and owner not in self.pins

    def _evict(self, pair: tuple[bytes, ...]) -> None:
        ns = namespace_of(pair[0])
        self._log_drop(pair, [ns] if ns is not None else [], None)
        self.evictions += len(pair)

    def _oldest_pairs(self) -> Iterator[tuple[bytes, ...]]:
        with self.lock:
            return self.table.oldest_pairs()

    def _victims(self, keep: bytes | None) -> Iterator[Victim]:
        for pair in self._oldest_pairs():
            if self._evictable(pair, keep):
                size = sum(self.session(sid).stored_bytes for sid in pair)
                yield Victim(size, partial(self._evict, pair), partial(self._records, pair))

    def _records(self, sids: Iterable[bytes]) -> set[Record]:
        """The records that the rows of these sessions lie in."""
        layers = [layer for sid in sids for layer in self.session(sid).layers.values()]
        return {e.record for layer in layers for e in layer.extents if e.record is not None}

    # --- rewinding ---------------------------------------------------------------------------

    def snapshot(self, sid: bytes) -> int:
        """V.SNAPSHOT: remember the row counts; the snapshot's id."""
        session = self.session(sid)
        if len(session.snapshots) >= MAX_SNAPSHOTS:
            raise BadArgument(f"no free snapshot slot (at most {MAX_SNAPSHOTS} a session)")
        number = self._next_snapshot
        self._next_snapshot += 1
        session.snapshots[number] = {i: layer.count for i, layer in session.layers.items()}
        return number

    def restore(self, sid: bytes, number: int, owner: object) -> None:
        """V.RESTORE: every count becomes min(current, captured)."""
        session = self.session(sid)
        counts = session.snapshots.get(number)
        if counts is None:
            raise BadArgument(f"unknown snap_id {number}")
        cuts = [
            (i, counts.get(i, 0))
            for i, layer in session.layers.items()
            if layer.count > counts.get(i, 0)
        ]
        if cuts:
            self.manifests.written(namespace_of(sid), None, owner)
            self.log.append(RecordType.CUT, dump_meta({"s": sid, "c": cuts}))
            self.apply_cut(session, cuts)
            self._changed(sid)

    def apply_cut(self, session: Session, cuts: Iterable[tuple[int, int]]) -> None:
        """Lower the counts of some layers; the caller has logged it."""
        with self.lock:
            for index, count in cuts:
                held = session.layers.get(index)
                if held is not None and held.count > count:
                    fewer = count_rows(held_between(held.extents, count, held.count))
                    held.extents = cut_after(held.extents, count)
                    held.count = count
                    held.held -= fewer
                    self.stored_bytes -= fewer * held.format.row_bytes

    def release(self, sid: bytes, number: int) -> bool:
        """V.COMMIT: forget a snapshot; whether it existed."""
        return self.session(sid).snapshots.pop(number, None) is not None

    # --- tables, pins, expiry, admission -----------------------------------------------------

    def blocks(self, ns: bytes) -> Blocks | None:
        """The block table of a namespace; touches it if there is one."""
        session = self.table.get(sides(ns)[0])
        if session is None or session.blocks is None:
            return None
        with self.lock:
            self.table.touch(session.sid)
        return session.blocks

    def pin(self, ns: bytes, pinned: bool) -> bool:
        """Pinned prefixes are never evicted; False if `ns` is not held."""
        if not self.holds(ns):
            return False
        if pinned != (ns in self.pins):
            self.log.append(RecordType.PIN, dump_meta({"n": ns, "p": pinned}))
            (self.pins.add if pinned else self.pins.discard)(ns)
        return True

    def expire(self, ns: bytes, seconds: int) -> bool:
        """Drop `ns` after `seconds`; False if it is not held."""
        if not self.holds(ns):
            return False
        at = self._wall_clock() + seconds
        self.log.append(RecordType.EXPIRE, dump_meta({"n": ns, "t": at}))
        self.expiry[ns] = at
        return True

    def drop_expired(self) -> int:
        """Drop every namespace whose time has come; how many there were."""
        now = self._wall_clock()
        due = [ns for ns, at in self.expiry.items() if at <= now]
        for ns in [ns for ns in due if not self.holds(ns)]:
            del self.expiry[ns]
        return self.drop_prefixes(due, None) if due else 0

    def admit(self, ns: bytes) -> int:
        """Count one more miss of `ns`."""
        count = self.admissions.pop(ns, 0) + 1
        self.admissions[ns] = count
        if len(self.admissions) > MAX_ADMISSIONS:
            self.admissions.popitem(last=False)
        return count

    def _changed(self, sid: bytes) -> None:
        for notify in self.on_change:
            notify(sid)


def membership(blocks: Blocks, probes: Buffer) -> bytes:
    """Bit i set iff probe i stands in the table; sorted search, O(K log N)."""
    import numpy as np

    table = blocks.sorted
    wanted = np.frombuffer(probes, dtype="<u8")
    places = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return np.packbits(table[places] == wanted, bitorder="little").tobytes()


def rows_meta(
    sid: bytes, layer: int, start: int, runs: Sequence[tuple[int, bytes]], fmt: Format
) -> bytes:
    """Metadata of a ROWS record; runs are (rows, run header)."""
    listed: list[Any] = [[rows, header.hex()] for rows, header in runs]
    return dump_meta({"s": sid, "l": layer, "a": start, "r": listed, "f": [fmt.tag, fmt.dim]})


def rows_extents(
    record: Record, start: int, shapes: Iterable[tuple[int, bytes]], row_bytes: int
) -> Extents:
    """Extents of a ROWS record: its runs lie one after another in the body."""
    record.owned = True
    found: list[Extent] = []
    at, shift = start, 0
    for rows, header in shapes:
        found.append(Extent(record, header, at, shift, at, at + rows))
        at += rows
        shift += rows * row_bytes
    return tuple(found)
