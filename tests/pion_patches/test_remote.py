"""A prefix somebody else holds: here a numpy holder, in float64, that can be told to fail."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pion_patches.prefix_entry import CannotSplit, capture_prefix
from pion_patches.remote import (
    RemoteEntry,
    RemoteKVCache,
    RemoteLost,
    RemoteReader,
    RemoteRows,
    remote_slots,
)
from pion_patches.split_cache import PrefixRows
from tests.pion_patches.attention_reference import Array, reference_attention, window_visible

KV_HEADS, HEADS, DIM, COUNT = 2, 6, 16, 11


def drawn(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def wide(array: mx.array) -> Array:
    return np.array(array, dtype=np.float64)


@dataclass
class Holder:
    """Answers from its own copy of the rows; `asked` says which way, `lost` refuses."""

    keys: mx.array
    values: mx.array
    tokens: int = COUNT
    lost: bool = False
    asked: list[str] = field(default_factory=list)
    fetched: int = 0

    def open(self) -> RemoteReader:
        return Reader(self)

    def rows(self, layer: int) -> PrefixRows:
        self.fetched += 1
        return PrefixRows(self.keys, self.values, self.tokens)


@dataclass
class Reader:
    holder: Holder

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteReader:
        return Reader(self.holder)

    def attend(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, need_lse: bool
    ) -> tuple[mx.array, mx.array | None]:
        self._note("attend")
        holder = self.holder
        all_keys = mx.concatenate([holder.keys, keys[None]], axis=2)
        all_values = mx.concatenate([holder.values, values[None]], axis=2)
        seen = window_visible(queries.shape[1], all_keys.shape[2], None)
        out, lse = self._reference(queries[None], all_keys, all_values, seen)
        return out[0], lse[0] if need_lse else None

    def attend_prefix(self, layer: int, queries: mx.array) -> tuple[mx.array, mx.array]:
        self._note("attend_prefix")
        out, lse = self._reference(queries[None], self.holder.keys, self.holder.values, None)
        return out[0], lse[0]

    def _note(self, way: str) -> None:
        self.holder.asked.append(way)
        if self.holder.lost:
            raise RemoteLost("told to")

    @staticmethod
    def _reference(
        queries: mx.array, keys: mx.array, values: mx.array, seen: Any
    ) -> tuple[mx.array, mx.array]:
        # A holder knows no scale but its own.
        parts = (wide(queries), wide(keys), wide(values))
        out, lse = reference_attention(*parts, 1 / DIM**0.5, seen)
        return mx.array(out.astype(np.float32)), mx.array(lse.astype(np.float32))


def make() -> tuple[Holder, RemoteKVCache]:
    holder = Holder(drawn(1, 1, KV_HEADS, COUNT, DIM), drawn(2, 1, KV_HEADS, COUNT, DIM))
    return holder, RemoteKVCache(RemoteRows(holder, 0, KV_HEADS, DIM))


def attend(
    cache: RemoteKVCache, batch: int, rows: int, mask: Any, *, scale: float = 0.3, sinks: Any = None
) -> tuple[mx.array, Any]:
    """Append `rows` new rows and attend with as many queries: found and expected."""
    own = [drawn(seed, batch, KV_HEADS, rows, DIM) for seed in (3, 4)]
    queries = drawn(5, batch, HEADS, rows, DIM)
    keys: Any
    values: Any
    keys, values = cache.update_and_fetch(*own)
    found = keys.pion_attend(queries, values, scale=scale, mask=mask, sinks=sinks)
    own_keys, own_values = cache._own_rows()
    prefix = [mx.repeat(side, batch, axis=0) for side in cache_rows(cache)]
    all_keys = mx.concatenate([prefix[0], own_keys], axis=2)
    all_values = mx.concatenate([prefix[1], own_values], axis=2)
    total = all_keys.shape[2]
    visible = additive = None
    if isinstance(mask, str):
        visible = window_visible(rows, total, None)
    elif mask is not None and mask.dtype == mx.bool_:
        visible = np.array(mask)
    elif mask is not None:
        additive = wide(mask)
    parts = (wide(queries), wide(all_keys), wide(all_values))
    wanted = None if sinks is None else wide(sinks)
    return found, reference_attention(*parts, scale, visible, additive, wanted)[0]


def cache_rows(cache: RemoteKVCache) -> tuple[mx.array, mx.array]:
    holder: Any = cache.prefix.remote
    return holder.keys, holder.values


SEEN = mx.array(np.random.default_rng(6).random((4, COUNT + 4)) < 0.5)
SEEN = mx.concatenate([mx.ones((4, COUNT), dtype=mx.bool_), SEEN[:, COUNT:]], axis=1)
CASES = {
    "one query": (1, 1, None, "attend"),
    "a causal chunk": (1, 4, "causal", "attend"),
    "a chunk that sees all": (1, 4, None, "attend_prefix"),
    "a batch": (3, 1, None, "attend_prefix"),
    "a causal batch": (3, 4, "causal", "attend_prefix"),
    "own rows masked": (1, 4, SEEN, "attend_prefix"),
    "own rows masked by head": (2, 4, mx.repeat(SEEN[None, None], HEADS, axis=1), "attend_prefix"),
    "own rows weighed": (1, 4, mx.where(SEEN, 0.0, -2.5), "attend_prefix"),
}


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.replace(" ", "-"))
def test_attention_there_is_attention_over_all_rows(case: str, sinks: bool) -> None:
    """Scale, grouped heads, sinks, and every mask that leaves the prefix whole."""
    batch, rows, mask, way = CASES[case]
    holder, cache = make()
    found, expected = attend(cache, batch, rows, mask, sinks=drawn(7, HEADS) if sinks else None)
    np.testing.assert_allclose(np.array(found), expected, atol=2e-6)
    assert holder.asked == [way]
    assert holder.fetched == 0
    assert cache.attended == 1


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_a_mask_that_hides_part_of_the_prefix_brings_the_rows_here(kind: str) -> None:
    """A window over a plain cache: the holder can only show all of it."""
    holder, cache = make()
    mask = mx.array(window_visible(4, COUNT + 4, 6))
    if kind == "additive":
        mask = mx.where(mask, 0.0, -mx.inf)
    found, expected = attend(cache, 1, 4, mask)
    np.testing.assert_allclose(np.array(found), expected, atol=2e-6)
    assert holder.asked == []
    assert holder.fetched == 1


def test_a_lost_prefix_goes_on_here_and_is_not_asked_again() -> None:
    holder, cache = make()
    attend(cache, 1, 1, None)
    holder.lost = True
    twin = copy.deepcopy(cache)
    for one in (cache, cache, twin):
        found, expected = attend(one, 1, 1, None)
        np.testing.assert_allclose(np.array(found), expected, atol=2e-6)
    assert holder.asked == ["attend", "attend"]
    assert holder.fetched == 1


def test_evaluating_the_state_fetches_nothing() -> None:
    """mlx-lm evaluates it after every chunk."""
    holder, cache = make()
    assert not cache.state
    attend(cache, 1, 3, "causal")
    keys, values = (side for side in cache.state)
    assert keys.shape == values.shape == (1, KV_HEADS, 3, DIM)
    mx.eval(cache.state)
    assert holder.fetched == 0
    other = RemoteKVCache(cache.prefix)
    other.state = (keys, values)
    assert other.offset == cache.offset == COUNT + 3
    other.state = ()
    assert other.offset == COUNT


def test_the_handle_is_what_models_ask_of_keys() -> None:
    _, cache = make()
    keys: Any
    values: Any
    keys, values = cache.update_and_fetch(*(drawn(seed, 2, KV_HEADS, 3, DIM) for seed in (3, 4)))
    assert keys.shape == values.shape == (2, KV_HEADS, COUNT + 3, DIM)
    assert keys.ndim == 4
    assert keys.dtype == mx.float32
    half = keys.astype(mx.float16), values.astype(mx.float16)
    queries = drawn(5, 2, HEADS, 3, DIM).astype(mx.float16)
    out = half[0].pion_attend(queries, half[1], scale=0.25, mask="causal")
    assert out.dtype == mx.float16
    with pytest.raises(TypeError, match="remote keys need remote values, not array"):
        keys.pion_attend(queries, drawn(4, 2, KV_HEADS, 3, DIM), scale=1.0, mask=None)
    with pytest.raises(ValueError, match="unknown attention mask 'none'"):
        keys.pion_attend(queries, values, scale=1.0, mask="none")


def test_an_entry_opens_caches_that_share_one_reader() -> None:
    holder, one = make()
    template: list[Any] = [object(), object()]
    rows: dict[tuple[int, ...], RemoteRows] = {
        (0,): one.prefix,
        (1,): RemoteRows(holder, 1, KV_HEADS, DIM),
    }
    model = type("Model", (), {})()
    entry = RemoteEntry.of(model, COUNT, remote_slots(template, rows, {}, COUNT), holder)
    first, second = entry.open(), entry.open()
    assert first[0].reader is first[1].reader
    assert first[0].reader is not second[0].reader
    assert entry.nbytes == 0
    assert entry.model() is model
    copied = copy.deepcopy(first)
    assert copied[0].reader is copied[1].reader
    assert copied[0].reader is not first[0].reader
    with pytest.raises(CannotSplit, match="a object cannot be split"):
        remote_slots([*template, object()], rows, {(2,): object()}, COUNT)


def test_a_remote_cache_becomes_an_ordinary_prefix() -> None:
    """Captured, it is held here: rows of the prefix and own rows behind them."""
    holder, cache = make()
    attend(cache, 1, 3, "causal")
    model = type("Model", (), {})()
    entry = capture_prefix(model, [cache], COUNT + 3)
    (plain,) = entry.open()
    assert plain.prefix.keys.shape == (1, KV_HEADS, COUNT + 3, DIM)
    assert mx.array_equal(plain.prefix.keys[..., :COUNT, :], holder.keys)
