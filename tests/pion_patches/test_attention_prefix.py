"""Prompt caches on a shared prefix: how they behave as caches, and what they refuse."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import cache

from pion_patches.attention import pion_attention_patch
from pion_patches.inproc import SWITCH, InprocStore
from pion_patches.prefix_cache import PatchNotInstalled, PrefixNotHeld, make_pion_prompt_cache
from pion_patches.prefix_entry import CannotSplit, PrefixEntry, PrefixMismatch, capture_prefix
from pion_patches.split import SplitRows
from pion_patches.split_cache import (
    TRIM_SLACK,
    PrefixRows,
    PrefixTrimError,
    SplitKVCache,
    SplitWindowCache,
    plain_prompt_cache,
)
from tests.pion_patches.zoo import VOCAB, families

caches: Any = cache  # mlx-lm is not typed
PREFIX, WINDOW = 21, 8
IDS = np.random.default_rng(0).integers(0, VOCAB, PREFIX)
REST = mx.array(np.random.default_rng(1).integers(0, VOCAB, 9))


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    with pion_attention_patch():
        yield


def build_cache(model: Any, ids: Any = IDS) -> list[Any]:
    made: list[Any] = caches.make_prompt_cache(model)
    model(mx.array(ids)[None], cache=made)
    mx.eval([one.state for one in made])
    return made


def holder(model: Any, namespace: str = "system") -> Any:
    """What `make_pion_prompt_cache` needs of a PionPromptCache."""
    store = InprocStore()
    store.hold(namespace, capture_prefix(model, build_cache(model), PREFIX))
    return SimpleNamespace(_mlx_prefix_kv=store)


def greedy(model: Any, prompt_cache: list[Any], count: int = 12, step: int = 2048) -> list[int]:
    steps = generate_step(
        REST, model, max_tokens=count, prompt_cache=prompt_cache, prefill_step_size=step
    )
    return [int(token) for token, _ in steps]


def split_leaves(prompt_cache: Any) -> list[Any]:
    inner = [leaf for one in prompt_cache for leaf in getattr(one, "caches", [one])]
    return [leaf for leaf in inner if isinstance(leaf, SplitKVCache | SplitWindowCache)]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "qwen3_5", "falcon_h1"])
@pytest.mark.parametrize("step", [2048, 3])
def test_generation_on_a_shared_prefix_says_what_an_ordinary_cache_says(
    name: str, step: int
) -> None:
    model = families[name](seed=7)
    pc = holder(model)
    expected = greedy(model, build_cache(model), step=step)
    made = make_pion_prompt_cache(model, "system", pc, PREFIX)
    assert greedy(model, made, step=step) == expected
    # The last token is sampled but never fed back.
    assert {one.offset for one in split_leaves(made)} == {PREFIX + 9 + 12}


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3_text", "llama4"])
def test_a_second_request_is_not_touched_by_the_first(name: str) -> None:
    """CASES C14: fetch, generate, fetch again; also while the first is still at work."""
    model = families[name](seed=7)
    pc = holder(model)
    first = make_pion_prompt_cache(model, "system", pc, PREFIX)
    said = greedy(model, first, 10)
    second = make_pion_prompt_cache(model, "system", pc, PREFIX)
    assert greedy(model, second, 10) == said
    running = [make_pion_prompt_cache(model, "system", pc, PREFIX) for _ in range(2)]
    tokens = [[], []]  # type: list[list[int]]
    for one, other in zip(
        *(generate_step(REST, model, max_tokens=10, prompt_cache=c) for c in running), strict=True
    ):
        tokens[0].append(int(one[0]))
        tokens[1].append(int(other[0]))
    assert tokens == [said, said]


def test_the_source_cache_stays_the_callers_own() -> None:
    model = families["qwen3_5"](seed=7)
    source, untouched = build_cache(model), build_cache(model)
    entry = capture_prefix(model, source, PREFIX)
    said = greedy(model, entry.open())
    assert greedy(model, source) == greedy(model, untouched) == said
    assert greedy(model, entry.open()) == said


def test_a_prefix_captured_in_one_thread_serves_another_and_is_read_by_a_third() -> None:
    """CASES G09: arrays that belong to the thread that made them would raise there."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("prefix_threads.py")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "ok\n", done.stdout + done.stderr


def test_requests_share_one_copy_of_the_prefix() -> None:
    model = families["llama"](seed=7)
    pc = holder(model)
    made = [make_pion_prompt_cache(model, "system", pc, PREFIX) for _ in range(8)]
    for layers in zip(*made, strict=True):
        assert len({id(layer.prefix.keys) for layer in layers}) == 1
    assert sum(layer.nbytes for one in made for layer in one) == 0


