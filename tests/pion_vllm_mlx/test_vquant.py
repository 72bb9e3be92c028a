"""Storage tiers through a real server: what each may change, and what none of them may."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from numpy.typing import NDArray

from pion_patches.cache_rebuild import RowLayout, RowPiece, dismantle, rebuild
from pion_server.formats import InputType, format_names, make_format
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.pieces import pack_piece, row_format
from pion_vllm_mlx.restore import fetch_prefix, find_prefix
from pion_vllm_mlx.ship import Outcome, store_prefix
from pion_vllm_mlx.shipment import pack_prefix
from pion_vllm_mlx.tier import NAMED, Tier
from pion_vllm_mlx.transport import Patience
from pion_vllm_mlx.transport.endpoint import Endpoint
from tests.pion_vllm_mlx.tiny import PREFIX, cold_answer, continue_greedily, tiny_llama

Server = Any
Rows = NDArray[np.floating]
Survivors = tuple[Server, dict[tuple[Any, ...], list[Any]]]
#: Generous: the first answer of a server on a busy machine may take long.
PATIENT = 20.0
LAYERS, HEADS, HEAD_DIM = 4, 2, 32
N = len(PREFIX)
LOSSY = [name for name in NAMED if name not in ("fp32", "fp16", "bf16")]
BLOCKS = [name for name in LOSSY if name != "int8"]
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
MODELS = {
    name: tiny_llama(dtype=dtype, num_hidden_layers=LAYERS, head_dim=HEAD_DIM)
    for name, dtype in DTYPES.items()
}


pytestmark = pytest.mark.usefixtures("no_lane_in_process")


def client(server: Server, model: Any, **settings: Any) -> PionPromptCache:
    return PionPromptCache(model, port=server.port, timeout=PATIENT, store="sync", **settings)


def outcome(
    server: Server, namespace: str, model: Any, **settings: Any
) -> tuple[list[Any], dict[str, Any]]:
    """The cache one client of its own gets, and the client's figures."""
    with client(server, model, **settings) as pc:
        cache = pc.get_or_prefill(PREFIX, namespace)
        return cache, pc.stats()


def missed_for(stats: dict[str, Any], reason: str) -> bool:
    reasons: dict[str, int] = stats["miss_reasons"]
    return stats["hits"] == 0 and reasons == {reason: 1}


def numbers(tensor: mx.array) -> Rows:
    """The rows of a cache's side `[1, H, …, D]` as they are stored, `[N, H*D]`, in float32."""
    return np.array(
        tensor[0, :, :N].astype(mx.float32).swapaxes(0, 1).reshape(N, -1), dtype=np.float32
    )


def as_read(rows: Rows, store: str, dtype: str) -> Rows:
    """What the format's own definition gives back for these rows, in the model's dtype."""
    fmt = make_format(store, rows.shape[1])
    read = fmt.decode(fmt.encode(memoryview(rows.tobytes()), len(rows), InputType.F32))
    return np.array(mx.array(read).astype(DTYPES[dtype]).astype(mx.float32))


def band(rows: Rows, store: str) -> Rows:
    """The largest error a format may make of each number, from its levels alone."""
    if store == "int8":
        return np.full_like(rows, np.ptp(rows) / 508)
    blocks = rows.reshape(len(rows), -1, 32)
    peak = np.repeat(np.abs(blocks).max(axis=2), 32, axis=1)
    spread = np.repeat(np.ptp(blocks, axis=2), 32, axis=1)
    bands: dict[str, Rows] = {
        "turbo4": peak / 14,
        "turbo3": peak / 6,
        "turbo2": peak / 3,
        # Three bits of mantissa; below 2^-6 of a scale the steps stop shrinking.
        "fp8": np.abs(rows) / 16 + peak / 240 / 1024,
        # Beside half a step, the bias as f16 shifts all numbers of a group.
        "mlx4g32": spread / 30 + peak / 2048,
    }
    return bands[store]


