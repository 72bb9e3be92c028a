"""Every attention operation against float64, in the engine itself: no server, no wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("mlx.core")

from pion_server.attend import portable, reference, sparse
from pion_server.attend.engine import Engine, visible_tokens
from pion_server.attend.requests import (
    BLOCK_MEAN,
    DIMS,
    QUEST,
    BlockQuery,
    DenseQuery,
    FusedQuery,
    OneShot,
    Query,
    SparseQuery,
    even_map,
)
from pion_server.attend.sessions import Shape, Slot

F32 = NDArray[np.float32]
KEY = b"s", 0
SINGLE = Engine(half=False, window=0)
HALF = Engine(half=True, window=0)
QUICK = settings(max_examples=40, deadline=None)


def slot_of(engine: Engine, keys: F32, values: F32) -> Slot:
    slot, k, v = engine.allocate(KEY, Shape(*keys.shape))
    np.copyto(k, keys, casting="same_kind")
    np.copyto(v, values, casting="same_kind")
    return slot


def answer(engine: Engine, keys: F32, values: F32, request: Query) -> F32:
    slot = slot_of(engine, keys, values)
    request.check(slot.shape)
    return np.frombuffer(engine.answer(slot, request), np.float32)


def normal(seed: int, *shape: int, scale: float = 1.0) -> F32:
    drawn = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return drawn * np.float32(scale)


def assert_close(found: Any, wanted: Any, atol: float = 2e-6) -> None:
    found, wanted = np.asarray(found).reshape(-1), np.asarray(wanted).reshape(-1)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=atol)
    if np.any(wanted):
        assert reference.cosine(found, wanted) >= 0.99999


windows = st.one_of(st.none(), st.integers(0, 50))
dims = st.sampled_from(DIMS)


@QUICK
@given(st.integers(0, 99), st.integers(1, 3), st.integers(1, 5), st.integers(1, 40), dims, windows)
def test_query_equals_float64(
    seed: int, heads: int, many: int, tokens: int, dim: int, window: int | None
) -> None:
    k, v = normal(seed, heads, tokens, dim), normal(seed + 1, heads, tokens, dim)
    q = normal(seed + 2, heads, many, dim)
    found = answer(SINGLE, k, v, DenseQuery.of(KEY, heads, dim, q.tobytes(), window))
    out, lse = reference.query(q, k, v, reference.first_visible(tokens, window))
    assert_close(found[: out.size], out)
    if many == 1:
        assert found.size == out.size
    else:
        assert_close(found[out.size :], lse)


@QUICK
@given(
    st.integers(0, 99),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(0, 8),
    dims,
    windows,
    st.booleans(),
)
def test_query_fused_equals_float64(
    seed: int,
    kv_heads: int,
    group: int,
    many: int,
    tokens: int,
    suffix: int,
    dim: int,
    window: int | None,
    shuffled: bool,
) -> None:
    heads = kv_heads * group
    k, v = normal(seed, kv_heads, tokens, dim), normal(seed + 1, kv_heads, tokens, dim)
    sk, sv = normal(seed + 2, kv_heads, suffix, dim), normal(seed + 3, kv_heads, suffix, dim)
    q = normal(seed + 4, heads, many, dim)
    head_map = even_map(heads, kv_heads)
    if shuffled:  # any map is allowed, also one that leaves kv heads unread
        head_map = np.random.default_rng(seed).integers(0, kv_heads, heads).astype(np.int32)
    blobs = [q.tobytes(), sk.tobytes(), sv.tobytes(), head_map.astype(np.uint8).tobytes()]
    request = FusedQuery.of(KEY, (heads, kv_heads), dim, suffix, blobs, window)
    first = reference.first_visible(tokens, window)
    wanted = reference.query_fused(q, k, v, sk, sv, head_map.tolist(), first)
    assert_close(answer(SINGLE, k, v, request), wanted)


@pytest.mark.parametrize("head_map", [[1, 1, 1, 1], [0, 2, 0, 2], [2, 1, 0, 0], [1, 0, 2, 1]])
def test_any_head_map_reads_the_heads_it_names(head_map: list[int]) -> None:
    k, v = normal(1, 3, 20, 32), normal(2, 3, 20, 32)
    sk, sv, q = normal(3, 3, 2, 32), normal(4, 3, 2, 32), normal(5, 4, 2, 32)
    mapped = np.array(head_map, np.int32)
    request = FusedQuery(KEY, q, sk, sv, mapped)
    assert_close(answer(SINGLE, k, v, request), reference.query_fused(q, k, v, sk, sv, head_map))
    blocks = BlockQuery("AUTO", KEY, q[:, 0], sk, sv, mapped, 4, 1)
    tokens = reference.choose_tokens(reference.score_blocks(q[:, 0], k, head_map, 4), 20, 4, 1)
    wanted = reference.query_fused(q[:, :1], k, v, sk, sv, head_map, tokens=tokens)
    # One query sees all of the suffix.
    assert_close(answer(SINGLE, k, v, blocks), wanted)


@QUICK
@given(
    st.integers(0, 99),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 12),
    st.sampled_from((32, 64)),
    windows,
)
def test_query_sparse_equals_float64(
    seed: int, heads: int, tokens: int, most: int, dim: int, window: int | None
) -> None:
    rng = np.random.default_rng(seed)
    k, v = normal(seed, heads, tokens, dim), normal(seed + 1, heads, tokens, dim)
    q = normal(seed + 2, heads, dim)
    # Out of range on both sides, twice the same, counts beyond Kmax: all of it may come.
    ids = rng.integers(-3, tokens + 3, (heads, most)).astype(np.int32)
    counts = rng.integers(0, most + 3, heads).astype(np.uint32)
    blobs = [q.tobytes(), ids.tobytes(), counts.tobytes()]
    request = SparseQuery.of(KEY, heads, dim, most, blobs, window)
    asked = [ids[h, : min(int(counts[h]), most)].tolist() for h in range(heads)]
    first = reference.first_visible(tokens, window)
    wanted = reference.query_sparse(q, k, v, asked, first)
    assert_close(answer(SINGLE, k, v, request), wanted)


@QUICK
@given(
    st.integers(0, 99),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(0, 4),
    windows,
    st.sampled_from((BLOCK_MEAN, QUEST)),
)
def test_query_by_blocks_equals_float64(
    seed: int,
    kv_heads: int,
    group: int,
    tokens: int,
    block: int,
    top: int,
    suffix: int,
    window: int | None,
    selector: int,
) -> None:
    heads, dim = kv_heads * group, 32
    k, v = normal(seed, kv_heads, tokens, dim), normal(seed + 1, kv_heads, tokens, dim)
    sk, sv = normal(seed + 2, kv_heads, suffix, dim), normal(seed + 3, kv_heads, suffix, dim)
    q = normal(seed + 4, heads, dim)
    head_map = even_map(heads, kv_heads).tolist()
    blobs = [q.tobytes(), sk.tobytes(), sv.tobytes(), b""]
    request = BlockQuery.of(
        "AUTO", KEY, (heads, kv_heads), dim, (block, top), suffix, blobs, window, selector
    )
    first = reference.first_visible(tokens, window)
    seen = list(range(first, tokens))
    if block * top < tokens:
        scores = reference.score_blocks(q, k, head_map, block, selector == QUEST)
        seen = reference.choose_tokens(scores, tokens, block, top, first)
    wanted = reference.query_fused(q[:, None], k, v, sk, sv, head_map, tokens=seen)
    assert_close(answer(SINGLE, k, v, request), wanted)


@QUICK
@given(
    st.integers(0, 99), st.integers(1, 3), st.integers(1, 30), st.integers(1, 40), st.integers(1, 9)
)
def test_querybatch_equals_float64(seed: int, heads: int, tokens: int, top: int, dim: int) -> None:
    k, v = normal(seed, heads, tokens, dim), normal(seed + 1, heads, tokens, dim)
    q = normal(seed + 2, heads, dim)
    blobs = [q.tobytes(), k.tobytes(), v.tobytes()]
    found = SINGLE.answer_once(OneShot.of(Shape(heads, tokens, dim), top, blobs))
    scores = np.einsum("hd,hnd->hn", q.astype(np.float64), k.astype(np.float64))
    best = [
        [n for _, n in sorted((-score, n) for n, score in enumerate(head))][:top]
        for head in scores.tolist()
    ]
    wanted = reference.query_sparse(q, k, v, best)
    assert_close(np.frombuffer(found, np.float32), wanted)


def test_querybatch_breaks_ties_by_the_lower_index() -> None:
    k = np.zeros((1, 6, 4), np.float32)
    k[0, [1, 3, 4]] = 1.0
    v = np.arange(6, dtype=np.float32).reshape(1, 6, 1).repeat(4, axis=2)
    q = np.ones((1, 4), np.float32)
    blobs = [q.tobytes(), k.tobytes(), v.tobytes()]
    found = SINGLE.answer_once(OneShot.of(Shape(1, 6, 4), 2, blobs))
    assert np.frombuffer(found, np.float32).tolist() == [2.0] * 4  # tokens 1 and 3


@pytest.mark.parametrize("dim", DIMS)
def test_half_precision_keys_stay_within_the_documented_cosine(dim: int) -> None:
    k, v = normal(1, 2, 200, dim), normal(2, 2, 200, dim)
    q = normal(3, 2, 3, dim)
    found = answer(HALF, k, v, DenseQuery.of(KEY, 2, dim, q.tobytes()))
    out, lse = reference.query(q, k, v)
    assert reference.cosine(found[: out.size], out) >= 0.99999
    np.testing.assert_allclose(found[out.size :], lse.reshape(-1), atol=2e-3)
    # What is left of the difference is the rounding of K and V, not of the arithmetic.
    rounded, _ = reference.query(q, k.astype(np.float16), v.astype(np.float16))
    assert_close(found[: out.size], rounded)


@pytest.mark.parametrize("window", [None, 70])
def test_tiles_join_to_the_same_attention(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(portable, "TILE_BYTES", 1)  # the least tile: 64 keys
    heads, kv_heads, many, tokens, suffix, dim = 4, 2, 3, 200, 130, 32
    k, v = normal(1, kv_heads, tokens, dim), normal(2, kv_heads, tokens, dim)
    sk, sv = normal(3, kv_heads, suffix, dim), normal(4, kv_heads, suffix, dim)
    q = normal(5, heads, many, dim, scale=3)
    head_map = even_map(heads, kv_heads)
    blobs = [q.tobytes(), sk.tobytes(), sv.tobytes(), head_map.astype(np.uint8).tobytes()]
    fused = FusedQuery.of(KEY, (heads, kv_heads), dim, suffix, blobs, window)
    first = reference.first_visible(tokens, window)
    wanted = reference.query_fused(q, k, v, sk, sv, head_map.tolist(), first)
    for engine in (SINGLE, HALF):
        found = answer(engine, k, v, fused)
        assert reference.cosine(found, wanted) >= 0.99999
    assert_close(answer(SINGLE, k, v, fused), wanted)
    ids = np.random.default_rng(6).integers(0, tokens, (kv_heads, 150)).astype(np.int32)
    counts = np.array([150, 3], np.uint32)
    blobs = [q[:2, 0].tobytes(), ids.tobytes(), counts.tobytes()]
    request = SparseQuery.of(KEY, kv_heads, dim, 150, blobs, window)
    asked = [ids[0].tolist(), ids[1, :3].tolist()]
    assert_close(
        answer(SINGLE, k, v, request), reference.query_sparse(q[:2, 0], k, v, asked, first)
    )


def test_many_queries_beyond_a_short_suffix_see_what_there_is() -> None:
    """M > S > 0 is tolerated: row m sees suffix positions 0..min(m, S - 1)."""
    k, v = normal(1, 1, 5, 32), normal(2, 1, 5, 32)
    sk, sv = normal(3, 1, 2, 32), normal(4, 1, 2, 32)
    q = normal(5, 1, 4, 32)
    request = FusedQuery.of(KEY, (1, 1), 32, 2, [q.tobytes(), sk.tobytes(), sv.tobytes(), b"\0"])
    found = answer(SINGLE, k, v, request).reshape(1, 4, 32)
    for m, seen in enumerate((1, 2, 2, 2)):
        keys, values = np.concatenate([k, sk[:, :seen]], 1), np.concatenate([v, sv[:, :seen]], 1)
        assert_close(found[:, m : m + 1], reference.query(q[:, m : m + 1], keys, values)[0])


def test_large_scores_do_not_overflow() -> None:
    k, v = normal(1, 1, 30, 64, scale=100), normal(2, 1, 30, 64)
    q = normal(3, 1, 2, 64, scale=100)
    found = answer(SINGLE, k, v, DenseQuery.of(KEY, 1, 64, q.tobytes()))
    out, lse = reference.query(q, k, v)
    np.testing.assert_allclose(found, np.concatenate([out.reshape(-1), lse.reshape(-1)]), rtol=1e-4)


def test_a_nan_query_spoils_its_own_row_only() -> None:
    k, v = normal(1, 2, 9, 32), normal(2, 2, 9, 32)
    q = normal(3, 2, 3, 32)
    q[0, 1, 5] = np.nan
    found = answer(SINGLE, k, v, DenseQuery.of(KEY, 2, 32, q.tobytes()))
    rows = found[: q.size].reshape(6, 32)
    lse = found[q.size :]
    assert np.isnan(rows[1]).all()
    assert np.isnan(lse[1])
    clean = [0, 2, 3, 4, 5]
    out, wanted = reference.query(np.nan_to_num(q), k, v)
    assert_close(rows[clean], out.reshape(6, 32)[clean])
    assert_close(lse[clean], wanted.reshape(-1)[clean])


def test_a_nan_query_is_answered_by_every_form() -> None:
    k, v = normal(1, 1, 40, 32), normal(2, 1, 40, 32)
    bad = np.full((1, 32), np.nan, np.float32).tobytes()
    sparse_blobs = [bad, np.zeros(1, "<i4").tobytes(), np.ones(1, "<u4").tobytes()]
    requests: list[Query] = [
        DenseQuery.of(KEY, 1, 32, bad),
        FusedQuery.of(KEY, (1, 1), 32, 0, [bad, b"", b"", b"\0"]),
        SparseQuery.of(KEY, 1, 32, 1, sparse_blobs),
        *(
            BlockQuery.of("AUTO", KEY, (1, 1), 32, (4, 2), 0, [bad, b"", b"", b""], None, selector)
            for selector in (BLOCK_MEAN, QUEST)
        ),
    ]
    for request in requests:
        assert np.isnan(answer(SINGLE, k, v, request)).all()


def test_repeated_requests_are_bit_equal() -> None:
    k, v = normal(1, 2, 333, 64), normal(2, 2, 333, 64)
    q, sk, sv = normal(3, 4, 2, 64), normal(4, 2, 5, 64), normal(5, 2, 5, 64)
    one = normal(6, 4, 64)
    requests: list[Query] = [
        DenseQuery.of(KEY, 2, 64, q[:2].tobytes()),
        FusedQuery.of(
            KEY, (4, 2), 64, 5, [q.tobytes(), sk.tobytes(), sv.tobytes(), bytes([0, 0, 1, 1])]
        ),
        BlockQuery.of("AUTO", KEY, (4, 2), 64, (16, 3), 0, [one.tobytes(), b"", b"", b""]),
    ]
    slot = slot_of(SINGLE, k, v)
    for request in requests:
        first = bytes(SINGLE.answer(slot, request))
        # The second slot has not summarised its blocks yet, the first one has.
        assert bytes(SINGLE.answer(slot, request)) == first
        assert bytes(SINGLE.answer(slot_of(SINGLE, k, v), request)) == first


def test_tensors_at_odd_addresses_answer_the_same_bits() -> None:
    """As they lie in a frame of the binary lane behind a sid of odd length."""
    k, v, q = normal(1, 1, 20, 32), normal(2, 1, 20, 32), normal(3, 2, 2, 32)
    frame = memoryview(b"x" + q.tobytes())
    even = [q.tobytes(), b"", b"", bytes(2)]
    requests = [
        FusedQuery.of(KEY, (2, 1), 32, 0, [blob, *even[1:]]) for blob in (frame[1:], even[0])
    ]
    assert all(request.queries.flags.aligned for request in requests)
    found = [answer(SINGLE, k, v, request).tobytes() for request in requests]
    assert found[0] == found[1]


def test_all_blocks_are_dense_attention_bit_for_bit() -> None:
    k, v = normal(1, 4, 1024, 128, scale=0.5), normal(2, 4, 1024, 128, scale=0.5)
    q = normal(3, 4, 128, scale=0.5)
    blobs = [q.tobytes(), b"", b"", bytes(range(4))]
    blocks = BlockQuery.of("AUTO", KEY, (4, 4), 128, (64, 16), 0, blobs)
    dense = FusedQuery.of(KEY, (4, 4), 128, 0, blobs)
    assert answer(SINGLE, k, v, blocks).tobytes() == answer(SINGLE, k, v, dense).tobytes()
    plain = answer(SINGLE, k, v, DenseQuery.of(KEY, 4, 128, q.tobytes()))
    np.testing.assert_allclose(answer(SINGLE, k, v, blocks), plain, atol=1e-6, rtol=0)


def test_all_tokens_named_are_dense_attention() -> None:
    """The design's tolerance: within 1e-6 at H=4, N=1024, D=128, 0.5 N(0,1)."""
    k, v = normal(1, 4, 1024, 128, scale=0.5), normal(2, 4, 1024, 128, scale=0.5)
    q = normal(3, 4, 128, scale=0.5)
    ids = np.arange(1024, dtype=np.int32)[None].repeat(4, axis=0)
    blobs = [q.tobytes(), ids.tobytes(), np.full(4, 1024, "<u4").tobytes()]
    found = answer(SINGLE, k, v, SparseQuery.of(KEY, 4, 128, 1024, blobs))
    plain = answer(SINGLE, k, v, DenseQuery.of(KEY, 4, 128, q.tobytes()))
    np.testing.assert_allclose(found, plain, atol=1e-6, rtol=0)


