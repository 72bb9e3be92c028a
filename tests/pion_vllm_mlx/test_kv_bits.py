"""Quantised K/V caches through a real server: the codes mlx-lm makes, stored and restored."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from pion_vllm_mlx import PionPromptCache, UnsupportedCache
from pion_vllm_mlx.kv_bits import KvBits
from tests.pion_patches.shipping import continuation, token_ids
from tests.pion_patches.zoo import build

Server = Any
TOKENS = 40
PREFIX = token_ids(0, TOKENS)
CALLS = (4, 1, 1)
PATIENT = 20.0


pytestmark = pytest.mark.usefixtures("no_lane_in_process")


def tiny(family: str, dtype: mx.Dtype = mx.float32) -> Any:
    """Heads of 32, the least that can be quantised in groups of 32."""
    wide = {"head_dim": 32} if family in ("llama", "gemma3_text") else {}
    return build(family, seed=1, dtype=dtype, **wide)


def ask(
    server: Server, namespace: str, model: Any, **settings: Any
) -> tuple[bytes, dict[str, Any], list[Any]]:
    """One call of a client of its own: the bits that follow, its figures, the cache's classes."""
    with PionPromptCache(model, port=server.port, timeout=PATIENT, store="sync", **settings) as pc:
        cache = pc.get_or_prefill(PREFIX, namespace)
        classes = [type(leaf) for leaf in cache]
        return continuation("", model, cache, TOKENS, CALLS).tobytes(), pc.stats(), classes


@pytest.mark.parametrize(
    ("family", "dtype", "bits", "fmt"),
    [
        ("llama", mx.float16, 4, "mlx4g32"),
        ("llama", mx.float32, 4, "raw"),
        ("llama", mx.bfloat16, 8, "raw"),
        ("llama", mx.float16, 3, "raw"),
        ("qwen3_5", mx.float32, 8, "raw"),
    ],
)
def test_codes_are_stored_as_they_are_and_continue_bit_for_bit(
    shared: Server, namespace: str, family: str, dtype: mx.Dtype, bits: int, fmt: str
) -> None:
    """mlx4g32 where scales are fp16 and groups of 32, raw otherwise; never quantised again."""
    model, settings = tiny(family, dtype), {"kv_bits": bits, "kv_group_size": 32}
    cold, stats, classes = ask(shared, namespace, model, **settings)
    assert stats["stores"] == 1
    assert QuantizedKVCache in classes
    warm, stats, again = ask(shared, namespace, model, **settings)
    assert stats["hits"] == 1
    assert again == classes
    assert warm == cold
    assert ask(shared, f"{namespace}-plain", model)[0] != cold
    info = shared.client().call("V.INFO", f"{namespace}_pk").decode()
    assert f"fmt={fmt}," in info or f"v_format:{fmt}\r\n" in info


def test_a_prefix_continues_as_mlx_lm_itself_does(shared: Server, namespace: str) -> None:
    """The same prompt by `generate_step`, split where the prefix ends: the same tokens."""
    model = tiny("llama", mx.float16)
    settings: dict[str, Any] = {"kv_bits": 4, "kv_group_size": 32}
    cold = KvBits().template(model, 0)
    for _ in generate_step(mx.array(PREFIX), model, max_tokens=0, prompt_cache=cold, **settings):
        pass
    said = []
    for source in ("mlx-lm", "stored", "restored"):
        cache = cold
        if source != "mlx-lm":
            with PionPromptCache(
                model, port=shared.port, timeout=PATIENT, store="sync", **settings
            ) as pc:
                cache = pc.get_or_prefill(PREFIX, namespace)
                assert pc.stats()["hits"] == (source == "restored")
        suffix = mx.array(token_ids(TOKENS, 3))
        steps = generate_step(suffix, model, max_tokens=6, prompt_cache=cache, **settings)
        said.append([int(token) for token, _ in steps])
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize(("start", "quantised"), [(TOKENS, True), (TOKENS + 1, False)])
def test_quantisation_starts_where_mlx_lm_starts_it(
    shared: Server, namespace: str, start: int, quantised: bool
) -> None:
    model = tiny("llama")
    settings = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    cold, _, classes = ask(shared, namespace, model, prefill_step_size=16, **settings)
    assert set(classes) == {QuantizedKVCache if quantised else KVCache}
    warm, stats, again = ask(shared, namespace, model, prefill_step_size=16, **settings)
    assert stats["hits"] == 1
    assert (warm, again) == (cold, classes)


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"kv_bits": 4, "kv_group_size": 32},
        {"kv_bits": 8, "kv_group_size": 64},
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": TOKENS + 1},
    ],
)
def test_codes_of_other_settings_are_a_miss_that_heals(
    shared: Server, namespace: str, other: dict[str, Any]
) -> None:
    """D03: other bits, another group size, or none under the same name."""
    model = build("llama", seed=1, head_dim=64)
    ask(shared, namespace, model, kv_bits=8, kv_group_size=32)
    cold = ask(shared, f"{namespace}-cold", model, **other)[0]
    answer, stats, _ = ask(shared, namespace, model, **other)
    assert stats["miss_reasons"] == {"rebuild": 1}
    assert answer == cold
    answer, stats, _ = ask(shared, namespace, model, **other)
    assert stats["hits"] == 1
    assert answer == cold


def test_codes_held_in_process_are_the_same(
    shared: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "0")
    model, answers = tiny("llama"), set()
    settings: dict[str, Any] = {"kv_bits": 4, "kv_group_size": 32}
    with PionPromptCache(model, port=shared.port, timeout=PATIENT, store="sync", **settings) as pc:
        for _ in range(3):
            cache = pc.get_or_prefill(PREFIX, namespace)
            answers.add(continuation("", model, cache, TOKENS, CALLS).tobytes())
        assert pc.stats()["hits_in_process"] == 2
    assert len(answers) == 1


def test_windows_are_refused_as_mlx_lm_cannot_quantise_them() -> None:
    with pytest.raises(UnsupportedCache, match="RotatingKVCache"):
        PionPromptCache(tiny("gemma3_text"), kv_bits=4, kv_group_size=32)


@pytest.mark.parametrize(
    "settings",
    [{"kv_bits": 7}, {"kv_bits": True}, {"kv_group_size": 16}, {"quantized_kv_start": -1}],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        PionPromptCache(tiny("llama"), **settings)
