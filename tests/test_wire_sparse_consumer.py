"""Blocks chosen in the server, for a model that generates elsewhere: the number is still found.

python tests/test_wire_sparse_consumer.py      # as pytest runs it
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from evals.tables.niah import NUMBER, QUESTION, make_haystack
from evals.texts import split_prompt
from pion_patches.attention import pion_attention_patch
from pion_server.attend import reference
from pion_vllm_mlx import PionPromptCache, make_pion_prompt_cache
from pion_vllm_mlx.small_model import load_small_model
from tests.pion_vllm_mlx.tiny import VOCAB, tiny_llama

Server = Any
#: A third of the text.
BLOCKS: dict[str, Any] = {"K_block": 16, "K_blocks": 8}
PREFIX = [int(token) for token in np.random.default_rng(8).integers(0, VOCAB, 330)]
REST = [3, 1, 4]


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with pion_attention_patch():
        yield


def answer(model: Any, tokenizer: Any, suffix: list[int], cache: list[Any]) -> str:
    steps = generate_step(mx.array(suffix), model, max_tokens=14, prompt_cache=cache)
    text: str = tokenizer.decode([int(token) for token, _ in steps])
    return text


@pytest.mark.model
def test_a_magic_number_is_answered_from_a_third_of_the_blocks(
    server: Callable[..., Server],
) -> None:
    model, tokenizer = load_small_model()
    running = server("--kvcache", "--metal-attention", "-w", "1")
    text = make_haystack(tokenizer, 400, depth=0.5)
    prefix, suffix = split_prompt(tokenizer, text, QUESTION)
    with PionPromptCache(model, port=running.port, stage2=True, timeout=5) as pc:
        cold = pc.get_or_prefill(prefix, "text")
        assert pc.flush()
        assert NUMBER in answer(model, tokenizer, suffix, cold)
    for selector in ("block_mean", "quest"):
        with PionPromptCache(model, port=running.port, stage2=True, timeout=5) as pc:
            settings = BLOCKS | {"selector": selector}
            cache = make_pion_prompt_cache(model, "text", pc, len(prefix), settings)
            assert NUMBER in answer(model, tokenizer, suffix, cache)
            assert pc.stats()["attend_resp"] >= 30 * 13
            assert pc.stats()["wire_losses"] == 0


@pytest.mark.parametrize("selector", ["block_mean", "quest"])
@pytest.mark.parametrize("where", ["server", "process"])
def test_what_a_model_gets_is_attention_over_the_chosen_blocks(
    server: Callable[..., Server], where: str, selector: str
) -> None:
    """The first layer of a tiny model, whose queries the numpy definition can follow."""
    model = tiny_llama(head_dim=32, num_hidden_layers=1)
    running = server()
    with PionPromptCache(model, port=running.port, stage2=True) as pc:
        pc.get_or_prefill(PREFIX, "blocks")
        assert pc.flush()
    with PionPromptCache(model, port=running.port, stage2=True) as pc:
        if where == "process":
            pc.get_or_prefill(PREFIX, "blocks")
        settings = {"K_block": 16, "K_blocks": 3, "selector": selector}
        there: Any = make_pion_prompt_cache(model, "blocks", pc, len(PREFIX), settings)
        plain: Any = make_prompt_cache(model)
        model(mx.array([PREFIX]), cache=plain)
        for token in REST:
            for one in (there, plain):
                mx.eval(model(mx.array([[token]]), cache=one))
        layer = model.model.layers[0]
        normed = layer.input_layernorm(model.model.embed_tokens(mx.array([[9]])))
        attention = layer.self_attn
        found = np.array(attention(normed, None, there[0])[0])
        q = attention.q_proj(normed).reshape(1, 1, 4, 32).swapaxes(1, 2)
        q = np.array(attention.rope(q, offset=len(PREFIX) + len(REST))[0])
        attention(normed, None, plain[0])
        keys, values = (np.array(side[0]) for side in (plain[0].keys, plain[0].values))
        k, v = keys[:, : len(PREFIX)], values[:, : len(PREFIX)]
        sk, sv = (side[:, len(PREFIX) : len(PREFIX) + 4] for side in (keys, values))
        scores = reference.score_blocks(q[:, 0], k, [0, 0, 1, 1], 16, selector == "quest")
        tokens = reference.choose_tokens(scores, len(PREFIX), 16, 3)
        assert 32 < len(tokens) < 80
        seen = reference.query_fused(q, k, v, sk, sv, [0, 0, 1, 1], 0, tokens)
        flat = mx.array(seen.astype(np.float32)).swapaxes(0, 1).reshape(1, 1, -1)
        np.testing.assert_allclose(found, np.array(attention.o_proj(flat)[0]), atol=1e-5)
        assert (pc.stats()["attend_resp"] > 0) == (where == "server")
        assert pc.stats()["wire_losses"] == 0


if __name__ == "__main__":
    sys.path.insert(0, os.fspath(Path(__file__).parents[1]))
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
