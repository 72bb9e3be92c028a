"""Whether a model's attention can be split: found out by trying, once per model instance.

The model's own forward pass is built, lazily and without computing anything, on caches that hand
out split handles with an empty prefix. Each handle must come back through the patched attention
function; a model that computes with its keys anywhere else fails there, and is refused by name with
the place and the reason. Names alone decide nothing: they only make the reason readable.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache

from .attention import pion_attention_patch
from .prefix_entry import CannotSplit, model_name
from .split import SplitRows
from .split_cache import PrefixRows, Rows, SplitKVCache

_cache: Any = cache  # mlx-lm is not typed

LATENT = "multi-head latent attention scores part of its keys outside the attention function"
SPARSE = "a sparse index reads the keys to choose among them"
STATE = "reads shared keys out of the cache's state (mlx-lm before 0.32)"

# Where a forward pass stopped (module of mlx_lm.models) and what that module does there.
REASONS = {
    "gemma2": "soft caps on the scores, inside its own softmax",
    "gear": "soft caps on the scores, inside its own softmax",
    "olmo": "its own softmax",
    "phi3small": "its own block-sparse softmax",
    "plamo": "repeats its keys for every query head itself",
    "plamo2": "calls mx.fast.scaled_dot_product_attention directly",
    "afm7": STATE,
    "gemma3n": STATE,
    "mla": LATENT,
    "bailing_hybrid": LATENT,
    "bailing_moe_v3": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "kimi_k3": LATENT,
    "kimi_linear": LATENT,
    "longcat_flash": LATENT,
    "deepseek_v32": SPARSE,
    "minimax_m3_vl": SPARSE,
}

_verdicts: dict[int, tuple[weakref.ref[Any], str | None]] = {}
_lock = threading.Lock()


def require_splittable(model: Any) -> None:
    """Raise `CannotSplit` unless every attention of ``model`` works on split keys.

    The answer is kept for as long as the model lives; the first call costs the time to build two
    forward passes, a few milliseconds for tens of layers.
    """
    reason = find_refusal(model)
    if reason is not None:
        raise CannotSplit(
            f"{model_name(model)} cannot attend to a split prefix: {reason}; "
            "use the cache rebuild instead"
        )


def find_refusal(model: Any) -> str | None:
    """Why ``model`` cannot be split, or None where it can."""
    with _lock:
        known = _verdicts.get(id(model))
        if known is not None and known[0]() is model:
            return known[1]
    reason = _try_model(model)
    with _lock:
        for key in [k for k, (alive, _) in _verdicts.items() if alive() is None]:
            del _verdicts[key]
        _verdicts[id(model)] = weakref.ref(model), reason
    return reason


class _Tripwire(SplitKVCache):
    """A split cache without a prefix: the first update gives the empty prefix its shape."""

    def __init__(self) -> None:
        super().__init__(PrefixRows(mx.zeros((1, 1, 0, 1)), mx.zeros((1, 1, 0, 1)), 0))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Rows, Rows]:
        if self.offset == 0:
            self.prefix = PrefixRows(keys[..., :0, :], values[..., :0, :], 0)
        self.suffix.update_and_fetch(keys, values)
        own_keys, own_values = self._own_rows()
        return (
            SplitRows((self.prefix.keys, own_keys), self._count_attend),
            SplitRows((self.prefix.values, own_values)),
        )


def _try_model(model: Any) -> str | None:
    try:
        trial = [_replace_attention(one) for one in _cache.make_prompt_cache(model)]
    except CannotSplit as error:
        return str(error)
    tripwires = list(_find_tripwires(trial))
    if not tripwires:
        return "it has no attention cache"
    with pion_attention_patch():
        for tokens in (2, 1):
            for wire in tripwires:
                wire.attended = 0
            try:
                model(mx.zeros((1, tokens), dtype=mx.int32), cache=trial)
            except Exception as error:
                return _describe(error)
            if not all(wire.attended for wire in tripwires):
                return "part of its attention never reaches the attention function"
    return None


def _replace_attention(one: Any) -> Any:
    kind = type(one)
    if kind is _cache.CacheList:
        return _cache.CacheList(*(_replace_attention(inner) for inner in one.caches))
    if kind in (_cache.KVCache, _cache.ConcatenateKVCache):
        return _Tripwire()
    if kind is _cache.RotatingKVCache and one.keep == 0:
        return _Tripwire()
    if kind in (_cache.ArraysCache, _cache.ChunkedKVCache, _cache.RotatingKVCache):
        return one
    raise CannotSplit(f"its cache is a {kind.__name__}")


def _find_tripwires(caches: Any) -> Iterator[_Tripwire]:
    for one in caches:
        if isinstance(one, _Tripwire):
            yield one
        elif type(one) is _cache.CacheList:
            yield from _find_tripwires(one.caches)


def _describe(error: Exception) -> str:
    """The innermost frame of a model module, and why it cannot take split keys."""
    trace: TracebackType | None = error.__traceback__
    place, module = "", ""
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        code = trace.tb_frame.f_code
        if not name.startswith(__package__ or "pion_patches"):
            place, module = f"{name}.{code.co_qualname}", name.rpartition(".")[2]
        trace = trace.tb_next
    reason = REASONS.get(module, "its forward pass does not take split keys")
    first_line = str(error).partition("\n")[0][:120]
    return f"{reason} ({place}: {type(error).__name__}: {first_line})"
