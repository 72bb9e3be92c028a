"""A tiny llama and what to compare of it: greedy tokens and the bits of every logit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

VOCAB = 61
PREFIX = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 40)]
SUFFIX = [5, 17, 60]


def tiny_llama(seed: int = 0, dtype: Any = mx.float32, **changes: Any) -> Any:
    """Two layers, two key-value heads of 16."""
    mx.random.seed(seed)
    settings: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
    }
    model = llama.Model(llama.ModelArgs(**(settings | changes)))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def continue_greedily(model: Any, cache: list[Any], count: int = 4) -> tuple[list[int], bytes]:
    """Run `SUFFIX` and `count` greedy tokens on a cache: the tokens, and the bits of all logits."""
    tokens: list[int] = []
    bits = b""
    step = mx.array(SUFFIX)[None]
    for _ in range(count):
        logits = model(step, cache=cache)[0, -1].astype(mx.float32)
        bits += np.array(logits).tobytes()
        tokens.append(int(mx.argmax(logits)))
        step = mx.array([[tokens[-1]]])
    return tokens, bits


def cold_answer(model: Any, prefix: list[int], step: int = 512) -> tuple[list[int], bytes]:
    """What a run without any store answers, with the same split and chunk size."""
    cache = make_prompt_cache(model)
    for start in range(0, len(prefix), step):
        model(mx.array(prefix[start : start + step])[None], cache=cache)
        mx.eval([leaf.state for leaf in cache])
    return continue_greedily(model, cache)
