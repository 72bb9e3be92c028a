"""With the patch installed nothing about stock mlx-lm changes: logits and tokens, bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache

from pion_patches import seam
from pion_patches.attention import (
    is_installed,
    pion_attention_patch,
    pion_scaled_dot_product_attention,
)
from tests.pion_patches.zoo import VOCAB, build, families

caches: Any = cache  # mlx-lm is not typed
PROMPT = mx.array(np.random.default_rng(0).integers(0, VOCAB, 27))

CACHES: dict[str, Callable[[Any], list[Any]]] = {
    "the model's own": caches.make_prompt_cache,
    "rotating": lambda m: [caches.RotatingKVCache(max_size=8, keep=2) for _ in m.layers],
    "quantised": lambda m: [caches.QuantizedKVCache(group_size=32, bits=8) for _ in m.layers],
    "chunked": lambda m: [caches.ChunkedKVCache(16) for _ in m.layers],
    "concatenated": lambda m: [caches.ConcatenateKVCache() for _ in m.layers],
    "batch": lambda m: [caches.BatchKVCache([0]) for _ in m.layers],
    "none": lambda m: [],
}


def answers(model: Any, make: Callable[[Any], list[Any]]) -> list[Any]:
    """Logits of a chunk, of single tokens and of a second chunk."""
    held = make(model) or None
    pieces = [PROMPT[None, :20]]
    if held:
        pieces += [PROMPT[None, 20:21], PROMPT[None, 21:22], PROMPT[None, 22:]]
    return [np.array(model(piece, cache=held)) for piece in pieces]


def greedy(model: Any) -> list[int]:
    return [int(token) for token, _ in generate_step(PROMPT, model, max_tokens=12)]


def assert_same_bits(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("kind", CACHES)
def test_logits_of_every_stock_cache_keep_their_bits(kind: str) -> None:
    """CASES O10."""
    model = build("llama", seed=7, head_dim=32)  # quantised caches need groups of 32
    before = answers(model, CACHES[kind])
    with pion_attention_patch():
        assert is_installed()
        assert_same_bits(answers(model, CACHES[kind]), before)
    assert_same_bits(answers(model, CACHES[kind]), before)


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3n", "gpt_oss", "qwen3_5", "deepseek_v3", "llama4", "mamba2", "afm7"]
)
def test_logits_and_greedy_tokens_of_a_family_keep_their_bits(name: str) -> None:
    model = families[name](seed=7)
    before, said = answers(model, caches.make_prompt_cache), greedy(model)
    with pion_attention_patch():
        assert_same_bits(answers(model, caches.make_prompt_cache), before)
        assert greedy(model) == said


def test_a_direct_call_runs_the_original_installed_or_not() -> None:
    mx.random.seed(2)
    q, k, v = (mx.random.normal((1, 2, 3, 8)) for _ in range(3))
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask="causal").tolist()
    assert pion_scaled_dot_product_attention(q, k, v, None, 0.3, "causal").tolist() == expected
    with pion_attention_patch():
        assert pion_scaled_dot_product_attention(q, k, v, None, 0.3, "causal").tolist() == expected


def test_errors_of_the_original_come_through_unchanged() -> None:
    q = mx.zeros((1, 2, 3, 8))

    class Quantised:
        bits, group_size = 4, 32

    with pion_attention_patch(), pytest.raises(ValueError, match="does not support attention sin"):
        pion_scaled_dot_product_attention(q, q, q, Quantised(), 0.3, None, sinks=mx.zeros((2,)))


def test_other_tools_still_see_the_stock_signature() -> None:
    before = inspect.signature(seam.bound_function())
    with pion_attention_patch():
        assert inspect.signature(seam.bound_function()) == before