def test_the_default_window_is_the_servers_and_zero_is_none() -> None:
    engine = Engine(half=False, window=3)
    k, v, q = normal(1, 1, 10, 32), normal(2, 1, 10, 32), normal(3, 1, 1, 32)
    for window, first in ((None, 7), (0, 0), (4, 6), (99, 0)):
        found = answer(engine, k, v, DenseQuery.of(KEY, 1, 32, q.tobytes(), window))
        assert_close(found, reference.query(q, k, v, first)[0])


def test_summaries_are_kept_counted_and_bounded() -> None:
    held: dict[Slot, int] = {}

    def grow(slot: Slot, nbytes: int) -> None:
        held[slot] = held.get(slot, 0) + nbytes

    engine = Engine(half=False, window=0, grow=grow)
    slot = slot_of(engine, normal(1, 2, 640, 32), normal(2, 2, 640, 32))
    q = normal(3, 2, 32).tobytes()

    def ask(block: int, selector: int) -> None:
        blobs = [q, b"", b"", b""]
        engine.answer(
            slot, BlockQuery.of("AUTO", KEY, (2, 2), 32, (block, 1), 0, blobs, None, selector)
        )

    ask(64, BLOCK_MEAN)
    assert held[slot] == 10 * 2 * 32 * 4
    ask(64, BLOCK_MEAN)
    ask(32, QUEST)
    assert held[slot] == (10 + 2 * 20) * 2 * 32 * 4
    ask(8, BLOCK_MEAN)  # blocks this small are not kept
    ask(16, BLOCK_MEAN)  # a third: the one longest unused goes
    assert held[slot] == (2 * 20 + 40) * 2 * 32 * 4
    assert set(slot.summaries) == {(32, QUEST), (16, BLOCK_MEAN)}


