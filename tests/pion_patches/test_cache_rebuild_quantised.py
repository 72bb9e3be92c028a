"""kv_bits caches are stored and restored as codes, never requantised."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.cache_rebuild import (
    RebuildError,
    cut,
    dismantle,
    rebuild,
)
from tests.pion_patches.positions import (
    KVCache,
    QuantizedKVCache,
    bits,
    filled,
    read,
    rows_of,
    through_bytes,
)
from tests.pion_patches.shipping import continuation, copied, feed
from tests.pion_patches.zoo import build

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def test_quantised_rows_are_cut_in_every_tensor() -> None:
    """D01: 253 tokens cut to 17, then 27 more, are 44 rows."""
    caches = [QuantizedKVCache(32, 4), QuantizedKVCache(32, 4)]
    for cache in caches:
        filled(cache_as_dense(cache), 253)
    image = cut(dismantle(caches, 253), 17)
    for cache in rebuild([QuantizedKVCache(32, 4), QuantizedKVCache(32, 4)], through_bytes(image)):
        rows = rows_of(17, 27, dim=32, dtype=mx.float16)
        keys, values = cache.update_and_fetch(rows, rows)
        assert cache.offset == 44
        assert {tensor.shape[2] for tensor in (*keys, *values)} == {44}


def cache_as_dense(cache: Any) -> Any:
    """A stand-in that feeds fp16 rows of 32 to a quantised cache."""

    class Feed:
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            wide = [mx.repeat(t, 16, axis=3).astype(mx.float16) for t in (keys, values)]
            cache.update_and_fetch(*wide)
            return keys, values

    return Feed()


@pytest.mark.parametrize(
    ("group_size", "bits_", "fmt"),
    [
        (32, 4, "mlx4g32"),
        (64, 4, "raw"),
        (32, 8, "raw"),
        (64, 2, "raw"),
        (32, 6, "raw"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_rows_are_stored_as_codes(
    group_size: int, bits_: int, fmt: str, dtype: mx.Dtype
) -> None:
    """Never requantised: codes, scales and biases come back as they were, and appends agree."""
    random = mx.random.key(5)
    rows = mx.random.normal((1, 2, 300, 64), key=random).astype(dtype)
    live: Any = QuantizedKVCache(group_size=group_size, bits=bits_)
    live.update_and_fetch(rows, 2 * rows)
    image = dismantle([live], 300)
    for piece in (image.leaves[0].keys, image.leaves[0].values):
        assert piece is not None
        assert piece.fmt == (fmt if dtype == mx.float16 else "raw")
        assert piece.layout.store_dim == (128 if piece.fmt == "mlx4g32" else piece.layout.row_bytes)
    (restored,) = rebuild([QuantizedKVCache(group_size, bits_)], through_bytes(image))
    for count in (1, 4):
        more = rows[:, :, :count]
        ours, theirs = (c.update_and_fetch(more, more) for c in (restored, live))
        for mine, its in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
            assert mine.dtype == its.dtype
            assert bits(mine) == bits(its)


def test_mlx4g32_rows_are_codes_then_scales_then_biases() -> None:
    """The V-store's packed row: u32 codes[D/8], f16 scales[D/32], f16 biases[D/32]."""
    live: Any = QuantizedKVCache(32, 4)
    rows = mx.random.normal((1, 2, 3, 32), key=mx.random.key(1)).astype(mx.float16)
    live.update_and_fetch(rows, rows)
    keys = dismantle([live], 3).leaves[0].keys
    assert keys is not None
    table = np.frombuffer(keys.to_bytes(), np.uint8).reshape(3, 64 * 5 // 8)
    codes = table[:, :32].copy().view(np.uint32)
    scales, biases = (table[:, at : at + 4].copy().view(np.float16) for at in (32, 36))
    packed = (mx.array(codes), mx.array(scales), mx.array(biases))
    expected = dequantised(live.keys)[0, :, :3].swapaxes(0, 1)
    assert mx.array_equal(dequantised(packed).reshape(3, 2, 32), expected).item()


def dequantised(parts: tuple[mx.array, mx.array, mx.array]) -> mx.array:
    codes, scales, biases = parts
    return mx.dequantize(codes, scales, biases, group_size=32, bits=4)


@pytest.mark.parametrize("width", [32, 64, 96, 128, 192, 256, 576])
def test_head_widths_that_quantise_in_groups_of_32_are_mlx4g32(width: int) -> None:
    """D12: those of 80 and 112 are refused by MLX itself, at the first token."""
    live: Any = QuantizedKVCache(32, 4)
    rows = mx.ones((1, 1, 2, width), dtype=mx.float16)
    live.update_and_fetch(rows, rows)
    keys = dismantle([live], 2).leaves[0].keys
    assert keys is not None
    assert keys.fmt == "mlx4g32"


@pytest.mark.parametrize(
    "template",
    [
        QuantizedKVCache(64, 4),
        QuantizedKVCache(32, 8),
        KVCache(),
    ],
)
def test_quantised_rows_fit_only_a_cache_of_the_same_kind(template: Any) -> None:
    """D03: other bits, another group size, or no quantisation at all."""
    live: Any = QuantizedKVCache(32, 4)
    rows = mx.ones((1, 1, 2, 64), dtype=mx.float16)
    live.update_and_fetch(rows, rows)
    with pytest.raises(RebuildError):
        rebuild([template], dismantle([live], 2))


def test_first_and_last_layers_may_stay_plain() -> None:
    """D05: tiers that exempt some layers come back as they were."""
    half: dict[str, Any] = {"heads": 2, "dim": 32, "dtype": mx.float16}
    live = [filled(KVCache(), 9, **half) for _ in range(3)]
    live[1] = live[1].to_quantized(group_size=32, bits=4)
    template = [KVCache(), QuantizedKVCache(32, 4), KVCache()]
    restored = rebuild(template, through_bytes(dismantle(live, 9)))
    assert [type(cache) for cache in restored] == [type(cache) for cache in live]
    assert read(restored[2].keys)[:9] == list(range(9))


def test_quantised_continuation_is_exact() -> None:
    """kv_bits as mlx-lm does it: prefill, quantise, then decode from the codes."""
    model: Any = build("llama", seed=2, dtype=mx.float16, head_dim=32)
    live = make_prompt_cache(model)
    feed("llama", model, live, 0, 40)
    live = [cache.to_quantized(group_size=32, bits=4) for cache in live]
    image = through_bytes(dismantle(live, 40))
    template = [c.to_quantized(group_size=32, bits=4) for c in make_prompt_cache(model)]
    restored = rebuild(template, image)
    cold = continuation("llama", model, copied(live), 40, (1, 1, 1))
    assert np.array_equal(continuation("llama", model, restored, 40, (1, 1, 1)), cold)
