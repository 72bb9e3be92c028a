"""What the kernels must answer, in float64 and without tricks: scores, softmax, a product."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pion_server.attend.kernels import Operands


def attend(operands: Operands) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Output [H_q][M][D] and log-sum-exp [H_q][M]; 0 and -inf for a row that sees nothing."""
    q, k, v = (np.array(one).astype(np.float64) for one in (operands.q, operands.k, operands.v))
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for head, kv_head in enumerate(np.array(operands.head_map).tolist()):
        tokens = _seen(operands, head)
        for m, query in enumerate(q[head]):
            keys, values = [k[kv_head, tokens]], [v[kv_head, tokens]]
            if operands.suffix_k is not None and operands.suffix_v is not None:
                suffix = operands.suffix_k.shape[1]
                end = min(max(suffix - q.shape[1], 0) + m + 1, suffix)
                keys.append(np.array(operands.suffix_k[kv_head])[:end].astype(np.float64))
                values.append(np.array(operands.suffix_v[kv_head])[:end].astype(np.float64))
            scores = np.concatenate(keys) @ query / np.sqrt(q.shape[2])
            if len(scores):
                top = scores.max()
                weights = np.exp(scores - top)
                out[head, m] = weights @ np.concatenate(values) / weights.sum()
                lse[head, m] = top + np.log(weights.sum())
    return out, lse


def _seen(operands: Operands, head: int) -> list[int]:
    first, total = operands.first, operands.k.shape[1]
    if operands.indices is None or operands.counts is None:
        return list(range(first, total))
    indices, counts = np.array(operands.indices), np.array(operands.counts)
    row = head if len(indices) > 1 else 0
    listed = indices[row, : counts[row]].tolist()
    return [token for token in listed if first <= token < total]
