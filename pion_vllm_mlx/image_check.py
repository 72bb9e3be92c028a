"""Whether a cache image is what a model computes for some tokens: for images of unknown origin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.cache_rebuild import CacheImage, RowPiece, dismantle, rebuild
from pion_vllm_mlx.prefill import prefill

#: How far logits and rows may be off, by dtype: as much as another chunk size makes, and far less
#: than another token or another model.
TOLERANCE: Final = {
    mx.float32: (1e-3, 1e-2),
    mx.float16: (2e-2, 1e-1),
    mx.bfloat16: (1e-1, 2.5e-1),
}
#: Caches with a row a token, in order. Windows may be turned differently and mean the same.
_IN_ORDER: Final = ("KVCache", "ConcatenateKVCache")


@dataclass(frozen=True, slots=True)
class Comparison:
    """An image beside a computed prefix.

    `logits`: max |difference| of the next logits, relative to the largest of them. `rows`: the
    same of K and V rows, by norm, relative to a typical one. NaN where one side has it.
    """

    logits: float
    rows: float
    dtype: mx.Dtype
    prefill_ms: int

    @property
    def holds(self) -> bool:
        """Whether the image stands for the tokens."""
        logits, rows = TOLERANCE.get(self.dtype, (0.0, 0.0))
        return self.logits <= logits and self.rows <= rows


def compare(model: Any, image: CacheImage, ids: Sequence[int], step: int) -> Comparison:
    """Compute the prefix `ids`, `step` tokens at a time, and compare; raises RebuildError.

    The rows show a single other token anywhere, the logits whatever has no comparable rows.
    """
    restored = rebuild(make_prompt_cache(model), image)
    cache = make_prompt_cache(model)
    seconds = prefill(model, ids, cache, step)
    rows = _rows_apart(dismantle(cache, len(ids)), image)
    probe = mx.array([[ids[-1]]])
    computed, read = (model(probe, cache=each)[0, -1] for each in (cache, restored))
    logits = _apart(mx.abs(computed - read), mx.max(mx.abs(computed)))
    return Comparison(logits, rows, computed.dtype, round(seconds * 1000))


def _rows_apart(one: CacheImage, other: CacheImage) -> float:
    apart = [0.0]
    for mine, its in zip(one.leaves, other.leaves, strict=True):
        for a, b in ((mine.keys, its.keys), (mine.values, its.values)):
            if mine.kind in _IN_ORDER and isinstance(a, RowPiece) and isinstance(b, RowPiece):
                apart.append(_pieces_apart(a, b))
    # Whatever is compared with NaN is no maximum, so a NaN is looked for first.
    return next((value for value in apart if value != value), max(apart))


def _pieces_apart(one: RowPiece, other: RowPiece) -> float:
    if one.layout != other.layout or one.rows != other.rows:
        return float("inf")
    a, b = (piece.parts[0].astype(mx.float32) for piece in (one, other))
    return _apart(mx.linalg.norm(a - b, axis=-1), mx.sqrt(mx.mean(mx.sum(a * a, axis=-1))))


def _apart(differences: mx.array, typical: mx.array) -> float:
    largest: Any = mx.max(differences.astype(mx.float32)).item()
    scale: Any = typical.astype(mx.float32).item()
    return float(largest) / float(scale) if scale else float("inf" if largest else 0)
