"""The stores as a command sees them, and the same data directory opened again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pion_server.errors import BadArgument, DamagedEntry, LogFailed, NotFound, OutOfMemory, Stale
from pion_server.formats import InputType
from pion_server.payload import FileSpan, Payload
from pion_server.store.files import DirectoryInUse
from pion_server.store.opening import StoreOptions, Stores, open_stores
from pion_server.store.schema import LayerSpec, Schema, uniform
from pion_server.store.sessions import Blocks
from pion_server.store.vstore import VStore, membership

ME, OTHER = object(), object()
DIM = 32


def body(payload: Payload) -> bytes:
    pieces = []
    for chunk in payload.chunks():
        if isinstance(chunk, FileSpan):
            pieces.append(chunk.file.read(chunk.offset, chunk.length))  # type: ignore[attr-defined]
        else:
            pieces.append(bytes(chunk))
    data = b"".join(pieces)
    assert len(data) == payload.nbytes
    return data


def packed(store: VStore, sid: bytes, layer: int, start: int, end: int) -> bytes | None:
    rows = store.rows(sid, layer, start, end)
    if rows is None:
        return None
    rows.verify()
    return body(rows.packed())


def blob(seed: int, rows: int, dtype: str = "f4") -> bytes:
    return np.random.default_rng(seed).standard_normal((rows, DIM)).astype(dtype).tobytes()


def open_at(tmp_path: Path, **options: object) -> Stores:
    return open_stores(StoreOptions(tmp_path, **options))  # type: ignore[arg-type]


def register(store: VStore, ns: bytes, fmt: str = "fp32", owner: object = ME) -> None:
    store.register(ns, (uniform(fmt, DIM), uniform(fmt, DIM)), owner=owner)


def save(stores: Stores) -> None:
    saving = stores.begin_save()
    saving.write()
    saving.finish()
    assert saving.adopt()
    saving.take_apart()


@pytest.mark.parametrize("saved", [False, True])
def test_rows_come_back_bit_equal_after_reopening(tmp_path: Path, saved: bool) -> None:
    stores = open_at(tmp_path)
    register(stores.vstore, b"ns")
    first, second = blob(1, 8), blob(2, 4)
    stores.vstore.store(b"ns_pk", 0, 0, 8, first, owner=ME)
    stores.vstore.store(b"ns_pk", 0, 4, 4, second, owner=ME)
    stores.vstore.store(b"ns_pv", 3, 0, 8, first, owner=ME)
    stores.ssm.store(b"ns", 7, b"state", owner=ME)
    expected = first[: 4 * DIM * 4] + second
    assert packed(stores.vstore, b"ns_pk", 0, 0, 8) == expected
    if saved:
        save(stores)
        assert packed(stores.vstore, b"ns_pk", 0, 0, 8) == expected
        assert (tmp_path / "pion.vstore.wal.0").stat().st_size == 0
        assert not list(tmp_path.glob("*.tmp"))
    stores.close()
    again = open_at(tmp_path)
    assert again.notices == []
    assert packed(again.vstore, b"ns_pk", 0, 0, 8) == expected
    assert packed(again.vstore, b"ns_pv", 3, 0, 8) == first
    assert again.vstore.stored_bytes == 16 * DIM * 4
    record = again.ssm.fetch(b"ns", 7)
    assert record is not None
    assert record.read() == b"state"
    again.close()


def test_rows_never_written_are_missing_not_zero(tmp_path: Path) -> None:
    store = open_at(tmp_path).vstore
    register(store, b"ns")
    store.store(b"ns_pk", 0, 4, 2, blob(1, 2), owner=ME)
    assert store.session(b"ns_pk").rows(0) == 6
    for start, end in ((0, 6), (3, 5), (5, 7), (0, 1)):
        assert packed(store, b"ns_pk", 0, start, end) is None
    assert packed(store, b"ns_pk", 0, 4, 6) == blob(1, 2)
    assert packed(store, b"ns_pk", 1, 0, 1) is None


def test_a_refused_store_changes_nothing(tmp_path: Path) -> None:
    store = open_at(tmp_path).vstore
    register(store, b"ns", "fp16")
    before = store.log.seq
    with pytest.raises(BadArgument, match=r"^ERR V\.STOREBATCH: blob size"):
        store.store(b"ns_pk", 0, 0, 2, blob(1, 2)[:-1], owner=ME)
    with pytest.raises(BadArgument):
        store.store(b"ns_pk", 256, 0, 1, blob(1, 1), owner=ME)
    with pytest.raises(NotFound, match="session not found"):
        store.store(b"no", 0, 0, 1, blob(1, 1), owner=ME)
    with pytest.raises(Stale):
        store.store(b"ns_pk", 0, 0, 1, blob(1, 1), gen=5, owner=ME)
    assert store.log.seq == before
    assert store.stored_bytes == 0


def test_least_recently_used_pair_goes_first_and_whole(tmp_path: Path) -> None:
    stores = open_at(tmp_path, max_sessions=4)
    store = stores.vstore
    for name in (b"a", b"b"):
        register(store, name)
        store.store(name + b"_pk", 0, 0, 1, blob(1, 1), owner=ME)
    assert store.lookup(b"a")
    register(store, b"c")
    assert store.lookup(b"b") is None
    assert store.lookup(b"a")
    assert store.evictions == 2
    store.pin(b"a", True)
    store.pin(b"c", True)
    with pytest.raises(BadArgument, match="no free slots"):
        register(store, b"d")
    stores.close()
    again = open_at(tmp_path, max_sessions=4).vstore
    assert sorted(s.sid for s in again.table) == [b"a_pk", b"a_pv", b"c_pk", b"c_pv"]
    assert again.pins == {b"a", b"c"}


def test_memory_limit_evicts_then_refuses(tmp_path: Path) -> None:
    row = DIM * 4
    stores = open_at(tmp_path, max_memory=10 * row)
    store = stores.vstore
    for name in (b"a", b"b"):
        register(store, name)
        store.store(name + b"_pk", 0, 0, 4, blob(1, 4), owner=ME)
    with pytest.raises(OutOfMemory):
        store.store(b"b_pv", 0, 0, 7, blob(1, 7), owner=ME)
    assert store.lookup(b"a")
    store.store(b"b_pv", 0, 0, 6, blob(1, 6), owner=ME)
    assert store.lookup(b"a") is None
    stores.ssm.store(b"x", 0, b"." * row, owner=ME)
    assert store.lookup(b"b") is None


def test_a_manifest_belongs_to_its_fill(tmp_path: Path) -> None:
    stores = open_at(tmp_path)
    store, manifests = stores.vstore, stores.vstore.manifests
    gen = manifests.begin(b"ns", ME)
    assert manifests.begin(b"ns", OTHER) == 0
    register(store, b"ns")
    assert store.lookup(b"ns") is None
    store.store(b"ns_pk", 0, 0, 1, blob(1, 1), gen=gen, owner=ME)
    stores.ssm.store(b"ns", 0, b"s", gen=gen, owner=ME)
    manifests.set(b"ns", gen, b"blob")
    assert manifests.get(b"ns") == (gen, b"blob")
    assert store.lookup(b"ns")
    with pytest.raises(Stale):
        store.store(b"ns_pk", 0, 0, 1, blob(2, 1), gen=gen, owner=ME)
    save(stores)
    stores.close()
    stores = open_at(tmp_path)
    store, manifests = stores.vstore, stores.vstore.manifests
    assert manifests.get(b"ns") == (gen, b"blob")
    store.store(b"ns_pv", 0, 0, 1, blob(2, 1), owner=OTHER)
    assert manifests.get(b"ns") is None
    assert manifests.begin(b"ns", ME) > gen
    store.store(b"ns_pv", 0, 0, 1, blob(2, 1), owner=ME)
    assert manifests.fill(b"ns")
    store.store(b"ns_pv", 0, 0, 1, blob(2, 1), owner=OTHER)
    assert manifests.fill(b"ns") is None


def test_dropping_a_prefix_with_a_manifest_drops_its_state(tmp_path: Path) -> None:
    stores = open_at(tmp_path)
    for name, managed in ((b"m", True), (b"u", False)):
        register(stores.vstore, name)
        gen = stores.vstore.manifests.begin(name, ME) if managed else None
        stores.ssm.store(name, 0, b"s", gen=gen, owner=ME)
        if gen:
            stores.vstore.manifests.set(name, gen, b"m")
    assert stores.vstore.drop_prefixes([b"m", b"u", b"none"], ME) == 2
    assert stores.ssm.fetch(b"m", 0) is None
    assert stores.ssm.fetch(b"u", 0) is not None


def test_restore_truncates_and_survives(tmp_path: Path) -> None:
    stores = open_at(tmp_path)
    store = stores.vstore
    store.create(b"s", uniform("int8", DIM), ME)
    store.store(b"s", 0, 0, 4, blob(1, 4), owner=ME)
    before = packed(store, b"s", 0, 0, 4)
    number = store.snapshot(b"s")
    store.store(b"s", 0, 4, 4, blob(2, 4), owner=ME)
    store.store(b"s", 1, 0, 4, blob(2, 4), owner=ME)
    store.restore(b"s", number, ME)
    assert packed(store, b"s", 0, 0, 4) == before
    assert store.session(b"s").rows(1) == 0
    stores.close()
    again = open_at(tmp_path).vstore
    assert packed(again, b"s", 0, 0, 4) == before
    assert again.session(b"s").rows(0) == 4


def test_schema_sessions_and_block_tables_survive(tmp_path: Path) -> None:
    stores = open_at(tmp_path)
    schema = Schema(LayerSpec("int8", 1), (LayerSpec("fp16", DIM), LayerSpec("mlx4g32", 64)))
    hashes = np.arange(10, dtype="<u8").tobytes()
    stores.vstore.register(b"ns", (schema, schema), blocks=Blocks(16, hashes), owner=ME)
    stores.vstore.store(b"ns_pk", 0, 0, 2, blob(3, 2, "f2"), input=InputType.F16, owner=ME)
    for _ in range(2):
        save(stores)
        stores.close()
        stores = open_at(tmp_path)
    assert stores.vstore.session(b"ns_pv").schema == schema
    assert packed(stores.vstore, b"ns_pk", 0, 0, 2) == blob(3, 2, "f2")
    blocks = stores.vstore.blocks(b"ns")
    assert blocks == Blocks(16, hashes)
    assert blocks is not None
    probes = np.array([3, 99, 0, 9, 9, 10, 1, 2, 5], dtype="<u8").tobytes()
    assert membership(blocks, probes) == bytes([0b11011101, 0b1])


def test_writes_during_a_save_are_kept(tmp_path: Path) -> None:
    stores = open_at(tmp_path)
    store = stores.vstore
    register(store, b"ns")
    store.store(b"ns_pk", 0, 0, 6, blob(1, 6), owner=ME)
    saving = stores.begin_save()
    store.store(b"ns_pk", 0, 4, 4, blob(2, 4), owner=ME)
    saving.write()
    store.store(b"ns_pv", 0, 0, 4, blob(3, 4), owner=ME)
    register(store, b"new")
    saving.finish()
    assert saving.adopt()
    saving.take_apart()
    expected = blob(1, 6)[: 4 * DIM * 4] + blob(2, 4)
    for _ in range(2):
        assert packed(store, b"ns_pk", 0, 0, 8) == expected
        assert packed(store, b"ns_pv", 0, 0, 4) == blob(3, 4)
        assert store.lookup(b"new")
        stores.close()
        stores = open_at(tmp_path)
        store = stores.vstore


def test_a_flipped_bit_is_an_error_for_its_entry_only(tmp_path: Path) -> None:
    stores = open_at(tmp_path)
    store = stores.vstore
    register(store, b"ns")
    for layer in range(3):
        store.store(b"ns_pk", layer, 0, 4, blob(layer, 4), owner=ME)
    stores.close()
    path = tmp_path / "pion.vstore.wal.0"
    data = bytearray(path.read_bytes())
    data[data.index(blob(1, 4)) + 100] ^= 4
    path.write_bytes(data)
    stores = open_at(tmp_path)
    for _ in range(2):
        for layer in (0, 2):
            assert packed(stores.vstore, b"ns_pk", layer, 0, 4) == blob(layer, 4)
        with pytest.raises(DamagedEntry):
            packed(stores.vstore, b"ns_pk", 1, 0, 4)
        save(stores)
        stores.close()
        stores = open_at(tmp_path)
    stores.vstore.store(b"ns_pk", 1, 0, 4, blob(9, 4), owner=ME)
    assert packed(stores.vstore, b"ns_pk", 1, 0, 4) == blob(9, 4)


def test_any_single_damaged_byte_leaves_every_other_record(tmp_path: Path) -> None:
    """Every byte of the log in turn: the data is bit-equal or its entry is an error."""
    stores = open_at(tmp_path / "a")
    register(stores.vstore, b"n")
    rows = [blob(layer, 1) for layer in range(3)]
    for layer, row in enumerate(rows):
        stores.vstore.store(b"n_pk", layer, 0, 1, row, owner=ME)
    stores.close()
    data = (tmp_path / "a" / "pion.vstore.wal.0").read_bytes()
    target = tmp_path / "b"
    target.mkdir()
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        (target / "pion.vstore.wal.0").write_bytes(damaged)
        stores = open_at(target)
        wrong = 0
        for layer, row in enumerate(rows):
            try:
                wrong += packed(stores.vstore, b"n_pk", layer, 0, 1) != row
            except DamagedEntry:
                wrong += 1
                assert data.index(row) <= place < data.index(row) + len(row)
        assert wrong <= 1, place
        if not any(data.index(row) <= place < data.index(row) + len(row) for row in rows):
            assert wrong == 0, place
        stores.close()


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\x5a" * 1000, b"PREC" * 20, b"\0"])
def test_a_torn_or_filled_tail_is_cut_and_later_writes_survive(tmp_path: Path, tail: bytes) -> None:
    """CASES E06, E07."""
    stores = open_at(tmp_path)
    register(stores.vstore, b"n")
    stores.vstore.store(b"n_pk", 0, 0, 1, blob(1, 1), owner=ME)
    stores.close()
    with (tmp_path / "pion.vstore.wal.0").open("ab") as file:
        file.write(tail)
    stores = open_at(tmp_path, keep_cut=True)
    assert any(f"{len(tail)} bytes" in notice for notice in stores.notices)
    kept = list(tmp_path.glob("pion.vstore.wal.0.cut-*"))
    assert [path.read_bytes() for path in kept] == [tail]
    stores.vstore.store(b"n_pk", 1, 0, 1, blob(2, 1), owner=ME)
    stores.close()
    stores = open_at(tmp_path)
    assert stores.notices == []
    assert packed(stores.vstore, b"n_pk", 0, 0, 1) == blob(1, 1)
    assert packed(stores.vstore, b"n_pk", 1, 0, 1) == blob(2, 1)


def test_log_cut_at_every_byte_of_its_last_record(tmp_path: Path) -> None:
    stores = open_at(tmp_path / "a")
    register(stores.vstore, b"n")
    stores.vstore.store(b"n_pk", 0, 0, 1, blob(1, 1), owner=ME)
    whole = stores.vstore.log.end
    stores.vstore.store(b"n_pk", 0, 0, 1, blob(2, 1), owner=ME)
    stores.close()
    data = (tmp_path / "a" / "pion.vstore.wal.0").read_bytes()
    target = tmp_path / "b"
    target.mkdir()
    for length in range(whole, len(data)):
        (target / "pion.vstore.wal.0").write_bytes(data[:length])
        stores = open_at(target)
        assert packed(stores.vstore, b"n_pk", 0, 0, 1) == blob(1, 1)
        assert stores.vstore.log.end == whole
        stores.close()


def test_a_full_disk_is_an_error_with_nothing_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = open_at(tmp_path)
    register(stores.vstore, b"n")
    stores.vstore.store(b"n_pk", 0, 0, 1, blob(1, 1), owner=ME)
    end = stores.vstore.log.end

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", full)
        with pytest.raises(LogFailed, match="No space left"):
            stores.vstore.store(b"n_pk", 0, 0, 1, blob(2, 1), owner=ME)
    assert stores.vstore.log.end == end
    assert packed(stores.vstore, b"n_pk", 0, 0, 1) == blob(1, 1)
    stores.vstore.store(b"n_pk", 0, 0, 1, blob(3, 1), owner=ME)
    stores.close()
    assert packed(open_at(tmp_path).vstore, b"n_pk", 0, 0, 1) == blob(3, 1)


def test_a_failed_fsync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES E09."""
    stores = open_at(tmp_path)
    register(stores.vstore, b"n")

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", broken)
        with pytest.raises(LogFailed, match="fsync"):
            stores.sync()
    with pytest.raises(LogFailed, match="failed earlier"):
        stores.vstore.store(b"n_pk", 0, 0, 1, blob(1, 1), owner=ME)


