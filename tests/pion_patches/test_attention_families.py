"""Every model family that fits on a CPU: split prefix against ordinary attention, or refused."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from pion_patches.attention import pion_attention_patch
from pion_patches.prefix_entry import CannotSplit, capture_prefix
from pion_patches.splittable import require_splittable
from tests.pion_patches.zoo import VOCAB, families

PREFIX = 21
LATENT = "multi-head latent attention"
SPARSE = "a sparse index reads the keys"

# Families that are refused, and the words that say why. All others must be exact.
REFUSED = {
    "bailing_hybrid": LATENT,
    "bailing_moe_v3": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": SPARSE,
    "deepseek_v41": "its cache is a LayerCache",
    "gemma2": "soft caps on the scores, inside its own softmax",
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": SPARSE,
    "kimi_k25": LATENT,
    "kimi_k3": LATENT,
    "kimi_linear": LATENT,
    "kimi_vl": LATENT,
    "longcat_flash": LATENT,
    "longcat_flash_ngram": LATENT,
    "mamba": "no attention cache",
    "mamba2": "no attention cache",
    "minimax_m3_vl": SPARSE,
    "mistral4": LATENT,
    "olmo": "its own softmax",
    "phi3small": "its own block-sparse softmax",
    "plamo": "repeats its keys",
    "plamo2": "calls mx.fast.scaled_dot_product_attention directly",
    "rwkv7": "no attention cache",
}
if mlx_lm.__version__ < "0.32":
    REFUSED |= dict.fromkeys(("afm7", "gemma3n"), "reads shared keys out of the cache's state")


def tokens(count: int, batch: int = 1, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).integers(0, VOCAB, (batch, count)))


def prefill(model: Any, prefix: mx.array) -> list[Any]:
    cache: list[Any] = make_prompt_cache(model)
    model(prefix, cache=cache)
    mx.eval([one.state for one in cache])
    return cache


def largest_difference(model: Any, prefix: mx.array, rest: mx.array, cuts: list[int]) -> float:
    """Over every piece of ``rest``: |split - ordinary| logits, relative to the largest logit."""
    ordinary = prefill(model, prefix)
    entry = capture_prefix(model, ordinary, prefix.shape[1])
    split, worst = entry.open(), 0.0
    for start, stop in itertools.pairwise(cuts):
        expected = as_numpy(model(rest[:, start:stop], cache=ordinary))
        found = as_numpy(model(rest[:, start:stop], cache=split))
        worst = max(worst, np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))
    return worst


def as_numpy(array: mx.array) -> Any:
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize("name", sorted(set(families) - set(REFUSED)))
def test_split_and_ordinary_attention_agree(name: str) -> None:
    """A chunk, single tokens until the windows (8) have left the prefix, and a chunk again."""
    model = families[name](seed=7)
    require_splittable(model)
    with pion_attention_patch():
        worst = largest_difference(model, tokens(PREFIX), tokens(16, seed=1), [0, 6, 7, 8, 12, 16])
    assert worst < 1e-5


@pytest.mark.parametrize("name", sorted(set(families) & set(REFUSED)))
def test_a_family_that_cannot_be_split_is_refused_by_name_with_its_reason(name: str) -> None:
    model = families[name](seed=7)
    with pytest.raises(CannotSplit) as caught:
        require_splittable(model)
    words = str(caught.value)
    assert words.startswith(f"{type(model).__module__}.Model cannot attend to a split prefix: ")
    assert REFUSED[name] in words
    assert words.endswith("use the cache rebuild instead")


def test_another_prefix_gives_other_logits() -> None:
    """Without it, a model that ignored its prefix would pass everything above."""
    model = families["llama"](seed=7)
    rest = tokens(4, seed=1)
    with pion_attention_patch():
        logits = [
            model(rest, cache=capture_prefix(model, prefill(model, prefix), PREFIX).open())
            for prefix in (tokens(PREFIX), tokens(PREFIX, seed=5))
        ]
    assert np.abs(as_numpy(logits[0]) - as_numpy(logits[1])).max() > 0.1


@pytest.mark.skipif("gear" not in families, reason="came with mlx-lm 0.32")
def test_the_verdict_is_about_the_model_at_hand_not_its_name() -> None:
    """The same class splits without soft caps and is refused with them."""
    model = families["gear"](seed=7)
    require_splittable(model)
    capped = copy.deepcopy(model)
    for layer in capped.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.attn_logit_softcapping = 30.0
    with pytest.raises(CannotSplit, match="soft caps on the scores"):
        require_splittable(capped)
    require_splittable(model)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "qwen3_5"])
@pytest.mark.parametrize("shared", [False, True], ids=["own-prefixes", "one-prefix"])
def test_a_batch_agrees_whether_its_prefix_is_shared_or_not(name: str, shared: bool) -> None:
    model = families[name](seed=7)
    prefix = mx.repeat(tokens(PREFIX), 3, axis=0) if shared else tokens(PREFIX, batch=3)
    rest = tokens(9, batch=3, seed=1)
    with pion_attention_patch():
        ordinary = prefill(model, prefix)
        source = prefill(model, prefix[:1]) if shared and name == "llama" else ordinary
        split = capture_prefix(model, source, PREFIX).open()
        for start, stop in [(0, 5), (5, 6), (6, 9)]:
            expected = model(rest[:, start:stop], cache=ordinary)
            found = model(rest[:, start:stop], cache=split)
            assert mx.allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float16, 2e-2), (mx.bfloat16, 1.5e-1)])
def test_half_precision_stays_within_its_rounding(dtype: mx.Dtype, tolerance: float) -> None:
    model = families["llama"](seed=7, dtype=dtype)
    with pion_attention_patch():
        worst = largest_difference(model, tokens(PREFIX), tokens(8, seed=1), [0, 5, 6, 8])
    assert worst < tolerance


class Forgetful:
    """Stores its keys and then attends to its own chunk alone, without an error anywhere."""

    def make_cache(self) -> list[Any]:
        return [KVCache()]  # type: ignore[no-untyped-call]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        rows = inputs[:, None, :, None].astype(mx.float32)
        cache[0].update_and_fetch(rows, rows)
        return mx.fast.scaled_dot_product_attention(rows, rows, rows, scale=1.0)


def test_a_model_that_never_asks_for_attention_on_its_keys_is_refused() -> None:
    with pytest.raises(CannotSplit, match="never reaches the attention function"):
        require_splittable(Forgetful())
