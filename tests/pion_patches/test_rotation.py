"""Moved keys are the keys a model computes there; where that cannot be shown, it is refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_patches import rotation
from pion_patches.rotation import CannotRotate, Turn, require_rotation
from tests.pion_patches.zoo import build

IDS = [int(token) for token in np.random.default_rng(5).integers(0, 199, 24)]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 512}
LONG = {
    "type": "longrope",
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0],
    "original_max_position_embeddings": 512,
}


def keys_at(model: Any, start: int, layer: int = 0) -> mx.array:
    """Layer `layer`'s keys of `IDS`, computed behind `start` other tokens."""
    cache: Any = make_prompt_cache(model)
    if start:
        model(mx.full((1, start), 7, dtype=mx.int32), cache=cache)
    model(mx.array(IDS)[None], cache=cache)
    keys: mx.array = cache[layer].keys[..., start : start + len(IDS), :]
    return keys


def furthest(one: mx.array, other: mx.array) -> float:
    return float(mx.max(mx.abs(one.astype(mx.float32) - other.astype(mx.float32))))


@pytest.mark.parametrize(("family", "changes"), [
    ("llama", {}),  # split-half layout
    ("llama", {"rope_traditional": True}),
    ("llama", {"rope_scaling": LLAMA3}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope_scaling": YARN}),
    ("cohere", {}),  # interleaved
    ("stablelm", {}),  # half of the dimensions
    ("phi3", {"rope_scaling": LONG, "partial_rotary_factor": 1.0}),
    ("smollm3", {}),  # a layer without RoPE
    ("nanbeige", {}),  # more caches than layers
])  # fmt: skip
def test_a_moved_key_is_the_one_computed_there(family: str, changes: dict[str, Any]) -> None:
    """O01, O02: every geometry by a thousand positions, no factor applied twice."""
    model: Any = build(family, seed=7, **changes)
    home, there = keys_at(model, 0), keys_at(model, 1000)
    turn = require_rotation(model)[0]
    assert turn.dims
    assert furthest(home, there) > 0.5  # else this shows nothing
    assert furthest(turn.move(home, 1000), there) <= 1e-3
    assert furthest(turn.move(there, -1000), home) <= 1e-3
    lengths = mx.linalg.norm(turn.move(home, 1000), axis=-1) / mx.linalg.norm(home, axis=-1)
    assert float(mx.max(mx.abs(lengths - 1))) < 1e-4  # O02: YaRN and SuScaled rotate only


def test_half_precision_keys_move_within_their_rounding() -> None:
    """O01: 0.05 in bfloat16."""
    model: Any = build("llama", seed=7, dtype=mx.bfloat16)
    turn = require_rotation(model)[0]
    moved = turn.move(keys_at(model, 0), 100)
    assert moved.dtype == mx.bfloat16
    assert furthest(moved, keys_at(model, 100)) <= 0.05


def test_every_layer_has_the_rotation_of_its_own_call() -> None:
    turns = require_rotation(build("smollm3", seed=7))
    assert [bool(turn.dims) for turn in turns] == [True, True, True, False]
    keys = mx.random.normal((1, 2, 3, 16))
    assert turns[3].move(keys, 50) is keys


@pytest.mark.parametrize(("family", "changes", "reason"), [
    ("gemma3_text", {}, "RotatingKVCache"),
    ("qwen3_5", {}, "ArraysCache"),
    ("mamba2", {}, "ArraysCache"),
    ("llama4", {}, "ChunkedKVCache"),
    ("deepseek_v3", {}, "latent attention"),
    ("deepseek_v2", {}, "not what mx.fast.rope returned"),
    ("gpt2", {}, "not what mx.fast.rope returned"),  # a table of positions
    ("hunyuan", {}, "not what mx.fast.rope returned"),  # a norm behind the rotation
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "depend on the length"),
])  # fmt: skip
def test_what_cannot_be_moved_is_refused_with_the_reason(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    """O02 (dynamic NTK), O08 (windows, recurrent layers)."""
    model = build(family, seed=7, **changes)
    with pytest.raises(CannotRotate, match=reason):
        require_rotation(model)


@pytest.mark.parametrize("wrong", [
    {"dims": 8},
    {"traditional": True},
    {"base": 5000.0},
    {"scale": 0.5},
    {"dims": 0},
])  # fmt: skip
def test_the_proof_catches_a_wrong_geometry(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    """O01: the self-test is no formality. What a model does is misread on purpose."""
    monkeypatch.setattr(rotation, "Turn", lambda *fields: misread(fields, wrong))
    with pytest.raises(CannotRotate, match="off those computed there"):
        require_rotation(build("llama", seed=7))


def misread(fields: tuple[Any, ...], wrong: dict[str, Any]) -> Turn:
    names = ("dims", "traditional", "base", "scale", "freqs")
    return Turn(**(dict(zip(names, fields, strict=False)) | wrong))


def test_watching_leaves_mlx_as_it_was() -> None:
    fast: Any = mx.fast
    original = fast.rope
    require_rotation(build("llama", seed=7))
    with pytest.raises(CannotRotate):
        require_rotation(build("gpt2", seed=7))
    assert fast.rope is original


def test_a_model_is_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", seed=7)
    turns = require_rotation(model)
    monkeypatch.setattr(rotation, "_try", lambda model: pytest.fail("proven again"))
    assert require_rotation(model) is turns
