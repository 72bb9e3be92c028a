"""QUERY_SPARSE_AUTO_FUSED: chosen blocks and a dense suffix in one softmax."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from pion_server.attend import reference
from tests.attention_client import (
    AttentionClient,
    auto_fused_words,
    auto_words,
    fused_words,
    normal,
)

if TYPE_CHECKING:
    from tests.conftest import ServerProcess


@pytest.fixture(scope="module")
def client(module_server: Callable[..., ServerProcess]) -> AttentionClient:
    return AttentionClient(module_server("--kvcache", "--metal-attention", "-w", "1"))


KV_HEADS, TOKENS, DIM, HEADS = 2, 777, 64, 6
K, V = normal(1, KV_HEADS, TOKENS, DIM), normal(2, KV_HEADS, TOKENS, DIM)
Q = normal(3, HEADS, DIM)
NONE = normal(0, KV_HEADS, 0, DIM)
GROUPS = [h // 3 for h in range(HEADS)]


@pytest.fixture
def stored(client: AttentionClient) -> AttentionClient:
    client.store("fused", 0, K, V)
    return client


@pytest.mark.parametrize("selector", [0, 1])
@pytest.mark.parametrize("suffix", [1, 5, 300])
def test_prefix_blocks_and_suffix_share_one_softmax(
    stored: AttentionClient, suffix: int, selector: int
) -> None:
    sk, sv = normal(4, KV_HEADS, suffix, DIM), normal(5, KV_HEADS, suffix, DIM)
    scores = reference.score_blocks(Q, K, GROUPS, 32, bool(selector))
    for window, first in ((-1, 0), (200, TOKENS - 200)):
        tokens = reference.choose_tokens(scores, TOKENS, 32, 4, first)
        wanted = reference.query_fused(Q[:, None], K, V, sk, sv, GROUPS, 0, tokens)[:, 0]
        words = auto_fused_words("fused", 0, Q, sk, sv, (32, 4), window, selector)
        found = stored.ask(words, *Q.shape)
        assert reference.cosine(found, wanted) >= 0.99999
        np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_without_a_suffix_it_is_sparse_auto(stored: AttentionClient) -> None:
    found = stored.ask(auto_fused_words("fused", 0, Q, NONE, NONE, (32, 4)))
    plain = stored.ask(auto_words("fused", 0, Q, KV_HEADS, (32, 4)))
    np.testing.assert_allclose(found, plain, atol=1e-6, rtol=0)


def test_with_all_blocks_it_is_query_fused(stored: AttentionClient) -> None:
    sk, sv = normal(4, KV_HEADS, 5, DIM), normal(5, KV_HEADS, 5, DIM)
    found = stored.ask(auto_fused_words("fused", 0, Q, sk, sv, (32, 99)))
    dense = stored.ask(fused_words("fused", 0, Q[:, None], sk, sv, bytes(GROUPS)))
    np.testing.assert_allclose(found, dense, atol=1e-6, rtol=0)


def test_the_suffix_is_seen_whatever_the_window(stored: AttentionClient) -> None:
    sk, sv = normal(4, KV_HEADS, 5, DIM), normal(5, KV_HEADS, 5, DIM)
    found = stored.ask(auto_fused_words("fused", 0, Q, sk, sv, (32, 4), 1), *Q.shape)
    last = [TOKENS - 1]
    wanted = reference.query_fused(Q[:, None], K, V, sk, sv, GROUPS, 0, last)[:, 0]
    np.testing.assert_allclose(found, wanted, atol=2e-6)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
