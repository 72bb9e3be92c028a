"""Online softmax: attention over parts, merged by their log-sum-exps, is attention over all.

Arithmetic only, float64 and float32, no server and no MLX: why Stage 2 may split a prefix at all.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pion_server.attend import reference


def merge(outs: list[Any], lses: list[float], dtype: type[np.floating[Any]]) -> NDArray[Any]:
    """The merge every client does: weights exp(lse - max), in `dtype`."""
    top = max(lses)
    weights = np.exp(np.array([lse - top for lse in lses], dtype))
    return np.array((weights @ np.array(outs, dtype)) / weights.sum())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from((0.1, 1.0, 30.0)),
)
def test_parts_of_any_size_merge_to_the_whole(seed: int, sizes: list[int], scale: float) -> None:
    rng = np.random.default_rng(seed)
    q = scale * rng.standard_normal(16)
    k, v = rng.standard_normal((2, sum(sizes), 16))
    cuts = np.cumsum(sizes)[:-1]
    parts = [
        reference.attend_row(q, keys, values)
        for keys, values in zip(np.split(k, cuts), np.split(v, cuts), strict=True)
    ]
    whole, _ = reference.attend_row(q, k, v)
    outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
    np.testing.assert_allclose(merge(outs, lses, np.float64), whole, atol=1e-12)
    np.testing.assert_allclose(merge(outs, lses, np.float32), whole, atol=1e-5)


def test_a_part_nobody_sees_weighs_nothing() -> None:
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 5, 8))
    whole, lse = reference.attend_row(k[0], k, v)
    nothing, never = reference.attend_row(k[0], k[:0], v[:0])
    assert never == -np.inf
    np.testing.assert_array_equal(merge([whole, nothing], [lse, never], np.float64), whole)


def test_large_log_sum_exps_do_not_overflow() -> None:
    left, right = np.full(4, 1.0), np.full(4, 3.0)
    np.testing.assert_allclose(merge([left, right], [5000.0, 5000.0], np.float32), 2.0)
    np.testing.assert_allclose(merge([left, right], [5000.0, 0.0], np.float32), 1.0)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