def test_the_last_block_is_always_among_the_chosen() -> None:
    scores = np.array([5, 1, 9, 9, 0], np.float32)
    assert sparse.choose_blocks(scores, 1).tolist() == [2, 4]
    assert sparse.choose_blocks(scores, 2).tolist() == [2, 3, 4]
    assert sparse.choose_blocks(scores, 3).tolist() == [0, 2, 3, 4]
    assert sparse.choose_blocks(scores[::-1], 3).tolist() == [1, 2, 4]
    assert sparse.choose_blocks(np.full(4, 7, np.float32), 2).tolist() == [0, 1, 3]


@pytest.mark.parametrize("selector", [BLOCK_MEAN, QUEST])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 47, 48, 49])
def test_block_scores_equal_float64(
    monkeypatch: pytest.MonkeyPatch, selector: int, tokens: int
) -> None:
    monkeypatch.setattr(sparse, "_CHUNK_BYTES", 1)  # a block at a time
    import mlx.core as mx

    k, q = normal(1, 2, tokens, 32), normal(2, 6, 32)
    head_map = even_map(6, 2)
    found = sparse.score_blocks(q, head_map, sparse.summarise(mx.array(k), 16, selector))
    wanted = reference.score_blocks(q, k, head_map.tolist(), 16, selector == QUEST)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_filler_tokens_lie_within_the_prefix() -> None:
    ids = np.array([[9, -1, 4, 4], [50, 51, -7, 2], [1, 2, 3, 4]], np.int32)
    tokens, counts = visible_tokens(ids, np.array([4, 3, 9], np.uint32), 2, 10)
    assert counts.tolist() == [3, 0, 3]
    assert tokens.tolist() == [[9, 4, 4], [0, 0, 0], [2, 3, 4]]
