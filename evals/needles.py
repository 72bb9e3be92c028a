"""Needles at the level of kernels: keys planted in random K, with values to be found again."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]

#: Neighbours with one key, as the tokens of a short sentence.
NEEDLE_TOKENS = 8


def plant_needles(
    k: F32, v: F32, count: int, heads: int, seed: int = 4
) -> tuple[list[F32], list[F32]]:
    """Write needles into `k` and `v` `[H_kv][N][D]`: runs of keys in one direction, one value each.

    Returns each needle's query `[heads][D]`, the same for every head, and its value `[D]`.
    """
    tokens, dim = k.shape[1:]
    rng = np.random.default_rng(seed)
    places = rng.choice(tokens // (2 * NEEDLE_TOKENS), count, replace=False)
    queries, answers = [], []
    for place in places * 2 * NEEDLE_TOKENS + rng.integers(0, NEEDLE_TOKENS, count):
        direction, answer = rng.standard_normal((2, dim), dtype=np.float32)
        direction *= np.float32(np.sqrt(dim) / np.linalg.norm(direction))
        k[:, place : place + NEEDLE_TOKENS] = 2.5 * direction
        v[:, place : place + NEEDLE_TOKENS] = answer
        queries.append(np.tile(direction, (heads, 1)))
        answers.append(answer)
    return queries, answers


def found_by(out: F32, answer: F32) -> bool:
    """Whether attention's output `[heads * D]` is the needle's value: cosine above 0.999."""
    wanted = np.tile(answer, out.size // answer.size)
    cosine = out.reshape(-1) @ wanted / (np.linalg.norm(out) * np.linalg.norm(wanted))
    return bool(cosine > 0.999)
