"""Cache images: compact, exact, and independent of the cache they were taken from."""

from __future__ import annotations

import copy
import dataclasses
import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.cache_rebuild import (
    CacheImage,
    RebuildError,
    RowPiece,
    cut,
    dismantle,
    rebuild,
)
from pion_patches.pieces import dtype_name
from tests.pion_patches.positions import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    append,
    bits,
    filled,
    offsets,
    read,
    state,
    through_bytes,
)
from tests.pion_patches.shipping import continuation, feed, to_pieces
from tests.pion_patches.zoo import RECENT, build

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def test_only_rows_that_hold_tokens_are_stored() -> None:
    """A10: five tokens in a 256-row buffer are five rows, and the sixth follows them."""
    image = dismantle([filled(KVCache(), 5)], 5)
    keys = image.leaves[0].keys
    assert keys is not None
    assert (keys.rows, keys.nbytes) == (5, 5 * 2 * 4)
    (cache,) = rebuild([KVCache()], through_bytes(image))
    assert append(cache, 5, 1) == [0, 1, 2, 3, 4, 5]
    assert cache.offset == 6


@pytest.mark.parametrize("length", [255, 256, 257, 600])
def test_restored_offset_is_the_prefix_not_the_buffer(length: int) -> None:
    """A07."""
    image = dismantle([filled(KVCache(), length)], length)
    (cache,) = rebuild([KVCache()], through_bytes(image))
    assert cache.offset == length
    assert append(cache, length, 3) == list(range(length + 3))


@pytest.mark.parametrize("length", [1, 200, 256, 300])
def test_rebuilt_buffers_have_room_in_steps_of_256(length: int) -> None:
    (cache,) = rebuild([KVCache()], dismantle([filled(KVCache(), length)], length))
    rows = cache.keys.shape[2]
    assert rows % 256 == 0
    assert rows >= length + 256
    append(cache, length, 200)
    assert cache.keys.shape[2] == rows  # the buffer was long enough: nothing was copied


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_keeps_its_bits(dtype: mx.Dtype) -> None:
    """N03: tiny, huge, infinite, negative zero and NaN payloads, through bytes and back."""
    size = 4 if dtype == mx.float32 else 2
    words = np.random.RandomState(3).randint(0, 1 << 8 * size, 2 * 5 * 4, dtype=np.int64)
    edge = {4: [0x7F801234, 0x80000000, 0xFFC00001], 2: [0x7F81, 0x8000, 0xFC01]}[size]
    words[: len(edge)] = edge
    source = mx.array(words.astype(f"u{size}")).view(dtype).reshape(1, 2, 5, 4)
    cache: Any = KVCache()
    cache.update_and_fetch(source, source)
    image = through_bytes(dismantle([cache], 5))
    (restored,) = rebuild([KVCache()], image)
    for tensor in restored.keys_and_values() if RECENT else restored.state:
        assert tensor.dtype == dtype
        assert bits(tensor) == bits(source)


def test_bf16_is_not_read_as_fp16() -> None:
    """N02: rows announced in another dtype than the cache's are refused."""
    image = dismantle([filled(KVCache(), 4, dtype=mx.bfloat16)], 4)
    keys = image.leaves[0].keys
    assert keys is not None
    assert keys.layout.store_format == "bf16"
    as_fp16 = RowPiece((keys.parts[0].view(mx.float16),), "dense")
    leaf = dataclasses.replace(image.leaves[0], keys=as_fp16)
    with pytest.raises(RebuildError, match="float16"):
        rebuild([KVCache()], CacheImage(4, (leaf,)))


@pytest.mark.parametrize("make", ["transposed", "strided", "broadcast"])
def test_views_are_stored_as_what_they_show(make: str) -> None:
    """E10."""
    base = mx.arange(2 * 6 * 4, dtype=mx.float32).reshape(1, 6, 2, 4)
    view = {
        "transposed": base.transpose(0, 2, 1, 3),
        "strided": base[:, ::2].transpose(0, 2, 1, 3),
        "broadcast": mx.broadcast_to(base[:, :1].transpose(0, 2, 1, 3), (1, 2, 6, 4)),
    }[make]
    cache: Any = ConcatenateKVCache()
    cache.keys, cache.values, cache.offset = view, view, view.shape[2]
    (restored,) = rebuild([ConcatenateKVCache()], through_bytes(dismantle([cache], cache.offset)))
    assert mx.array_equal(restored.keys, view).item()
    assert mx.array_equal(restored.values, view).item()