def check_side(exact: mx.array, restored: mx.array, store: str, dtype: str) -> None:
    """That a restored side is what its format's definition reads, within the format's band."""
    assert restored.dtype == exact.dtype
    want, got = numbers(exact), numbers(restored)
    assert np.array_equal(got, as_read(want, store, dtype))
    if store in LOSSY:
        # Scales are rounded to f16, and what is read to the model's dtype.
        slack = np.abs(want).max() * (2**-9 if dtype != "bfloat16" else 2**-7)
        assert (np.abs(got - want) <= 1.01 * band(want, store) + slack).all()
        assert not np.array_equal(got, want)


def test_the_documented_sizes_are_the_formats_own() -> None:
    """Every format has a row in docs/formats.md, with the bytes a row of 1,024 numbers takes."""
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    sizes = dict(re.findall(r"^\| `(\w+)` \| [^|]*D[^|]* \| (\d+|by R) \|", text, re.MULTILINE))
    # This one depends on its rotary part.
    assert sizes.pop("bf16_rope_fp8_body") == "by R"
    names = set(format_names()) - {"bf16_rope_fp8_body"}
    assert sizes == {name: str(make_format(name, 1024).row_bytes) for name in names}


TIERS = [
    *((name, 0, "float16") for name in NAMED),
    *((name, 1, "float16") for name in LOSSY),
    *((name, 1, "auto") for name in ("turbo4", "mlx4g32")),
]


