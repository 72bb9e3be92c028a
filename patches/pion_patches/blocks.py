"""Attention of single queries over the best blocks of a prefix, chosen by their keys.

Block b holds tokens ``[b*size, (b+1)*size)``. *block_mean* scores a block by its mean key, *quest*
(arXiv:2406.10774) by the upper bound that its smallest and largest values allow; scores are
averaged over all heads, all heads read the same blocks, and the last block is always among them.
It is an approximation, unless the blocks asked for cover the prefix: then it is dense attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache

from .lse import fold_queries
from .split import SplitRows, attend_parts
from .split_cache import PrefixRows, Rows, SplitKVCache

SELECTORS = ("block_mean", "quest")

_cache: Any = cache  # mlx-lm is not typed


@dataclass(frozen=True, slots=True)
class Blocks:
    """Read the best ``count`` blocks of ``size`` tokens, and the last one."""

    size: int
    count: int
    selector: str

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Blocks:
        """Read ``{"K_block": 64, "K_blocks": 8, "selector": "block_mean"}``, the defaults.

        Raises `ValueError` for settings that mean nothing.
        """
        unknown = settings.keys() - {"K_block", "K_blocks", "selector"}
        if unknown:
            names = ", ".join(sorted(map(str, unknown)))
            raise ValueError(f"sparse_full_layers knows K_block, K_blocks, selector, not {names}")
        size, count = settings.get("K_block", 64), settings.get("K_blocks", 8)
        for name, value in (("K_block", size), ("K_blocks", count)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is a number of 1 or more, not {value!r}")
        selector = settings.get("selector", SELECTORS[0])
        if selector not in SELECTORS:
            raise ValueError(f"selector {selector!r} is not one of {', '.join(SELECTORS)}")
        return cls(size, count, selector)


class BlockKVCache(SplitKVCache):
    """A `SplitKVCache` whose single queries read only the best blocks of the prefix."""

    def __init__(self, prefix: PrefixRows, blocks: Blocks) -> None:
        super().__init__(prefix)
        self.blocks = blocks

    def keys_and_values(self) -> tuple[Rows, Rows]:
        keys, values = super().keys_and_values()
        assert isinstance(keys, SplitRows)
        assert isinstance(self.prefix, PrefixRows)
        return BlockKeys(keys, self.prefix, self.blocks), values


class BlockKeys(SplitRows):
    """Split keys that choose blocks of their first part where one query a head asks.

    Several queries at once, batches, masks and sinks are attended to densely.
    """

    __slots__ = ("_blocks", "_prefix")

    def __init__(self, keys: SplitRows, prefix: PrefixRows, blocks: Blocks) -> None:
        super().__init__(keys.parts, keys._on_attend)
        self._prefix = prefix
        self._blocks = blocks

    def astype(self, dtype: mx.Dtype) -> BlockKeys:
        return BlockKeys(super().astype(dtype), self._prefix, self._blocks)

    def pion_attend(
        self,
        queries: mx.array,
        values: SplitRows,
        *,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """See `SplitRows.pion_attend`."""
        blocks, total = self._blocks, self.parts[0].shape[2]
        lone = queries.shape[0] == queries.shape[2] == 1 and mask is None and sinks is None
        if not lone or blocks.size * blocks.count >= total:
            return super().pion_attend(queries, values, scale=scale, mask=mask, sinks=sinks)
        if self._on_attend is not None:
            self._on_attend()
        tokens, counts = choose_tokens(queries * scale, self._prefix, blocks)
        own = self.parts[1].shape[2]
        seen = mx.concatenate([counts, mx.ones((own,), dtype=mx.bool_)])
        chosen = [mx.take(side.parts[0], tokens, axis=2) for side in (self, values)]
        parts = [(chosen[0], chosen[1]), (self.parts[1], values.parts[1])]
        return attend_parts(queries, parts, scale, seen)


def with_blocks(caches: Sequence[Any], blocks: Blocks) -> list[Any]:
    """Caches just opened on a prefix, those that see all of it as block caches."""
    made: list[Any] = []
    for one in caches:
        if type(one) is SplitKVCache and isinstance(one.prefix, PrefixRows):
            made.append(BlockKVCache(one.prefix, blocks))
        elif type(one) is _cache.CacheList:
            made.append(_cache.CacheList(*with_blocks(one.caches, blocks)))
        else:
            made.append(one)
    return made


def choose_tokens(
    queries: mx.array, prefix: PrefixRows, blocks: Blocks
) -> tuple[mx.array, mx.array]:
    """Tokens of the chosen blocks for scaled ``queries`` [1, H, 1, D], and which of them count.

    Lazily: how many are chosen depends on the scores, so a place that is not needed is filled with
    some token that does not count.
    """
    total = prefix.keys.shape[2]
    summary = _summaries.setdefault(prefix, {})
    key = (blocks.size, blocks.selector)
    if key not in summary:
        summary[key] = _summarise(prefix.keys[0].astype(mx.float32), blocks)
    folded = fold_queries(queries, prefix.keys.shape[1], 1.0)[0]
    scores = _score(folded, summary[key])
    last = scores.shape[0] - 1
    best = mx.argsort(-scores)[: blocks.count]
    chosen = mx.concatenate([best, mx.array([last])])
    # The last block is read anyway; here only where it was not chosen.
    wanted = mx.concatenate([mx.ones((blocks.count,), dtype=mx.bool_), mx.all(best != last)[None]])
    tokens = (chosen[:, None] * blocks.size + mx.arange(blocks.size)).reshape(-1)
    counts = mx.repeat(wanted, blocks.size) & (tokens < total)
    return mx.minimum(tokens, total - 1), counts


def _summarise(keys: mx.array, blocks: Blocks) -> tuple[mx.array, ...]:
    """Figures [K, D, blocks] of ``keys`` [K, N, D]: means, or smallest and largest values."""
    heads, total, dim = keys.shape
    short = -total % blocks.size
    # A partial block counts over its own tokens: for extremes its last one fills the rest.
    filled = mx.concatenate([keys, mx.repeat(keys[:, -1:], short, axis=1)], axis=1)
    grouped = filled.reshape(heads, -1, blocks.size, dim)
    figures: tuple[mx.array, ...]
    if blocks.selector == "quest":
        figures = (mx.min(grouped, axis=2), mx.max(grouped, axis=2))
    else:
        sums = mx.pad(keys, [(0, 0), (0, short), (0, 0)]).reshape(grouped.shape).sum(axis=2)
        sizes = mx.full((sums.shape[1],), float(blocks.size))
        sizes[-1] = float(blocks.size - short)
        figures = (sums / sizes[:, None],)
    made = tuple(figure.swapaxes(1, 2) for figure in figures)
    mx.eval(made)
    return made


def _score(folded: mx.array, summary: tuple[mx.array, ...]) -> mx.array:
    """Scores [blocks] of scaled queries [K, G, D], summed over all heads."""
    if len(summary) == 1:
        return (folded @ summary[0]).sum(axis=(0, 1))
    least, most = summary
    positive, negative = mx.maximum(folded, 0), mx.minimum(folded, 0)
    return (positive @ most + negative @ least).sum(axis=(0, 1))


# What was computed of the blocks of a prefix, for as long as it lives.
_summaries: weakref.WeakKeyDictionary[PrefixRows, dict[tuple[int, str], tuple[mx.array, ...]]]
_summaries = weakref.WeakKeyDictionary()