def test_zero_rows_and_unused_slots_round_trip() -> None:
    """E12, C08: an emptied cache, a new one, an empty array and slots that are None."""
    emptied: Any = filled(KVCache(), 3)
    emptied.trim(3)
    caches = [emptied, KVCache(), RotatingKVCache(max_size=8), ChunkedKVCache(8), ArraysCache(2)]
    image = through_bytes(dismantle(caches, 0))
    restored = rebuild(caches, image)
    assert offsets(restored[:4]) == [0, 0, 0, 0]
    assert append(restored[0], 0, 2) == [0, 1]
    assert restored[1].keys is None
    assert restored[4].cache == [None, None]
    open_group = state(mx.zeros((1, 0, 24)), mx.ones((1, 2)), None)
    (again,) = rebuild([ArraysCache(3)], through_bytes(dismantle([open_group], 7)))
    assert [slot if slot is None else slot.shape for slot in again.cache] == [
        (1, 0, 24),
        (1, 2),
        None,
    ]


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_state_of_any_number_of_slots_keeps_nones_shapes_and_dtypes(slots: int) -> None:
    """C08: nothing assumes two arrays a layer."""
    arrays: list[mx.array | None] = [
        mx.full((1, 3 + n), n + 0.5, dtype=DTYPES[n % 3]) for n in range(slots)
    ]
    if slots > 1:
        arrays[1] = None
    (restored,) = rebuild([ArraysCache(slots)], through_bytes(dismantle([state(*arrays)], 9)))
    assert len(restored.cache) == slots
    for found, expected in zip(restored.cache, arrays, strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            assert found.dtype == expected.dtype
            assert mx.array_equal(found, expected).item()


def test_integer_state_is_kept() -> None:
    """A layer may keep token ids; zero is one of them."""
    (restored,) = rebuild(
        [ArraysCache(1)], through_bytes(dismantle([state(mx.zeros((1, 2), mx.int64))], 9))
    )
    assert restored.cache[0].dtype == mx.int64


def test_image_does_not_change_when_the_cache_goes_on() -> None:
    """C14, A06: of plain, windowed and recurrent caches."""
    for cache in (filled(KVCache(), 17), filled(RotatingKVCache(max_size=32), 17)):
        image = dismantle([cache], 17)
        before = [bits(array) for array in image.arrays()]
        append(cache, 17, 1)
        cache.keys[...] = -1
        assert [bits(array) for array in image.arrays()] == before
    live: Any = state(mx.ones((1, 2)))
    image = dismantle([live], 5)
    live.cache[0][...] = 7
    live.cache[0] = None
    assert image.leaves[0].arrays[0] is not None
    assert image.leaves[0].arrays[0].tolist() == [[1, 1]]


def test_second_restore_of_an_image_equals_the_first() -> None:
    """C14: what a caller does to its cache stays with that caller."""
    model: Any = build("qwen3_5", seed=7)
    cache = make_prompt_cache(model)
    feed("qwen3_5", model, cache, 0, 40)
    image = dismantle(cache, 40)
    runs = []
    for _ in range(2):
        restored = rebuild(make_prompt_cache(model), image)
        runs.append(continuation("qwen3_5", model, restored, 40))
        for array in (slot for c in restored[:3] for slot in c.cache):
            array[...] = 0
    assert np.array_equal(runs[0], runs[1])


def test_nothing_after_a_cut_is_reachable() -> None:
    """A06: no view, no attribute and no stored byte has a position from 17 on."""
    short = cut(dismantle([filled(KVCache(), 300)], 300), 17)
    for piece in (short.leaves[0].keys, short.leaves[0].values):
        assert piece is not None
        assert len(piece.to_bytes()) == 17 * 2 * 4
    (cache,) = rebuild([KVCache()], short)
    assert cache.offset == 17
    for tensor in (cache.keys, cache.values, *cache.state[:2]):
        assert max(read(tensor)) == 16
    assert append(cache, 17, 1) == list(range(18))
    assert all(
        max(np.frombuffer(data, np.float32)) == 16
        for n, data in to_pieces(short).items()
        if n != "manifest"
    )


def test_side_without_width_needs_no_bytes() -> None:
    """Some index caches keep keys and values of width 0."""
    live: Any = KVCache()
    live.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.zeros((1, 1, 3, 0)))
    image = through_bytes(dismantle([live], 3))
    assert image.leaves[0].values is None
    (restored,) = rebuild([KVCache()], image)
    keys, values = restored.update_and_fetch(mx.ones((1, 1, 1, 4)), mx.zeros((1, 1, 1, 0)))
    assert (keys.shape, values.shape) == ((1, 1, 4, 4), (1, 1, 4, 0))


def test_template_is_left_alone() -> None:
    template = [KVCache(), CacheList(ArraysCache(1), RotatingKVCache(max_size=8))]
    live = [
        filled(KVCache(), 4),
        CacheList(state(mx.ones((1, 2))), filled(RotatingKVCache(max_size=8), 4)),
    ]
    restored = rebuild(template, dismantle(live, 4))
    assert template[0].keys is None
    assert template[1].caches[0].cache == [None]
    assert restored[1].caches is not template[1].caches


def test_image_can_be_handed_to_another_thread() -> None:
    """What was restored is evaluated: a lazy array belongs to the thread that made it."""
    image = dismantle([filled(KVCache(), 4), state(mx.ones((1, 3), mx.bfloat16))], 4)
    caches = rebuild([KVCache(), ArraysCache(1)], image)
    sizes: list[int] = []

    def use() -> None:
        sizes.append(len(image.leaves[0].keys.to_bytes()))  # type: ignore[union-attr]
        sizes.append(len(append(caches[0], 4, 1)))
        sizes.append(int(caches[1].cache[0].sum().item()))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert sizes == [4 * 2 * 4, 5, 3]


def test_deep_copies_are_stored_like_their_original() -> None:
    live = [filled(KVCache(), 4), state(mx.ones((1, 3)))]
    first, second = (dismantle(caches, 4) for caches in (live, copy.deepcopy(live)))
    assert to_pieces(first) == to_pieces(second)
    assert [dtype_name(array) for array in first.arrays()] == ["float32"] * 3
