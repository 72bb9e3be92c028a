"""The prompt memory on caches whose rows are their own positions: no model, no server."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as _cache

from pion_patches import second_tier
from pion_patches.live_caches import arrays_of
from pion_patches.prompt_memory import BLOCK, PromptMemory

KEY = ("model", None, None)
caches: Any = _cache  # not typed


def rows(tokens: int, cache: Any = None) -> Any:
    """A cache of `tokens` rows, each of which is its position twice."""
    made: Any = cache if cache is not None else caches.KVCache()
    positions = mx.broadcast_to(mx.arange(tokens).reshape(1, 1, tokens, 1), (1, 1, tokens, 2))
    made.update_and_fetch(positions.astype(mx.float32), positions.astype(mx.float32))
    return made


def state(value: float) -> Any:
    made: Any = caches.ArraysCache(2)
    made.cache = [mx.full((1, 4), value), mx.full((1, 4), value + 0.5)]
    return made


def remember(memory: PromptMemory, tokens: int, *caches: Any, kind: str = "assistant") -> None:
    memory.insert_cache(KEY, list(range(tokens)), list(caches), cache_type=kind)


def fetch(memory: PromptMemory, tokens: Sequence[int]) -> tuple[Any, int]:
    cache, rest = memory.fetch_nearest_cache(KEY, list(tokens))
    assert len(rest) >= min(1, len(tokens))
    return cache, len(tokens) - len(rest)


def test_nothing_after_the_match_is_reachable() -> None:
    """A06: 17 of 300 tokens match."""
    memory = PromptMemory()
    remember(memory, 300, rows(300))
    (found,), matched = fetch(memory, [*range(17), 9000, 9001])
    assert matched == 17
    assert found.offset == 17
    views = [found.keys, found.values, *found.state[:2], *found.keys_and_values()]
    for view in views:
        assert view.shape[2] == 17
        assert np.array(view)[0, 0, :, 0].tolist() == list(range(17))


def test_a_padded_buffer_is_not_taken_for_tokens() -> None:
    """A10: five tokens in a buffer of 256."""
    memory = PromptMemory()
    remember(memory, 5, rows(5))
    (found,), matched = fetch(memory, [*range(5), 77])
    assert (matched, found.offset) == (5, 5)
    found.update_and_fetch(mx.full((1, 1, 1, 2), 5.0), mx.full((1, 1, 1, 2), 5.0))
    assert np.array(found.keys_and_values()[0])[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_mixed_caches_are_cut_all_or_not_at_all() -> None:
    """A03: a chunked cache trims fewer tokens than it is asked to."""
    memory = PromptMemory()
    chunked: Any = rows(1024, caches.ChunkedKVCache(512))
    remember(memory, 1024, rows(1024), chunked)
    assert fetch(memory, [*range(300), 5000]) == (None, 0)
    found, matched = fetch(memory, [*range(1024), 5000])
    assert matched == 1024
    assert [cache.offset for cache in found] == [1024, 1024]


def test_a_window_is_cut_until_it_has_wrapped() -> None:
    """B01."""
    for tokens, matched in ((7, 5), (20, 0)):
        memory = PromptMemory()
        window: Any = caches.RotatingKVCache(8)
        remember(memory, tokens, rows(tokens, window))
        found, count = fetch(memory, [0, 1, 2, 3, 4, 5000, 5001])
        assert count == matched
        if found:
            assert np.array(found[0].keys_and_values()[0])[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4]


def test_states_are_found_at_the_tokens_they_belong_to() -> None:
    """C02, C05: an answer 40 tokens long, stops at 16 and 32, a prompt that leaves it at 35."""
    memory = PromptMemory()
    for stop in (16, 32):
        remember(memory, stop, rows(stop), state(stop), kind=BLOCK)
    assert len(memory) == 0
    remember(memory, 40, rows(40), state(40))
    (found, recurrent), matched = fetch(memory, [*range(35), 5000, 5001])
    assert matched == 32
    assert found.offset == 32
    assert recurrent.cache[0].tolist() == [[32.0] * 4]
    assert fetch(memory, [*range(15), 5000])[1] == 0


def test_a_state_outlives_the_conversation_it_was_taken_in() -> None:
    """A second session goes on from the first one's system prompt, and the first is evicted."""
    memory = PromptMemory(1)
    remember(memory, 16, rows(16), state(16), kind=BLOCK)
    remember(memory, 40, rows(40), state(40))
    other = [*range(20), *range(100, 120)]
    memory.insert_cache(KEY, other, [rows(40), state(7)])
    assert len(memory) == 1
    assert fetch(memory, [*range(20), 9, 9])[1] == 16


