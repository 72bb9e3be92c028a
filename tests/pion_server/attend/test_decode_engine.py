"""Decode steps against float64, in the engine itself: chunks, single tokens, windows, rewinds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mlx.core")

from pion_server.attend import portable
from pion_server.attend.decode import Suffix
from pion_server.attend.engine import Engine
from pion_server.attend.requests import DIMS
from pion_server.attend.sessions import Shape, Slot
from pion_server.errors import Replay
from tests.attention_client import normal
from tests.pion_server.attend.decoding import F32, Step, assert_equal_to_float64

SINGLE = Engine(half=False, window=0)
HALF = Engine(half=True, window=0)
PREFIX = 20


def slot_of(engine: Engine, keys: F32, values: F32) -> Slot:
    slot, k, v = engine.allocate((b"s", 0), Shape(*keys.shape))
    np.copyto(k, keys, casting="same_kind")
    np.copyto(v, values, casting="same_kind")
    return slot


def ask(engine: Engine, slot: Slot | None, suffix: Suffix, step: Step) -> memoryview:
    request = step.request()
    suffix.planned = max(suffix.planned, request.end)
    return engine.step(slot, suffix, request)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    tokens=st.integers(1, 40),
    chunks=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=5),
    dim=st.sampled_from(DIMS),
    window=st.sampled_from([0, 0, 1, 2, 7, 30, 1000]),
    shuffled=st.booleans(),
)
def test_any_steps_equal_float64(
    seed: int,
    kv_heads: int,
    group: int,
    tokens: int,
    chunks: list[tuple[int, int]],
    dim: int,
    window: int,
    shuffled: bool,
) -> None:
    """Each chunk rewinds by up to its second number and appends as many rows as its first."""
    heads = kv_heads * group
    rng = np.random.default_rng(seed)
    head_map = bytes(head // group for head in range(heads))
    if shuffled:  # any map is allowed, also one that leaves kv heads unread
        head_map = rng.integers(0, kv_heads, heads, np.uint8).tobytes()
    prefix = normal(seed, kv_heads, tokens, dim), normal(seed + 1, kv_heads, tokens, dim)
    slot = slot_of(SINGLE, *prefix)
    suffix = Suffix(slot.shape)
    held = np.zeros((2, kv_heads, 0, dim), np.float32)
    for rows, back in chunks:
        length = held.shape[2]
        drop = min(back, length)
        new = rng.standard_normal((2, kv_heads, rows, dim), dtype=np.float32)
        held = np.concatenate([held[:, :, : length - drop], new], axis=2)
        many = int(rng.integers(1, held.shape[2] + 1))
        q = rng.standard_normal((heads, many, dim), dtype=np.float32)
        step = Step(q, new[0], new[1], head_map, tokens, length, drop, window)
        reply = ask(SINGLE, slot, suffix, step)
        assert_equal_to_float64(step, reply, prefix, (held[0], held[1]))
    assert suffix.length == held.shape[2]


@pytest.mark.parametrize("window", [0, 5, 70, 200])
def test_many_small_tiles_equal_one(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Windows and the causal edge cut through tiles; some tiles are seen by some rows only."""
    monkeypatch.setattr(portable, "TILE_BYTES", 1)
    prefix = normal(1, 2, 200, 32), normal(2, 2, 200, 32)
    slot = slot_of(SINGLE, *prefix)
    suffix = Suffix(slot.shape)
    k, v, q = normal(3, 2, 150, 32), normal(4, 2, 150, 32), normal(5, 4, 150, 32)
    step = Step(q, k, v, b"\0\0\1\1", 200, window=window)
    assert_equal_to_float64(step, ask(SINGLE, slot, suffix, step), prefix, (k, v))


