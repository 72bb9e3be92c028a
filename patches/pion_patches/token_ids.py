"""Lists of token ids as arrays, and how far two of them are the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def as_ids(tokens: Sequence[int]) -> np.ndarray:
    """Token ids as int64 [N]; raises ValueError for anything but integers."""
    ids = np.asarray(tokens)
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"token ids are integers, not {ids.dtype} {ids.shape}")
    return ids.astype(np.int64)


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading ids are the same."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
