"""Random models of real shapes: what can be shown of a family without its weights.

Exactness can: bits do not depend on what the weights mean. Answers and times cannot, so no eval
reports those of a random model as anything else.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import gpt2, qwen3_5

VOCAB = 512
#: Layers of Qwen3.5-4B: three of linear attention, then one of softmax attention, eight times.
HYBRID_LAYERS, HYBRID_INTERVAL = 32, 4


def random_hybrid(seed: int, layers: int = HYBRID_LAYERS, vocab: int = VOCAB) -> Any:
    """A qwen3_5 with the layer pattern of Qwen3.5-4B (24 + 8) and narrow layers, float32."""
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "full_attention_interval": HYBRID_INTERVAL,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "vocab_size": vocab,
        "max_position_embeddings": 16_384,
    }
    arguments = qwen3_5.ModelArgs(model_type="qwen3_5", text_config=text)
    return _randomise(qwen3_5.Model(arguments), seed)


def random_gpt2(seed: int, layers: int = 12, width: int = 768, heads: int = 12) -> Any:
    """GPT-2's shape (the small one by default, 124M) with a small vocabulary, float32."""
    arguments = gpt2.ModelArgs(
        model_type="gpt2",
        n_ctx=1024,
        n_embd=width,
        n_head=heads,
        n_layer=layers,
        n_positions=1024,
        layer_norm_epsilon=1e-5,
        vocab_size=VOCAB,
    )
    return _randomise(gpt2.Model(arguments), seed)


def random_ids(seed: int, count: int) -> list[int]:
    """Token ids of those models, none of them special."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, count)]


def _randomise(model: Any, seed: int) -> Any:
    # Some tensors start as zeros or ones: moved, so that no state in a cache is trivial.
    random = np.random.default_rng(seed)

    def shift(parameter: mx.array) -> mx.array:
        noise = random.standard_normal(parameter.shape, dtype=np.float32)
        return parameter.astype(mx.float32) + 0.05 * mx.array(noise)

    mx.random.seed(seed)
    model.update(tree_map(shift, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model
