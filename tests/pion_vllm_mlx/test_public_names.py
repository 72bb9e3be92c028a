"""The names an application imports: all there, and none costs an import of MLX before use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pion_vllm_mlx


def test_public_names_are_sorted_and_exist() -> None:
    assert pion_vllm_mlx.__all__ == sorted(pion_vllm_mlx.__all__)
    for name in pion_vllm_mlx.__all__:
        assert getattr(pion_vllm_mlx, name).__name__ == name
    assert set(pion_vllm_mlx.__all__) <= set(dir(pion_vllm_mlx))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        pion_vllm_mlx.no_such_name  # noqa: B018


def test_importing_the_package_does_not_import_mlx() -> None:
    """The BLAS has to be chosen before MLX is loaded."""
    script = "import sys, pion_vllm_mlx; print('mlx.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.split() == [b"False"]


def test_the_names_of_the_quick_start_are_one_import() -> None:
    from pion_vllm_mlx import (
        PionPromptCache,
        install_pion_attention_patch,
        make_pion_prompt_cache,
    )

    assert PionPromptCache.make_namespace is pion_vllm_mlx.make_namespace
    assert callable(install_pion_attention_patch)
    assert callable(make_pion_prompt_cache)


def test_a_prefix_can_be_split_once_the_attention_patch_is_installed() -> None:
    """`make_pion_prompt_cache` finds what `get_or_prefill` computed: the same tokens."""
    from tests.pion_vllm_mlx.mini_server import MiniServer
    from tests.pion_vllm_mlx.tiny import PREFIX, cold_answer, continue_greedily, tiny_llama

    model = tiny_llama()
    cold, _ = cold_answer(model, PREFIX)
    pion_vllm_mlx.install_pion_attention_patch()
    try:
        with MiniServer() as server, pion_vllm_mlx.PionPromptCache(model, port=server.port) as pc:
            for _ in range(2):
                assert continue_greedily(model, pc.get_or_prefill(PREFIX, "ns"))[0] == cold
                cache = pion_vllm_mlx.make_pion_prompt_cache(model, "ns", pc, len(PREFIX))
                assert continue_greedily(model, cache)[0] == cold
            other = PREFIX[::-1]
            pc.get_or_prefill(other, "ns")
            cache = pion_vllm_mlx.make_pion_prompt_cache(model, "ns", pc, len(other))
            assert continue_greedily(model, cache)[0] == cold_answer(model, other)[0]
    finally:
        pion_vllm_mlx.uninstall_pion_attention_patch()
