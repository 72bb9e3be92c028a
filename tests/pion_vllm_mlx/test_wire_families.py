"""Every model family on a CPU: generating through the wire against ordinary attention.

Tiny models have heads of 16; the portable engine computes those as well, so both sides are told to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.attention import pion_attention_patch
from pion_patches.cache_rebuild import flatten
from pion_patches.remote import RemoteKVCache
from pion_vllm_mlx import PionPromptCache, attend_wire, wire_prefix
from pion_vllm_mlx.mlx_lm_patch import make_pion_prompt_cache
from tests.pion_patches.shipping import continuation, feed, token_ids
from tests.pion_patches.test_attention_families import REFUSED
from tests.pion_patches.zoo import families

PREFIX = 21
#: A question longer than the windows (8), tokens one by one, and a chunk in between.
CALLS = (9, 1, 1, 4, 1, 1)
#: Of the largest logit, in float32.
TOLERANCE = 1e-5
HERE = Path(__file__).parent

# Families whose attention stays in this process, and the words that say why.
REFUSED_THERE = {
    "deepseek_v2": "keys and values of different widths",
    "mimo_v2_flash": "keys and values of different widths",
    "minicpm3": "keys and values of different widths",
    "recurrent_gemma": "a RotatingKVCache is not attended to in the server",
    "youtu_llm": "keys and values of different widths",
}


@pytest.fixture(scope="module")
def small(module_server: Callable[..., Any]) -> Any:
    return module_server(extra=HERE / "small_heads.py")


@pytest.fixture(scope="module")
def older(module_server: Callable[..., Any]) -> Any:
    return module_server(extra=HERE / "no_sessions.py")


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(wire_prefix, "HEAD_DIMS", (8, 16, 24, *attend_wire.HEAD_DIMS))
    with pion_attention_patch():
        yield


def store(port: int, model: Any, name: str) -> None:
    with PionPromptCache(model, port=port, stage2=True) as pc:
        pc.get_or_prefill(token_ids(0, PREFIX), name)
        assert pc.flush()
        assert pc.stats()["stores"] == 1


def ordinary(name: str, model: Any) -> Any:
    cache = make_prompt_cache(model)
    feed(name, model, cache, 0, PREFIX)
    return continuation(name, model, cache, PREFIX, CALLS)


@pytest.mark.parametrize("name", sorted(set(families) - set(REFUSED)))
def test_attention_on_the_wire_and_ordinary_attention_agree(
    small: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scales, grouped heads, sinks, windows, shared layers, hybrids: within 1e-5 in float32."""
    model: Any = families[name](seed=7)
    store(small.port, model, name)
    with PionPromptCache(model, port=small.port, stage2=True) as fresh:
        with caplog.at_level(logging.WARNING, "pion_vllm_mlx"):
            cache = make_pion_prompt_cache(model, name, fresh, PREFIX)
        there = [one for _, one in flatten(cache) if isinstance(one, RemoteKVCache)]
        found = continuation(name, model, cache, PREFIX, CALLS)
        stats = fresh.stats()
    expected = ordinary(name, model)
    assert np.abs(found - expected).max() < TOLERANCE * max(1.0, np.abs(expected).max())
    assert stats["wire_losses"] == stats["misses"] == 0
    if name in REFUSED_THERE:
        assert not there
        said = f"{type(model).__module__}.Model is not attended to in the server: "
        assert said in caplog.text
        assert REFUSED_THERE[name] in caplog.text
    else:
        assert all(one.attended for one in there)
        assert stats["attend_binary"] + stats["attend_resp"] > 0
        assert not caplog.text


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3_text", "qwen3_5", "gpt2"])
@pytest.mark.parametrize("lane", ["binary", "resp"])
@pytest.mark.parametrize("extra", ["small_heads", "no_sessions"])
def test_lanes_and_older_servers_agree_with_ordinary_attention(
    older: Any, small: Any, name: str, lane: str, extra: str
) -> None:
    """Sinks need the log-sum-exp: without decode sessions only RESP's QUERY answers one."""
    model: Any = families[name](seed=9)
    label = f"{name}-{lane}"
    running = small if extra == "small_heads" else older
    store(running.port, model, label)
    port = {"binary": None, "resp": 0}[lane]
    with PionPromptCache(model, port=running.port, stage2=True, binary_port=port) as fresh:
        cache = make_pion_prompt_cache(model, label, fresh, PREFIX)
        found = continuation(name, model, cache, PREFIX, CALLS)
        stats = fresh.stats()
    expected = ordinary(name, model)
    assert np.abs(found - expected).max() < TOLERANCE * max(1.0, np.abs(expected).max())
    used = "resp" if running is older and name == "gpt_oss" else lane
    assert stats[f"attend_{used}"] > 0
    assert stats["attend_resp"] + stats["attend_binary"] == stats[f"attend_{used}"]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3_text"])
def test_a_batch_on_one_prefix_agrees(small: Any, name: str) -> None:
    """B rows share the prefix; their own tokens differ."""
    model: Any = families[name](seed=11)
    label = f"{name}-batch"
    store(small.port, model, label)
    rest = mx.array(np.random.default_rng(1).integers(0, 199, (3, 9)))
    plain = make_prompt_cache(model)
    model(mx.repeat(mx.array([token_ids(0, PREFIX)]), 3, axis=0), cache=plain)
    with PionPromptCache(model, port=small.port, stage2=True) as fresh:
        cache = make_pion_prompt_cache(model, label, fresh, PREFIX)
        for start, stop in [(0, 5), (5, 6), (6, 9)]:
            expected = model(rest[:, start:stop], cache=plain)
            found = model(rest[:, start:stop], cache=cache)
            assert mx.allclose(found, expected, atol=1e-5, rtol=1e-5)
        assert fresh.stats()["wire_losses"] == 0


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(mx.float16, 2e-2), (mx.bfloat16, 1.5e-1)], ids=["fp16", "bf16"]
)
def test_half_precision_stays_within_its_rounding(
    small: Any, dtype: mx.Dtype, tolerance: float
) -> None:
    model: Any = families["llama"](seed=7, dtype=dtype)
    label = f"llama-{dtype}"
    store(small.port, model, label)
    with PionPromptCache(model, port=small.port, stage2=True) as fresh:
        cache = make_pion_prompt_cache(model, label, fresh, PREFIX)
        found = continuation("llama", model, cache, PREFIX, CALLS)
    assert np.abs(found - ordinary("llama", model)).max() < tolerance
