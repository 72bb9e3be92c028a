"""The prefix cache for vllm-mlx, driven as its scheduler drives it, with mlx-lm's own batches."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from pion_patches.engine_cache import TieredPrefixCache, cache_of
from pion_patches.live_caches import arrays_of, leaves_of
from pion_patches.prompt_memory import PromptMemory
from pion_patches.resumable_batches import ResumableBatchGenerator
from tests.pion_patches.test_prompt_memory import Tier
from tests.pion_patches.vllm_mlx_stand_in import (
    CacheEntry,
    MemoryAwarePrefixCache,
    MemoryCacheConfig,
)
from tests.pion_patches.zoo import build

FAMILIES = ("llama", "qwen3_5", "gemma3_text", "gpt_oss")
WORDS = [int(token) for token in np.random.default_rng(3).integers(10, 190, 700)]
TINY = MemoryCacheConfig(min_prefix_tokens=1)
make_batches: Any = ResumableBatchGenerator  # mlx-lm's are not typed
make_stock: Any = BatchGenerator


class Cache(TieredPrefixCache, MemoryAwarePrefixCache):
    """As the patch makes it."""


def cache_class(tier: Any) -> Callable[..., Any]:
    return type("Tiered", (Cache,), {"tier": tier})


@dataclass
class Engine:
    """The part of vllm-mlx's scheduler that has to do with its cache."""

    family: str
    config: Any = TINY
    tier: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model: Any = build(self.family, seed=1)
        self.cache = cache_class(self.tier)(self.model, self.config)
        self.batches = make_batches(self.model, stop_tokens=[[0]], **self.options)

    def ask(self, *prompts: Sequence[int], count: int = 6) -> list[tuple[list[int], int]]:
        """Answer and cached tokens of prompts that come at once."""
        found: dict[int, list[int]] = {}
        asked: dict[int, list[int]] = {}
        cached = {}
        for prompt in prompts:
            cache, rest = self.cache.fetch(list(prompt))
            caches = None if cache is None else [cache]
            (uid,) = self.batches.insert([rest], max_tokens=[count], caches=caches)
            asked[uid], found[uid], cached[uid] = list(prompt), [], len(prompt) - len(rest)
        open_ = set(asked)
        while open_:
            for answer in self.batches.next()[1]:
                found[answer.uid].append(answer.token)
                if answer.finish_reason is not None:
                    open_.discard(answer.uid)
                    self.cache.store(asked[answer.uid] + found[answer.uid], answer.prompt_cache)
        return [(found[uid], cached[uid]) for uid in asked]


def cold(family: str, prompt: Sequence[int], count: int = 6) -> list[int]:
    """What mlx-lm's own batch generator answers."""
    batches = make_stock(build(family, seed=1), stop_tokens=[[0]])
    batches.insert([list(prompt)], max_tokens=[count])
    answer = []
    while True:
        for response in batches.next()[1]:
            answer.append(response.token)
            if response.finish_reason is not None:
                return answer


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_asked_before_is_answered_as_if_it_were_not(family: str) -> None:
    """A01, B07: the same prompt, the next turn, another end, all of them at once."""
    engine = Engine(family)
    first = WORDS[:300]
    ((answer, cached),) = engine.ask(first)
    assert (answer, cached) == (cold(family, first), 0)
    assert engine.ask(first) == [(answer, 299)]
    assert engine.cache._last_match_type == "prefix"
    assert engine.cache._last_matched_key == tuple(first[:299])
    turn = [*first, *answer, *WORDS[300:320]]
    assert engine.ask(turn) == [(cold(family, turn), 300 + len(answer))]
    parting, again = [*WORDS[:200], *WORDS[400:430]], [*WORDS[:200], *WORDS[430:460]]
    assert engine.ask(parting) == [(cold(family, parting), 200 if family == "llama" else 0)]
    # Where the second has left the first there is a state now.
    assert engine.ask(again) == [(cold(family, again), 200)]
    prompts = [WORDS[500:], first, again, turn, WORDS[600:603]]
    together = engine.ask(*prompts)
    assert [answer for answer, _ in together] == [cold(family, prompt) for prompt in prompts]


