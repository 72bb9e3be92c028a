"""Blocks of a prefix held in this process: those the definition chooses, or all of them."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.attention import pion_attention_patch
from pion_patches.blocks import BlockKVCache, Blocks, _summaries, choose_tokens, with_blocks
from pion_patches.prefix_entry import capture_prefix
from pion_patches.split_cache import PrefixRows
from pion_server.attend import reference
from tests.pion_patches.zoo import families

KV_HEADS, HEADS, DIM = 2, 6, 16
MAP = [0, 0, 0, 1, 1, 1]


def drawn(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


@pytest.mark.parametrize("selector", ["block_mean", "quest"])
@pytest.mark.parametrize("total", [1000, 1024])
@pytest.mark.parametrize(("size", "count"), [(64, 1), (64, 8), (7, 20), (1, 5), (500, 1)])
def test_the_chosen_blocks_are_those_of_the_definition(
    selector: str, total: int, size: int, count: int
) -> None:
    keys = drawn(1, 1, KV_HEADS, total, DIM)
    prefix = PrefixRows(keys, keys, total)
    for seed in (2, 3):
        queries = drawn(seed, 1, HEADS, 1, DIM)
        tokens, counts = choose_tokens(queries / DIM**0.5, prefix, Blocks(size, count, selector))
        found = sorted(np.array(tokens)[np.array(counts)].tolist())
        q, k = np.array(queries[0, :, 0]), np.array(keys[0])
        scores = reference.score_blocks(q, k, MAP, size, selector == "quest")
        assert found == sorted(reference.choose_tokens(scores, total, size, count))


def test_a_tie_goes_to_the_first_blocks_and_the_last_is_read_all_the_same() -> None:
    keys = mx.ones((1, 1, 40, DIM))
    prefix = PrefixRows(keys, keys, 40)
    tokens, counts = choose_tokens(mx.ones((1, 1, 1, DIM)), prefix, Blocks(8, 2, "block_mean"))
    found = sorted(np.array(tokens)[np.array(counts)].tolist())
    assert found == [*range(16), *range(32, 40)]


@pytest.fixture
def opened() -> Any:
    model = families["llama"](seed=7)
    prefix = mx.array(np.random.default_rng(0).integers(0, 199, (1, 60)))
    source = make_prompt_cache(model)
    model(prefix, cache=source)
    return model, capture_prefix(model, source, 60)


def logits(model: Any, caches: list[Any], tokens: Any) -> Any:
    return np.stack([np.array(model(mx.array([[t]]), cache=caches)[0, -1]) for t in tokens])


def test_blocks_that_cover_the_prefix_are_dense_attention_and_few_are_not(opened: Any) -> None:
    model, entry = opened
    rest = [5, 4, 3, 2]
    with pion_attention_patch():
        dense = logits(model, entry.open(), rest)
        whole = with_blocks(entry.open(), Blocks(8, 8, "quest"))
        assert all(type(one) is BlockKVCache for one in whole)
        assert np.array_equal(logits(model, whole, rest), dense)
        few = with_blocks(entry.open(), Blocks(8, 2, "quest"))
        twin = copy.deepcopy(few)
        found = logits(model, few, rest)
        assert np.abs(found - dense).max() > 1e-3
        assert np.array_equal(logits(model, twin, rest), found)
        assert all(one.attended == len(rest) for one in few)


def test_several_queries_and_batches_are_attended_to_densely(opened: Any) -> None:
    model, entry = opened
    with pion_attention_patch():
        for shape in ((1, 4), (2, 1), (2, 3)):
            tokens = mx.array(np.random.default_rng(1).integers(0, 199, shape))
            few = with_blocks(entry.open(), Blocks(8, 1, "block_mean"))
            expected = model(tokens, cache=entry.open())
            assert mx.array_equal(model(tokens, cache=few), expected)


def test_windows_and_sinks_stay_as_they_are() -> None:
    """gpt_oss: its full layers have sinks, which no choice of blocks may leave out."""
    model = families["gpt_oss"](seed=7)
    source = make_prompt_cache(model)
    model(mx.array([[3] * 60]), cache=source)
    entry = capture_prefix(model, source, 60)
    with pion_attention_patch():
        few = with_blocks(entry.open(), Blocks(8, 1, "block_mean"))
        kinds = {type(one).__name__ for one in few}
        assert kinds == {"BlockKVCache", "SplitWindowCache"}
        expected = logits(model, entry.open(), [1, 2])
        assert np.array_equal(logits(model, few, [1, 2]), expected)


def test_figures_of_blocks_go_with_their_prefix() -> None:
    keys = drawn(1, 1, 1, 40, DIM)
    prefix = PrefixRows(keys, keys, 40)
    for selector in ("quest", "block_mean"):
        choose_tokens(drawn(2, 1, 1, 1, DIM), prefix, Blocks(8, 2, selector))
    assert set(_summaries[prefix]) == {(8, "quest"), (8, "block_mean")}
    alive = weakref.ref(prefix)
    del prefix
    gc.collect()
    assert alive() is None