@pytest.mark.parametrize("fork", [copy.deepcopy, lambda made: [copy.copy(one) for one in made]])
def test_a_fork_shares_the_prefix_and_nothing_else(fork: Any) -> None:
    model = families["llama"](seed=7)
    made = make_pion_prompt_cache(model, "system", holder(model), PREFIX)
    model(REST[None, :4], cache=made)
    forked = fork(made)
    assert forked[0].prefix is made[0].prefix
    said = greedy(model, forked, 6)
    assert made[0].offset == PREFIX + 4
    assert forked[0].offset == PREFIX + 4 + 9 + 6
    assert greedy(model, made, 6) == said


def test_split_keys_want_split_values() -> None:
    keys: Any = SplitRows((rows(3), rows(2)))
    with pytest.raises(TypeError, match="split keys need split values, not array"):
        keys.pion_attend(rows(1), rows(5), scale=1.0, mask=None)


def rows(count: int, start: int = 0, heads: int = 1) -> mx.array:
    """Keys that hold their own position, so that what is returned says where it came from."""
    positions = mx.arange(start, start + count, dtype=mx.float32)
    return mx.broadcast_to(positions[None, None, :, None], (1, heads, count, 2))


def prefix_rows(total: int, kept: int | None = None) -> PrefixRows:
    kept = total if kept is None else kept
    held = mx.contiguous(rows(kept, total - kept))
    return PrefixRows(held, held, total)


def positions(handle: Any) -> list[int]:
    parts = handle.parts if isinstance(handle, SplitRows) else [handle]
    return [int(x) for part in parts for x in np.array(part[0, 0, :, 0])]


def test_a_full_cache_hands_out_every_position_once() -> None:
    one = SplitKVCache(prefix_rows(5))
    for start, count in [(5, 3), (8, 1), (9, 300), (309, 1)]:
        keys, values = one.update_and_fetch(rows(count, start), rows(count, start))
        assert positions(keys) == positions(values) == list(range(start + count))
        assert keys.shape == (1, 1, start + count, 2)
        assert keys.dtype == mx.float32
        assert keys.astype(mx.float16).dtype == mx.float16
    assert one.offset == one.size() == 310
    assert not one.empty()
    assert one.nbytes == one.suffix.nbytes > 0


@pytest.mark.parametrize("prefix", [1, 5, 7, 8, 20])
@pytest.mark.parametrize("steps", [[1] * 100, [3, 1, 1, 9, 1, 2, 30, 90, 1, 1, 3], [40]])
def test_a_window_cache_hands_out_what_a_full_ring_would(prefix: int, steps: list[int]) -> None:
    ring = caches.RotatingKVCache(max_size=WINDOW)
    ring.update_and_fetch(rows(prefix), rows(prefix))
    kept = min(prefix, WINDOW - 1)
    one = SplitWindowCache(prefix_rows(prefix, kept), WINDOW)
    at = prefix
    for count in steps:
        expected_mask = ring.make_mask(count)
        found_mask = one.make_mask(count)
        ring_keys, _ = ring.update_and_fetch(rows(count, at), rows(count, at))
        keys, _ = one.update_and_fetch(rows(count, at), rows(count, at))
        at += count
        assert positions(keys) == sorted(positions(ring_keys))
        assert one.offset == at == ring.offset
        assert one.size() == ring.size()
        if isinstance(expected_mask, mx.array):
            assert found_mask.tolist() == expected_mask.tolist()
        else:
            assert found_mask == expected_mask
    assert one.suffix.offset <= 2 * WINDOW + TRIM_SLACK + max(steps)


def test_a_window_narrower_than_the_ring_counts_from_the_query() -> None:
    one = SplitWindowCache(prefix_rows(6, 6), WINDOW)
    mask = one.make_mask(1, window_size=3)
    assert mask.tolist() == [False, False, False, False, True, True, True]
    mask = one.make_mask(2, window_size=3)
    keys, _ = one.update_and_fetch(rows(2, 6), rows(2, 6))
    assert positions(keys) == list(range(8))
    assert mask.tolist() == [
        [False, False, False, False, True, True, True, False],
        [False, False, False, False, False, True, True, True],
    ]


def test_trimming_goes_as_far_back_as_the_prefix_and_no_further() -> None:
    one = SplitKVCache(prefix_rows(5))
    one.update_and_fetch(rows(4, 5), rows(4, 5))
    assert caches.can_trim_prompt_cache([one])
    assert caches.trim_prompt_cache([one, copy.deepcopy(one)], 3) == 3
    assert one.offset == 6
    keys, _ = one.update_and_fetch(rows(1, 6), rows(1, 6))
    assert positions(keys) == list(range(7))
    with pytest.raises(PrefixTrimError, match="only 2 came after the shared prefix of 5"):
        one.trim(3)
    assert one.offset == 7
    assert one.trim(2) == 2
    assert one.trim(0) == 0


