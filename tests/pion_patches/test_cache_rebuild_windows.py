"""Windows, chunks and cuts: what a cache no longer holds is never made up."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_patches.cache_rebuild import (
    UnsupportedCache,
    cut,
    dismantle,
    rebuild,
)
from tests.pion_patches.positions import (
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    append,
    filled,
    offsets,
    one_by_one,
    read,
    state,
    through_bytes,
)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def test_ring_is_restored_as_it_was() -> None:
    """B04: twenty single tokens, then four at once, attend to 13..23 in order."""
    ring: Any = RotatingKVCache(max_size=8)
    one_by_one(ring, 0, 20)
    image = through_bytes(dismantle([ring], 20))
    (cache,) = rebuild([RotatingKVCache(max_size=8)], image)
    assert read(cache.keys) == read(ring.keys)
    assert cache._idx == ring._idx
    assert append(cache, 20, 4) == list(range(13, 24))


@pytest.mark.parametrize("length", [7, 8, 9])
def test_one_state_has_one_image_however_it_was_fed(length: int) -> None:
    """B05: nine tokens in one block leave nine rows, one by one eight; the same are stored."""
    block = filled(RotatingKVCache(max_size=8), length)
    single: Any = RotatingKVCache(max_size=8)
    one_by_one(single, 0, length)
    held = []
    for cache in (block, single):
        image = dismantle([cache], length)
        keys = image.leaves[0].keys
        assert keys is not None
        held.append(sorted(int(row) for row in keys.parts[0][:, 0].tolist()))  # type: ignore[union-attr, arg-type]
        (restored,) = rebuild([RotatingKVCache(max_size=8)], image)
        assert sorted(append(restored, length, 1)) == list(range(max(0, length - 7), length + 1))
    assert held[0] == held[1] == list(range(max(0, length - 8), length))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 20),
    keep=st.integers(0, 4),
    before=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    after=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_ring_of_any_history_continues_alike(
    size: int, keep: int, before: list[int], after: list[int]
) -> None:
    keep = min(keep, size - 1)
    live: Any = RotatingKVCache(max_size=size, keep=keep)
    seen = 0
    for count in before:
        append(live, seen, count)
        seen += count
    image = through_bytes(dismantle([live], seen))
    (restored,) = rebuild([RotatingKVCache(max_size=size, keep=keep)], image)
    for count in after:
        mask, other = (cache.make_mask(count, window_size=size) for cache in (live, restored))
        assert type(mask) is type(other)
        if isinstance(mask, mx.array):
            assert mx.array_equal(mask, other).item()
        assert append(restored, seen, count) == append(live, seen, count)
        seen += count
    assert restored._idx == live._idx


def test_ring_trimmed_past_its_start_is_refused() -> None:
    """mlx-lm 0.32.2 takes a trim of more than the ring holds and leaves its position negative."""
    ring: Any = filled(RotatingKVCache(max_size=8), 6)
    ring.trim(4)
    assert offsets(rebuild([RotatingKVCache(max_size=8)], dismantle([ring], 2))) == [2]
    ring._idx = -1
    with pytest.raises(UnsupportedCache, match="ring position -1"):
        dismantle([ring], 2)


def test_chunked_cache_keeps_its_start() -> None:
    chunk = 256
    live: Any = filled(ChunkedKVCache(chunk), 512)
    live.maybe_trim_front()
    (restored,) = rebuild([ChunkedKVCache(chunk)], through_bytes(dismantle([live], 512)))
    assert restored.start_position == live.start_position == 256
    for cache in (live, restored):
        cache.maybe_trim_front()
    assert append(restored, 512, 5) == append(live, 512, 5) == list(range(256, 517))


def test_cut_of_a_mixed_list_is_whole_or_refused() -> None:
    """A03: never 300 tokens in one layer and 512 in another."""
    caches = [filled(KVCache(), 1024), filled(ChunkedKVCache(512), 1024)]
    image = dismantle(caches, 1024)
    with pytest.raises(UnsupportedCache, match="1024 tokens only"):
        cut(image, 300)
    plain = cut(dismantle([caches[0], filled(KVCache(), 1024)], 1024), 300)
    assert offsets(rebuild([KVCache(), KVCache()], plain)) == [300, 300]


def test_window_that_has_wrapped_cannot_be_cut() -> None:
    """B01: eight tokens fit the window and can be cut; after twenty the first are gone."""
    wrapped = dismantle([filled(RotatingKVCache(max_size=8), 20)], 20)
    with pytest.raises(UnsupportedCache, match="wrapped"):
        cut(wrapped, 12)
    short = cut(dismantle([filled(RotatingKVCache(max_size=8), 8)], 8), 5)
    (cache,) = rebuild([RotatingKVCache(max_size=8)], short)
    assert one_by_one(cache, 5, 2) == list(range(7))


def test_recurrent_state_cannot_be_cut() -> None:
    """C02: keeping the rows and resetting the state would be plausible and wrong."""
    image = dismantle([state(mx.ones((1, 4))), filled(KVCache(), 40)], 40)
    with pytest.raises(UnsupportedCache, match="40 tokens only"):
        cut(image, 30)
    assert cut(image, 40) is image
    with pytest.raises(ValueError, match="41"):
        cut(image, 41)
