"""Which blocks of a prefix a query should read: block summaries, scores, selection.

Block b of size B holds tokens `[bB, min((b+1)B, N))`. Block-mean scores a block by the average over
query heads of q . mean(K of the block) / sqrt(D). Quest (Tang et al., arXiv:2406.10774) uses an
upper bound instead: the average of sum_d max(q_d min_d, q_d max_d) / sqrt(D), with the
per-dimension minimum and maximum over the block. Both are linear in per-kv-head sums of q (quest:
of its negative and positive parts), so the query heads are summed first.

Summaries are made by MLX and read by numpy: scoring them is a small product, and a choice made on
the host spares one wait for the device.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pion_server.attend.requests import F32, QUEST, BlockQuery

# Keys widened to float32 at once while their blocks are summarised.
_CHUNK_BYTES = 64 << 20


def choose_tokens(
    request: BlockQuery, summary: tuple[F32, ...], total: int, first: int
) -> NDArray[np.int32]:
    """The tokens (ascending, from `first` on) of the blocks chosen for all heads together."""
    scores = score_blocks(request.queries, request.head_map, summary)
    blocks = choose_blocks(scores, request.top)
    tokens = (blocks[:, None] * request.block + np.arange(request.block)[None]).reshape(-1)
    tokens = tokens[(tokens >= first) & (tokens < total)]
    return tokens.astype(np.int32)


def choose_blocks(scores: F32, top: int) -> NDArray[np.int64]:
    """The `top` highest blocks (ties: the lower index) and always the last one, ascending."""
    last = len(scores) - 1
    best = np.argsort(-scores, kind="stable")[:top]
    return np.sort(best if last in best else np.append(best, last))


def score_blocks(queries: F32, head_map: NDArray[np.int32], summary: tuple[F32, ...]) -> F32:
    """The score of every block, averaged over the query heads [H_q][D]."""
    kv_heads, blocks, dim = summary[0].shape
    parts = (queries,) if len(summary) == 1 else (np.minimum(queries, 0), np.maximum(queries, 0))
    scale = np.float32(1.0 / (math.sqrt(dim) * len(queries)))
    scores = np.zeros(blocks, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for part, bound in zip(parts, summary, strict=True):
            summed = np.zeros((kv_heads, dim), np.float32)
            np.add.at(summed, head_map, part * scale)
            scores += np.matmul(bound, summed[..., None]).sum(axis=(0, 2))
    return scores


def summarise(keys: mx.array, block: int, selector: int) -> tuple[F32, ...]:
    """Per-block figures of K [H][N][D], each [H][blocks][D] float32: (mean,) or (min, max)."""
    heads, total, dim = keys.shape
    step = max(1, _CHUNK_BYTES // (4 * heads * block * dim)) * block
    chunks = []
    for start in range(0, total, step):
        piece = keys[:, start : start + step].astype(mx.float32)
        whole = piece.shape[1] // block * block
        if whole:
            chunks.append(_reduce(piece[:, :whole].reshape(heads, -1, block, dim), selector))
        if whole < piece.shape[1]:
            chunks.append(_reduce(piece[:, None, whole:], selector))
        mx.eval(chunks[-2:])
    figures = [mx.concatenate(list(side), axis=1) for side in zip(*chunks, strict=True)]
    mx.eval(figures)
    return tuple(np.asarray(figure) for figure in figures)


def _reduce(blocks: mx.array, selector: int) -> tuple[mx.array, ...]:
    if selector == QUEST:
        return mx.min(blocks, axis=2), mx.max(blocks, axis=2)
    return (mx.mean(blocks, axis=2),)
