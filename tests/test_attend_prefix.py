"""Stage 2, basics: K and V are stored once, then each query sends Q only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from pion_server.attend import reference
from tests.attention_client import AttentionClient, normal, query_words, store_words

if TYPE_CHECKING:
    from tests.conftest import ServerProcess


@pytest.fixture(scope="module")
def client(module_server: Callable[..., ServerProcess]) -> AttentionClient:
    return AttentionClient(module_server("--kvcache", "--metal-attention", "-w", "1"))


HEADS, TOKENS, DIM = 8, 2048, 64
K, V = normal(1, HEADS, TOKENS, DIM), normal(2, HEADS, TOKENS, DIM)


def test_queries_of_a_stored_prefix_equal_cpu_softmax(client: AttentionClient) -> None:
    assert client.lookup("prefix") == "MISS"
    client.store("prefix", 0, K, V)
    assert client.lookup("prefix") == "HIT"
    assert client.lookup("prefix", 1) == "MISS"
    for seed in range(10):
        q = normal(10 + seed, HEADS, 1, DIM)
        out, _ = client.query("prefix", 0, q)
        wanted, _ = reference.query(q, K, V)
        assert reference.cosine(out, wanted) >= 0.99999
        np.testing.assert_allclose(out, wanted, atol=1e-6)


def test_querybatch_answers_the_same_with_everything_on_the_wire(client: AttentionClient) -> None:
    client.store("prefix", 0, K, V)
    q = normal(3, HEADS, 1, DIM)
    blobs = q.tobytes(), K.tobytes(), V.tobytes()
    dense = client.ask(("ATTEND.QUERYBATCH", HEADS, TOKENS, DIM, TOKENS, *blobs), *q.shape)
    np.testing.assert_allclose(dense, client.query("prefix", 0, q)[0], atol=1e-6)
    best = client.ask(("ATTEND.QUERYBATCH", HEADS, TOKENS, DIM, 7, *blobs), *q.shape)
    scores = np.einsum("hmd,hnd->hn", q, K)
    wanted = reference.query_sparse(q[:, 0], K, V, np.argsort(-scores)[:, :7].tolist())
    np.testing.assert_allclose(best[:, 0], wanted, atol=1e-6)


def test_what_a_query_sends_does_not_grow_with_the_prefix(client: AttentionClient) -> None:
    q = normal(3, HEADS, 1, DIM)
    sent = len(client.raw.pack(*query_words("prefix", 0, q)))
    stored = len(client.raw.pack(*store_words("prefix", 0, K, V)))
    assert sent - q.nbytes < 200
    assert stored > 1000 * sent


def test_layers_and_sessions_are_kept_apart(client: AttentionClient) -> None:
    kv = [normal(seed, 1, 5, 32) for seed in range(3)]
    for number, (sid, layer) in enumerate((("a", 0), ("a", 1), ("b", 0))):
        client.store(sid, layer, kv[number], kv[number])
    q = normal(9, 1, 1, 32)
    for number, (sid, layer) in enumerate((("a", 0), ("a", 1), ("b", 0))):
        wanted, _ = reference.query(q, kv[number], kv[number])
        np.testing.assert_allclose(client.query(sid, layer, q)[0], wanted, atol=1e-6)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
