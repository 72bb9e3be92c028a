"""QUERY_SPARSE: each head reads the tokens named for it, and no others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from pion_server.attend import reference
from tests.attention_client import AttentionClient, normal, sparse_words

if TYPE_CHECKING:
    from tests.conftest import ServerProcess


@pytest.fixture(scope="module")
def client(module_server: Callable[..., ServerProcess]) -> AttentionClient:
    return AttentionClient(module_server("--kvcache", "--metal-attention", "-w", "1"))


HEADS, TOKENS, DIM = 4, 1024, 128
K, V = normal(1, HEADS, TOKENS, DIM, scale=0.5), normal(2, HEADS, TOKENS, DIM, scale=0.5)
Q = normal(3, HEADS, DIM, scale=0.5)
EVERY = np.arange(TOKENS, dtype=np.int32)[None].repeat(HEADS, axis=0)


@pytest.fixture
def stored(client: AttentionClient) -> AttentionClient:
    client.store("sparse", 0, K, V)
    return client


def test_all_tokens_are_dense_attention(stored: AttentionClient) -> None:
    found = stored.ask(sparse_words("sparse", 0, Q, EVERY, [TOKENS] * HEADS), HEADS, DIM)
    dense, _ = stored.query("sparse", 0, Q[:, None])
    np.testing.assert_allclose(found, dense[:, 0], atol=1e-6, rtol=0)


def test_one_set_for_all_heads(stored: AttentionClient) -> None:
    ids = EVERY[:, 5:700:31]
    found = stored.ask(sparse_words("sparse", 0, Q, ids, [ids.shape[1]] * HEADS), HEADS, DIM)
    wanted = reference.query_sparse(Q, K, V, ids.tolist())
    assert reference.cosine(found, wanted) >= 0.99999
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_heads_may_read_different_sets_of_different_sizes(stored: AttentionClient) -> None:
    rng = np.random.default_rng(4)
    ids = np.stack([rng.permutation(TOKENS)[:60] for _ in range(HEADS)]).astype(np.int32)
    counts = [60, 1, 17, 0]
    found = stored.ask(sparse_words("sparse", 0, Q, ids, counts), HEADS, DIM)
    wanted = reference.query_sparse(
        Q, K, V, [head[:count].tolist() for head, count in zip(ids, counts, strict=True)]
    )
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_allclose(found[1], V[1, ids[1, 0]], atol=1e-6)
    assert not found[3].any()


def test_tokens_twice_count_twice_and_those_outside_are_skipped(stored: AttentionClient) -> None:
    ids = np.array([[7, 7, 9, -1, TOKENS, 2**31 - 1, -(2**31)]] * HEADS, np.int32)
    found = stored.ask(sparse_words("sparse", 0, Q, ids, [7] * HEADS), HEADS, DIM)
    wanted = reference.query_sparse(Q, K, V, [[7, 7, 9]] * HEADS)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_window_hides_named_tokens(stored: AttentionClient) -> None:
    ids = EVERY[:, ::100]
    found = stored.ask(sparse_words("sparse", 0, Q, ids, [99] * HEADS, 300), HEADS, DIM)
    wanted = reference.query_sparse(Q, K, V, ids.tolist(), TOKENS - 300)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
