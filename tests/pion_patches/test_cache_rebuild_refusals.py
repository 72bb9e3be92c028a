"""Every doubt is a refusal: nothing is stored, nothing restored, and the message says why."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.cache_rebuild import (
    CacheImage,
    RebuildError,
    RowPiece,
    UnsupportedCache,
    cut,
    dismantle,
    known_caches,
    rebuild,
)
from tests.pion_patches.positions import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    filled,
    state,
    through_bytes,
)
from tests.pion_patches.shipping import feed, from_pieces, to_pieces
from tests.pion_patches.zoo import build, families

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def reshaped(image: CacheImage, leaf: int = 0, **changes: Any) -> CacheImage:
    """The image with fields of one leaf replaced; names of meta fields go into its meta."""
    found = image.leaves[leaf]
    fields = {field.name for field in dataclasses.fields(found)}
    meta = {**found.meta, **{name: v for name, v in changes.items() if name not in fields}}
    direct = {name: v for name, v in changes.items() if name in fields}
    leaves = list(image.leaves)
    leaves[leaf] = dataclasses.replace(found, **({"meta": meta} | direct))
    return CacheImage(image.tokens, tuple(leaves))


class OwnCache(KVCache):  # type: ignore[misc]
    """What somebody derives from a known class."""


def test_subclass_of_a_known_cache_is_unknown() -> None:
    with pytest.raises(UnsupportedCache, match="OwnCache") as refused:
        dismantle([filled(KVCache(), 3), CacheList(filled(OwnCache(), 3))], 3)
    assert "cache 1.0" in refused.value.found
    assert refused.value.known == known_caches()
    with pytest.raises(UnsupportedCache):
        rebuild([OwnCache()], dismantle([filled(KVCache(), 3)], 3))


def test_namesake_of_a_known_cache_is_unknown() -> None:
    namesake = type("KVCache", (), {"__module__": "mlx_lm.models.cache"})
    with pytest.raises(UnsupportedCache):
        dismantle([namesake()], 0)


def test_every_cache_class_of_mlx_lm_is_known_or_for_batches() -> None:
    """A class a new mlx-lm brings shows up here, not in a user's log."""
    classes = {
        name
        for name, found in vars(mlx_caches).items()
        if isinstance(found, type) and issubclass(found, mlx_caches._BaseCache)
    }
    batched = {"_BaseCache", "BatchKVCache", "BatchRotatingKVCache"}
    assert classes - batched == set(known_caches()) - {"deepseek_v41.LayerCache"}


@pytest.mark.parametrize("rows", [2, 0])
def test_batch_is_refused(rows: int) -> None:
    batch: Any = KVCache()
    tensor = mx.zeros((rows, 1, 4, 2))
    batch.keys, batch.values, batch.offset = tensor, tensor, 4
    with pytest.raises(UnsupportedCache, match="not one sequence"):
        dismantle([batch], 4)
    with pytest.raises(UnsupportedCache, match="not one sequence"):
        dismantle([state(mx.ones((rows, 3)))], 4)
    with pytest.raises(UnsupportedCache):
        dismantle([BatchKVCache([0, 1])], 4)


def test_state_captured_in_a_padded_batch_is_refused() -> None:
    padded = state(mx.ones((1, 3)))
    padded.lengths = mx.array([3])
    with pytest.raises(UnsupportedCache, match="padded"):
        dismantle([padded], 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["missing", "zero", "nan", "inf"])
def test_state_that_was_never_captured_is_refused(fault: str, dtype: mx.Dtype) -> None:
    """C04."""
    good = mx.full((1, 3), 300.0, dtype)
    bad = {
        "missing": state(None, None),
        "zero": state(mx.zeros((1, 3), dtype), mx.zeros((1, 2), dtype)),
        "nan": state(good, mx.array([[1.0, float("nan")]], dtype)),
        "inf": state(good, mx.array([[float("-inf")]], dtype)),
    }[fault]
    with pytest.raises(UnsupportedCache):
        dismantle([filled(KVCache(), 32), bad], 32)
    assert dismantle([filled(KVCache(), 32), state(good, -good)], 32).tokens == 32