@pytest.fixture(scope="module")
def survivors(
    module_server: Callable[..., Server],
) -> Iterator[Survivors]:
    """A server killed and restarted after every tier was stored, and the caches that were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
        server = module_server()
        stored = {}
        for dtype in DTYPES:
            for tier in TIERS:
                settings = settings_of(tier)
                cache, stats = outcome(server, name_of(tier, dtype), MODELS[dtype], **settings)
                assert missed_for(stats, "absent")
                assert stats["stores"] == 1
                stored[(dtype, *tier)] = cache
        server.kill()
        server.restart()
        yield server, stored


def settings_of(tier: tuple[str, int, str]) -> dict[str, Any]:
    return dict(zip(("vquant", "boundary_protect", "protect_dtype"), tier, strict=True))


def name_of(tier: tuple[str, int, str], dtype: str) -> str:
    return PionPromptCache.make_namespace("tiers", dtype, *map(str, tier))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: "-".join(map(str, tier)))
def test_every_tier_outlives_a_kill_and_reads_as_its_format_defines(
    survivors: tuple[Server, dict[tuple[Any, ...], list[Any]]],
    tier: tuple[str, int, str],
    dtype: str,
) -> None:
    """D05 for the protected ones: K and the outer layers of V are exempt, and they reload."""
    server, stored = survivors
    vquant, protect, protect_dtype = tier
    restored, stats = outcome(server, name_of(tier, dtype), MODELS[dtype], **settings_of(tier))
    assert stats["hits"] == 1
    native = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[dtype]
    kept = native if protect_dtype == "auto" else "fp16"
    for layer, (exact, got) in enumerate(zip(stored[(dtype, *tier)], restored, strict=True)):
        outer = layer < protect or layer >= LAYERS - protect
        check_side(exact.keys, got.keys, kept if protect else vquant, dtype)
        check_side(exact.values, got.values, kept if protect and outer else vquant, dtype)
        assert got.offset == N


def test_protected_pieces_of_a_half_precision_model_keep_every_bit(
    shared: Server, namespace: str
) -> None:
    model = MODELS["float16"]
    settings = {"vquant": "turbo2", "boundary_protect": 1}
    exact, _ = outcome(shared, namespace, model, **settings)
    restored, stats = outcome(shared, namespace, model, **settings)
    assert stats["hits"] == 1
    for layer in range(LAYERS):
        assert np.array_equal(numbers(exact[layer].keys), numbers(restored[layer].keys))
        same = np.array_equal(numbers(exact[layer].values), numbers(restored[layer].values))
        assert same == (layer in (0, LAYERS - 1))


def test_more_protected_layers_than_there_are_is_all_of_them(
    shared: Server, namespace: str
) -> None:
    model = MODELS["float16"]
    settings = {"vquant": "turbo2", "boundary_protect": 99}
    outcome(shared, namespace, model, **settings)
    restored, stats = outcome(shared, namespace, model, **settings)
    assert stats["hits"] == 1
    assert continue_greedily(model, restored) == cold_answer(model, PREFIX)


@pytest.mark.parametrize("protect_dtype", ["float16", "auto"])
def test_auto_with_protection_is_refused(protect_dtype: str) -> None:
    with pytest.raises(ValueError, match="lossless"):
        PionPromptCache(MODELS["float32"], boundary_protect=1, protect_dtype=protect_dtype)


@pytest.mark.parametrize("before", ["mlx4g32", "turbo3"])
def test_a_lossy_prefix_is_a_clean_miss_for_a_lossless_client_and_heals(
    shared: Server, namespace: str, before: str
) -> None:
    """D03: the config changed from 4 bits to none; one miss, then hits, for the old client too."""
    model = MODELS["float32"]
    outcome(shared, namespace, model, vquant=before)
    cache, stats = outcome(shared, namespace, model)
    assert missed_for(stats, "format")
    assert stats["stores"] == 1
    assert continue_greedily(model, cache) == cold_answer(model, PREFIX)
    for settings in ({}, {"vquant": before}):
        cache, stats = outcome(shared, namespace, model, **settings)
        assert stats["hits"] == 1
        assert continue_greedily(model, cache) == cold_answer(model, PREFIX)


def test_another_lossy_format_is_a_clean_miss_and_the_old_rows_can_be_dropped(
    shared: Server, namespace: str
) -> None:
    """D03: mlx4g32, reopened as int8, then as turbo3, then protected."""
    model = MODELS["float32"]
    outcome(shared, namespace, model, vquant="mlx4g32")
    for settings in (
        {"vquant": "int8"},
        {"vquant": "turbo3"},
        {"vquant": "turbo3", "boundary_protect": 1},
        {"vquant": "turbo3", "boundary_protect": 2},
    ):
        _, stats = outcome(shared, namespace, model, **settings)
        assert missed_for(stats, "format"), settings
        _, stats = outcome(shared, namespace, model, **settings)
        assert stats["hits"] == 1, settings
    raw = shared.client()
    assert raw.call("KV.PREFIX.DROP", namespace)
    assert "ERR" in raw.error("V.INFO", f"{namespace}_pv")


@pytest.mark.parametrize(("head_dim", "heads"), [(80, 1), (112, 1), (80, 2), (112, 2), (10, 3)])
@pytest.mark.parametrize("vquant", ["turbo4", "mlx4g32"])
def test_widths_that_blocks_do_not_divide_stay_lossless_others_do_not(
    shared: Server, namespace: str, head_dim: int, heads: int, vquant: str
) -> None:
    """D12: a row is all heads, so 2 x 80 has blocks and 1 x 80 has none; neither fails."""
    model = tiny_llama(head_dim=head_dim, num_key_value_heads=heads, num_attention_heads=2 * heads)
    settings = {"vquant": vquant, "boundary_protect": 0}
    exact, stats = outcome(shared, namespace, model, **settings)
    assert stats["stores"] == 1
    restored, stats = outcome(shared, namespace, model, **settings)
    assert stats["hits"] == 1
    for one, two in zip(exact, restored, strict=True):
        same = np.array_equal(numbers(one.values), numbers(two.values))
        assert same == bool(head_dim * heads % 32)


def test_only_the_side_whose_width_does_not_fit_stays_lossless(
    shared: Server, namespace: str
) -> None:
    """D12: K of 40, V of 64; each piece is decided by itself, by store and restore alike."""
    plain: Any = KVCache
    live = plain()
    live.update_and_fetch(mx.random.normal((1, 1, N, 40)), mx.random.normal((1, 1, N, 64)))
    pieces = shipped(shared, namespace, [live], [plain()], Tier("turbo4"))
    assert np.array_equal(numbers(pieces[0].keys), numbers(live.keys))
    assert np.array_equal(
        numbers(pieces[0].values), as_read(numbers(live.values), "turbo4", "float32")
    )


def test_a_piece_kept_lossless_for_its_width_is_told_once(
    shared: Server, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """D12: with a warning."""
    model = tiny_llama(head_dim=24, num_key_value_heads=3, num_attention_heads=3)
    with caplog.at_level(logging.WARNING, "pion_vllm_mlx"):
        for _ in range(2):
            outcome(shared, namespace, model, vquant="turbo3")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "turbo3" in told[0]
    assert "72" in told[0]


@pytest.mark.parametrize("store", [*LOSSY, "fp16", "bf16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_numbers_are_not_encoded(store: str, bad: float) -> None:
    """D13: the scaled formats would read 0 or the largest number of the block; so nothing is."""
    rows = np.ones((3, 64), dtype=np.float32)
    rows[1, 40] = bad
    piece = RowPiece((mx.array(rows),), "dense")
    with pytest.raises(ValueError, match=store):
        pack_piece(piece, row_format(store, piece.layout))
    assert pack_piece(piece, row_format("fp32", piece.layout)).tobytes() == rows.tobytes()


def test_numbers_beyond_fp16_are_not_stored_as_infinities() -> None:
    """K of a bfloat16 model under a protected tier: fp16 as designed, unless it overflows."""
    for peak, dtype, store in ((7e4, "bfloat16", "fp16"), (3.4e38, "float32", "bf16")):
        piece = RowPiece((mx.full((2, 32), peak).astype(DTYPES[dtype]),), "dense")
        with pytest.raises(ValueError, match="overflows"):
            pack_piece(piece, row_format(store, piece.layout))
        pack_piece(piece, row_format("int8", piece.layout))
    beyond = RowPiece((mx.full((2, 32), 7e8),), "dense")
    for store in ("turbo4", "turbo2", "fp8", "mlx4g32"):
        with pytest.raises(ValueError, match=f"{store} overflows"):
            pack_piece(beyond, row_format(store, beyond.layout))
    kept = RowPiece((mx.full((2, 32), 65504.0),), "dense")
    assert len(pack_piece(kept, row_format("fp16", kept.layout))) == 2 * 32 * 2


def test_a_prefix_that_cannot_be_encoded_is_still_answered(shared: Server, namespace: str) -> None:
    """D13: one warning, nothing under the name, and the caller's cache is the cold one."""
    model = tiny_llama(head_dim=HEAD_DIM)
    layer = model.model.layers[0].self_attn
    layer.v_proj.weight = layer.v_proj.weight * 1e7
    cold = cold_answer(model, PREFIX)
    for _ in range(2):
        cache, stats = outcome(shared, namespace, model, vquant="fp16")
        assert missed_for(stats, "absent")
        assert (stats["stores"], stats["stores_failed"]) == (0, 1)
        assert continue_greedily(model, cache) == cold
    outcome(shared, namespace, model)
    assert outcome(shared, namespace, model)[1]["hits"] == 1


