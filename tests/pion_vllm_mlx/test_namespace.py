"""Names: the namespace contract, and fingerprints that change with everything that matters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import xxhash
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

from pion_vllm_mlx import namespace
from pion_vllm_mlx.fingerprint_file import FingerprintFile
from pion_vllm_mlx.namespace import forget_fingerprint, make_namespace, model_fingerprint
from tests.pion_patches.shipping import feed
from tests.pion_patches.zoo import families

FIXED_IDS = [(i * 7919) % 50257 for i in range(64)]
GOLDEN_KEY = "5170cf0f4ecdc16bca0d204b6bb7758e"


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    mx.random.seed(seed)
    settings: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 61,
    }
    model = llama.Model(llama.ModelArgs(**(settings | changes)))
    mx.eval(model.parameters())
    return model


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pion"


def test_namespace_is_the_first_32_hex_of_sha256_of_the_joined_parts() -> None:
    # echo -n 'llama|fp16|You are helpful.' | sha256sum
    assert make_namespace("llama", "fp16", "You are helpful.") == "1ccc2decb5e1beb24ac9ac67e8441af6"


def test_namespace_takes_numbers_as_text_and_refuses_bytes() -> None:
    assert make_namespace("m", 500000.0, None) == make_namespace("m", "500000.0", "None")
    with pytest.raises(TypeError, match="bytes"):
        make_namespace("m", b"fp16")


def test_shifted_part_boundaries_give_other_names() -> None:
    """I03: ("org_1","2345") and ("org_12345","") differ."""
    assert make_namespace("org_1", "2345") != make_namespace("org_12345", "")


def test_parts_that_contain_the_separator_collide_as_documented() -> None:
    """I02: the joined contract is shared with other clients; the manifest catches the collision."""
    assert make_namespace("a|b", "c") == make_namespace("a", "b|c")


@pytest.mark.parametrize("hash_seed", ["0", "1", None])
def test_key_of_a_fixed_token_list_is_the_same_in_every_process(hash_seed: str | None) -> None:
    """N01: one golden hex, whatever PYTHONHASHSEED is."""
    script = (
        "from pion_vllm_mlx.namespace import make_namespace\n"
        f"print(make_namespace('model', 'fp16', ','.join(map(str, {FIXED_IDS}))))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == GOLDEN_KEY


def test_equal_models_have_equal_fingerprints() -> None:
    assert model_fingerprint(tiny_llama()) == model_fingerprint(tiny_llama())


def test_fingerprint_is_the_same_under_every_hash_seed() -> None:
    script = (
        "import mlx.nn as nn\n"
        "from pion_vllm_mlx.namespace import model_fingerprint\n"
        "model = nn.Sequential(nn.RMSNorm(4), nn.RoPE(8, base=500.0))\n"
        "model.settings = {'b': {'x', 'y', 'z'}, 'a': (1, None, 2.5)}\n"
        "print(model_fingerprint(model))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(answers) == 1


def change_one_weight(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3


def swap_two_weights(model: Any) -> None:
    first, second = model.model.layers
    first.mlp.up_proj.weight, second.mlp.up_proj.weight = (
        second.mlp.up_proj.weight,
        first.mlp.up_proj.weight,
    )


def add_adapter(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj = LoRALinear.from_base(attention.q_proj, r=2)


def change_adapter_scale(model: Any) -> None:
    add_adapter(model)
    model.model.layers[0].self_attn.q_proj.scale = 7.0


def retype(model: Any) -> None:
    model.set_dtype(mx.bfloat16)


def move_rope_base(model: Any) -> None:
    model.model.layers[1].self_attn.rope.base = 500.0


@pytest.mark.parametrize(
    "change",
    [
        change_one_weight,
        swap_two_weights,
        add_adapter,
        change_adapter_scale,
        retype,
        move_rope_base,
    ],
)
def test_any_change_of_the_model_changes_the_fingerprint(change: Callable[[Any], None]) -> None:
    """E13, J01: weights, adapters and RoPE count, not names."""
    model = tiny_llama()
    before = model_fingerprint(model)
    change(model)
    assert model_fingerprint(model) != before


@pytest.mark.parametrize("name", sorted(families))
def test_a_model_that_has_been_called_is_the_model_it_was(name: str) -> None:
    """A process that has generated finds what one that has not did store (plamo3 keeps a scale)."""
    model: Any = families[name](seed=7)
    fresh = model_fingerprint(model)
    feed(name, model, make_prompt_cache(model), 0, 3)
    assert model_fingerprint(model) == fresh
    forget_fingerprint(model)
    assert model_fingerprint(model) == fresh


def test_weights_that_a_module_remembers_still_count() -> None:
    """What it keeps of a call is ignored; what it was computed from is not."""
    model: Any = families["plamo3"](seed=7)
    feed("plamo3", model, make_prompt_cache(model), 0, 3)
    before = model_fingerprint(model)
    model.model.layers.layers[0].pre_mixer_norm.weight += 0.5
    assert model_fingerprint(model) != before


def test_two_adapters_of_one_name_differ() -> None:
    """J01: the same adapter name with other weights, and with another scale."""
    prints = set()
    for scale, fill in ((20.0, 0.0), (20.0, 1.0), (10.0, 0.0)):
        model = tiny_llama()
        mx.random.seed(1)
        layer = LoRALinear.from_base(model.model.layers[0].self_attn.q_proj, r=2, scale=scale)
        layer.lora_b = layer.lora_b + fill
        model.model.layers[0].self_attn.q_proj = layer
        prints.add(model_fingerprint(model))
    assert len(prints) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 20000.0},
        {"rms_norm_eps": 1e-6},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"max_position_embeddings": 4096},
    ],
)
def test_configuration_counts_even_where_no_weight_changes(settings: dict[str, Any]) -> None:
    """E13: an edited config.json (rope_theta) alone is another model."""
    assert model_fingerprint(tiny_llama(**settings)) != model_fingerprint(tiny_llama())


def test_other_weights_of_the_same_name_and_shape_differ() -> None:
    """E13: weights replaced under the same name."""
    assert model_fingerprint(tiny_llama(seed=1)) != model_fingerprint(tiny_llama(seed=2))


def test_an_adapter_name_as_plain_text_is_not_the_adapter() -> None:
    """I02: fields are tagged, so equal text in two roles gives two keys."""
    first, second = tiny_llama(), tiny_llama()
    first.adapter = "X"
    second.salt = "X"
    assert model_fingerprint(first) != model_fingerprint(second)


def hashed_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the size of every full tensor hash from now on."""
    seen: list[int] = []
    original = xxhash.xxh3_128_hexdigest

    def recording(data: Any) -> str:
        seen.append(len(data))
        return str(original(data))

    monkeypatch.setattr(xxhash, "xxh3_128_hexdigest", recording)
    return seen