def test_a_window_cache_can_always_take_back_its_slack_and_says_when_rows_are_gone() -> None:
    one = SplitWindowCache(prefix_rows(5, 5), WINDOW)
    at = 5
    for count in [10, *[1] * 200]:
        one.update_and_fetch(rows(count, at), rows(count, at))
        at += count
        assert one.trim(7) == 7
        keys, _ = one.update_and_fetch(rows(7, at - 7), rows(7, at - 7))
        assert positions(keys) == list(range(max(0, at - 14), at))
        assert one.suffix.offset <= 2 * WINDOW + TRIM_SLACK + 7
    assert one.is_trimmable()
    assert one.trim(TRIM_SLACK) == TRIM_SLACK
    with pytest.raises(PrefixTrimError, match="sliding window of 8 are gone"):
        one.trim(WINDOW + 40)
    assert one.offset == at - TRIM_SLACK


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_speculative_decoding_on_a_shared_prefix_says_the_same(name: str) -> None:
    """Drafted tokens are taken back by trimming, past where the sliding window drops rows."""
    model, draft = families[name](seed=7), families["llama"](seed=3)
    expected = greedy(model, build_cache(model), 90)
    both = make_pion_prompt_cache(model, "system", holder(model), PREFIX) + build_cache(draft)
    steps = speculative_generate_step(
        REST, model, draft, max_tokens=90, num_draft_tokens=3, prompt_cache=both
    )
    assert [int(token) for token, _, _ in steps] == expected


@pytest.mark.parametrize(
    "one", [SplitKVCache(prefix_rows(5)), SplitWindowCache(prefix_rows(9, 7), WINDOW)]
)
def test_state_round_trips(one: Any) -> None:
    twin = copy.deepcopy(one)
    mx.eval(one.state)
    at = one.offset
    for count in (2, 90, 1):
        one.update_and_fetch(rows(count, at), rows(count, at))
        at += count
    twin.state = one.state
    mx.eval(one.state)
    assert twin.offset == one.offset
    found, expected = (c.update_and_fetch(rows(1, at), rows(1, at))[0] for c in (twin, one))
    assert positions(found) == positions(expected)


def test_a_prefix_can_be_captured_after_its_ring_has_turned() -> None:
    """Single tokens rotate the stored ring; the rows are put in order."""
    model = families["gemma3_text"](seed=7)
    source = build_cache(model, IDS[:4])
    for token in IDS[4:]:
        model(mx.array([[int(token)]]), cache=source)
    entry = capture_prefix(model, source, PREFIX)
    assert greedy(model, entry.open()) == greedy(model, source)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1"])
@pytest.mark.parametrize("more", [0, 20])
def test_a_split_cache_becomes_an_ordinary_one_or_a_longer_prefix(name: str, more: int) -> None:
    model = families[name](seed=7)
    extra = mx.array(np.random.default_rng(3).integers(0, VOCAB, (1, 20)))[:, :more]
    ordinary = build_cache(model)
    split = capture_prefix(model, ordinary, PREFIX).open()
    for token in range(more):
        for one in (ordinary, split):
            mx.eval(model(extra[:, token : token + 1], cache=one))
    longer = capture_prefix(model, split, PREFIX + more).open()
    plain = plain_prompt_cache(split)
    assert not split_leaves(plain)
    said = greedy(model, ordinary)
    assert greedy(model, plain) == greedy(model, longer) == said
    assert greedy(model, split) == said


def test_clear_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = families["llama"](seed=7), families["llama"](seed=7)
    pc = holder(model)
    with pytest.raises(PrefixMismatch, match="'system' has 21 tokens, not 20"):
        make_pion_prompt_cache(model, "system", pc, 20)
    with pytest.raises(PrefixNotHeld, match=r"no prefix 'other' .*get_or_prefill"):
        make_pion_prompt_cache(model, "other", pc, PREFIX)
    with pytest.raises(PrefixMismatch, match="computed by another model than this mlx_lm"):
        make_pion_prompt_cache(twin, "system", pc, PREFIX)
    with pytest.raises(CannotSplit, match="sparse_full_layers needs the prefix in this process"):
        make_pion_prompt_cache(model, "other", pc, PREFIX, sparse_full_layers={"K_block": 64})
    with pytest.raises(CannotSplit, match="soft caps"):
        make_pion_prompt_cache(families["gemma2"](seed=7), "system", pc, PREFIX)
    with pytest.raises(TypeError, match="dict keeps no prefixes in process"):
        make_pion_prompt_cache(model, "system", {}, PREFIX)
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(PrefixNotHeld, match=f"{SWITCH} turns the in-process lane off"):
        make_pion_prompt_cache(model, "system", pc, PREFIX)