def test_rows_behind_a_common_beginning_are_not_reachable() -> None:
    """A06, vllm-mlx#385: 300 tokens are kept, 17 of them are the same."""
    engine = Engine("llama")
    engine.ask(WORDS[:300])
    other = [*WORDS[:17], *WORDS[400:427]]
    cache, rest = engine.cache.fetch(other)
    assert cache is not None
    assert len(rest) == len(other) - 17
    for layer in cache:
        assert layer.offset == 17
        views = [*arrays_of(layer), *arrays_of(layer.state)]
        assert {array.shape[2] for array in views} == {17}
    assert engine.ask(other) == [(cold("llama", other), 17)]


@pytest.mark.parametrize("length", [255, 256, 257, 600])
def test_reuse_ends_where_the_prompts_part(length: int) -> None:
    """A07: at the steps of the buffer as anywhere else."""
    engine = Engine("llama")
    engine.ask(WORDS[:650])
    prompt = [*WORDS[:length], 3, 5, 7]
    assert engine.ask(prompt) == [(cold("llama", prompt), length)]


def test_a_quantised_cache_is_cut_in_every_part() -> None:
    """D01, vllm-mlx#69: 253 tokens are kept, 17 are shared, 27 follow."""
    model: Any = build("llama", seed=1)
    cache = Cache(model, TINY)
    live: Any = [QuantizedKVCache(group_size=32, bits=4) for _ in make_prompt_cache(model)]
    rows = mx.random.normal((1, 2, 253, 32))
    for layer in live:
        layer.update_and_fetch(rows, rows)
    assert cache.store(WORDS[:253], live)
    found, rest = cache.fetch([*WORDS[:17], *WORDS[300:327]])
    assert found is not None
    assert len(rest) == 27
    for layer in found:
        assert {array.shape[2] for array in arrays_of(layer)} == {17}
        sides = layer.update_and_fetch(rows[..., :27, :], rows[..., :27, :])
        assert layer.offset == 44
        assert {part.shape[2] for part in arrays_of(sides)} == {44}


def test_a_kept_cache_is_nobody_elses() -> None:
    """Two that resume the same prompt write behind it, each for itself."""
    engine = Engine("qwen3_5")
    engine.ask(WORDS[:130])
    one, _ = engine.cache.fetch(WORDS[:130])
    two, _ = engine.cache.fetch(WORDS[:130])
    assert one is not None
    assert two is not None
    before = [np.array(array) for array in arrays_of(two)]
    engine.model(mx.array([WORDS[300:310]]), cache=one)
    mx.eval(list(arrays_of(one)))
    assert all(np.array_equal(np.array(a), b) for a, b in zip(arrays_of(two), before, strict=True))


def test_a_cache_fetched_in_one_thread_is_computed_with_in_another() -> None:
    """G09."""
    engine = Engine("gemma3_text")
    engine.ask(WORDS[:150])
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(engine.cache.fetch(WORDS[:140])))
    thread.start()
    thread.join()
    cache, _ = found[0]
    assert cache is not None
    assert [len(list(arrays_of(leaf))) for leaf in leaves_of(cache)] == [2, 2, 2, 2]
    engine.model(mx.array([WORDS[139:140]]), cache=cache)
    mx.eval(list(arrays_of(cache)))


def test_no_conversation_shows_in_another() -> None:
    """G01, G05: sixteen with a word of their own, room for two, then fresh ones two at a time."""
    engine = Engine("llama", config=MemoryCacheConfig(max_entries=2, min_prefix_tokens=1))
    kept = [[number + 10, *WORDS[: 20 + number], number + 100] for number in range(16)]
    assert all(cached == 0 for _, cached in engine.ask(*kept))
    assert len(engine.cache) == 2
    for turn in range(0, 10, 2):
        fresh = [[*WORDS[300 + n : 340 + n], n + 10] for n in (turn, turn + 1)]
        answers = engine.ask(*fresh)
        assert [answer for answer, _ in answers] == [cold("llama", prompt) for prompt in fresh]
        # A word or two at the beginning may be the same by chance.
        assert max(cached for _, cached in answers) <= 2


