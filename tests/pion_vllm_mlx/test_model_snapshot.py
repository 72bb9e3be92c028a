"""Snapshots of models: whatever a fingerprint depends on, touching it shows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.tuner.lora import LoRALinear

from pion_vllm_mlx.model_snapshot import NoSnapshot, Snapshot
from tests.pion_patches.zoo import families
from tests.pion_vllm_mlx.test_namespace import tiny_llama


def replace_a_weight_by_an_equal_one(model: Any) -> None:
    norm = model.model.norm
    norm.weight = mx.array(norm.weight)
    mx.eval(norm.weight)


def replace_a_weight_at_its_old_place(model: Any) -> None:
    """The new array may get the old one's id."""
    norm = model.model.norm
    shape = norm.weight.shape
    del norm.weight
    norm.weight = mx.zeros(shape)


def swap_two_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def add_an_adapter(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj = LoRALinear.from_base(attention.q_proj, r=2)


def move_the_rope_base(model: Any) -> None:
    model.model.layers[1].self_attn.rope.base = 500.0


def change_a_setting_in_place(model: Any) -> None:
    model.args.rope_theta = 3.0


def change_a_setting_within_a_dictionary(model: Any) -> None:
    model.args.rope_scaling["factor"] = 4.0


def change_what_a_list_says(model: Any) -> None:
    model.model.layer_types[0] = "sliding_attention"


def add_a_name(model: Any) -> None:
    model.model.layers[0].mlp.note = 1


def rename_a_part(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    first, mlp["gate"] = mlp["gate_proj"], mlp["gate_proj"]
    del mlp["gate_proj"]
    assert first is mlp["gate"]


def drop_a_layer(model: Any) -> None:
    model.model.layers.pop()


@pytest.mark.parametrize(
    "change",
    [
        replace_a_weight_by_an_equal_one,
        replace_a_weight_at_its_old_place,
        swap_two_layers,
        add_an_adapter,
        move_the_rope_base,
        change_a_setting_in_place,
        change_a_setting_within_a_dictionary,
        change_what_a_list_says,
        add_a_name,
        rename_a_part,
        drop_a_layer,
        Module.train,
    ],
)
def test_any_touch_shows(change: Callable[[Any], None]) -> None:
    model = tiny_llama(rope_scaling={"type": "linear", "factor": 2.0})
    model.eval()
    snapshot = Snapshot(model)
    assert snapshot.still_shows(model)
    change(model)
    assert not snapshot.still_shows(model)


def test_another_model_is_not_the_one_shown() -> None:
    model = tiny_llama()
    snapshot = Snapshot(model)
    assert not snapshot.still_shows(tiny_llama())


@pytest.mark.parametrize("name", sorted(families))
def test_models_of_every_family_have_a_snapshot_or_are_refused(name: str) -> None:
    model: Any = families[name](seed=7)
    try:
        snapshot = Snapshot(model)
    except NoSnapshot:
        return
    assert snapshot.still_shows(model)


def test_parts_of_an_unusual_kind_are_refused() -> None:
    model = tiny_llama()
    model.adapters = {"first": mx.zeros(3)}
    with pytest.raises(NoSnapshot, match="adapters"):
        Snapshot(model)


def test_a_snapshot_keeps_no_weight_and_no_model_alive() -> None:
    model = tiny_llama()
    snapshot = Snapshot(model)
    weight = weakref.ref(model.model.norm.weight)
    model.model.norm.weight = mx.zeros((32,))
    assert weight() is None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not snapshot.still_shows(tiny_llama())
