"""`make_pion_prompt_cache`: a prompt cache for one request on top of a prefix held in process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .attention import is_installed
from .blocks import Blocks, with_blocks
from .inproc import SWITCH, lane_is_off
from .prefix_entry import CannotSplit, PrefixEntry, PrefixMismatch, model_name
from .splittable import require_splittable


class PatchNotInstalled(RuntimeError):
    """The attention patch is not installed, so a split cache could not be used."""


class PrefixNotHeld(LookupError):
    """No prefix of that name is held in this process."""


def make_pion_prompt_cache(
    model: Any,
    namespace: str | bytes,
    prompt_cache: Any,
    prefix_len: int,
    sparse_full_layers: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Make a cache list for one request whose first ``prefix_len`` tokens are a held prefix.

    Use it as ``generate(..., prompt_cache=...)`` or ``model(tokens, cache=...)``, and pass only the
    tokens *after* the prefix. Rows of the prefix are shared by all caches made for the namespace;
    a cache owns what its request adds. One cache serves one request at a time.

    ``prompt_cache`` is the `PionPromptCache` that computed the prefix (anything with a store of
    `PrefixEntry` by namespace as ``_mlx_prefix_kv`` will do). Where the prefix is not held in this
    process, or the lane is turned off, its ``open_remote(namespace, prefix_len, sparse)`` is asked
    for an entry whose attention is computed elsewhere (see `remote`), then its
    ``restore(namespace, prefix_len)`` for a cache rebuilt from the server: an ordinary one, with
    rows of its own.

    ``sparse_full_layers``, such as ``{"K_block": 64, "K_blocks": 8, "selector": "quest"}``, makes
    single queries of layers that see the whole prefix read only its best blocks, an approximation
    (see `blocks`). A cache that is rebuilt from the server has none of it.

    Raises `PatchNotInstalled`; `CannotSplit` for a model whose attention cannot be split, by name
    and with the reason; `PrefixNotHeld` for a namespace that is neither in this process nor to be
    rebuilt; `PrefixMismatch` for another model or another ``prefix_len`` than the prefix's.
    In each of these cases the cache rebuild (``prompt_cache.get_or_prefill``) still works.
    """
    if not is_installed():
        raise PatchNotInstalled("call install_pion_attention_patch() first")
    blocks = Blocks.of(sparse_full_layers) if sparse_full_layers else None
    require_splittable(model)
    entry = _find_entry(namespace, prompt_cache)
    if entry is None:
        entry = _open_remote(namespace, prompt_cache, prefix_len, sparse_full_layers)
    if entry is None and sparse_full_layers:
        raise CannotSplit(
            "sparse_full_layers needs the prefix in this process, or a server that attends to it "
            "(PionPromptCache(stage2=True)); leave it out"
        )
    if entry is None:
        return _rebuild(namespace, prompt_cache, prefix_len)
    if entry.model() is not model:
        raise PrefixMismatch(
            f"prefix {namespace!r} was computed by another model than this {model_name(model)}"
        )
    if prefix_len != entry.tokens:
        raise PrefixMismatch(f"prefix {namespace!r} has {entry.tokens} tokens, not {prefix_len}")
    caches = entry.open()
    return with_blocks(caches, blocks) if blocks is not None else caches


def _find_entry(namespace: str | bytes, prompt_cache: Any) -> PrefixEntry | None:
    store = getattr(prompt_cache, "_mlx_prefix_kv", None)
    if store is None:
        raise TypeError(f"{type(prompt_cache).__name__} keeps no prefixes in process")
    entry: PrefixEntry | None = None if lane_is_off() else store.get(namespace)
    return entry


def _open_remote(
    namespace: str | bytes, prompt_cache: Any, prefix_len: int, sparse: Mapping[str, Any] | None
) -> PrefixEntry | None:
    open_remote = getattr(prompt_cache, "open_remote", None)
    if open_remote is None:
        return None
    entry: PrefixEntry | None = open_remote(namespace, prefix_len, sparse)
    return entry


def _rebuild(namespace: str | bytes, prompt_cache: Any, prefix_len: int) -> list[Any]:
    restore = getattr(prompt_cache, "restore", None)
    cache: list[Any] | None = restore(namespace, prefix_len) if restore is not None else None
    if cache is None:
        why = f"{SWITCH} turns the in-process lane off" if lane_is_off() else "it is not held"
        raise PrefixNotHeld(
            f"no prefix {namespace!r} of {prefix_len} tokens in this process ({why}), "
            "nor stored for this model; compute it with get_or_prefill"
        )
    return cache