def test_a_fetched_cache_is_the_callers_own() -> None:
    """C14: what one stream computes on, the next does not see."""
    memory = PromptMemory()
    remember(memory, 10, rows(10), state(1.0))
    (first_rows, first_state), _ = fetch(memory, [*range(10), 5])
    first_rows.update_and_fetch(mx.ones((1, 1, 3, 2)), mx.ones((1, 1, 3, 2)))
    first_state[0] = mx.zeros((1, 4))
    (again_rows, again_state), matched = fetch(memory, [*range(10), 5])
    assert matched == again_rows.offset == 10
    assert again_state.cache[0].tolist() == [[1.0] * 4]


def test_the_list_given_away_is_emptied() -> None:
    memory = PromptMemory()
    cache = [rows(3)]
    memory.insert_cache(KEY, [1, 2, 3], cache)
    assert cache == []


def test_one_larger_than_the_limit_costs_no_other_its_place() -> None:
    """F04: mlx-lm 0.32.2 is left with nothing."""
    memory = PromptMemory(max_bytes=20_000)
    for number in range(3):
        memory.insert_cache(KEY, [number, *range(99)], [rows(100)])
    assert len(memory) == 3
    held = memory.nbytes
    memory.insert_cache(KEY, [9, *range(1999)], [rows(2000)])
    assert (len(memory), memory.nbytes) == (3, held)
    assert memory.counts["rejected"] == 1


def test_the_limit_in_bytes_holds_after_every_insertion() -> None:
    memory = PromptMemory(100, 30_000)
    for number in range(30):
        tokens = 20 + 7 * number
        for stop in range(8, tokens, 8):
            memory.insert_cache(
                KEY, [number, *range(stop - 1)], [rows(stop), state(stop)], cache_type=BLOCK
            )
        memory.insert_cache(KEY, [number, *range(tokens - 1)], [rows(tokens), state(1)])
        assert memory.nbytes <= 30_000
    assert len(memory) > 1
    memory.trim_to(n_bytes=0)
    assert (len(memory), memory.nbytes) == (0, 0)


def test_token_ids_are_integers_of_any_kind_and_nothing_else() -> None:
    """A16."""
    memory = PromptMemory()
    memory.insert_cache(KEY, [np.int64(5), 6, np.int32(7)], [rows(3)])  # type: ignore[list-item]
    assert fetch(memory, [5, 6, 7, 8])[1] == 3
    assert memory.fetch_nearest_cache(KEY, []) == (None, [])
    words: Any = ["5", "6", "7", "8"]
    assert memory.fetch_nearest_cache(KEY, words) == (None, words)
    assert memory.counts["errors"] == 1


def test_another_picture_is_another_prompt() -> None:
    """K01: mlx_lm.server names an image by a negative id in the place of its tokens."""
    tier = Tier(100)
    memory = PromptMemory(tier=tier)
    memory.insert_cache(KEY, [1, 2, -77, -77, 3], [rows(5)])
    assert fetch(memory, [1, 2, -88, -88, 3, 4])[1] == 2
    assert fetch(memory, [1, 2, -77, -77, 3, 4])[1] == 5
    assert tier.asked == tier.stored == []


def test_other_models_prefixes_are_not_found() -> None:
    memory = PromptMemory()
    remember(memory, 10, rows(10))
    assert memory.fetch_nearest_cache(("other", None, None), list(range(11)))[0] is None


def test_a_cache_of_other_tokens_than_it_is_said_to_hold_is_cut_or_refused() -> None:
    """C09: a state's tokens cannot be counted, rows can."""
    memory = PromptMemory()
    remember(memory, 10, rows(8))
    assert fetch(memory, range(20))[1] == 8
    memory = PromptMemory()
    remember(memory, 10, rows(8), state(1))
    assert (len(memory), memory.counts["incoherent"]) == (0, 1)


