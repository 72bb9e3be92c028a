"""Pieces as bytes: every bit pattern comes back, and nothing is taken for what it is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import xxhash

from pion_patches.cache_rebuild import CacheImage, Leaf
from pion_patches.pieces import RowLayout, RowPiece, dtype_name
from pion_vllm_mlx.held import HeldPrefixes
from pion_vllm_mlx.manifest import Rows
from pion_vllm_mlx.pieces import Landing, is_lossless, pack_piece, places_of, row_format
from pion_vllm_mlx.tier import Tier


def rows_of(piece: RowPiece, store: str) -> tuple[Rows, memoryview]:
    data = pack_piece(piece, row_format(store, piece.layout))
    return Rows(0, piece.rows, piece.layout, store, xxhash.xxh3_64_hexdigest(data)), data


def through_the_wire(piece: RowPiece, store: str) -> RowPiece:
    rows, data = rows_of(piece, store)
    landing = Landing(rows)
    place = places_of([landing])(0, len(data))
    assert place is not None
    place[:] = data
    assert landing.is_intact()
    return landing.piece()


def bits(array: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8)))  # type: ignore[arg-type]


def same_bits(one: RowPiece, two: RowPiece) -> bool:
    return one.fmt == two.fmt and [(dtype_name(a), a.shape, bits(a)) for a in one.parts] == [
        (dtype_name(b), b.shape, bits(b)) for b in two.parts
    ]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_every_16_bit_pattern_is_kept(dtype: Any) -> None:
    """N02, N03: NaN payloads, -0.0, infinities and subnormals; bf16 is never read as fp16."""
    words = mx.arange(65536, dtype=mx.uint32).astype(mx.uint16).reshape(2048, 32).view(dtype)
    piece = RowPiece((words,), "dense")
    restored = through_the_wire(piece, piece.layout.store_format)
    assert same_bits(restored, piece)


def test_bf16_values_that_fp16_cannot_hold_are_kept() -> None:
    """N03: through fp16 these would be 0, inf and inf."""
    values = mx.array([[1e-30, 65536.0, 3.4e38, -0.0]]).astype(mx.bfloat16)
    piece = RowPiece((values,), "dense")
    assert same_bits(through_the_wire(piece, "bf16"), piece)


def test_fp32_bit_patterns_are_kept() -> None:
    words = np.random.default_rng(1).integers(0, 2**32, (64, 48), dtype=np.uint32)
    piece = RowPiece((mx.array(words).view(mx.float32),), "dense")
    assert same_bits(through_the_wire(piece, "fp32"), piece)


def test_quantised_parts_are_kept_as_codes() -> None:
    keys = mx.random.normal((10, 64)).astype(mx.float16)
    for bits_, fmt in ((4, "mlx4g32"), (8, "raw")):
        piece = RowPiece(tuple(mx.quantize(keys, group_size=32, bits=bits_)), fmt)
        assert piece.layout.store_format == fmt
        assert same_bits(through_the_wire(piece, fmt), piece)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_stored_as_fp32_is_lossless(dtype: Any) -> None:
    values = mx.array([[1.5, -0.0, 65504.0, 2.0**-24, float("inf"), 0.1]]).astype(dtype)
    piece = RowPiece((values,), "dense")
    assert is_lossless(rows_of(piece, "fp32")[0])
    assert same_bits(through_the_wire(piece, "fp32"), piece)


@pytest.mark.parametrize("store", ["fp16", "int8", "fp8", "turbo4", "mlx4g32"])
def test_lossy_formats_come_back_in_the_models_dtype(store: str) -> None:
    values = mx.random.uniform(-1, 1, (20, 64)).astype(mx.bfloat16)
    piece = RowPiece((values,), "dense")
    assert not is_lossless(rows_of(piece, store)[0])
    (restored,) = through_the_wire(piece, store).parts
    assert restored.dtype == mx.bfloat16
    assert mx.abs(restored - values).max().item() < 0.2  # type: ignore[operator]


@pytest.mark.parametrize(
    ("store", "layout"),
    [
        ("fp16", RowLayout("raw", ("uint32", "float16"), (8, 2))),
        ("mlx4g32", RowLayout("raw", ("uint32", "float16"), (8, 2))),
        ("raw", RowLayout("dense", ("float16",), (8,))),
        ("turbo4", RowLayout("dense", ("float16",), (40,))),
        ("fp32", RowLayout("dense", ("float32",), (8193,))),
        ("nonsense", RowLayout("dense", ("float32",), (8,))),
    ],
)
def test_a_format_that_cannot_hold_the_rows_is_refused(store: str, layout: RowLayout) -> None:
    with pytest.raises(ValueError):
        row_format(store, layout)


def test_a_bulk_of_another_length_or_place_gets_no_memory() -> None:
    rows, data = rows_of(RowPiece((mx.zeros((4, 8)),), "dense"), "fp32")
    landings = [Landing(rows), Landing(rows)]
    place = places_of(landings)
    assert place(0, len(data) - 1) is None
    assert place(0, len(data) + 1) is None
    assert place(2, len(data)) is None
    assert landings[0].view is None
    with pytest.raises(ValueError, match="nothing"):
        landings[0].piece()
    assert not landings[0].is_intact()


def test_landings_share_no_memory() -> None:
    rows, data = rows_of(RowPiece((mx.zeros((4, 8)),), "dense"), "fp32")
    landings = [Landing(rows), Landing(rows)]
    place = places_of(landings)
    first = place(0, len(data))
    assert first is not None
    first[:] = data
    second = place(1, len(data))
    assert second is not None
    second[:] = b"\xff" * len(data)
    assert landings[0].is_intact()
    assert not landings[1].is_intact()
    assert first.tobytes() == data


@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_a_piece_that_arrives_again_is_decoded_again(store: str) -> None:
    sent = [RowPiece((mx.full((4, 64), value),), "dense") for value in (1.0, 2.0)]
    rows, first = rows_of(sent[0], store)
    other, second = rows_of(sent[1], store)
    landings = [Landing(rows), Landing(rows)]
    place = places_of(landings)
    for data, value, checksum in ((first, 1.0, rows.checksum), (second, 2.0, other.checksum)):
        landings[0].rows = dataclasses.replace(rows, checksum=checksum)
        view = place(0, len(data))
        assert view is not None
        view[:] = data
        place(1, len(data))
        assert mx.all(landings[0].piece().parts[0] == value).item()


def test_no_more_is_opened_at_once_than_some_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pion_vllm_mlx.pieces._OPENED_AT_ONCE", 300)
    rows, data = rows_of(RowPiece((mx.zeros((4, 8)),), "dense"), "fp32")
    landings = [Landing(rows) for _ in range(4)]
    place = places_of(landings)
    place(0, len(data))
    assert [landing.view is not None for landing in landings] == [True, True, False, False]
    place(2, len(data))
    assert all(landing.view is not None for landing in landings)


def test_what_arrives_again_is_checked_again() -> None:
    """A reply that broke off after a whole piece, and comes otherwise at the second attempt."""
    rows, data = rows_of(RowPiece((mx.zeros((4, 8)),), "dense"), "fp32")
    landings = [Landing(rows), Landing(rows)]
    place = places_of(landings)
    for content in (bytes(len(data)), b"\xff" * len(data)):
        view = place(0, len(data))
        assert view is not None
        view[:] = content
        place(1, len(data))
        assert landings[0].is_intact() is (content == bytes(len(data)))


def test_boundary_protection_counts_layers_from_both_ends() -> None:
    layout = RowLayout("dense", ("bfloat16",), (64,))
    tier = Tier("fp8", boundary_protect=2)
    values = [tier.store_for("values", layer, 7, layout) for layer in range(7)]
    assert values == ["fp16", "fp16", "fp8", "fp8", "fp8", "fp16", "fp16"]
    assert {tier.store_for("keys", layer, 7, layout) for layer in range(7)} == {"fp16"}
    auto = Tier("fp8", boundary_protect=1, protect_dtype="auto")
    assert [auto.store_for("values", n, 3, layout) for n in range(3)] == ["bf16", "fp8", "bf16"]
    everything = Tier("fp8", boundary_protect=99)
    assert {everything.store_for("values", n, 3, layout) for n in range(3)} == {"fp16"}


def test_quantised_caches_are_stored_as_they_are_whatever_the_tier() -> None:
    layout = RowLayout("mlx4g32", ("uint32", "float16", "float16"), (8, 2, 2))
    assert Tier("fp8").store_for("keys", 0, 2, layout) == "mlx4g32"


def image_of(size: int) -> CacheImage:
    piece = RowPiece((mx.zeros((1, size)),), "dense")
    return CacheImage(1, (Leaf((0,), "KVCache", {}, piece, None, ()),))


def test_held_prefixes_are_found_by_name_ids_and_model_and_leave_by_age() -> None:
    held = HeldPrefixes(budget=3000)
    for name in (b"a", b"b", b"c"):
        assert held.hold(name, (1,), "model", image_of(250))
    assert held.get(b"a", (1,), "model") is not None
    assert held.get(b"a", (2,), "model") is None
    assert held.get(b"a", (1,), "other") is None
    assert held.hold(b"d", (1,), "model", image_of(250))
    assert held.get(b"b", (1,), "model") is None
    assert held.get(b"a", (1,), "model") is not None
    assert len(held) == 3
    assert held.nbytes == 3000
    assert not held.hold(b"e", (1,), "model", image_of(1000))
    assert len(held) == 3
    assert held.hold(b"a", (1,), "model", image_of(10))
    assert held.nbytes == 2040
    held.drop(b"a")
    held.clear()
    assert (len(held), held.nbytes) == (0, 0)