def test_one_server_a_directory_and_private_files(tmp_path: Path) -> None:
    stores = open_at(tmp_path / "data")
    with pytest.raises(DirectoryInUse, match="in use"):
        open_at(tmp_path / "data")
    register(stores.vstore, b"n")
    save(stores)
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "data").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path
    stores.close()
    open_at(tmp_path / "data").close()


@pytest.mark.parametrize("content", [b"PIONVS01" + b"\0" * 100, b"hello", b"\0" * 64])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    from pion_server.store.log import ForeignFile

    path = tmp_path / "pion.vstore.0"
    path.write_bytes(content)
    with pytest.raises(ForeignFile, match=r"pion\.vstore\.0"):
        open_at(tmp_path)
    assert path.read_bytes() == content


def test_ssm_budget_evicts_whole_sids_and_refuses_what_never_fits(tmp_path: Path) -> None:
    """CASES F04."""
    ssm = open_at(tmp_path, ssm_budget=100).ssm
    ssm.store(b"a", 0, b"." * 30, owner=ME)
    ssm.store(b"a", 1, b"." * 30, owner=ME)
    ssm.store(b"b", 0, b"." * 30, owner=ME)
    with pytest.raises(OutOfMemory):
        ssm.store(b"c", 0, b"." * 101, owner=ME)
    assert ssm.fetch(b"b", 0)
    assert ssm.fetch(b"a", 0)
    ssm.store(b"c", 0, b"." * 40, owner=ME)
    assert ssm.fetch(b"b", 0) is None
    assert ssm.fetch(b"a", 1)
    ssm.store(b"e", 0, b"", owner=ME)
    empty = ssm.fetch(b"e", 0)
    assert empty is not None
    assert empty.read() == b""