def test_a_large_model_is_hashed_once_per_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "_ALWAYS_HASHED", 0)
    seen = hashed_bytes(monkeypatch)
    model = tiny_llama()
    first = model_fingerprint(model)
    once = len(seen)
    assert model_fingerprint(model) == first
    assert len(seen) == once > 0

    model.model.norm.weight = model.model.norm.weight * 2
    assert model_fingerprint(model) != first
    assert len(seen) == 2 * once


def test_a_forgotten_fingerprint_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "_ALWAYS_HASHED", 0)
    model = tiny_llama()
    before = model_fingerprint(model)
    change_one_weight(model)
    forget_fingerprint(model)
    assert model_fingerprint(model) != before


def test_files_that_did_not_change_save_the_next_process_the_hashing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(namespace, "_ALWAYS_HASHED", 0)
    weights = tmp_path / "model"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"stands for the weights")
    seen = hashed_bytes(monkeypatch)
    first = model_fingerprint(tiny_llama(), source=weights)
    once = len(seen)
    assert model_fingerprint(tiny_llama(), source=weights) == first
    assert len(seen) == once > 0

    # Other weights in memory than those the entry was made for: hashed, and different.
    assert model_fingerprint(tiny_llama(seed=9), source=weights) != first
    assert len(seen) == 2 * once

    (weights / "model.safetensors").write_bytes(b"stands for weights, replaced")
    assert model_fingerprint(tiny_llama(), source=weights) == first
    assert len(seen) == 3 * once


@pytest.mark.parametrize(
    "damage", [b"", b"\x00" * 40, b"[1, 2]", b'{"key": 5}', b'{"a": "b"', b"[" * 9000]
)
def test_a_damaged_fingerprint_file_is_ignored(
    damage: bytes, own_cache_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(namespace, "_ALWAYS_HASHED", 0)
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"w")
    expected = model_fingerprint(tiny_llama())
    own_cache_folder.mkdir(parents=True)
    shelf = FingerprintFile()
    shelf.path.write_bytes(damage)
    assert model_fingerprint(tiny_llama(), source=source) == expected
    assert expected in json.loads(shelf.path.read_text()).values()


def test_a_missing_source_and_an_unwritable_folder_only_cost_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(namespace, "_ALWAYS_HASHED", 0)
    expected = model_fingerprint(tiny_llama())
    assert model_fingerprint(tiny_llama(), source=tmp_path / "gone") == expected
    blocked = tmp_path / "a-file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked / "below"))
    assert model_fingerprint(tiny_llama(), source=blocked) == expected


def test_the_fingerprint_file_keeps_only_the_newest_entries(tmp_path: Path) -> None:
    shelf = FingerprintFile(tmp_path)
    for number in range(300):
        shelf.put(str(number), f"{number:064x}")
    assert shelf.get("299") == f"{299:064x}"
    assert shelf.get("0") is None
    assert len(json.loads(shelf.path.read_text())) == 256
