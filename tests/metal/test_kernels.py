"""Every kernel against float64: on the GPU where there is Metal, else in the emulator."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from pion_server.attend.kernels import Kind, Operands, select
from pion_server.attend.kernels.sources import DIMS, DTYPES
from tests.metal.cases import cases, long_case
from tests.metal.conftest import Run
from tests.metal.oracle import attend

# Of the largest value. float16 too is compared with the numbers the kernel was given, so that no
# rounding of the inputs hides an error of the kernel.
TOLERANCE = 2e-6
# One dimension has every kernel and dtype, each other one a kernel: together each piece of source
# with each number of simdgroups and of rows.
SAMPLE = [
    *((kind, 64, mx.float32) for kind in Kind),
    (Kind.BATCHED_Q_FUSED, 128, mx.float16),
    (Kind.Q1, 512, mx.float16),
    (Kind.BATCHED_Q, 192, mx.float32),
    (Kind.Q1_SPARSE_FUSED, 96, mx.float16),
]
ALL = [(kind, dim, dtype) for kind in Kind for dim in DIMS for dtype in DTYPES]


def check(run: Run, kind: Kind, operands: Operands, name: str) -> None:
    out, lse = run(kind, operands)
    expected_out, expected_lse = attend(operands)
    largest = max(float(np.max(np.abs(expected_out))), 1e-3)
    assert float(np.max(np.abs(out - expected_out))) <= TOLERANCE * largest, name
    seen = np.isfinite(expected_lse)
    np.testing.assert_array_equal(lse[~seen], expected_lse[~seen], name)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], TOLERANCE, TOLERANCE, err_msg=name)


@pytest.mark.parametrize(("kind", "dim", "dtype"), SAMPLE, ids=str)
def test_kernel_agrees_with_float64(run: Run, kind: Kind, dim: int, dtype: mx.Dtype) -> None:
    for name, operands in cases(kind, dim, dtype):
        check(run, kind, operands, name)


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "dim", "dtype"), ALL, ids=str)
def test_every_kernel_agrees_with_float64(run: Run, kind: Kind, dim: int, dtype: mx.Dtype) -> None:
    for name, operands in cases(kind, dim, dtype):
        check(run, kind, operands, name)


@pytest.mark.parametrize("kind", [Kind.Q1, Kind.BATCHED_Q_FUSED, Kind.Q1_SPARSE])
def test_long_prefix_is_cut_in_slices(run: Run, kind: Kind) -> None:
    """Also where a head sees one key or none, so that most slices are empty."""
    operands = long_case(kind)
    kernel = select(kind, 32, mx.float32)
    assert kernel is not None
    assert kernel.launch(operands)["grid"][2] == 2
    check(run, kind, operands, "long")


def test_large_scores_do_not_overflow(run: Run) -> None:
    """Scores of several hundreds: exp of one would be infinite without the maximum subtracted."""
    _, operands = list(cases(Kind.BATCHED_Q_FUSED, 64, mx.float32))[3]
    large = replace(operands, q=operands.q * 200)
    out, lse = run(Kind.BATCHED_Q_FUSED, large)
    expected_out, expected_lse = attend(large)
    assert float(np.max(expected_lse)) > 300
    # The scores themselves have a relative error of 1e-7 or so, which the exponential passes on.
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=1e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


def test_nan_stays_in_its_row(run: Run) -> None:
    """A NaN in one query is seen in that query's answer and in no other."""
    _, operands = list(cases(Kind.BATCHED_Q, 64, mx.float32))[3]
    broken = np.array(operands.q)
    broken[2, 5, 7] = np.nan
    out, lse = run(Kind.BATCHED_Q, replace(operands, q=mx.array(broken)))
    expected_out, expected_lse = attend(operands)
    hit = np.zeros(lse.shape, bool)
    hit[2, 5] = True
    assert np.all(np.isnan(out[hit]))
    assert np.all(np.isnan(lse[hit]))
    np.testing.assert_allclose(out[~hit], expected_out[~hit], atol=1e-5)
    np.testing.assert_allclose(lse[~hit], expected_lse[~hit], atol=1e-5)