def test_an_engine_of_half_floats_keeps_suffixes_whole() -> None:
    prefix = normal(1, 2, PREFIX, 64), normal(2, 2, PREFIX, 64)
    rounded = [side.astype(np.float16).astype(np.float32) for side in prefix]
    slot = slot_of(HALF, *prefix)
    k, v, q = normal(3, 2, 5, 64), normal(4, 2, 5, 64), normal(5, 4, 5, 64)
    step = Step(q, k, v, b"\0\0\1\1", PREFIX)
    found = ask(HALF, slot, Suffix(slot.shape), step)
    assert_equal_to_float64(step, found, (rounded[0], rounded[1]), (k, v))


def test_growing_keeps_every_row() -> None:
    prefix = normal(1, 1, 3, 32), normal(2, 1, 3, 32)
    slot = slot_of(SINGLE, *prefix)
    suffix = Suffix(slot.shape)
    k, v = normal(3, 1, 300, 32), normal(4, 1, 300, 32)
    for at in range(300):
        step = Step(normal(at, 1, 1, 32), k[:, at : at + 1], v[:, at : at + 1], b"\0", 3, length=at)
        reply = ask(SINGLE, slot, suffix, step)
        if at % 60 == 59:
            grown = k[:, : at + 1], v[:, : at + 1]
            assert_equal_to_float64(step, reply, prefix, grown)


def begun(key: float = 1.0) -> tuple[Slot, Suffix, Step]:
    """A suffix of 3 rows, and the step that appended the last of them, with that value in K."""
    slot = slot_of(SINGLE, normal(1, 1, 9, 32), normal(2, 1, 9, 32))
    suffix = Suffix(slot.shape)
    k, v = normal(3, 1, 3, 32), normal(4, 1, 3, 32)
    k[0, 2, 5] = key
    first = Step(normal(5, 1, 2, 32), k[:, :2], v[:, :2], b"\0", 9)
    last = Step(normal(6, 1, 1, 32), k[:, 2:], v[:, 2:], b"\0", 9, length=2)
    ask(SINGLE, slot, suffix, first)
    ask(SINGLE, slot, suffix, last)
    return slot, suffix, last


@pytest.mark.parametrize("key", [1.0, np.nan])
def test_a_step_done_twice_is_done_once(key: float) -> None:
    slot, suffix, last = begun(key)
    assert ask(SINGLE, slot, suffix, last) == ask(SINGLE, slot, suffix, last)
    assert suffix.length == 3
    rewind = last.but(k=last.v, length=3, drop=2)
    replies = {bytes(ask(SINGLE, slot, suffix, rewind)) for _ in range(3)}
    assert len(replies) == 1
    assert suffix.length == 2


@pytest.mark.parametrize("changed", [{"length": 1}, {"length": 4}, {"length": 0}, {"length": 9}])
def test_another_length_is_replay_and_changes_nothing(changed: dict[str, int]) -> None:
    slot, suffix, last = begun()
    assert suffix.rows is not None
    before = suffix.rows.key_rows.copy()
    with pytest.raises(Replay, match="3 tokens"):
        ask(SINGLE, slot, suffix, last.but(**changed))
    assert suffix.length == 3
    np.testing.assert_array_equal(suffix.rows.key_rows, before)


def test_other_rows_for_the_last_position_are_no_retry() -> None:
    slot, suffix, last = begun()
    other = last.v.copy()
    other[0, 0, 31] = np.nextafter(other[0, 0, 31], 2)
    with pytest.raises(Replay):
        ask(SINGLE, slot, suffix, last.but(v=other))
    assert suffix.length == 3


def test_rows_without_queries_and_queries_without_rows() -> None:
    slot, suffix, last = begun()
    none = last.but(q=last.q[:, :0], length=3)
    assert ask(SINGLE, None, suffix, none).nbytes == 0
    assert suffix.length == 4
    again = last.but(k=last.k[:, :0], v=last.v[:, :0], length=4, drop=1)
    np.testing.assert_array_equal(
        again.parts(ask(SINGLE, slot, suffix, again))[1],
        again.parts(ask(SINGLE, slot, suffix, again.but(length=3, drop=0)))[1],
    )
