"""Pion: memory for LLMs.

Names are loaded on first use, so that importing this package does not import MLX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pion_patches.cache_rebuild import UnsupportedCache
    from pion_vllm_mlx.hybrid_retrieval import HybridRetrievalCache
    from pion_vllm_mlx.mlx_lm_patch import (
        install_pion_attention_patch,
        make_pion_prompt_cache,
        uninstall_pion_attention_patch,
    )
    from pion_vllm_mlx.namespace import make_namespace, model_fingerprint
    from pion_vllm_mlx.prefill import require_suffix
    from pion_vllm_mlx.prompt_cache import PionPromptCache

__all__ = [
    "HybridRetrievalCache",
    "PionPromptCache",
    "UnsupportedCache",
    "install_pion_attention_patch",
    "make_namespace",
    "make_pion_prompt_cache",
    "model_fingerprint",
    "require_suffix",
    "uninstall_pion_attention_patch",
]

_HOMES = {
    "HybridRetrievalCache": "pion_vllm_mlx.hybrid_retrieval",
    "PionPromptCache": "pion_vllm_mlx.prompt_cache",
    "UnsupportedCache": "pion_patches.cache_rebuild",
    "install_pion_attention_patch": "pion_vllm_mlx.mlx_lm_patch",
    "make_namespace": "pion_vllm_mlx.namespace",
    "make_pion_prompt_cache": "pion_vllm_mlx.mlx_lm_patch",
    "model_fingerprint": "pion_vllm_mlx.namespace",
    "require_suffix": "pion_vllm_mlx.prefill",
    "uninstall_pion_attention_patch": "pion_vllm_mlx.mlx_lm_patch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