def test_short_prompts_are_left_alone_as_vllm_mlx_is_told_to() -> None:
    engine = Engine("llama", config=MemoryCacheConfig(min_prefix_tokens=64))
    engine.ask(WORDS[:60])
    assert engine.ask(WORDS[:60]) == [(cold("llama", WORDS[:60]), 0)]
    engine.ask(WORDS[:200])
    assert engine.ask([*WORDS[:63], *WORDS[300:400]])[0][1] == 0
    assert engine.ask([*WORDS[:64], *WORDS[300:400]])[0][1] == 64


def test_what_the_tier_holds_is_restored_where_it_gains() -> None:
    model: Any = build("llama", seed=1)
    tier = ModelTier(model, held=64)
    engine = Engine("llama", tier=tier)
    prompt = WORDS[:100]
    assert engine.ask(prompt) == [(cold("llama", prompt), 64)]
    assert tier.stored == [100 + 6]
    assert tier.prefills == []
    figures = engine.cache.get_stats()
    assert (figures["tier_hits"], figures["tier_tokens"], figures["hits"]) == (1, 64, 1)
    assert figures["entry_count"] == len(engine.cache) > 0
    # In memory now, to the last token.
    assert engine.ask(prompt)[0][1] == 99
    assert engine.cache.get_stats()["tier_hits"] == 1


class ModelTier(Tier):
    """Holds the first tokens of `WORDS`, as the model computes them."""

    def __init__(self, model: Any, held: int) -> None:
        super().__init__(held)
        self.model = model
        self.gone: list[Any] = []
        self.prefills: list[tuple[int, float]] = []

    def restore(self, offer: Any) -> list[Any]:
        cache: list[Any] = self.model.make_cache()
        self.model(mx.array([WORDS[: offer.tokens]]), cache=cache)
        mx.eval(list(arrays_of(cache)))
        return cache

    def detach(self, model_key: Any) -> None:
        self.gone.append(model_key)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        self.prefills.append((tokens, seconds))


def test_the_tier_is_told_how_fast_the_model_computes() -> None:
    """Else a restore that is slower than computing could not be told from one that is not."""
    tier = ModelTier(None, held=0)
    engine = Engine("llama", tier=tier)
    engine.ask(WORDS[:200])
    engine.ask(WORDS[:210])
    ((tokens, seconds),) = tier.prefills
    assert tokens == 199
    assert 0 < seconds < 60


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a fault that was put there")


