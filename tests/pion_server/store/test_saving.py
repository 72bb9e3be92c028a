"""A SAVE of many small records: what the thread that serves clients must have no part in."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pion_server.commands.saving import save_copy, save_default
from pion_server.config import Config
from pion_server.errors import CommandError
from pion_server.state import ServerState, open_state
from pion_server.store.log import Record
from pion_server.store.opening import StoreOptions, Stores, open_stores
from pion_server.store.schema import uniform
from pion_server.store.vstore import VStore

ME = object()
DIM = 32
PREFIXES, LAYERS = 30, 10
RECORDS = PREFIXES * LAYERS * 2


def blob(seed: int, rows: int = 2) -> bytes:
    return np.random.default_rng(seed).standard_normal((rows, DIM)).astype("f4").tobytes()


def fill(stores: Stores) -> None:
    for number in range(PREFIXES):
        ns = b"n%d" % number
        stores.vstore.register(ns, (uniform("fp32", DIM),) * 2, owner=ME)
        for layer in range(LAYERS):
            stores.vstore.store(ns + b"_pk", layer, 0, 2, blob(layer), owner=ME)
            stores.ssm.store(ns, layer, blob(layer), owner=ME)


def held(store: VStore, sid: bytes, layer: int, rows: int = 2) -> bytes | None:
    found = store.rows(sid, layer, 0, rows)
    return b"".join(bytes(e.read(DIM * 4)) for e in found.extents) if found else None


@pytest.fixture
def state(tmp_path: Path) -> Iterator[ServerState]:
    state = open_state(Config(directory=tmp_path))
    fill(state.stores)
    yield state
    state.close()


@pytest.fixture
def freed_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which records were freed, one entry a record."""
    threads: list[int] = []
    ends = Record.__del__

    def end(record: Record) -> None:
        threads.append(threading.get_ident())
        ends(record)

    monkeypatch.setattr(Record, "__del__", end)
    return threads


def run(state: ServerState, way: str) -> None:
    save = save_default(state) if way == "save" else save_copy(state, "copy")
    assert asyncio.run(save) == "OK"


def test_the_old_records_of_a_save_are_freed_beside_the_loop(
    state: ServerState, freed_in: list[int]
) -> None:
    """All at once they would stop every client: 200,000 did for a fifth of a second."""
    run(state, "save")
    assert len(freed_in) >= RECORDS
    assert threading.get_ident() not in freed_in


def test_what_a_copy_or_a_failed_save_gathered_is_freed_beside_the_loop(
    state: ServerState, freed_in: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(state, "copy")
    assert len(freed_in) >= RECORDS
    del freed_in[:]
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", _fail)
        with pytest.raises(CommandError, match="failed: no more"):
            asyncio.run(save_default(state))
    assert len(freed_in) >= RECORDS
    assert threading.get_ident() not in freed_in
    assert held(state.vstore, b"n7_pk", 3) == blob(3)
    run(state, "save")


def _fail(*_: object) -> None:
    raise OSError(5, "no more")


@pytest.mark.parametrize("way", ["save", "copy"])
def test_no_collection_goes_through_what_a_save_gathers(state: ServerState, way: str) -> None:
    """A pass over all that a SAVE made took half a second, with the interpreter locked."""
    gone_through = [0]

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            seen = (len(gc.get_objects(n)) for n in range(about["generation"] + 1))
            gone_through.append(sum(seen))

    gc.freeze()
    gc.callbacks.append(note)
    try:
        run(state, way)
        assert len([[] for _ in range(3000)])  # whatever was put off happens now
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()
    assert gc.isenabled()
    assert max(gone_through) < 2 * RECORDS


def test_writers_get_their_turn_while_the_index_learns_the_new_places(tmp_path: Path) -> None:
    """Between any two steps: rows over old ones, new rows, cuts, drops, and the same name anew."""
    stores = open_stores(StoreOptions(tmp_path))
    fill(stores)
    store = stores.vstore
    saving = stores.begin_save()
    saving.write()
    saving.finish()
    steps = 0
    expected = {(b"n%d_pk" % n, at): blob(at) for n in range(PREFIXES) for at in range(LAYERS)}
    while not saving.adopt(0):
        number, layer = steps % PREFIXES, steps % LAYERS
        sid = b"n%d_pk" % number
        if steps % 7 == 0:
            store.store(sid, layer, 1, 2, blob(steps), owner=ME)
            if (sid, layer) in expected:
                expected[sid, layer] = expected[sid, layer][: DIM * 4] + blob(steps)
        elif steps in (50, 300):
            store.drop_prefixes([b"n%d" % number], ME)
            stores.ssm.drop(b"n%d" % number, owner=ME)
            store.register(b"n%d" % number, (uniform("fp32", DIM),) * 2, owner=ME)
            store.store(sid, layer, 0, 2, blob(steps), owner=ME)
            expected = {key: data for key, data in expected.items() if key[0] != sid}
            expected[sid, layer] = blob(steps)
        steps += 1
    assert steps >= RECORDS
    saving.take_apart()
    for _ in range(2):
        for (sid, layer), data in expected.items():
            assert held(store, sid, layer, len(data) // DIM // 4) == data
        stores.close()
        stores = open_stores(StoreOptions(tmp_path))
        assert stores.notices == []
        store = stores.vstore
    stores.close()


def test_no_room_is_made_by_eviction_before_the_index_is_in_the_new_files(
    tmp_path: Path,
) -> None:
    """What would go lies in the old files, so nothing would be gained."""
    stores = open_stores(StoreOptions(tmp_path))
    if not stores.vstore.log.file.can_punch():
        pytest.skip("this file system has no holes")
    for number in range(3):
        ns = b"n%d" % number
        stores.vstore.register(ns, (uniform("fp32", DIM),) * 2, owner=ME)
        stores.vstore.store(ns + b"_pk", 0, 0, 2000, blob(number, 2000), owner=ME)
    saving = stores.begin_save()
    for step in (saving.write, saving.finish, lambda: saving.adopt(0)):
        step()
        assert not stores.make_room(100_000, None)
        assert len(stores.vstore.table) == 6
    assert saving.adopt()
    saving.take_apart()
    assert stores.make_room(100_000, None)
    assert len(stores.vstore.table) == 4
    stores.begin_save().abandon()
    assert stores.make_room(100_000, None)
    stores.close()