def test_without_the_patch_a_cache_is_refused_not_made() -> None:
    from pion_patches.attention import install_pion_attention_patch, uninstall_pion_attention_patch

    model = families["llama"](seed=7)
    pc = holder(model)
    uninstall_pion_attention_patch()
    with pytest.raises(PatchNotInstalled, match=r"install_pion_attention_patch\(\) first"):
        make_pion_prompt_cache(model, "system", pc, PREFIX)
    install_pion_attention_patch()


@pytest.mark.parametrize(
    ("made", "kind", "words"),
    [
        (lambda m: build_cache(m, IDS[:5]), PrefixMismatch, "holds 5 tokens, not the 21"),
        (caches.make_prompt_cache, PrefixMismatch, "holds 0 tokens"),
        (
            lambda m: [caches.QuantizedKVCache() for _ in m.layers],
            CannotSplit,
            "mlx_lm.models.llama.Model: a QuantizedKVCache cannot be split",
        ),
        (lambda m: [caches.BatchKVCache([0])], CannotSplit, "a BatchKVCache cannot be split"),
        (lambda m: [], CannotSplit, "no attention cache to split"),
    ],
)
def test_a_cache_that_cannot_become_a_prefix_is_refused(made: Any, kind: Any, words: str) -> None:
    model = families["llama"](seed=7)
    with pytest.raises(kind, match=words):
        capture_prefix(model, made(model), PREFIX)


def entry_of(model: Any, nbytes: int) -> PrefixEntry:
    return PrefixEntry(weakref.ref(model), 1, (), nbytes)


class Owner:
    """Stands for a model: something a weak reference can point at."""


def test_the_lane_keeps_to_its_budget_and_drops_the_least_recently_used() -> None:
    owner, store = Owner(), InprocStore(budget_bytes=100)
    for name in "abc":
        assert store.hold(name, entry_of(owner, 30))
    assert store.get("a") is not None
    store["d"] = entry_of(owner, 30)
    assert [name in store for name in "abcd"] == [True, False, True, True]
    assert store.get(b"a") is store["a"]
    store.hold(b"\xff", entry_of(owner, 0))
    assert "\udcff" in store
    assert store.drop(b"\xff".decode("utf-8", "surrogateescape"))
    assert "b" not in store
    assert store.get("b") is None
    stats = store.stats()
    assert (stats.entries, stats.nbytes, stats.evicted, stats.misses) == (3, 90, 1, 1)
    assert store.hold("a", entry_of(owner, 40))
    assert store.stats().nbytes == 100
    assert store.drop("c")
    assert not store.drop("c")
    store.clear()
    assert len(store) == store.stats().nbytes == 0


def test_an_entry_beyond_the_whole_budget_is_refused_and_evicts_nothing() -> None:
    owner, store = Owner(), InprocStore(budget_bytes=100)
    store.hold("a", entry_of(owner, 60))
    assert not store.hold("a", entry_of(owner, 101))
    assert store["a"].nbytes == 60
    assert store.stats().refused == 1


def test_entries_of_a_model_that_is_gone_make_room() -> None:
    owner, store = Owner(), InprocStore(budget_bytes=100)
    store.hold("gone", entry_of(owner, 60))
    del owner
    gc.collect()
    other = Owner()
    store.hold("new", entry_of(other, 60))
    assert "gone" not in store
    assert store.stats().evicted == 0


def test_the_switch_turns_the_lane_off_in_a_running_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, store = Owner(), InprocStore()
    store.hold("a", entry_of(owner, 1))
    monkeypatch.setenv(SWITCH, "1")
    assert not store.hold("b", entry_of(owner, 1))
    assert store.get("a") is None
    assert "a" not in store
    monkeypatch.setenv(SWITCH, "0")
    assert store.get("a") is not None
    with pytest.raises(KeyError):
        store["b"]


def test_threads_can_hold_fetch_and_drop_at_once() -> None:
    owner, store, errors = Owner(), InprocStore(budget_bytes=70), []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(400):
                name = str(rng.integers(5))
                act = rng.integers(3)
                if act == 0:
                    store.hold(name, entry_of(owner, int(rng.integers(1, 40))))
                elif act == 1:
                    store.get(name)
                else:
                    store.drop(name)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    held = [store[name].nbytes for name in "01234" if name in store]
    assert store.stats().nbytes == sum(held) <= 70