def test_threads_and_evictions_do_not_disturb_each_other() -> None:
    """G03: fetch, insert and trim from eight threads on five prompts."""
    memory = PromptMemory(3)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(60):
                length = 10 + (number + turn) % 5
                cache = rows(length)
                mx.eval(list(arrays_of(cache)))
                remember(memory, length, cache)
                found, matched = fetch(memory, range(length))
                assert found is None or found[0].offset == matched
                memory.trim_to(n_sequences=2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert memory.counts["errors"] == 0
    assert len(memory) <= 3


@dataclass
class Held:
    tokens: int


@dataclass
class Latest(Held):
    ids: list[int]
    nbytes: int


class Tier:
    """A second tier that holds the first `held` tokens of anything."""

    min_gain = 4

    def __init__(self, held: int, find: Any = None, restore: Any = None) -> None:
        self.held = self.last = held
        self.asked: list[int] = []
        self.stored: list[int] = []
        self._find = find
        self._restore = restore

    def attach(self, model_key: Any, provider: Any) -> None:
        """Nothing to prepare."""

    def detach(self, model_key: Any) -> None:
        """Nothing is held of a model."""

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Nothing is slower than this tier."""

    def find(self, model_key: Any, tokens: Sequence[int]) -> Held:
        self.asked.append(len(tokens))
        if self._find is not None:
            self._find()
        return Held(min(self.held, len(tokens)))

    def restore(self, offer: Any) -> list[Any] | None:
        if self._restore is not None:
            self._restore()
        cache = rows(offer.tokens)
        mx.eval(cache.keys, cache.values)
        return [cache]

    def latest(self, model_key: Any) -> Latest:
        return Latest(self.last, list(range(self.last)), nbytes=self.last)

    def store(
        self, model_key: Any, tokens: Sequence[int], cache: Sequence[Any], *, anchor: bool = False
    ) -> None:
        self.stored.append(len(tokens))

    def close(self) -> None:
        """Nothing to let go of."""


def test_the_second_tier_is_asked_where_it_may_gain_enough() -> None:
    tier = Tier(30)
    memory = PromptMemory(tier=tier)
    assert fetch(memory, range(100))[1] == 30
    assert memory.counts["tier_tokens"] == 30
    # Kept, so memory has it now; three tokens more are not worth asking for.
    assert fetch(memory, range(34))[1] == 30
    assert tier.asked == [99]
    remember(memory, 50, rows(50))
    assert tier.stored == [50]


def test_a_second_tier_that_has_less_than_memory_is_not_used() -> None:
    memory = PromptMemory(tier=Tier(30))
    remember(memory, 40, rows(40))
    assert fetch(memory, range(100))[1] == 40
    assert memory.counts["tier_hits"] == 0


def _fail() -> None:
    raise OSError("a fault that was put there")


@pytest.mark.parametrize("where", ["find", "restore"])
def test_a_second_tier_that_fails_is_a_miss(where: str) -> None:
    memory = PromptMemory(tier=Tier(30, **{where: _fail}))
    assert fetch(memory, range(100)) == (None, 0)
    remember(memory, 20, rows(20))
    assert fetch(memory, range(100))[1] == 20


@pytest.mark.parametrize("where", ["find", "restore"])
def test_a_second_tier_that_is_late_is_a_miss_until_it_has_answered(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIND", "RESTORE_LEAST", "RESTORE_MOST"):
        for module in (second_tier, __import__("pion_patches.prompt_memory", fromlist=["x"])):
            monkeypatch.setattr(module, name, 0.05, raising=False)
    gate = threading.Event()
    tier = Tier(30, **{where: gate.wait})
    memory = PromptMemory(tier=tier)
    assert fetch(memory, range(100)) == (None, 0)
    assert fetch(memory, range(100)) == (None, 0)
    assert tier.asked == [99]
    gate.set()
    deadline = time.monotonic() + 10
    while fetch(memory, range(100))[1] != 30 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert memory.counts["tier_hits"] == 1


def test_a_request_waits_for_its_own_conversation_only_to_be_restored_ahead() -> None:
    going = threading.Event()
    tier = Tier(30, restore=lambda: going.wait(10))
    memory = PromptMemory(tier=tier)
    ahead = memory.preload(KEY)
    assert ahead is not None
    assert not ahead.finish(0.05)
    tier.held = 0  # whoever asks the tier itself gets nothing
    begun = time.monotonic()
    assert fetch(memory, range(500, 600))[1] == 0
    assert time.monotonic() - begun < 5
    threading.Timer(0.1, going.set).start()
    assert fetch(memory, range(100))[1] == 30
    assert memory.counts["preloaded_tokens"] == 30
    assert memory.counts["tier_hits"] == 0
    assert len(memory) == 1


def test_what_cannot_be_restored_ahead_is_asked_for_as_ever() -> None:
    """Too large, too short, nothing there, an error: in no case does a request see any of it."""

    failures = [OSError("the disk is gone")]

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    for tier, most in (
        (Tier(30), 50),
        (Tier(3), 1 << 40),
        (Tier(0), 1 << 40),
        (Tier(30, restore=fail_once), 1 << 40),
    ):
        memory = PromptMemory(max_bytes=most, tier=tier)
        ahead = memory.preload(KEY)
        assert ahead is not None
        assert ahead.finish(10)
        assert fetch(memory, range(500, 600))[1] == (30 if tier.held == 30 else 0)
        assert memory.counts["preloaded_tokens"] == 0
    assert not failures
    assert PromptMemory().preload(KEY) is None
