"""Head dimension 512, as Gemma 4's full-attention layers have it, in every form of query."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from pion_server.attend import reference
from tests.attention_client import (
    F32,
    AttentionClient,
    auto_fused_words,
    auto_words,
    fused_words,
    normal,
    sparse_words,
)

if TYPE_CHECKING:
    from tests.conftest import ServerProcess


@pytest.fixture(scope="module")
def client(module_server: Callable[..., ServerProcess]) -> AttentionClient:
    return AttentionClient(module_server("--kvcache", "--metal-attention", "-w", "1"))


HEADS, TOKENS, DIM = 2, 300, 512
K, V = normal(1, HEADS, TOKENS, DIM), normal(2, HEADS, TOKENS, DIM)
SK, SV = normal(3, HEADS, 4, DIM), normal(4, HEADS, 4, DIM)
Q = normal(5, 2 * HEADS, 3, DIM)
GROUPS = bytes([0, 0, 1, 1])


@pytest.fixture
def stored(client: AttentionClient) -> AttentionClient:
    client.store("wide", 0, K, V)
    return client


def close(found: F32, wanted: reference.F64) -> None:
    assert reference.cosine(found, wanted) >= 0.99999
    np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize("many", [1, 3])
def test_query(stored: AttentionClient, many: int) -> None:
    q = Q[:HEADS, :many]
    out, lse = stored.query("wide", 0, q)
    wanted, wanted_lse = reference.query(q, K, V)
    close(out, wanted)
    if many > 1:
        close(lse, wanted_lse)


@pytest.mark.parametrize("many", [1, 3])
def test_query_fused(stored: AttentionClient, many: int) -> None:
    q = Q[:, :many]
    found = stored.ask(fused_words("wide", 0, q, SK, SV, GROUPS), *q.shape)
    close(found, reference.query_fused(q, K, V, SK, SV, list(GROUPS)))


def test_query_sparse(stored: AttentionClient) -> None:
    ids = np.array([[1, 200, 299], [5, 6, 7]], np.int32)
    found = stored.ask(sparse_words("wide", 0, Q[:HEADS, 0], ids, [3, 2]), HEADS, DIM)
    close(found, reference.query_sparse(Q[:HEADS, 0], K, V, [[1, 200, 299], [5, 6]]))


def test_query_sparse_auto_with_and_without_a_suffix(stored: AttentionClient) -> None:
    q = Q[:, 0]
    scores = reference.score_blocks(q, K, list(GROUPS), 16)
    tokens = reference.choose_tokens(scores, TOKENS, 16, 3)
    found = stored.ask(auto_words("wide", 0, q, HEADS, (16, 3)), *q.shape)
    none = normal(0, HEADS, 0, DIM)
    close(found, reference.query_fused(Q[:, :1], K, V, none, none, list(GROUPS), 0, tokens)[:, 0])
    found = stored.ask(auto_fused_words("wide", 0, q, SK, SV, (16, 3)), *q.shape)
    close(found, reference.query_fused(Q[:, :1], K, V, SK, SV, list(GROUPS), 0, tokens)[:, 0])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