@pytest.mark.parametrize("where", ["_best", "_fetch", "_insert", "shared"])
def test_a_fault_costs_one_request_its_reuse(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """G08: the next one is served as if nothing had been."""
    engine = Engine("qwen3_5")
    expected = cold("qwen3_5", WORDS[:90])
    engine.ask(WORDS[:90])
    with monkeypatch.context() as failing:
        failing.setattr(PromptMemory, where, _fail)
        assert engine.ask(WORDS[:90])[0][0] == expected
    assert engine.ask(WORDS[:90]) == [(expected, 89)]


def test_a_tier_that_fails_is_a_miss() -> None:
    engine = Engine("llama", tier=Tier(30, find=_fail))
    assert engine.ask(WORDS[:90]) == [(cold("llama", WORDS[:90]), 0)]
    assert engine.ask(WORDS[:90])[0][1] == 89


def test_a_cache_of_another_kind_leaves_the_tier() -> None:
    """--max-kv-size makes every layer a window, which what is stored does not fit."""
    engine = Engine("llama", tier=Tier(30), options={"max_kv_size": 64})
    assert engine.cache.memory.tier is None
    assert engine.ask(WORDS[:50])[0][0] == cold("llama", WORDS[:50])


def test_states_on_a_cache_from_elsewhere_are_not_kept() -> None:
    """Nobody here knows which tokens are before those that follow."""
    engine = Engine("qwen3_5")
    theirs = engine.model.make_cache()
    engine.model(mx.array([WORDS[:64]]), cache=theirs)
    engine.batches.insert([WORDS[64:200]], max_tokens=[4], caches=[theirs])
    answers: list[Any] = []
    while not (answers and answers[-1].finish_reason):
        answers += engine.batches.next()[1]
    assert len(engine.cache) == 0
    assert engine.cache.fetch(WORDS[64:200])[0] is None


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_prompt_is_an_error_and_stops_nobody(family: str) -> None:
    """A16: alone, behind a batch of prompts that is full, and while others are answered.

    vllm-mlx alone ends everybody's request. Behind a full batch its length of nothing was taken
    for the shortest, and no prompt went on.
    """
    engine = Engine(family, options={"prefill_batch_size": 2, "prefill_step_size": 64})
    prompts = [WORDS[:300], WORDS[300:580], [], WORDS[580:650], []]
    uids = [engine.batches.insert([prompt], max_tokens=[6])[0] for prompt in prompts]
    answers: list[Any] = []
    for call in range(60):
        if call == 8:
            uids += engine.batches.insert([[]])
        found = engine.batches.next()[1]
        expected = {0: [uids[2], uids[4]], 8: [uids[-1]]}.get(call, [])
        assert [answer.uid for answer in found if answer.finish_reason == "error"] == expected
        answers += found
    for uid, prompt in zip(uids, [*prompts, []], strict=True):
        tokens = [answer.token for answer in answers if answer.uid == uid]
        assert tokens == cold(family, prompt) if prompt else len(tokens) == 1


def test_an_empty_prompt_alone_is_an_error_and_the_next_is_answered() -> None:
    """A16: through the cache, as the scheduler does it; nothing is kept of it."""
    engine = Engine("llama")
    engine.ask([])
    assert len(engine.cache) == 0
    assert engine.ask(WORDS[:90]) == [(cold("llama", WORDS[:90]), 0)]
    engine.ask([])
    assert engine.ask(WORDS[:90]) == [(cold("llama", WORDS[:90]), 89)]


def test_removing_and_clearing() -> None:
    engine = Engine("llama")
    engine.ask(WORDS[:90])
    assert WORDS[:50] in engine.cache
    assert engine.cache.remove(WORDS[:50])
    assert not engine.cache.remove(WORDS[:50])
    assert WORDS[:50] not in engine.cache
    engine.ask(WORDS[:90])
    engine.cache.clear()
    assert len(engine.cache) == 0
    assert engine.cache.memory_usage_mb == 0
    assert engine.ask(WORDS[:90]) == [(cold("llama", WORDS[:90]), 0)]


def test_files_and_the_ssd_are_the_tiers_business() -> None:
    engine = Engine("llama", tier=Tier(0))
    assert not engine.cache.save_to_disk("nowhere")
    engine.ask(WORDS[:90])
    assert engine.cache.save_to_disk("nowhere")
    assert engine.cache.load_from_disk("nowhere") == 0
    engine.cache.set_ssd_tier(object())
    assert engine.cache.check_ssd(WORDS[:90]) is None


def test_what_the_multimodal_generator_has_prepared_stays_its_own() -> None:
    """It keeps a prompt's logits beside it, so an exact match is of use there."""
    cache = Cache(build("llama", seed=1), TINY)
    layer: Any = KVCache
    prepared = CacheEntry((1, 2, 3), [layer()])
    cache.commit_prepared(prepared)
    assert cache.fetch([1, 2, 3]) == (prepared.cache, [])
    assert cache._last_match_type == "exact"
    assert cache.fetch([7, 8, 9]) == (None, [7, 8, 9])
    assert (cache._stats.hits, cache._stats.misses) == (1, 1)


class TheirCache(KVCache):
    """As mlx-vlm has them: a class of the same name, not mlx-lm's."""


def test_layers_that_are_not_mlx_lms_are_kept_as_vllm_mlx_does_it() -> None:
    tier = ModelTier(None, held=0)
    engine = Engine("llama", tier=tier)
    layer: Any = TheirCache
    theirs = [layer() for _ in range(4)]
    assert engine.cache.store(WORDS[:90], theirs)
    assert engine.cache.fetch(WORDS[:90]) == (theirs, [])
    assert engine.cache.fetch(WORDS[:100]) == (theirs, WORDS[90:100])
    assert tier.stored == []


def test_a_model_that_is_unloaded_is_let_go() -> None:
    """The tier indexes it by a key of its own, and would hold its weights for ever."""
    tier = ModelTier(None, held=0)
    engine = Engine("llama", tier=tier)
    engine.ask(WORDS[:90])
    key, number = engine.cache.key, id(engine.model)
    assert cache_of(engine.model) is engine.cache
    del engine.cache, engine.batches
    gc.collect()
    assert tier.gone == [key]
    assert cache_of(engine.model) is None
    assert number == id(engine.model)
