"""Which kernel is taken, what is proven before it answers, and what happens when it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from pion_server.attend import portable
from pion_server.attend.fallback import with_fallback
from pion_server.attend.kernels import (
    Disagreement,
    Kind,
    Operands,
    available,
    kernel_operations,
    select,
    self_check,
)
from pion_server.attend.kernels.sources import DIMS, DTYPES
from tests.metal.conftest import Run
from tests.metal.oracle import attend

NAMES = {
    "query_one": Kind.Q1,
    "query_many": Kind.BATCHED_Q,
    "query_fused": Kind.BATCHED_Q_FUSED,
    "decode": Kind.BATCHED_Q_FUSED,
    "query_sparse": Kind.Q1_SPARSE,
    "query_sparse_fused": Kind.Q1_SPARSE_FUSED,
}


class Fake:
    """A kernel that computes by the oracle what `change` makes of its operands."""

    def __init__(self, change: Callable[[Operands], Operands] = lambda operands: operands) -> None:
        self.change = change
        self.kinds: list[Kind] = []

    def __call__(self, kind: Kind, operands: Operands) -> tuple[mx.array, mx.array]:
        self.kinds.append(kind)
        out, lse = attend(self.change(operands))
        return mx.array(out.astype(np.float32)), mx.array(lse.astype(np.float32))


def lose_a_token(operands: Operands) -> Operands:
    """As a kernel whose loop starts one too far."""
    if operands.indices is not None and operands.counts is not None:
        return replace(operands, counts=mx.maximum(operands.counts - 1, 0))
    return replace(operands, first=operands.first + 1)


def queries(dim: int = 64, tokens: int = 9) -> tuple[mx.array, mx.array, mx.array]:
    draw = np.random.default_rng(tokens)
    q, k, v = (
        mx.array(draw.standard_normal(shape, np.float32))
        for shape in ((2, dim), (2, tokens, dim), (2, tokens, dim))
    )
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_operation_is_fitted_to_its_kernel(name: str, dtype: mx.Dtype) -> None:
    """With an exact kernel each operation answers what the portable path does."""
    fake = Fake()
    self_check(kernel_operations(portable, fake), portable, name, 96, dtype)
    assert set(fake.kinds) == {NAMES[name]}


@pytest.mark.parametrize("name", NAMES)
def test_lost_token_is_noticed(name: str) -> None:
    fake = Fake(lose_a_token)
    with pytest.raises(Disagreement, match="off by"):
        self_check(kernel_operations(portable, fake), portable, name, 64, mx.float32)


def test_windows_that_move_from_row_to_row_stay_with_plain_mlx() -> None:
    fake = Fake()
    draw = np.random.default_rng(1)
    q, k, s = (mx.array(draw.standard_normal((2, n, 64), np.float32)) for n in (3, 9, 4))
    arguments = q, k, k, s, s, np.array([0, 1], np.int32), 5
    found = kernel_operations(portable, fake).decode(*arguments)
    np.testing.assert_array_equal(found, portable.decode(*arguments))
    assert fake.kinds == []


def test_empty_suffix_reaches_the_kernel_as_rows_it_never_reads() -> None:
    """An empty MLX array has no buffer that could be bound."""
    q, k, v = queries()
    none = mx.zeros((2, 0, 64))
    operands = Operands(
        q=q[:, None], k=k, v=v, head_map=mx.array([0, 1]), suffix_k=none, suffix_v=none
    )
    kernel = select(Kind.BATCHED_Q_FUSED, 64, mx.float32)
    assert kernel is not None
    assert all(array.size for array in kernel.launch(operands)["inputs"])


def test_proof_is_asked_for_once_a_variant() -> None:
    fake = Fake()
    operations = kernel_operations(portable, fake)
    q, k, v = queries()
    operations.query_one(q, k, v, 0)
    assert len(fake.kinds) == 2
    operations.query_one(q, k, v, 0)
    assert len(fake.kinds) == 3
    operations.query_one(q, k.astype(mx.float16), v.astype(mx.float16), 0)
    assert len(fake.kinds) == 5


def test_refused_kernel_is_not_run_again() -> None:
    """Not even for a request that it would answer right: here all weight is on one token."""
    fake = Fake(lose_a_token)
    operations = kernel_operations(portable, fake)
    q, k, v = queries(tokens=1)
    for _ in range(3):
        with pytest.raises(Disagreement):
            operations.query_one(q, k, v, 0)
    assert len(fake.kinds) == 1


def test_refusal_of_one_variant_leaves_the_others() -> None:
    def wrong_in_half(operands: Operands) -> Operands:
        return lose_a_token(operands) if operands.k.dtype == mx.float16 else operands

    operations = kernel_operations(portable, Fake(wrong_in_half))
    q, k, v = queries()
    with pytest.raises(Disagreement):
        operations.query_one(q, k.astype(mx.float16), v.astype(mx.float16), 0)
    found = operations.query_one(q, k, v, 0)
    np.testing.assert_allclose(found, portable.query_one(q, k, v, 0), atol=1e-5)


def test_nan_is_a_disagreement() -> None:
    fake = Fake(lambda operands: replace(operands, q=operands.q * mx.nan))
    with pytest.raises(Disagreement, match="off by nan"):
        self_check(kernel_operations(portable, fake), portable, "query_many", 32, mx.float32)


@pytest.mark.parametrize("failure", [RuntimeError("no such function"), None], ids=str)
def test_engine_falls_back_with_one_warning(failure: Exception | None) -> None:
    """Whether the kernel fails or is wrong, plain MLX answers, and it is said once."""

    def run(kind: Kind, operands: Operands) -> tuple[mx.array, mx.array]:
        if failure is not None:
            raise failure
        return Fake(lose_a_token)(kind, operands)

    warnings: list[str] = []
    engine = with_fallback(kernel_operations(portable, run), portable, warnings.append)
    q, k, v = queries()
    for _ in range(3):
        answer = engine.query_one(q, k, v, 0)
        np.testing.assert_array_equal(answer, portable.query_one(q, k, v, 0))
    assert len(warnings) == 1
    assert ("no such function" if failure else "off by") in warnings[0]


def test_kernels_exist_for_the_dimensions_of_the_wire() -> None:
    for kind in Kind:
        for dim in DIMS:
            assert select(kind, dim, mx.float32) is not None
            assert select(kind, dim, mx.float16) is not None
        assert select(kind, 48, mx.float32) is None
        assert select(kind, 64, mx.bfloat16) is None


def test_no_kernel_is_an_error_to_the_operations() -> None:
    q, k, v = queries(dim=40)
    with pytest.raises(ValueError, match="no kernel for D=40"):
        kernel_operations(portable).query_one(q, k, v, 0)


@pytest.mark.skipif(available(), reason="this machine has Metal")
def test_without_metal_every_call_fails() -> None:
    operations = kernel_operations(portable)
    q, k, v = queries()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            operations.query_one(q, k, v, 0)


def check_through_operations(run: Run, name: str, dim: int, dtype: mx.Dtype) -> None:
    def as_arrays(kind: Kind, operands: Operands) -> tuple[mx.array, mx.array]:
        out, lse = run(kind, operands)
        return mx.array(out), mx.array(lse)

    self_check(kernel_operations(portable, as_arrays), portable, name, dim, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_kernel_passes_its_self_check(run: Run, name: str) -> None:
    """What happens on first use, but for the GPU."""
    check_through_operations(run, name, 64, mx.float32)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_passes_its_self_check(run: Run, name: str, dim: int, dtype: mx.Dtype) -> None:
    check_through_operations(run, name, dim, dtype)


def test_unknown_operation_has_no_self_check() -> None:
    with pytest.raises(ValueError, match="no operation query_all"):
        self_check(portable, portable, "query_all", 64, mx.float32)
