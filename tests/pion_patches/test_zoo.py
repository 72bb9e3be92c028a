"""Every model family of mlx-lm continues from a stored cache as from its own, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.cache_rebuild import dismantle, rebuild
from tests.pion_patches.families_table import table
from tests.pion_patches.shipping import (
    DTYPES,
    continuation,
    copied,
    feed,
    from_pieces,
    largest_difference,
    to_pieces,
    write_pieces,
)
from tests.pion_patches.zoo import CHUNK, RECENT, WINDOW, build, families, left_out, model_modules

ROOT = Path(__file__).parents[2]
PREFIX = 40
#: One family for each way a cache list can be made up.
SHAPES = (
    "llama",  # plain
    "gemma3n",  # windows, full layers, fewer caches than layers
    "gpt_oss",  # windows with attention sinks
    "qwen3_5",  # recurrent and full layers
    "mamba2",  # recurrent only
    "rwkv7",  # recurrent only, three arrays
    "baichuan_m1",  # a recurrent cache and a window in each layer
    "deepseek_v3",  # latent attention: K and V differ in width
    "deepseek_v32",  # two attention caches a layer
    "longcat_flash_ngram",  # token ids as state
    "llama4",  # chunked attention
    "recurrent_gemma",  # recurrent layers and a window
)
#: As above, of 0.32 only.
RECENT_SHAPES = ("deepseek_v41", "minimax_m3_vl", "iquestloopcoder")
#: Shapes in half precision, without experts, whose weights a CPU gathers in float32 only.
HALVES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("llama", "gemma3n", "qwen3_5", "mamba2", "rwkv7", "baichuan_m1")},
    "recurrent_gemma": {},
    "deepseek_v3": {"first_k_dense_replace": 4},
    "deepseek_v32": {"first_k_dense_replace": 4},
    "llama4": {"interleave_moe_layer_step": 5},
}
NO_HALF = "GatherMM"


def exactness(family: str, dtype: mx.Dtype, prefix: int = PREFIX, **changes: Any) -> None:
    """Prefill, take apart, travel as bytes, rebuild, continue: equal to continuing without."""
    model: Any = build(family, seed=1, dtype=dtype, **changes)
    cache = make_prompt_cache(model)
    try:
        feed(family, model, cache, 0, prefix)
    except RuntimeError as error:
        if NO_HALF in str(error) and dtype != mx.float32:
            pytest.skip(str(error))
        raise
    image = dismantle(cache, prefix)
    pieces = to_pieces(image)
    cold = continuation(family, model, copied(cache), prefix)
    restored = rebuild(make_prompt_cache(model), from_pieces(pieces))
    assert largest_difference(continuation(family, model, restored, prefix), cold) == 0.0
    # Without the stored state the model says something else, or the test would show nothing.
    empty = continuation(family, model, make_prompt_cache(model), prefix, (1,))
    assert largest_difference(empty, cold[:1]) > 1e-4


@pytest.mark.parametrize("family", families)
def test_restored_family_continues_bit_for_bit(family: str) -> None:
    exactness(family, mx.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", HALVES)
def test_restored_cache_shape_continues_bit_for_bit_in_half_precision(
    family: str, dtype: str
) -> None:
    exactness(family, DTYPES[dtype], **HALVES[family])


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", families)
def test_restored_family_continues_bit_for_bit_in_half_precision(family: str, dtype: str) -> None:
    exactness(family, DTYPES[dtype])


@pytest.mark.parametrize("prefix", [1, WINDOW - 1, WINDOW, WINDOW + 1, 255, 256, 257])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5", "baichuan_m1", "llama4"])
def test_prefixes_around_every_boundary_are_exact(family: str, prefix: int) -> None:
    """A07: windows, chunks and the 256-row buffer steps end at these lengths."""
    exactness(family, mx.float32, prefix)


def test_prefix_longer_than_a_chunk_is_exact() -> None:
    exactness("llama4", mx.float32, CHUNK + 1)


def test_families_restore_in_a_fresh_process(tmp_path: Path) -> None:
    """What one process stored, another one, which never saw the prompt, continues exactly."""
    names = [name for name in (*SHAPES, *RECENT_SHAPES) if name in families]
    cold = {}
    for family in names:
        model: Any = families[family](seed=1)
        cache = make_prompt_cache(model)
        feed(family, model, cache, 0, PREFIX)
        write_pieces(tmp_path / f"{family}@float32", to_pieces(dismantle(cache, PREFIX)))
        cold[family] = continuation(family, model, cache, PREFIX)
    path = os.pathsep.join([str(ROOT), str(ROOT / "patches")])
    subprocess.run(
        [sys.executable, "-m", "tests.pion_patches.shipping", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        timeout=240,
        check=False,  # judged by what it wrote: the exit of a CPU build may abort
    )
    assert (tmp_path / "done").exists()
    for family in names:
        logits = np.load(tmp_path / f"{family}@float32" / "logits.npy")
        assert largest_difference(logits, cold[family]) == 0.0, family


def test_every_model_of_mlx_lm_is_in_the_zoo_or_left_out_for_a_reason() -> None:
    assert {*families, *left_out} == set(model_modules())
    assert not families.keys() & left_out.keys()
    print(f"{len(families)} families, left out: {left_out}")


def test_families_left_out_are_these() -> None:
    pinned = {"bitnet", "muse_spark"} if RECENT else {"bitnet", "phi3small"}
    assert left_out.keys() == pinned
    assert all("Metal kernel" in left_out[name] for name in pinned - {"phi3small"})


@pytest.mark.skipif(not RECENT, reason="the count is pinned for mlx-lm 0.32")
def test_zoo_has_not_shrunk() -> None:
    assert len(families) >= 124


@pytest.mark.skipif(not RECENT, reason="the page is about mlx-lm 0.32")
def test_page_of_families_is_what_the_zoo_says() -> None:
    """`python -m tests.pion_patches.families_table > docs/model_families.md` mends it."""
    assert (ROOT / "docs" / "model_families.md").read_text(encoding="utf-8") == table()
