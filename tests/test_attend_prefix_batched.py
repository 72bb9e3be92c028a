"""Many queries at once, [H][M][D], equal CPU softmax; one query's reply is as it always was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from pion_server.attend import reference
from tests.attention_client import AttentionClient, normal, query_words

if TYPE_CHECKING:
    from tests.conftest import ServerProcess


@pytest.fixture(scope="module")
def client(module_server: Callable[..., ServerProcess]) -> AttentionClient:
    return AttentionClient(module_server("--kvcache", "--metal-attention", "-w", "1"))


HEADS, TOKENS, DIM = 4, 700, 64
K, V = normal(1, HEADS, TOKENS, DIM), normal(2, HEADS, TOKENS, DIM)


@pytest.mark.parametrize("many", [1, 2, 7, 33])
def test_batched_queries_equal_cpu_softmax(client: AttentionClient, many: int) -> None:
    client.store("batched", 0, K, V)
    q = normal(3, HEADS, many, DIM)
    out, _ = client.query("batched", 0, q)
    wanted, _ = reference.query(q, K, V)
    assert reference.cosine(out, wanted) >= 0.99999
    np.testing.assert_allclose(out, wanted, atol=1e-6)


def test_a_batch_answers_what_its_queries_get_one_by_one(client: AttentionClient) -> None:
    client.store("batched", 0, K, V)
    q = normal(4, HEADS, 5, DIM)
    together, _ = client.query("batched", 0, q)
    for m in range(5):
        alone, _ = client.query("batched", 0, q[:, m : m + 1])
        np.testing.assert_allclose(together[:, m : m + 1], alone, atol=1e-6)


def test_one_query_has_no_trailer(client: AttentionClient) -> None:
    """M is told by the length of Q alone: [H][1][D] is the form clients have always sent."""
    client.store("batched", 0, K, V)
    one, two = normal(5, HEADS, 1, DIM), normal(6, HEADS, 2, DIM)
    assert len(client.raw.call(*query_words("batched", 0, one))) == HEADS * DIM * 4
    assert len(client.raw.call(*query_words("batched", 0, two))) == HEADS * 2 * (DIM + 1) * 4


def test_grouped_queries_fold_into_rows(client: AttentionClient) -> None:
    """How clients send GQA: the query heads of a kv head are further rows of it."""
    client.store("batched", 0, K, V)
    q = normal(7, 3 * HEADS, 1, DIM)
    folded, _ = client.query("batched", 0, q.reshape(HEADS, 3, DIM))
    none = normal(0, HEADS, 0, DIM)
    wanted = reference.query_fused(q, K, V, none, none, [h // 3 for h in range(3 * HEADS)])
    np.testing.assert_allclose(folded.reshape(wanted.shape), wanted, atol=1e-6)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
