"""The keyspace without a server: records whole and torn, and what all keys count for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pion_server.errors import DamagedEntry
from pion_server.store.budget import MemoryBudget
from pion_server.store.key_changes import Change
from pion_server.store.key_values import (
    LARGE,
    SortedSet,
    element_size,
    key_size,
    value_bytes,
    value_length,
)
from pion_server.store.keyspace import Keyspace
from pion_server.store.log import RecordLog
from pion_server.store.opening import KEYS_KIND, StoreOptions, open_stores
from pion_server.store.scan_order import ScanOrder

KEYS = [b"a", b"b\xff", b"c\0"]
NAMES = [b"x", b"y\xfe", b""]
key = st.sampled_from(KEYS)
value = st.sampled_from([b"", b"v", b"w" * 300, b"L" * LARGE, b"M" * (LARGE + 7)])
Step = tuple[Any, ...]
step: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("set"), key, value, st.sampled_from([None, 2**62])),
    st.tuples(st.just("mset"), key, value, key, value),
    st.tuples(st.just("fields"), key, st.dictionaries(st.sampled_from(NAMES), value, min_size=1)),
    st.tuples(
        st.just("members"),
        key,
        st.dictionaries(st.sampled_from(NAMES), st.floats(-9, 9), min_size=1),
    ),
    st.tuples(st.just("remove"), key, st.sampled_from(NAMES)),
    st.tuples(st.just("expire"), key, st.sampled_from([None, 2**62, 2**61])),
    st.tuples(st.just("delete"), key),
    st.tuples(st.just("clear")),
)


def perform(keyspace: Keyspace, todo: Step) -> None:
    """One change, as a command makes it."""
    kind, *rest = todo
    change = Change()
    held = keyspace.find(rest[0]) if rest else None
    match kind:
        case "set":
            change.put_string(*rest)
        case "mset":
            change.put_string(rest[0], rest[1])
            change.put_string(rest[2], rest[3])
        case "fields":
            fresh = held is None or not isinstance(held.data, dict)
            change.put_fields(rest[0], rest[1].items(), fresh=fresh)
        case "members":
            fresh = held is None or not isinstance(held.data, SortedSet)
            change.put_members(rest[0], rest[1].items(), fresh=fresh)
        case "remove" if held is not None and isinstance(held.data, dict) and len(held.data) > 1:
            change.remove_fields(rest[0], [rest[1]])
        case "remove" if (
            held is not None and isinstance(held.data, SortedSet) and len(held.data) > 1
        ):
            change.remove_members(rest[0], [rest[1]])
        case "expire" if held is not None:
            change.set_expiry(*rest)
        case "delete":
            change.delete(rest[0])
        case "clear":
            change.clear()
    keyspace.commit(change)


def contents(keyspace: Keyspace) -> dict[bytes, Any]:
    """All keys with what they hold and when they expire."""
    found: dict[bytes, Any] = {}
    for name, entry in keyspace.held():
        data: Any = entry.data
        if isinstance(data, dict):
            data = {field: value_bytes(one) for field, one in data.items()}
        elif isinstance(data, SortedSet):
            assert sorted(data.scores.items()) == sorted((m, s) for s, m in data.items())
            assert data.items() == sorted(data.items())
            data = data.items()
        else:
            data = value_bytes(data)
        found[name] = data, entry.expires_at
    return found


def counted(keyspace: Keyspace) -> int:
    """What all keys count for, from what they hold."""
    total = 0
    for name, entry in keyspace.held():
        if isinstance(entry.data, dict):
            fields = entry.data.items()
            total += key_size(name) + sum(element_size(f, value_length(v)) for f, v in fields)
        elif isinstance(entry.data, SortedSet):
            total += key_size(name) + sum(element_size(m, 0) for m in entry.data.scores)
        else:
            total += key_size(name, value_length(entry.data))
    return total


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=st.lists(step, max_size=25), save=st.integers(0, 30))
def test_figures_and_files_say_what_the_keys_are(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step], save: int
) -> None:
    directory = tmp_path_factory.mktemp("keys")
    stores = open_stores(StoreOptions(directory))
    for number, todo in enumerate(steps):
        perform(stores.keyspace, todo)
        if number == save:
            saving = stores.begin_save()
            saving.write()
            saving.finish()
            assert saving.adopt()
        keyspace = stores.keyspace
        assert keyspace.stored_bytes == counted(keyspace)
        assert keyspace.expiring == sum(e.expires_at is not None for _, e in keyspace.held())
    before, order = contents(stores.keyspace), [name for name, _ in stores.keyspace.held()]
    stores.close()
    again = open_stores(StoreOptions(directory))
    assert contents(again.keyspace) == before
    assert [name for name, _ in again.keyspace.held()] == order
    assert again.keyspace.stored_bytes == counted(again.keyspace)
    again.close()
    shutil.rmtree(directory)


def test_a_torn_log_holds_whole_commands_only(tmp_path: Path) -> None:
    """Cut anywhere, what is left is what some number of commands had made."""
    stores = open_stores(StoreOptions(tmp_path / "whole"))
    steps: list[Step] = [
        ("mset", b"a", b"1" * 200, b"b\xff", b"2" * LARGE),
        ("fields", b"c\0", {b"x": b"3" * 50, b"y\xfe": b"4" * LARGE}),
        ("members", b"a", {b"x": 1.5, b"y\xfe": -2.0}),
        ("mset", b"c\0", b"5", b"b\xff", b"6"),
        ("delete", b"a"),
    ]
    history, ends = [contents(stores.keyspace)], [0]
    for todo in steps:
        perform(stores.keyspace, todo)
        history.append(contents(stores.keyspace))
        ends.append(stores.keyspace.log.end)
    stores.close()
    log = (tmp_path / "whole" / "pion.wal.0").read_bytes()
    cuts = {end + shift for end in ends for shift in (-60, -1, 0, 1, 45, 120)}
    for cut in sorted(cut for cut in cuts if 0 <= cut <= len(log)):
        directory = tmp_path / f"cut{cut}"
        directory.mkdir()
        (directory / "pion.wal.0").write_bytes(log[:cut])
        torn = open_stores(StoreOptions(directory))
        left = contents(torn.keyspace)
        torn.close()
        done = max(number for number, end in enumerate(ends) if end <= cut)
        # A last record without its second head is whole once its body is.
        assert left in (history[done], history[min(done + 1, len(steps))]), cut


def test_damage_to_one_small_value_costs_its_neighbours_nothing(tmp_path: Path) -> None:
    """They lie in one record: of a command with several values, and of many keys in a snapshot."""
    stores = open_stores(StoreOptions(tmp_path / "a"))
    perform(stores.keyspace, ("mset", b"one", b"1" * 100, b"two", b"2" * 100))
    perform(stores.keyspace, ("set", b"three", b"3" * 100, None))
    stores.close()
    for name in ("pion.wal.0", "pion.snapshot.0"):
        path = tmp_path / "a" / name
        data = path.read_bytes()
        path.write_bytes(data.replace(b"2" * 100, b"2" * 99 + b"x"))
        stores = open_stores(StoreOptions(tmp_path / "a"))
        values: dict[bytes, Any] = {key: entry.data for key, entry in stores.keyspace.held()}
        assert (values[b"one"], values[b"three"]) == (b"1" * 100, b"3" * 100)
        with pytest.raises(DamagedEntry):
            value_bytes(values[b"two"])
        stores.close()
        path.write_bytes(data)
        stores = open_stores(StoreOptions(tmp_path / "a"))
        saving = stores.begin_save()
        saving.write()
        saving.finish()
        assert saving.adopt()
        stores.close()


def test_a_log_that_takes_nothing_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyspace = Keyspace(RecordLog(tmp_path / "log", tmp_path, KEYS_KIND))
    perform(keyspace, ("set", b"a", b"old", None))
    before = contents(keyspace)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(keyspace.log.file), "write", full)
    for todo in (("set", b"a", b"new", None), ("fields", b"b\xff", {b"x": b"1"}), ("clear",)):
        with pytest.raises(Exception, match="No space left"):
            perform(keyspace, todo)
        assert contents(keyspace) == before


def test_a_full_store_evicts_few_of_many_without_looking_at_all(tmp_path: Path) -> None:
    budget = MemoryBudget()
    keyspace = Keyspace(RecordLog(None, tmp_path, KEYS_KIND), budget=budget)
    for number in range(500):
        perform(keyspace, ("set", b"%04d" % number, b"v" * 100, None))
    budget.limit = keyspace.stored_bytes
    for number in range(100):
        keyspace.promise(b"%04d" % number)
    perform(keyspace, ("set", b"new!", b"v" * 100, None))
    assert keyspace.find(b"0100") is None
    assert len(keyspace) == 500
    assert all(keyspace.find(b"%04d" % number) for number in range(100))


@given(data=st.data())
def test_scan_order_misses_nothing_and_repeats_nothing(data: st.DataObject) -> None:
    numbers: dict[bytes, int] = {}
    order = ScanOrder(numbers.get)

    def add(name: bytes) -> None:
        numbers[name] = order.add(name, len(numbers))

    stay = [b"stay%d" % number for number in range(data.draw(st.integers(0, 20)))]
    for name in stay:
        add(name)
    found: list[bytes] = []
    cursor, turn = 0, 0
    while True:
        cursor, names = order.after(cursor, data.draw(st.integers(1, 5)))
        found += names
        if cursor == 0 or turn > 60:
            break
        name = b"other%d" % data.draw(st.integers(0, 5))
        if name in numbers:
            del numbers[name]
        elif turn < 30:
            add(name)
        turn += 1
    assert [name for name in found if name in set(stay)] == stay


def use_a_clock(start: float) -> tuple[Callable[[], float], Callable[[float], None]]:
    """A clock, and what sets it forward."""
    now = [start]

    def forward(seconds: float) -> None:
        now[0] += seconds

    return (lambda: now[0]), forward


def test_a_key_that_expires_between_look_and_change_is_still_changed(tmp_path: Path) -> None:
    clock, forward = use_a_clock(1000.0)
    log = RecordLog(tmp_path / "log", tmp_path, KEYS_KIND)
    keyspace = Keyspace(log, wall_clock=clock)
    perform(keyspace, ("fields", b"a", {b"x": b"1"}))
    perform(keyspace, ("expire", b"a", 1_000_500))
    change = Change()
    change.put_fields(b"a", [(b"y", b"2")], fresh=keyspace.find(b"a") is None)
    change.set_expiry(b"a", None)
    forward(1.0)
    keyspace.commit(change)
    assert contents(keyspace) == {b"a": ({b"x": b"1", b"y": b"2"}, None)}


def test_what_exists_promises_ends(tmp_path: Path) -> None:
    clock, forward = use_a_clock(100.0)
    budget = MemoryBudget(2 * key_size(b"a", 1000))
    log = RecordLog(None, tmp_path, KEYS_KIND)
    keyspace = Keyspace(log, budget=budget, clock=clock)
    perform(keyspace, ("set", b"a", b"v" * 1000, None))
    perform(keyspace, ("set", b"b", b"v" * 1000, None))
    assert keyspace.promise(b"a")
    assert keyspace.promise(b"b")
    with pytest.raises(Exception, match="nothing left to evict"):
        perform(keyspace, ("set", b"c", b"v" * 1000, None))
    forward(11)
    perform(keyspace, ("set", b"c", b"v" * 1000, None))
    assert keyspace.find(b"a") is None


def test_times_kept_for_keys_set_again_do_not_pile_up(tmp_path: Path) -> None:
    clock, forward = use_a_clock(1000.0)
    keyspace = Keyspace(RecordLog(None, tmp_path, KEYS_KIND), wall_clock=clock)
    for number in range(5000):
        perform(keyspace, ("set", b"a", b"v", 2_000_000 + number))
    assert len(keyspace._due) < 1100
    assert keyspace.expiring == 1
    forward(1003.0)
    keyspace.forget_expired()
    assert len(keyspace) == 1
    forward(2.0)
    keyspace.forget_expired()
    assert len(keyspace) == keyspace.expiring == keyspace.stored_bytes == 0
