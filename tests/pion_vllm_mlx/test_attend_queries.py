"""The attention queries of `PionPromptCache`: right, repeated where they must be, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_server.attend import reference
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.transport import ServerError, TransportError
from tests.attention_client import F32, AttentionClient, normal
from tests.pion_vllm_mlx.tiny import PREFIX, tiny_llama

NAME = "asked"
HEADS, KV_HEADS, DIM = 4, 2, 32
MAP = [0, 0, 1, 1]
Server = Any


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(head_dim=DIM)


@pytest.fixture(scope="module")
def rows(model: Any) -> tuple[F32, F32]:
    """K and V [kv heads][tokens][dim] of layer 1."""
    caches = make_prompt_cache(model)
    model(mx.array([PREFIX]), cache=caches)
    one: Any = caches[1]
    count = len(PREFIX)
    return np.array(one.keys[0, :, :count]), np.array(one.values[0, :, :count])


@pytest.fixture
def running(server: Callable[..., Server], model: Any) -> Server:
    started = server()
    with PionPromptCache(model, port=started.port, stage2=True) as first:
        first.get_or_prefill(PREFIX, NAME)
        assert first.flush()
    return started


@pytest.fixture(params=[None, 0], ids=["binary", "resp"])
def pc(request: pytest.FixtureRequest, running: Server, model: Any) -> Iterator[PionPromptCache]:
    with PionPromptCache(
        model, port=running.port, stage2=True, binary_port=request.param, timeout=5
    ) as opened:
        yield opened


def ask_all(pc: PionPromptCache, rows: tuple[F32, F32], window: int = 0) -> None:
    """Every query against float64."""
    k, v = rows
    none = k[:, :0]
    q, sk, sv = normal(1, HEADS, 3, DIM), normal(2, KV_HEADS, 5, DIM), normal(3, KV_HEADS, 5, DIM)
    first = max(len(PREFIX) - window, 0) if window else 0

    folded = q.reshape(KV_HEADS, 6, DIM)
    for many in (6, 1):
        out, lse = pc.attend_query(NAME, 1, folded[:, :many], window=window)
        wanted, wanted_lse = reference.query(folded[:, :many], k, v, first)
        np.testing.assert_allclose(out, wanted, atol=2e-6)
        np.testing.assert_allclose(lse, wanted_lse, atol=2e-6)

    out = pc.attend_query_fused(NAME, 1, q, sk, sv, window=window)
    np.testing.assert_allclose(out, reference.query_fused(q, k, v, sk, sv, MAP, first), atol=2e-6)
    turned = bytes(reversed(MAP))
    out = pc.attend_query_fused(NAME, 1, q, none, none, head_map=turned, window=window)
    np.testing.assert_allclose(
        out, reference.query_fused(q, k, v, none, none, list(turned), first), atol=2e-6
    )
    lone = q[:, 0]
    for selector in ("block_mean", "quest"):
        scores = reference.score_blocks(lone, k, MAP, 8, selector == "quest")
        tokens = reference.choose_tokens(scores, k.shape[1], 8, 2, first)
        options: Any = {"block": 8, "blocks": 2, "window": window, "selector": selector}
        out = pc.attend_query_sparse_auto(NAME, 1, lone, kv_heads=KV_HEADS, **options)
        wanted = reference.query_fused(lone[:, None], k, v, none, none, MAP, 0, tokens)[:, 0]
        np.testing.assert_allclose(out, wanted, atol=2e-6)
        out = pc.attend_query_sparse_auto_fused(NAME, 1, lone, sk, sv, **options)
        # All of the suffix is seen by a lone query, which is its last position.
        wanted = reference.query_fused(lone[:, None], k, v, sk, sv, MAP, 0, tokens)[:, 0]
        np.testing.assert_allclose(out, wanted, atol=2e-6)


@pytest.mark.parametrize("window", [0, 9, 1000])
def test_every_query_is_what_float64_says(
    pc: PionPromptCache, rows: tuple[F32, F32], window: int
) -> None:
    ask_all(pc, rows, window)
    assert pc.cold_rehydrates_observed == 0


def test_after_a_restart_the_first_query_has_the_session_made_again(
    pc: PionPromptCache, running: Server, rows: tuple[F32, F32]
) -> None:
    ask_all(pc, rows)
    running.kill()
    running.restart()
    ask_all(pc, rows)
    assert pc.cold_rehydrates_observed == 1


def test_each_query_brings_a_cold_session_back(
    server: Callable[..., Server], model: Any, rows: tuple[F32, F32]
) -> None:
    """COLDMISS on either lane: KV.PREFIX.WARM, then the same query once more."""
    running = server("--sdpa-slots", "2")
    client = AttentionClient(running)
    k, v = rows
    q, none = normal(1, HEADS, 1, DIM), k[:, :0]
    with PionPromptCache(model, port=running.port, stage2=True) as pc:
        pc.get_or_prefill(PREFIX, NAME)
        assert pc.flush()
        ways: list[Callable[[], Any]] = [
            lambda: pc.attend_query(NAME, 1, q[:KV_HEADS]),
            lambda: pc.attend_query_fused(NAME, 1, q, none, none),
            lambda: pc.attend_query_sparse_auto(NAME, 1, q[:, 0], kv_heads=KV_HEADS),
            lambda: pc.attend_query_sparse_auto_fused(NAME, 1, q[:, 0], none, none),
        ]
        for number, ask in enumerate(ways, 1):
            for layer in range(2):
                client.store("other", layer, k, v)
            assert client.lookup(pc._attend_session(NAME), 1) == "COLD"
            ask()
            assert pc.cold_rehydrates_observed == number
        assert pc.stats()["attend_binary"] == 1
        assert pc.lookup(NAME)


def test_what_is_nowhere_is_an_error(pc: PionPromptCache, running: Server) -> None:
    q = normal(1, HEADS, 1, DIM)
    with pytest.raises(ServerError, match="session not found"):
        pc.attend_query("nowhere", 0, q)
    with pytest.raises(ServerError, match="session not found"):
        pc.attend_query_fused(NAME, 7, q, q[:, :0], q[:, :0])
    running.kill()
    with pytest.raises(TransportError):
        pc.attend_query(NAME, 0, q)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"queries": normal(1, 3, 1, DIM)}, "3 query heads cannot share 2 kv heads"),
        ({"queries": normal(1, HEADS, DIM)}, "not .H..M..D."),
        ({"queries": normal(1, HEADS, 0, DIM)}, "not .H..M..D."),
        ({"suffix_keys": normal(1, KV_HEADS, 4, DIM)}, r"suffix \(2, 4, 32\), \(2, 5, 32\)"),
        ({"suffix_values": normal(1, KV_HEADS, 5, 16)}, r"suffix \(2, 5, 32\), \(2, 5, 16\)"),
        ({"head_map": bytes([0, 0, 1, 2])}, "head_map names kv head 2 of 2"),
        ({"head_map": bytes(3)}, "head_map of 3 for 4 query heads"),
    ],
)
def test_arrays_that_do_not_go_together_are_refused_before_anything_is_sent(
    pc: PionPromptCache, change: dict[str, Any], words: str
) -> None:
    arguments = {
        "queries": normal(1, HEADS, 1, DIM),
        "suffix_keys": normal(2, KV_HEADS, 5, DIM),
        "suffix_values": normal(3, KV_HEADS, 5, DIM),
    }
    with pytest.raises(ValueError, match=words):
        pc.attend_query_fused(NAME, 1, **(arguments | change))
    stats = pc.stats()
    assert stats["attend_binary"] == stats["attend_resp"] == 0


def test_other_shapes_than_the_session_s_are_refused_by_the_server(pc: PionPromptCache) -> None:
    with pytest.raises(ServerError, match="the session has 2 heads of dimension 32"):
        pc.attend_query(NAME, 1, normal(1, HEADS, 1, DIM))
    with pytest.raises(ServerError, match="the session has 2 heads of dimension 32"):
        pc.attend_query_fused(
            NAME, 1, normal(1, 4, 1, DIM), normal(2, 1, 1, DIM), normal(2, 1, 1, DIM)
        )
    for bad in ({"selector": "best"}, {"block": 0}, {"blocks": 0}):
        with pytest.raises((ValueError, ServerError)):
            pc.attend_query_sparse_auto(NAME, 1, normal(1, 4, DIM), kv_heads=2, **bad)
    assert pc.lookup(NAME)


def test_a_query_of_nan_spoils_its_own_row_only(pc: PionPromptCache, rows: tuple[F32, F32]) -> None:
    q = normal(1, HEADS, 2, DIM)
    none = rows[0][:, :0]
    right = pc.attend_query_fused(NAME, 1, q, none, none)
    q[0, 1, 3] = np.nan
    found = pc.attend_query_fused(NAME, 1, q, none, none)
    assert np.isnan(found[0, 1]).all()
    found[0, 1] = right[0, 1]
    np.testing.assert_allclose(found, right, atol=1e-6)


def test_arrays_of_mlx_and_of_any_width_will_do(pc: PionPromptCache) -> None:
    q = normal(1, HEADS, 2, DIM)
    none = np.zeros((KV_HEADS, 0, DIM))
    half = mx.array(q).astype(mx.bfloat16)
    expected = pc.attend_query_fused(NAME, 1, np.array(half.astype(mx.float32)), none, none)
    found = pc.attend_query_fused(NAME, 1, half, none, none)
    assert found.dtype == np.float32
    assert found.tobytes() == expected.tobytes()


def test_without_stage2_there_are_no_queries(running: Server, model: Any) -> None:
    with PionPromptCache(model, port=running.port) as plain:
        with pytest.raises(RuntimeError, match=r"PionPromptCache\(stage2=True\)"):
            plain.attend_query(NAME, 0, normal(1, HEADS, 1, DIM))
        assert plain.cold_rehydrates_observed == 0
