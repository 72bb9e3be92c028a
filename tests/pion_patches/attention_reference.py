"""Attention in numpy float64: the oracle of the attention tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def reference_attention(
    queries: Array,
    keys: Array,
    values: Array,
    scale: float,
    visible: NDArray[np.bool_] | None = None,
    additive: Array | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """Textbook attention [B, H, M, Dv] and log-sum-exp [B, H, M] (sinks included).

    ``visible`` and ``additive`` broadcast to [B, H, M, N]. Rows that see nothing get 0 and -inf
    (0 and the sink where there are sinks).
    """
    group = queries.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    with np.errstate(all="ignore"):
        scores = queries @ keys.swapaxes(-1, -2) * scale
        if additive is not None:
            scores = scores + additive
        seen = np.ones(scores.shape, dtype=bool)
        if visible is not None:
            seen = np.broadcast_to(visible, scores.shape)
        if additive is not None:
            seen = seen & np.broadcast_to(additive > -np.inf, scores.shape)
        scores = np.where(seen, scores, -np.inf)
        logits = scores
        if sinks is not None:
            column = np.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
            logits = np.concatenate([scores, column], axis=-1)
        top = np.max(logits, axis=-1, keepdims=True, initial=-np.inf)
        safe = np.where(top == -np.inf, 0.0, top)
        total = np.sum(np.exp(logits - safe), axis=-1, keepdims=True)
        weights = np.exp(scores - safe)
        out = (weights @ values) / total
        lse = (safe + np.log(total))[..., 0]
    return np.where(seen.any(axis=-1, keepdims=True), out, 0.0), lse


def window_visible(rows: int, total: int, window: int | None) -> NDArray[np.bool_]:
    """[rows, total]: causal from the last key back, each query seeing ``window`` keys at most."""
    query = np.arange(total - rows, total)[:, None]
    key = np.arange(total)[None]
    seen: NDArray[np.bool_] = key <= query
    return seen if window is None else seen & (key > query - window)
