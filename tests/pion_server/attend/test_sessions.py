"""Slots without an engine: states, least recent use, the cold registry, bytes, victims."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pion_server.attend.sessions import Key, Shape, Slot, Slots, namespace_of
from pion_server.errors import ColdMiss, NotFound

NONE = cast(Any, None)


def slot(sid: bytes, layer: int = 0, nbytes: int = 10, heads: int = 1) -> Slot:
    return Slot((sid, layer), Shape(heads, 2, 32), NONE, NONE, nbytes)


def filled(*sids: bytes, limit: int = 3, cold_limit: int = 1024) -> Slots:
    slots = Slots(limit, cold_limit)
    for sid in sids:
        slots.put(slot(sid))
    return slots


def states(slots: Slots, *sids: bytes) -> str:
    return "".join(slots.state((sid, 0))[0] for sid in sids)


def test_the_least_recently_stored_or_queried_turns_cold() -> None:
    slots = filled(b"a", b"b", b"c")
    slots.use((b"a", 0))
    slots.put(slot(b"b"))
    slots.put(slot(b"d"))
    assert states(slots, b"a", b"b", b"c", b"d", b"e") == "HHCHM"
    assert (slots.warm, slots.cold, slots.demotions, slots.rehydrates) == (3, 1, 1, 0)


def test_looking_is_no_use() -> None:
    slots = filled(b"a", b"b", b"c")
    slots.state((b"a", 0))
    slots.shape((b"a", 0))
    slots.put(slot(b"d"))
    assert slots.state((b"a", 0)) == "COLD"


def test_cold_and_missing_say_so() -> None:
    slots = filled(b"a", b"b", limit=1)
    with pytest.raises(ColdMiss, match=r"^COLDMISS session evicted to cold tier"):
        slots.use((b"a", 0))
    with pytest.raises(NotFound, match="session not found"):
        slots.use((b"a", 1))
    with pytest.raises(NotFound, match="session not found"):
        slots.shape((b"c", 0))
    assert slots.shape((b"a", 0)) == slots.cold_shape((b"a", 0)) == Shape(1, 2, 32)
    assert slots.cold_shape((b"b", 0)) is None


def test_storing_a_cold_layer_is_a_rehydrate() -> None:
    slots = filled(b"a", b"b", limit=1)
    slots.put(slot(b"a", heads=4))
    assert states(slots, b"a", b"b") == "HC"
    assert slots.rehydrates == 1
    assert slots.use((b"a", 0)).shape.heads == 4


def test_the_cold_registry_forgets_the_one_longest_unused() -> None:
    slots = filled(b"a", b"b", limit=2, cold_limit=2)
    slots.demote((b"b", 0))  # as the memory budget may, out of turn
    slots.put(slot(b"c"))
    slots.put(slot(b"d"))  # demotes a, older than b
    assert states(slots, b"a", b"b", b"c", b"d") == "CCHH"
    slots.put(slot(b"e"))
    assert states(slots, b"a", b"b", b"c", b"d", b"e") == "MCCHH"


def test_bytes_follow_every_change() -> None:
    slots = Slots(2)
    first = slot(b"a", nbytes=10)
    slots.put(first)
    slots.grow(first, 3)
    slots.put(slot(b"b", nbytes=20))
    assert (slots.nbytes, slots.held_bytes((b"a", 0)), slots.held_bytes((b"x", 0))) == (33, 13, 0)
    slots.put(slot(b"a", nbytes=1))
    slots.grow(first, 100)  # replaced meanwhile: nobody holds it
    assert slots.nbytes == 21
    slots.put(slot(b"c", nbytes=5))
    assert slots.nbytes == 6
    assert slots.drop(b"a") == slots.drop(b"c") == 1
    assert slots.nbytes == 0


def test_drop_takes_one_layer_or_all_cold_ones_too() -> None:
    slots = Slots(2)
    for layer in range(4):
        slots.put(slot(b"s", layer))
    slots.put(slot(b"other"))
    assert slots.drop(b"s", 1) == 1
    assert slots.drop(b"s", 1) == 0
    assert slots.drop(b"s") == 3
    assert slots.drop(b"s") == slots.drop(b"none") == 0
    assert (slots.warm, slots.cold) == (1, 0)
    assert slots.state((b"s", 3)) == "MISS"


def test_victims_come_oldest_first_and_spare_the_namespace_that_asks() -> None:
    slots = filled(b"x_attn", b"y", b"x")
    slots.use((b"y", 0))
    assert [v.nbytes for v in slots.victims(None)] == [10, 10, 10]
    [victim] = slots.victims(b"x")
    victim.evict()
    victim.evict()  # gone by then: no harm
    assert states(slots, b"x_attn", b"x", b"y") == "HHC"
    next(iter(slots.victims(b"y"))).evict()
    assert states(slots, b"x_attn", b"x") == "CH"


def test_a_key_is_sid_and_layer_whole() -> None:
    keys: list[Key] = [(b"a", 1), (b"a", 11), (b"a1", 1), (b"A", 1)]
    slots = Slots(9)
    for number, (sid, layer) in enumerate(keys):
        slots.put(slot(sid, layer, nbytes=number))
    assert [slots.use(key).nbytes for key in keys] == [0, 1, 2, 3]


def test_the_namespace_of_an_attention_session() -> None:
    assert namespace_of(b"ns_attn") == b"ns"
    assert namespace_of(b"ns") == b"ns"
