"""Attention as its definition says, in numpy float64: the oracle of the tests, not an engine.

Shapes as in `requests`: Q [H][M][D], K and V [H_kv][N][D]. Loops over heads and rows on purpose:
nothing here shares an idea with the fast paths it judges.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]


def attend_row(query: ArrayLike, keys: ArrayLike, values: ArrayLike) -> tuple[F64, float]:
    """One query [D] over n keys: softmax(q K^T / sqrt(D)) V and ln sum exp of the scores.

    No keys: zeros and -inf.
    """
    q, k, v = (np.asarray(part, np.float64) for part in (query, keys, values))
    if not len(k):
        return np.zeros(v.shape[-1]), -np.inf
    scores = k @ q / np.sqrt(len(q))
    top = scores.max()
    weights = np.exp(scores - top)
    return weights @ v / weights.sum(), float(top + np.log(weights.sum()))


def first_visible(tokens: int, window: int | None, default: int = 0) -> int:
    """The first prefix token seen under a window (None: the default, 0: none)."""
    width = default if window is None else window
    return tokens - min(width, tokens) if width > 0 else 0


def query(q: ArrayLike, k: ArrayLike, v: ArrayLike, first: int = 0) -> tuple[F64, F64]:
    """QUERY: output [H][M][D] and log-sum-exp [H][M]."""
    queries, keys, values = (np.asarray(part, np.float64) for part in (q, k, v))
    rows = [
        [attend_row(row, keys[h, first:], values[h, first:]) for row in queries[h]]
        for h in range(len(queries))
    ]
    out = np.array([[row[0] for row in head] for head in rows])
    return out, np.array([[row[1] for row in head] for head in rows])


def query_fused(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    suffix_k: ArrayLike,
    suffix_v: ArrayLike,
    head_map: Sequence[int],
    first: int = 0,
    tokens: Sequence[int] | None = None,
) -> F64:
    """QUERY_FUSED: output [H_q][M][D]; `tokens` instead of `first` reads only those of the prefix.

    Row m sees suffix positions 0..max(S - M, 0) + m, at most S - 1.
    """
    queries, keys, values = (np.asarray(part, np.float64) for part in (q, k, v))
    more_keys, more_values = (np.asarray(part, np.float64) for part in (suffix_k, suffix_v))
    heads, many, _ = queries.shape
    length = more_keys.shape[1]
    read = list(range(first, keys.shape[1])) if tokens is None else list(tokens)
    out = np.zeros(queries.shape)
    for h in range(heads):
        kv = head_map[h]
        for m in range(many):
            seen = min(max(length - many, 0) + m, length - 1) + 1
            row_keys = np.concatenate([keys[kv, read], more_keys[kv, :seen]])
            row_values = np.concatenate([values[kv, read], more_values[kv, :seen]])
            out[h, m], _ = attend_row(queries[h, m], row_keys, row_values)
    return out


def decode(
    q: ArrayLike,
    prefix: tuple[ArrayLike, ArrayLike],
    suffix: tuple[ArrayLike, ArrayLike],
    head_map: Sequence[int],
    window: int = 0,
) -> tuple[F64, F64]:
    """DECODE.STEP once it has appended: output [H_q][M][D] and log-sum-exp [H_q][M].

    Query m is at position N + S - M + m and sees the last `window` positions up to it (0: all).
    """
    queries = np.asarray(q, np.float64)
    keys = np.concatenate([np.asarray(prefix[0]), np.asarray(suffix[0])], axis=1)
    values = np.concatenate([np.asarray(prefix[1]), np.asarray(suffix[1])], axis=1)
    heads, many, _ = queries.shape
    out, lse = np.zeros(queries.shape), np.zeros((heads, many))
    for h in range(heads):
        for m in range(many):
            end = keys.shape[1] - many + m + 1
            seen = slice(max(end - window, 0) if window else 0, end)
            kv = head_map[h]
            out[h, m], lse[h, m] = attend_row(queries[h, m], keys[kv, seen], values[kv, seen])
    return out, lse


def query_sparse(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, ids: Sequence[Sequence[int]], first: int = 0
) -> F64:
    """QUERY_SPARSE: q [H][D]; `ids[h]` are the tokens asked for head h."""
    queries, keys, values = (np.asarray(part, np.float64) for part in (q, k, v))
    out = np.zeros(queries.shape)
    for h, asked in enumerate(ids):
        seen = [i for i in asked if first <= i < keys.shape[1]]
        out[h], _ = attend_row(queries[h], keys[h, seen], values[h, seen])
    return out


def score_blocks(
    q: ArrayLike, k: ArrayLike, head_map: Sequence[int], block: int, quest: bool = False
) -> F64:
    """The score of every block: q [H_q][D], k [H_kv][N][D]."""
    queries, keys = np.asarray(q, np.float64), np.asarray(k, np.float64)
    heads, dim = queries.shape
    scores = []
    for start in range(0, keys.shape[1], block):
        per_head = []
        for h in range(heads):
            held = keys[head_map[h], start : start + block]
            if quest:
                low, high = held.min(axis=0), held.max(axis=0)
                terms = np.maximum(queries[h] * low, queries[h] * high)
            else:
                terms = queries[h] * held.mean(axis=0)
            per_head.append(terms.sum() / np.sqrt(dim))
        scores.append(np.mean(per_head))
    return np.array(scores)


def choose_tokens(scores: F64, tokens: int, block: int, top: int, first: int = 0) -> list[int]:
    """The tokens of the `top` best blocks (ties: the lower) and of the last one, ascending."""
    ranked = sorted(range(len(scores)), key=lambda b: (-scores[b], b))[:top]
    chosen = sorted({*ranked, len(scores) - 1})
    return [t for b in chosen for t in range(b * block, min((b + 1) * block, tokens)) if t >= first]


def cosine(a: ArrayLike, b: ArrayLike) -> float:
    """The cosine of two tensors taken as vectors."""
    x, y = np.asarray(a, np.float64).reshape(-1), np.asarray(b, np.float64).reshape(-1)
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))