def shipped(
    server: Server, namespace: str, live: list[Any], template: list[Any], tier: Tier
) -> list[Any]:
    """A cache of `PREFIX` through the server, as a client stores and restores it."""
    lane, name = Endpoint("127.0.0.1", server.port, connect_timeout=PATIENT), namespace.encode()
    try:
        shipment = pack_prefix(
            dismantle(live, N), PREFIX, "a" * 64, tier, prefill_ms=1, prefill_step=512
        )
        assert store_prefix(lane, name, shipment).outcome is Outcome.STORED
        patience = Patience(first_byte=PATIENT)
        found = find_prefix(lane, name, PREFIX, "a" * 64, tier, patience)
        return rebuild(template, fetch_prefix(lane, name, found, PATIENT).image)
    finally:
        lane.close()


def tensors(cache: Any) -> list[mx.array]:
    """Codes, scales and biases of K and V, of the rows that hold tokens."""
    return [
        tensor[..., : cache.offset, :] for side in (cache.keys, cache.values) for tensor in side
    ]


def same_bits(one: Any, two: Any) -> bool:
    return len(tensors(one)) == len(tensors(two)) == 6 and all(
        a.dtype == b.dtype and a.shape == b.shape and mx.array_equal(a, b).item()
        for a, b in zip(tensors(one), tensors(two), strict=True)
    )