@pytest.mark.parametrize("tokens", [39, 41])
def test_state_of_another_token_count_is_refused(tokens: int) -> None:
    """C09: the count is in the manifest, in every leaf and in the blob."""
    live = [state(mx.ones((1, 3))), filled(KVCache(), 40)]
    with pytest.raises(UnsupportedCache, match="40 tokens"):
        dismantle(live, tokens)
    pieces = to_pieces(dismantle(live, 40))
    pieces["manifest"] = pieces["manifest"].replace(b'"tokens": 40', b'"tokens": %d' % tokens)
    with pytest.raises(RebuildError, match="40 tokens"):
        from_pieces(pieces)
    image = dismantle(live, 40)
    with pytest.raises(RebuildError, match="40 tokens"):
        rebuild(make_like(live), CacheImage(tokens, image.leaves))


def make_like(caches: list[Any]) -> list[Any]:
    return [ArraysCache(len(c.cache)) if hasattr(c, "cache") else type(c)() for c in caches]


@pytest.mark.parametrize("missing", range(3))
def test_image_without_one_of_its_leaves_is_refused(missing: int) -> None:
    """C15: never 30 of 40 layers."""
    live = [filled(KVCache(), 4), state(mx.ones((1, 3))), filled(KVCache(), 4)]
    image = dismantle(live, 4)
    leaves = tuple(leaf for index, leaf in enumerate(image.leaves) if index != missing)
    with pytest.raises(RebuildError):
        rebuild(make_like(live), CacheImage(4, leaves))


@pytest.mark.parametrize("changes", [
    {"offset": 5}, {"offset": "4"}, {"offset": True}, {"rows": 3}, {"rows": 1 << 40},
    {"rows": None},
    {"keys": None}, {"values": None}, {"arrays": (mx.ones((1, 1)),)}, {"unused": True},
    {"unused": "no"}, {"kind": "ArraysCache"}, {"kind": "ConcatenateKVCache"}, {"path": (1,)},
    {"path": (0, 0)}, {"folded": {"keys": "dense"}}, {"folded": 3},
    {"meta": {}}, {"meta": {"offset": 4, "rows": 4}},
    {"meta": {"offset": 4, "rows": 4, "keys": {"heads": 1, "widths": [2], "dtypes": ["float32"]}}},
])  # fmt: skip
def test_leaf_that_lies_is_refused(changes: dict[str, Any]) -> None:
    image = dismantle([filled(KVCache(), 4)], 4)
    with pytest.raises(RebuildError):
        rebuild([KVCache()], reshaped(image, **changes))


@pytest.mark.parametrize("shape", [
    {"heads": 2, "widths": [2], "dtypes": ["float32"]},
    {"heads": -1, "widths": [-2], "dtypes": ["float32"]},
    {"heads": 1, "widths": [2, 2], "dtypes": ["float32", "float32"]},
    {"heads": 1, "widths": [2], "dtypes": ["float16"]},
    {"heads": 1, "widths": [2], "dtypes": ["complex64"]},
    {"heads": 1, "widths": [], "dtypes": []},
    {"heads": 1, "widths": [1 << 30], "dtypes": ["float32"]},
    {"heads": 1, "widths": ["2"], "dtypes": ["float32"]},
    {"heads": 1, "widths": [2]},
    [1, 2],
])  # fmt: skip
def test_shape_that_lies_is_refused(shape: Any) -> None:
    image = dismantle([filled(KVCache(), 4)], 4)
    lie = {**image.leaves[0].meta, "keys": shape}
    with pytest.raises(RebuildError):
        rebuild([KVCache()], reshaped(image, meta=lie))


@pytest.mark.parametrize("changes", [
    {"idx": 9}, {"idx": -1}, {"idx": None}, {"rows": 7}, {"rows": 9}, {"max_size": 16}, {"keep": 4},
])  # fmt: skip
def test_ring_that_lies_is_refused(changes: dict[str, Any]) -> None:
    image = dismantle([filled(RotatingKVCache(max_size=8), 20)], 20)
    with pytest.raises(RebuildError):
        rebuild([RotatingKVCache(max_size=8)], reshaped(image, **changes))


