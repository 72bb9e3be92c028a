"""A cache out of parts computed apart: a stub, then packs, each moved to where it now stands.

A pack's rows were computed right behind the stub, so the first pack stands in place and is exact.
Every further one is moved: its keys are rotated by the difference of positions, its values stay.
What it lacks then is what it never saw, the packs before it; `recompute` tokens of it are run
through the model again with all of them in view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from pion_patches.cache_rebuild import ROOM, CacheImage, dismantle, rebuild
from pion_patches.rotation import Turn
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.shelf import Volume


@dataclass(frozen=True, slots=True)
class Composed:
    """A cache of `tokens` tokens, of which `recomputed` were run through the model again."""

    cache: list[Any]
    tokens: int
    recomputed: int


def compose(
    model: Any,
    turns: Sequence[Turn],
    stub: CacheImage,
    packs: Sequence[Volume],
    recompute: int,
    step: int,
) -> Composed:
    """Put `packs` behind the stub in their order; the cache is the caller's own.

    `turns`: `require_rotation(model)`. `recompute`: tokens of each pack but the first to compute
    anew, in chunks of `step`. Raises RebuildError for rows that are not this model's.
    """
    template = _template(model)
    length = sum(len(pack.ids) for pack in packs)
    cache = rebuild(template, stub, room=length + ROOM)
    at, recomputed = stub.tokens, 0
    for place, pack in enumerate(packs):
        again = min(recompute, len(pack.ids)) if place else 0
        if again:
            prefill(model, pack.ids[:again], cache, step)
            recomputed += again
        # Always from the stored rows, so that moving a pack often loses no more than once.
        rows = rebuild(template, pack.image, room=0)
        if again < len(pack.ids):
            for turn, layer, part in zip(turns, cache, rows, strict=True):
                keys = turn.move(part.keys[..., again : len(pack.ids), :], at - stub.tokens)
                layer.update_and_fetch(keys, part.values[..., again : len(pack.ids), :])
        at += len(pack.ids)
    mx.eval([(layer.keys, layer.values) for layer in cache])
    return Composed(cache, at, recomputed)


def rows_behind(model: Any, cache: Sequence[Any], start: int, tokens: int) -> CacheImage:
    """The rows of `tokens` tokens from position `start` on, as an image of their own.

    Their keys keep the rotation of the positions they were computed at.
    """
    parts = _template(model)
    for part, whole in zip(parts, cache, strict=True):
        part.keys = whole.keys[..., start : start + tokens, :]
        part.values = whole.values[..., start : start + tokens, :]
        part.offset = tokens
    return dismantle(parts, tokens)


def _template(model: Any) -> list[KVCache]:
    make: Any = make_prompt_cache
    template: list[KVCache] = make(model)
    return template
