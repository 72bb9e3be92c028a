"""QUERY_SPARSE_AUTO: the server picks the blocks; a planted needle is found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from pion_server.attend import reference
from tests.attention_client import F32, AttentionClient, auto_words, fused_words, normal

if TYPE_CHECKING:
    from tests.conftest import ServerProcess


@pytest.fixture(scope="module")
def client(module_server: Callable[..., ServerProcess]) -> AttentionClient:
    return AttentionClient(module_server("--kvcache", "--metal-attention", "-w", "1"))


DIM = 64


def expected(
    q: F32, k: F32, v: F32, block: int, top: int, quest: bool = False, first: int = 0
) -> reference.F64:
    """The definition, in float64: chosen blocks, then dense attention over their tokens."""
    group = len(q) // len(k)
    head_map = [h // group for h in range(len(q))]
    scores = reference.score_blocks(q, k, head_map, block, quest)
    tokens = reference.choose_tokens(scores, k.shape[1], block, top, first)
    none = k[:, :0]
    return reference.query_fused(q[:, None], k, v, none, none, head_map, 0, tokens)[:, 0]


@pytest.mark.parametrize("selector", [0, 1])
@pytest.mark.parametrize("tokens", [1000, 1024])
def test_the_best_blocks_and_the_last_are_read(
    client: AttentionClient, selector: int, tokens: int
) -> None:
    k, v, q = normal(1, 2, tokens, DIM), normal(2, 2, tokens, DIM), normal(3, 6, DIM)
    client.store("auto", 0, k, v)
    for block, top in ((64, 1), (64, 8), (7, 20), (1, 5), (500, 1)):
        words = auto_words("auto", 0, q, 2, (block, top), -1, selector)
        found = client.ask(words, *q.shape)
        np.testing.assert_allclose(found, expected(q, k, v, block, top, bool(selector)), atol=2e-6)


def test_as_many_blocks_as_there_are_is_dense(client: AttentionClient) -> None:
    """The design's tolerance: 1e-6 at H=4, N=1024, D=128, 0.5 N(0,1)."""
    k, v = normal(1, 4, 1024, 128, scale=0.5), normal(2, 4, 1024, 128, scale=0.5)
    q = normal(3, 4, 128, scale=0.5)
    client.store("auto", 1, k, v)
    dense, _ = client.query("auto", 1, q[:, None])
    for block, top in ((64, 16), (64, 99), (1024, 1), (5000, 1), (1, 1024)):
        found = client.ask(auto_words("auto", 1, q, 4, (block, top)), *q.shape)
        np.testing.assert_allclose(found, dense[:, 0], atol=1e-6, rtol=0)


def test_a_head_map_may_be_given_or_left_out(client: AttentionClient) -> None:
    k, v, q = normal(1, 2, 256, DIM), normal(2, 2, 256, DIM), normal(3, 4, DIM)
    client.store("auto", 2, k, v)
    left_out = client.raw.call(*auto_words("auto", 2, q, 2, (16, 3)))
    given = client.raw.call(*auto_words("auto", 2, q, 2, (16, 3), head_map=bytes([0, 0, 1, 1])))
    other = client.raw.call(*auto_words("auto", 2, q, 2, (16, 3), head_map=bytes([1, 1, 0, 0])))
    assert given == left_out
    assert other != left_out


def test_the_window_applies_after_the_choice(client: AttentionClient) -> None:
    k, v, q = normal(1, 2, 256, DIM), normal(2, 2, 256, DIM), normal(3, 2, DIM)
    client.store("auto", 3, k, v)
    found = client.ask(auto_words("auto", 3, q, 2, (16, 6), 100), *q.shape)
    np.testing.assert_allclose(found, expected(q, k, v, 16, 6, first=156), atol=2e-6)


@pytest.mark.parametrize("selector", [0, 1])
def test_a_planted_needle_is_found_wherever_it_lies(client: AttentionClient, selector: int) -> None:
    """8,192 tokens, 8 blocks of 64 read, the needle eight tokens long: as dense attention finds it.

    Its keys point along the query, its values are one vector, so the answer must be that vector.
    """
    tokens, length = 8192, 8
    k, v = normal(1, 1, tokens, DIM), normal(2, 1, tokens, DIM)
    for place in (0, 60, 4000, 5119, tokens - length):
        q, needle = normal(place, 1, DIM), normal(place + 1, DIM)
        keys, values = k.copy(), v.copy()
        keys[0, place : place + length] = 20 * q[0] / np.linalg.norm(q[0])
        values[0, place : place + length] = needle
        client.store("auto", 4, keys, values)
        found = client.ask(auto_words("auto", 4, q, 1, (64, 8), -1, selector))
        assert reference.cosine(found, needle) > 0.999
        none = normal(0, 1, 0, DIM)
        dense = client.ask(fused_words("auto", 4, q[:, None], none, none, bytes(1)))
        assert reference.cosine(found, dense) > 0.999


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