@pytest.mark.parametrize("changes", [
    {"start": 300}, {"start": -1}, {"buffer": 3}, {"buffer": 1 << 40}, {"chunk_size": 16},
])  # fmt: skip
def test_chunk_that_lies_is_refused(changes: dict[str, Any]) -> None:
    image = dismantle([filled(ChunkedKVCache(8), 20)], 20)
    with pytest.raises(RebuildError):
        rebuild([ChunkedKVCache(8)], reshaped(image, **changes))


@pytest.mark.parametrize("arrays", [
    (), (None,), (mx.ones((2, 3)),), (mx.array(1.0),), (mx.ones((1, 3)), None),
    (mx.array([[float("nan")]]),),
])  # fmt: skip
def test_state_that_lies_is_refused(arrays: tuple[mx.array | None, ...]) -> None:
    image = dismantle([state(mx.ones((1, 3)))], 4)
    with pytest.raises(RebuildError):
        rebuild([ArraysCache(1)], reshaped(image, arrays=arrays))


def test_cache_of_another_model_is_refused() -> None:
    image = dismantle([filled(KVCache(), 4) for _ in range(4)], 4)
    for template in (
        [KVCache() for _ in range(3)],
        [KVCache() for _ in range(5)],
        [*(KVCache() for _ in range(3)), RotatingKVCache(max_size=8)],
        [CacheList(KVCache(), KVCache()), CacheList(KVCache(), KVCache())],
        [],
    ):
        with pytest.raises(RebuildError):
            rebuild(template, image)


def test_empty_caches_are_no_prefix() -> None:
    """Only beside a cache that counts its tokens may another be unused."""
    with pytest.raises(UnsupportedCache, match="holds 0 tokens, not 4"):
        dismantle([filled(KVCache(), 4), KVCache()], 4)
    with pytest.raises(UnsupportedCache):
        dismantle([CacheList(KVCache(), KVCache())], 4)
    with pytest.raises(UnsupportedCache):
        dismantle([], 4)
    spare = [CacheList(filled(KVCache(), 4), KVCache())]
    (restored,) = rebuild([CacheList(KVCache(), KVCache())], through_bytes(dismantle(spare, 4)))
    assert type(restored) is CacheList
    assert restored.caches[1].keys is None


@pytest.mark.skipif("deepseek_v41" not in families, reason="this mlx-lm has no private cache")
def test_private_cache_of_another_window_is_refused() -> None:
    model: Any = build("deepseek_v41")
    cache = make_prompt_cache(model)
    feed("deepseek_v41", model, cache, 0, 9)
    other: Any = build("deepseek_v41", sliding_window=16)
    image = dismantle(cache, 9)
    with pytest.raises(RebuildError, match="window_size"):
        rebuild(make_prompt_cache(other), image)
    with pytest.raises(UnsupportedCache):
        cut(image, 8)


def test_rows_of_a_wrong_size_are_refused() -> None:
    keys = dismantle([filled(KVCache(), 4)], 4).leaves[0].keys
    assert keys is not None
    data = keys.to_bytes()
    for rows, cut_off in ((4, 1), (5, 0), (3, 0), (-4, 0)):
        with pytest.raises(RebuildError):
            RowPiece.from_buffer(data[: len(data) - cut_off], keys.layout, rows)
    for changes in (
        {"fmt": "mlx4g32"}, {"fmt": "int8"}, {"dtypes": ("complex64",)}, {"widths": (0,)},
        {"widths": (1, 1)}, {"dtypes": (), "widths": ()},
        {"widths": (1, 1), "dtypes": ("float32",) * 2},
    ):  # fmt: skip
        with pytest.raises(RebuildError):
            RowPiece.from_buffer(data, dataclasses.replace(keys.layout, **changes), 4)