@pytest.mark.parametrize("tier", [Tier(), Tier("fp8"), Tier("turbo2", boundary_protect=1)])
@pytest.mark.parametrize(
    ("group_size", "bits", "dtype", "fmt"),
    [
        (32, 4, "float16", "mlx4g32"),
        (32, 4, "bfloat16", "raw"),
        (32, 4, "float32", "raw"),
        (64, 4, "float16", "raw"),
        (32, 8, "float16", "raw"),
    ],
)
def test_kv_bits_caches_are_stored_as_codes_whatever_the_tier(
    shared: Server, namespace: str, tier: Tier, group_size: int, bits: int, dtype: str, fmt: str
) -> None:
    """Never requantised: codes, scales and biases come back bit for bit, and appends agree."""
    rows = mx.random.normal((2, 1, 2, N, 64), key=mx.random.key(4)).astype(DTYPES[dtype])
    live: Any = QuantizedKVCache(group_size, bits)
    live.update_and_fetch(rows[0], rows[1])
    template = QuantizedKVCache(group_size, bits)
    (restored,) = shipped(shared, namespace, [live], [template], tier)
    assert same_bits(restored, live)
    info = shared.client().call("V.INFO", f"{namespace}_pk").decode()
    assert f"v_format:{fmt}\r\n" in info
    for cache in (live, restored):
        cache.update_and_fetch(rows[0, :, :, :3], rows[1, :, :, :3])
    assert same_bits(restored, live)


def quantised_model(bits: int = 4, group_size: int = 32) -> Any:
    """A model whose own caches are quantised, as a server with `kv_bits` makes them."""
    model = tiny_llama(dtype=mx.float16, head_dim=64)
    model.make_cache = lambda: [QuantizedKVCache(group_size, bits) for _ in range(2)]
    return model


def test_a_model_with_quantised_caches_hits_with_the_very_codes(
    server: Callable[..., Server], namespace: str
) -> None:
    """kv_bits through the public call, over a kill: codes, and so every logit, are the same."""
    running, model = server(), quantised_model()
    exact, stats = outcome(running, namespace, model)
    assert stats["stores"] == 1
    running.kill()
    running.restart()
    restored, stats = outcome(running, namespace, model)
    assert stats["hits"] == 1
    assert all(same_bits(one, two) for one, two in zip(restored, exact, strict=True))
    assert continue_greedily(model, restored) == continue_greedily(model, exact)


@pytest.mark.parametrize("after", [{"bits": 8}, {"group_size": 64}])
def test_codes_of_another_bit_width_or_group_are_a_clean_miss(
    shared: Server, namespace: str, after: dict[str, int]
) -> None:
    """D03: the same weights, caches of 4 bits in groups of 32, then others."""
    outcome(shared, namespace, quantised_model())
    changed = quantised_model(**after)
    exact, stats = outcome(shared, namespace, changed)
    assert (stats["hits"], stats["misses"], stats["stores"]) == (0, 1, 1)
    restored, stats = outcome(shared, namespace, changed)
    assert stats["hits"] == 1
    assert all(same_bits(one, two) for one, two in zip(restored, exact, strict=True))


