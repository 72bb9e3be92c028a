"""Pion: memory for LLMs.

Names are loaded on first use, so that importing this package does not import MLX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pion_patches.cache_rebuild import UnsupportedCache
    from pion_vllm_mlx.namespace import make_namespace, model_fingerprint
    from pion_vllm_mlx.prefill import require_suffix
    from pion_vllm_mlx.prompt_cache import PionPromptCache

__all__ = [
    "PionPromptCache",
    "UnsupportedCache",
    "make_namespace",
    "model_fingerprint",
    "require_suffix",
]

_HOMES = {
    "PionPromptCache": "pion_vllm_mlx.prompt_cache",
    "UnsupportedCache": "pion_patches.cache_rebuild",
    "make_namespace": "pion_vllm_mlx.namespace",
    "model_fingerprint": "pion_vllm_mlx.namespace",
    "require_suffix": "pion_vllm_mlx.prefill",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
