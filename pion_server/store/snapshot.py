"""The V-store as snapshot items, and records back into a V-store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pion_server.errors import DamagedEntry
from pion_server.formats import Format
from pion_server.store.compaction import Item, Part, drain, whole_item
from pion_server.store.entries import RecordType, dump_meta, load_meta, name_bytes
from pion_server.store.log import Record
from pion_server.store.manifests import Manifest
from pion_server.store.rows import Extent, Extents, select
from pion_server.store.schema import Schema
from pion_server.store.sessions import Blocks, Session
from pion_server.store.vstore import VStore, rows_extents, rows_meta

MAX_BODY = 16 << 20
# Run headers stand in a record's metadata, which is bounded too.
MAX_RUNS = 1 << 16


class _FrozenLayer(NamedTuple):
    number: int
    format: Format
    extents: Extents


class _FrozenSession(NamedTuple):
    session: Session
    blocks: Blocks | None
    layers: list[_FrozenLayer]


class VStoreFreeze:
    """The live state at one moment, to be written out and then adopted by the running store.

    Readers change nothing of this, and the store's own lock, for which the event loop would wait,
    is never held for long.
    """

    def __init__(self, store: VStore) -> None:
        self._store = store
        self._covers = store.log.seq
        self._sessions = [
            _FrozenSession(
                s,
                s.blocks,
                [_FrozenLayer(i, x.format, x.extents) for i, x in s.layers.items()],
            )
            for s in store.table
        ]
        self._manifests = list(store.manifests.by_ns.items())
        self._pins = list(store.pins)
        self._expiry = list(store.expiry.items())
        self._last_gen = store.manifests.last_gen
        self._places: dict[tuple[int, int], Extents] = {}
        self._manifest_places: list[tuple[bytes, Manifest, Record]] = []

    def items(self) -> Iterator[Item]:
        """As `Frozen.items`."""
        yield Item(RecordType.GENERATION, dump_meta({"g": self._last_gen}), [])
        for frozen in self._sessions:
            session, blocks = frozen.session, frozen.blocks
            listed = [[session.sid, session.schema.to_json()]]
            yield Item(RecordType.CREATE, dump_meta({"s": listed}), [])
            for layer in frozen.layers:
                self._places[(session.index, layer.number)] = ()
                for group in _groups(layer.extents, layer.format.row_bytes):
                    yield self._rows_item(session, layer, group)
            if blocks is not None:
                meta = dump_meta({"s": session.sid, "b": blocks.block_size})
                yield Item(RecordType.BLOCKS, meta, [blocks.hashes])
        for ns, manifest in self._manifests:
            yield self._manifest_item(ns, manifest)
        for ns in self._pins:
            yield Item(RecordType.PIN, dump_meta({"n": ns, "p": True}), [])
        for ns, at in self._expiry:
            yield Item(RecordType.EXPIRE, dump_meta({"n": ns, "t": at}), [])

    def _manifest_item(self, ns: bytes, manifest: Manifest) -> Item:
        def placed(record: Record) -> None:
            self._manifest_places.append((ns, manifest, record))

        meta = dump_meta({"n": ns, "g": manifest.gen})
        return whole_item(RecordType.MANIFEST, meta, manifest.record, placed)

    def _rows_item(
        self, session: Session, layer: _FrozenLayer, group: Sequence[Extent], again: bool = False
    ) -> Item:
        """One item for a group of adjacent extents, or for one lost extent."""
        key, row_bytes, start = (
            (session.index, layer.number),
            layer.format.row_bytes,
            group[0].start,
        )
        if group[0].record is None:
            lost = {"s": session.sid, "l": layer.number, "a": start, "r": group[0].rows}

            def lost_again(_: Record) -> None:
                self._places[key] += (group[0],)

            return Item(RecordType.LOST, dump_meta(lost), [], lost_again)
        runs = [(e.rows, e.header) for e in group]
        if layer.format.header_bytes == 0:
            runs = [(sum(e.rows for e in group), b"")]
        parts: list[Part | bytes] = [
            Part(e.record, e.shift + (e.start - e.base) * row_bytes, e.rows * row_bytes)
            for e in group
            if e.record is not None
        ]

        def placed(record: Record) -> None:
            self._places[key] += rows_extents(record, start, runs, row_bytes)

        def instead() -> Iterator[Item]:
            for sound in _groups(tuple(map(_lost_if_damaged, group)), row_bytes):
                yield self._rows_item(session, layer, sound, again=True)

        meta = rows_meta(session.sid, layer.number, start, runs, layer.format)
        return Item(RecordType.ROWS, meta, parts, placed, None if again else instead)

    def adopt(self) -> Iterator[None]:
        """As `Frozen.adopt`; rows written since stay as they are. A step is one layer."""
        for ns, manifest, record in self._manifest_places:
            if self._store.manifests.by_ns.get(ns) is manifest:
                manifest.record = record
            yield
        for frozen in self._sessions:
            session = frozen.session
            for layer in frozen.layers:
                held = session.layers.get(layer.number)
                if held is not None:
                    places = self._places[(session.index, layer.number)]
                    # One assignment: a reader sees the old places or the new ones.
                    held.extents = self._moved(held.extents, places)
                yield

    def take_apart(self) -> None:
        """As `Frozen.take_apart`."""
        for frozen in self._sessions:
            drain(frozen.layers)
        for pile in (self._sessions, self._manifests, self._pins, self._expiry):
            drain(pile)
        drain(self._manifest_places)
        drain(self._places)

    def _moved(self, extents: Extents, places: Extents) -> Extents:
        moved: list[Extent] = []
        for extent in extents:
            if extent.record is not None and extent.record.seq > self._covers:
                moved.append(extent)
                continue
            for piece in select(places, extent.start, extent.end) or (extent,):
                last = moved[-1] if moved else None
                if last and last.end == piece.start and _same_run(last, piece):
                    moved[-1] = replace(last, end=piece.end)
                else:
                    moved.append(piece)
        return tuple(moved)


def _same_run(one: Extent, other: Extent) -> bool:
    """Whether two extents are pieces of one run of one record."""
    place = (one.base, one.shift, one.header)
    return one.record is other.record and place == (other.base, other.shift, other.header)


def _lost_if_damaged(extent: Extent) -> Extent:
    try:
        if extent.record is not None:
            extent.record.verify(afresh=True)
    except DamagedEntry:
        return replace(extent, record=None)
    return extent


def _groups(extents: Extents, row_bytes: int) -> Iterator[list[Extent]]:
    """Adjacent extents, up to 16 MiB together and cut to that size; lost ones alone."""
    group: list[Extent] = []
    size = 0
    for extent in extents:
        step = max(1, MAX_BODY // row_bytes)
        for start in range(extent.start, extent.end, step):
            piece = extent.clip(start, start + step)
            joins = (
                group
                and piece.record is not None
                and group[-1].record is not None
                and group[-1].end == piece.start
                and size + piece.rows * row_bytes <= MAX_BODY
                and len(group) < MAX_RUNS
            )
            if group and not joins:
                yield group
                group, size = [], 0
            group.append(piece)
            size += piece.rows * row_bytes
    if group:
        yield group


def replay(store: VStore, record: Record) -> None:
    """Apply one record of a snapshot or log; records about unknown sessions are ignored."""
    meta = load_meta(record.meta)
    kind = record.type
    if kind == RecordType.CREATE:
        for sid in meta.get("x", ()):
            store.remove(name_bytes(sid))
        for sid, schema in meta["s"]:
            name, wanted = name_bytes(sid), Schema.from_json(schema)
            held = store.table.get(name)
            if held is None or held.schema != wanted:
                store.remove(name)
                store.table.add(name, wanted)
        if "b" in meta:
            sid, block_size = meta["b"]
            _replay_blocks(store.table.get(name_bytes(sid)), block_size, record)
    elif kind == RecordType.DROP:
        sids, names = ([name_bytes(x) for x in meta[key]] for key in ("s", "n"))
        store.apply_drop(sids, names, None)
    elif kind in (RecordType.FILL, RecordType.MANIFEST, RecordType.UNMANIFEST):
        store.manifests.replay(kind, name_bytes(meta["n"]), int(meta.get("g", 0)), record)
    elif kind == RecordType.GENERATION:
        store.manifests.last_gen = max(store.manifests.last_gen, int(meta["g"]))
    elif kind == RecordType.PIN:
        change = store.pins.add if meta["p"] else store.pins.discard
        change(name_bytes(meta["n"]))
    elif kind == RecordType.RELEASED:
        pass
    elif kind == RecordType.EXPIRE:
        store.expiry[name_bytes(meta["n"])] = float(meta["t"])
    else:
        session = store.table.get(name_bytes(meta["s"]))
        if session is not None:
            _replay_session(store, session, kind, meta, record)


def _replay_session(
    store: VStore, session: Session, kind: int, meta: dict[str, Any], record: Record
) -> None:
    if kind == RecordType.ROWS:
        runs = [(int(rows), bytes.fromhex(header)) for rows, header in meta["r"]]
        fmt = session.layer(meta["l"]).format
        if [fmt.tag, fmt.dim] != meta["f"] or sum(
            n for n, _ in runs
        ) * fmt.row_bytes != record.length:
            raise ValueError("rows of another format: the record that made their session was lost")
        store.apply_rows(session, meta["l"], rows_extents(record, meta["a"], runs, fmt.row_bytes))
    elif kind == RecordType.LOST:
        lost = Extent(None, b"", meta["a"], 0, meta["a"], meta["a"] + meta["r"])
        store.apply_rows(session, meta["l"], (lost,))
    elif kind == RecordType.CUT:
        store.apply_cut(session, meta["c"])
    elif kind == RecordType.BLOCKS:
        _replay_blocks(session, meta["b"], record)


def _replay_blocks(session: Session | None, block_size: int, record: Record) -> None:
    try:
        blocks = Blocks(block_size, record.read())
    except DamagedEntry:
        blocks = None
    if session is not None:
        session.blocks = blocks if blocks and blocks.count else None