@pytest.mark.parametrize("side", ["keys", "values"])
def test_codes_on_the_server_are_the_rows_of_mx_quantize(
    shared: Server, namespace: str, side: str
) -> None:
    """A stored row is u32 codes, f16 scales, f16 biases: `mx.dequantize` reads it as it lies."""
    dense = mx.random.normal((2, 1, 2, N, 64), key=mx.random.key(9)).astype(mx.float16)
    live: Any = QuantizedKVCache(32, 4)
    live.update_and_fetch(dense[0], dense[1])
    shipped(shared, namespace, [live], [QuantizedKVCache(32, 4)], Tier())
    rows = dense[0 if side == "keys" else 1, 0].swapaxes(0, 1).reshape(N, 128)
    codes, scales, biases = stored_parts(shared, namespace, side)
    for mine, its in zip((codes, scales, biases), mx.quantize(rows, 32, 4), strict=True):
        assert mine.dtype == its.dtype
        assert mx.array_equal(mine, its).item()
    read = mx.dequantize(codes, scales, biases, group_size=32, bits=4)
    error = mx.abs(read - rows).reshape(-1, 32).max(axis=1)
    # MLX moves the step so that one end of a group is exact; then half a step is not the bound.
    assert (error <= mx.abs(scales).reshape(-1)).all().item()


@pytest.mark.parametrize("vquant", ["mlx4g32", "int8", "turbo4"])
def test_a_hit_has_the_caches_of_a_cold_run_and_keeps_what_follows_exactly(
    shared: Server, namespace: str, vquant: str
) -> None:
    """Rows are decoded into the model's own class: only the prefix is what the tier made of it."""
    model = tiny_llama(dtype=mx.float16, head_dim=64)
    cold, _ = outcome(shared, namespace, model, vquant=vquant)
    warm, stats = outcome(shared, namespace, model, vquant=vquant)
    assert stats["hits"] == 1
    assert [type(layer) for layer in warm] == [type(layer) for layer in cold]
    k = mx.random.normal((1, 2, 3, 64)).astype(mx.float16)
    for layer in warm:
        keys, values = layer.update_and_fetch(k, k)
        assert mx.array_equal(keys[..., -3:, :], k).item()
        assert mx.array_equal(values[..., -3:, :], k).item()
        assert layer.trim(3) == 3


def stored_parts(server: Server, namespace: str, side: str) -> tuple[mx.array, ...]:
    """Layer 0 of a side as the server keeps it: rows of mlx4g32, 128 numbers each."""
    sid = f"{namespace}_p{side[0]}"
    blob = server.client().call("V.FETCH", sid, 0, "RANGE", 0, N, "FMT", "PACKED")
    layout = RowLayout("mlx4g32", ("uint32", "float16", "float16"), (16, 4, 4))
    return RowPiece.from_buffer(blob, layout, N).parts


def test_rows_we_quantised_restore_straight_into_a_quantised_cache(
    shared: Server, namespace: str
) -> None:
    """mlx4g32 of a dense cache: MLX reads of the codes what our own decoder reads."""
    model = tiny_llama(dtype=mx.float16, head_dim=64)
    exact, _ = outcome(shared, namespace, model, vquant="mlx4g32")
    decoded, stats = outcome(shared, namespace, model, vquant="mlx4g32")
    assert stats["hits"] == 1
    shape = {"heads": 2, "widths": [8, 2, 2], "dtypes": ["uint32", "float16", "float16"]}
    dense = dismantle(exact, N)
    leaf = replace(
        dense.leaves[0],
        kind="QuantizedKVCache",
        meta={"offset": N, "rows": N, "group_size": 32, "bits": 4, "keys": shape, "values": shape},
        keys=RowPiece(stored_parts(shared, namespace, "keys"), "mlx4g32"),
        values=RowPiece(stored_parts(shared, namespace, "values"), "mlx4g32"),
    )
    (cache,) = rebuild([QuantizedKVCache(32, 4)], replace(dense, leaves=(leaf,)))
    for side in ("keys", "values"):
        codes, scales, biases = getattr(cache, side)
        read = mx.dequantize(codes, scales, biases, group_size=32, bits=4)
        error = np.abs(numbers(read) - numbers(getattr(decoded[0], side)))
        # q * s + b, rounded once by MLX in f16 and once by us from f32.
        assert error.max() <= 2**-10 * np.abs(numbers(read)).max()
