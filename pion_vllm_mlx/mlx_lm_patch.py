"""Let mlx-lm attend to a prefix that is held outside a request's cache.

    install_pion_attention_patch()
    cache = make_pion_prompt_cache(model, namespace, prompt_cache, prefix_len)
    text = generate(model, tokenizer, rest_of_the_prompt, prompt_cache=cache)

`prompt_cache` is the `PionPromptCache` that computed the prefix or, with ``stage2=True``, one that
leaves it in the server. This is the documented face of `pion_patches`; it holds no code of its own.
"""

from __future__ import annotations

from pion_patches._patch import PatchConflict, UnsupportedVersion
from pion_patches.attention import (
    install_pion_attention_patch,
    is_installed,
    pion_attention_patch,
    pion_scaled_dot_product_attention,
    uninstall_pion_attention_patch,
)
from pion_patches.prefix_cache import PatchNotInstalled, PrefixNotHeld, make_pion_prompt_cache
from pion_patches.prefix_entry import CannotSplit, PrefixMismatch
from pion_patches.seam_report import SeamReport, seam_report
from pion_patches.split_cache import PrefixTrimError, plain_prompt_cache

__all__ = [
    "CannotSplit",
    "PatchConflict",
    "PatchNotInstalled",
    "PrefixMismatch",
    "PrefixNotHeld",
    "PrefixTrimError",
    "SeamReport",
    "UnsupportedVersion",
    "install_pion_attention_patch",
    "is_installed",
    "make_pion_prompt_cache",
    "pion_attention_patch",
    "pion_scaled_dot_product_attention",
    "plain_prompt_cache",
    "seam_report",
    "uninstall_pion_attention_patch",
]
