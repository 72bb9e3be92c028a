"""Mixed models: every leaf is routed by what it is, and state counts for one token only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.cache_rebuild import RebuildError, UnsupportedCache, cut, dismantle, rebuild
from pion_patches.hybrid import classify, fit_to_store, is_hybrid, route
from pion_patches.pieces import CacheImage
from tests.pion_patches.positions import (
    ArraysCache,
    BatchKVCache,
    KVCache,
    QuantizedKVCache,
    append,
    filled,
    state,
    through_bytes,
)
from tests.pion_patches.shipping import (
    continuation,
    copied,
    feed,
    from_pieces,
    largest_difference,
    to_pieces,
    token_ids,
)
from tests.pion_patches.zoo import build, families


def prefilled(family: str, tokens: int, **changes: Any) -> tuple[Any, list[Any]]:
    model: Any = build(family, seed=7, **changes)
    cache = make_prompt_cache(model)
    feed(family, model, cache, 0, tokens)
    return model, cache


def image_of(family: str, **changes: Any) -> CacheImage:
    return dismantle(prefilled(family, 20, **changes)[1], 20)


@pytest.mark.parametrize(("family", "routes"), [
    ("llama", ["kv"] * 4),
    ("gemma3_text", ["window", "kv"] * 2),
    ("gemma3n", ["window", "kv"]),  # two of four layers share another's K/V
    ("qwen3_5", ["recurrent"] * 3 + ["kv"]),
    ("jamba", ["recurrent", "kv"] * 2),
    ("mamba2", ["recurrent"] * 4),
    ("baichuan_m1", ["recurrent", "window", "recurrent", "kv"] * 2),
    ("llama4", ["chunk"] * 3 + ["kv"]),
    ("deepseek_v32", ["kv"] * 8),
    ("longcat_flash_ngram", ["recurrent"] + ["kv"] * 4),
])  # fmt: skip
def test_caches_are_routed_by_class_not_by_layer(family: str, routes: list[str]) -> None:
    model: Any = build(family)
    slots = classify(make_prompt_cache(model))
    assert [slot.route for slot in slots] == routes
    assert is_hybrid(slots) == ("recurrent" in routes)


@pytest.mark.skipif("deepseek_v41" not in families, reason="this mlx-lm has no private cache")
def test_private_cache_goes_as_one_blob() -> None:
    routing = route(image_of("deepseek_v41"))
    assert [lane.slot.route for lane in routing.lanes] == ["opaque"] * 4
    assert [lane.blob for lane in routing.lanes] == [0, 1, 2, 3]


def test_ranks_count_leaves_with_rows_and_blobs_are_leaf_indexes() -> None:
    routing = route(image_of("baichuan_m1"))
    assert [(lane.rank, lane.blob) for lane in routing.lanes] == [
        (None, 0), (0, None), (None, 2), (1, None), (None, 4), (2, None), (None, 6), (3, None),
    ]  # fmt: skip
    assert routing.lanes[3].slot.path == (1, 1)


@pytest.mark.parametrize(("family", "uniform"), [
    ("llama", ("fp32", 32)),
    ("qwen3_5", ("fp32", 64)),
    ("deepseek_v3", None),  # latent attention: K is 24 wide, V 8
    ("openelm", None),  # layers differ in heads
    ("mamba2", None),  # no rows at all
])  # fmt: skip
def test_uniform_models_register_one_width(family: str, uniform: tuple[str, int] | None) -> None:
    assert route(image_of(family)).uniform == uniform


def test_schema_names_format_and_width_of_every_rank() -> None:
    """REGISTER.SCHEMA: K specs, then V specs, in V-store order."""
    routing = route(image_of("deepseek_v3"))
    assert routing.key_specs == ("fmt=fp32,dim=24",) * 4
    assert routing.value_specs == ("fmt=fp32,dim=8",) * 4
    bf16 = route(dismantle([filled(KVCache(), 3, heads=2, dim=4, dtype=mx.bfloat16)], 3))
    assert bf16.uniform == ("bf16", 8)
    live = QuantizedKVCache(32, 4)
    live.update_and_fetch(*[mx.ones((1, 2, 3, 64), mx.float16)] * 2)
    assert route(dismantle([live], 3)).uniform == ("mlx4g32", 128)
    eight = QuantizedKVCache(32, 8)
    eight.update_and_fetch(*[mx.ones((1, 2, 3, 64), mx.float16)] * 2)
    # 128 code bytes, and 4 groups with 2 bytes of scale and of bias each.
    assert route(dismantle([eight], 3)).uniform == ("raw", 128 + 4 * 4)


def test_side_without_width_is_declared_but_never_stored() -> None:
    live = KVCache()
    live.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.zeros((1, 1, 3, 0)))
    routing = route(dismantle([live, filled(KVCache(), 3, dim=4)], 3))
    assert routing.uniform is None
    assert routing.key_specs == ("fmt=fp32,dim=4",) * 2
    assert routing.value_specs == ("fmt=raw,dim=1", "fmt=fp32,dim=4")


def test_unknown_caches_are_not_routed() -> None:
    with pytest.raises(UnsupportedCache, match="BatchKVCache"):
        classify([KVCache(), BatchKVCache([0])])


@pytest.mark.parametrize("limits", [{"widest": 8}, {"most_layers": 1}, {"most_layers": 0}])
def test_rows_the_store_has_no_place_for_travel_as_blobs(limits: dict[str, int]) -> None:
    model, cache = prefilled("gemma3_text", 20)
    image = fit_to_store(dismantle(cache, 20), **limits)
    routing = route(image)
    assert len(routing.keys) == (limits.get("most_layers", 0))
    assert [lane.blob is None for lane in routing.lanes] == [
        lane.rank is not None for lane in routing.lanes
    ]
    restored = rebuild(make_prompt_cache(model), through_bytes(image))
    cold = continuation("gemma3_text", model, cache, 20, (1, 3))
    assert np.array_equal(continuation("gemma3_text", model, restored, 20, (1, 3)), cold)


def test_rows_that_travelled_as_a_blob_can_be_cut() -> None:
    image = dismantle([filled(KVCache(), 9)], 9)
    (cache,) = rebuild([KVCache()], cut(fit_to_store(image, most_layers=0), 4))
    assert append(cache, 4, 1) == list(range(5))


def test_rows_that_fit_are_left_as_they_are() -> None:
    image = image_of("qwen3_5")
    assert fit_to_store(image) == image


# State exists only at the token where it was captured


def test_checkpoint_before_the_last_token_answers_like_a_cold_run() -> None:
    """C01: the same prompt again. Running its last token twice changes the answer."""
    model, cache = prefilled("qwen3_5", 39)
    image = dismantle(cache, 39)
    cold = continuation("qwen3_5", model, copied(cache), 39, (1, 1))
    restored = rebuild(make_prompt_cache(model), image)
    assert largest_difference(continuation("qwen3_5", model, restored, 39, (1, 1)), cold) == 0.0
    feed("qwen3_5", model, cache, 39, 1)
    naive = rebuild(make_prompt_cache(model), dismantle(cache, 40))
    again = model(mx.array([token_ids(39, 1)]), cache=naive)
    assert largest_difference(np.array(again[0, -1]), cold[0]) > 1e-2


def test_chunks_of_any_size_before_a_checkpoint_are_the_same_state() -> None:
    """F-Q35: exactly one on MLX's own BLAS; a tuned BLAS sums products of other shapes otherwise.

    A wrong state is off by 0.1 or more (CASES C01, C02).
    """
    whole = prefilled("qwen3_5", 40)[1]
    model: Any = build("qwen3_5", seed=7)
    pieces = to_pieces(dismantle(whole, 40))
    cache = make_prompt_cache(model)
    for start, count in ((0, 16), (16, 16), (32, 8)):
        feed("qwen3_5", model, cache, start, count)
    restored = rebuild(make_prompt_cache(model), from_pieces(pieces))
    ours, theirs = (continuation("qwen3_5", model, c, 40, (1, 1)) for c in (restored, cache))
    assert largest_difference(ours, theirs) < 1e-4


def test_shorter_prefix_of_a_hybrid_is_an_honest_miss() -> None:
    """C02: 30 of 40 tokens cannot be had by resetting the recurrent part."""
    image = dismantle(prefilled("qwen3_5", 40)[1], 40)
    with pytest.raises(UnsupportedCache, match="40 tokens only"):
        cut(image, 30)


@pytest.mark.parametrize("piece", ["keys.0", "values.0", "blob.1", "manifest"])
def test_missing_piece_makes_the_whole_prefix_a_miss(piece: str) -> None:
    """C15."""
    pieces = to_pieces(image_of("qwen3_5"))
    del pieces[piece]
    with pytest.raises(KeyError):
        from_pieces(pieces)


def test_piece_of_another_model_makes_the_whole_prefix_a_miss() -> None:
    """A state of another width would run; a state of other slots or another class is refused."""
    model, cache = prefilled("qwen3_5", 20)
    pieces = to_pieces(dismantle(cache, 20))
    foreign = to_pieces(image_of("kimi_linear"))
    pieces["blob.0"] = foreign["blob.0"]
    with pytest.raises(RebuildError, match="4 arrays, not 2"):
        rebuild(make_prompt_cache(model), from_pieces(pieces))
    pieces = to_pieces(dismantle(cache, 20))
    pieces["keys.0"] = to_pieces(image_of("llama"))["keys.0"]
    with pytest.raises(RebuildError, match="rows of"):
        from_pieces(pieces)


def test_pure_recurrent_model_has_no_rows() -> None:
    image = image_of("mamba2")
    routing = route(image)
    assert (routing.keys, routing.values, routing.uniform) == ((), (), None)
    assert sorted(to_pieces(image)) == ["blob.0", "blob.1", "blob.2", "blob.3", "manifest"]


def test_state_and_rows_of_one_layer_come_back_together() -> None:
    live = [state(mx.ones((1, 2)), None), filled(KVCache(), 5)]
    first, second = rebuild([ArraysCache(2), KVCache()], through_bytes(dismantle(live, 5)))
    assert first.cache[1] is None
    assert append(second, 5, 1) == list(range(6))