def test_expired_prefixes_go_and_expiry_survives(tmp_path: Path) -> None:
    stores = open_at(tmp_path)
    register(stores.vstore, b"n")
    assert stores.vstore.expire(b"n", 60)
    assert not stores.vstore.expire(b"none", 60)
    stores.close()
    stores = open_at(tmp_path)
    assert stores.vstore.drop_expired() == 0
    stores.vstore._wall_clock = lambda: __import__("time").time() + 61
    assert stores.vstore.drop_expired() == 1
    assert not stores.vstore.holds(b"n")


@pytest.mark.parametrize(("fmt", "extents"), [("fp32", 1), ("int8", 300)])
def test_a_save_joins_rows_that_came_one_by_one(tmp_path: Path, fmt: str, extents: int) -> None:
    stores = open_at(tmp_path)
    register(stores.vstore, b"n", fmt)
    rows = blob(4, 300)
    width = DIM * 4
    for at in range(300):
        piece = rows[at * width : (at + 1) * width]
        stores.vstore.store(b"n_pk", 0, at, 1, piece, owner=ME)
    before = packed(stores.vstore, b"n_pk", 0, 0, 300)
    save(stores)
    assert len(stores.vstore.session(b"n_pk").layers[0].extents) == extents
    assert packed(stores.vstore, b"n_pk", 0, 0, 300) == before
    stores.close()
    assert packed(open_at(tmp_path).vstore, b"n_pk", 0, 0, 300) == before
