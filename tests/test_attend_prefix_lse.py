"""The log-sum-exp trailer, end to end: two halves merged by it are attention over the whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from pion_server.attend import reference
from tests.attention_client import AttentionClient, normal

if TYPE_CHECKING:
    from tests.conftest import ServerProcess


@pytest.fixture(scope="module")
def client(module_server: Callable[..., ServerProcess]) -> AttentionClient:
    return AttentionClient(module_server("--kvcache", "--metal-attention", "-w", "1"))


HEADS, TOKENS, MANY, DIM = 3, 400, 6, 128
K, V = normal(1, HEADS, TOKENS, DIM), normal(2, HEADS, TOKENS, DIM)
Q = normal(3, HEADS, MANY, DIM, scale=2.0)


def test_the_trailer_is_the_natural_log_of_the_sum(client: AttentionClient) -> None:
    client.store("whole", 0, K, V)
    _, lse = client.query("whole", 0, Q)
    np.testing.assert_allclose(lse, reference.query(Q, K, V)[1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 150, 399])
def test_halves_merge_to_the_whole(client: AttentionClient, cut: int) -> None:
    client.store("left", 0, K[:, :cut], V[:, :cut])
    client.store("right", 0, K[:, cut:], V[:, cut:])
    halves = [client.query(sid, 0, Q) for sid in ("left", "right")]
    top = np.maximum(halves[0][1], halves[1][1])
    weights = [np.exp(lse - top) for _, lse in halves]
    total = sum(w[..., None] * out for w, (out, _) in zip(weights, halves, strict=True))
    merged = total / (weights[0] + weights[1])[..., None]
    wanted, wanted_lse = reference.query(Q, K, V)
    assert reference.cosine(merged, wanted) >= 0.99999
    np.testing.assert_allclose(merged, wanted, atol=5e-6)
    np.testing.assert_allclose(top + np.log(weights[0] + weights[1]), wanted_lse, atol=1e-5)


def test_a_window_counts_in_the_trailer_too(client: AttentionClient) -> None:
    client.store("whole", 0, K, V)
    out, lse = client.query("whole", 0, Q, 100)
    wanted, wanted_lse = reference.query(Q, K, V, TOKENS - 100)
    np.testing.assert_allclose(out, wanted, atol=5e-6)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
