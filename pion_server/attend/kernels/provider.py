"""The operations on our kernels, each proven on this machine before it answers.

What a compiler accepted is not yet right on this GPU, and a first request may prove nothing (one
token, no suffix). So the first call for an operation, head dimension and dtype of K runs a small
random case of its own both ways. A kernel that fails it stays refused: every call raises, and the
caller takes the portable path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pion_server.attend.kernels.sources import Kind, Operands, select
from pion_server.attend.operations import Operations

Run: TypeAlias = Callable[[Kind, Operands], tuple[mx.array, mx.array]]

# Of the largest value. MLX may multiply float32 matrices in TF32 (2^-11) on GPUs that have it; a
# wrong index or a lost key is off by far more.
_TOLERANCE = 5e-3


class Disagreement(Exception):
    """A kernel does not answer what the portable path does."""


def run_kernel(kind: Kind, operands: Operands) -> tuple[mx.array, mx.array]:
    """Output and log-sum-exp, by the kernel for these operands; ValueError if there is none."""
    kernel = select(kind, operands.k.shape[2], operands.k.dtype)
    if kernel is None:
        raise ValueError(f"no kernel for D={operands.k.shape[2]} and {operands.k.dtype}")
    return kernel(operands)


def kernel_operations(portable: Operations, run: Run = run_kernel) -> Operations:
    """`Operations` by kernels; every one raises where a kernel is refused.

    To be used by one thread, as the engine is. `run` is there for tests.
    """
    return cast(Operations, _Proven(_Bare(run), portable))


class _Proven:
    """Asks `bare` once a small case of its own was answered as `portable` does."""

    def __init__(self, bare: Operations, portable: Operations) -> None:
        self._bare = bare
        self._portable = portable
        self._verdicts: dict[tuple[str, int, mx.Dtype], Exception | None] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, q: mx.array, k: mx.array, *rest: Any) -> Any:
        # No kernel has a window that differs from row to row.
        rowwise = name == "decode" and rest[-1] and q.shape[1] > 1
        able = self._portable if rowwise else self._proven(name, k)
        return getattr(able, name)(q, k, *rest)

    def _proven(self, name: str, k: mx.array) -> Operations:
        case = name, k.shape[2], k.dtype
        if case not in self._verdicts:
            try:
                self_check(self._bare, self._portable, *case)
            except Exception as error:
                self._verdicts[case] = error
            else:
                self._verdicts[case] = None
        refusal = self._verdicts[case]
        if refusal is not None:
            raise refusal
        return self._bare


class _Bare:
    """The operations without the proof."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def query_one(self, q: mx.array, k: mx.array, v: mx.array, first: int) -> mx.array:
        operands = Operands(q=q[:, None], k=k, v=v, head_map=_own_heads(q), first=first)
        return self._run(Kind.Q1, operands)[0][:, 0]

    def query_many(
        self, q: mx.array, k: mx.array, v: mx.array, first: int
    ) -> tuple[mx.array, mx.array]:
        operands = Operands(q=q, k=k, v=v, head_map=_own_heads(q), first=first)
        return self._run(Kind.BATCHED_Q, operands)

    def query_fused(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        suffix_k: mx.array,
        suffix_v: mx.array,
        head_map: NDArray[np.int32],
        first: int,
    ) -> mx.array:
        heads = mx.array(head_map)
        operands = Operands(
            q=q, k=k, v=v, head_map=heads, first=first, suffix_k=suffix_k, suffix_v=suffix_v
        )
        return self._run(Kind.BATCHED_Q_FUSED, operands)[0]

    def decode(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        suffix_k: mx.array,
        suffix_v: mx.array,
        head_map: NDArray[np.int32],
        window: int,
    ) -> mx.array:
        total = k.shape[1]
        hidden = max(total + suffix_k.shape[1] - window, 0) if window else 0
        gone = max(hidden - total, 0)
        operands = Operands(
            q=q,
            k=k,
            v=v,
            head_map=mx.array(head_map),
            first=min(hidden, total),
            suffix_k=suffix_k[:, gone:],
            suffix_v=suffix_v[:, gone:],
        )
        out, lse = self._run(Kind.BATCHED_Q_FUSED, operands)
        return mx.concatenate([out, lse[..., None]], axis=-1)

    def query_sparse(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        tokens: NDArray[np.int32],
        counts: NDArray[np.int32],
    ) -> mx.array:
        indices, lengths = mx.array(tokens), mx.array(counts)
        operands = Operands(
            q=q[:, None], k=k, v=v, head_map=_own_heads(q), indices=indices, counts=lengths
        )
        return self._run(Kind.Q1_SPARSE, operands)[0][:, 0]

    def query_sparse_fused(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        tokens: NDArray[np.int32],
        suffix_k: mx.array,
        suffix_v: mx.array,
        head_map: NDArray[np.int32],
    ) -> mx.array:
        operands = Operands(
            q=q[:, None],
            k=k,
            v=v,
            head_map=mx.array(head_map),
            indices=mx.array(tokens[None]),
            counts=mx.array([len(tokens)], mx.int32),
            suffix_k=suffix_k,
            suffix_v=suffix_v,
        )
        return self._run(Kind.Q1_SPARSE_FUSED, operands)[0][:, 0]


def _own_heads(q: mx.array) -> mx.array:
    """A kv head for each query head."""
    return mx.arange(q.shape[0], dtype=mx.int32)


def self_check(
    kernels: Operations, portable: Operations, name: str, dim: int, dtype: mx.Dtype
) -> None:
    """Compare the operation `name` on small random cases; raises Disagreement."""
    for arguments in _cases(name, dim, dtype):
        found, expected = (getattr(side, name)(*arguments) for side in (kernels, portable))
        if name != "query_many":
            found, expected = (found,), (expected,)
        for ours, theirs in zip(found, expected, strict=True):
            a, b = np.array(ours), np.array(theirs)
            worst = float(np.max(np.abs(a - b))) / float(np.max(np.abs(b)))
            # Written so that a NaN disagrees.
            if not worst <= _TOLERANCE:
                raise Disagreement(f"off by {worst:.1e} in the self-check")


def _cases(name: str, dim: int, dtype: mx.Dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments for each way a kernel is compiled: one query row a head, and several."""
    draw = np.random.default_rng(dim)

    def tensor(*shape: int) -> mx.array:
        return mx.array(draw.standard_normal(shape, np.float32))

    kv_heads, tokens, first = 2, 45, 3
    k, v = (tensor(kv_heads, tokens, dim).astype(dtype) for _ in range(2))
    suffix = tensor(kv_heads, 11, dim), tensor(kv_heads, 11, dim)
    head_map = np.array([1, 0, 0, 1], np.int32)
    some = draw.choice(tokens, (kv_heads, 19), replace=False).astype(np.int32)
    match name:
        case "query_one":
            yield tensor(kv_heads, dim), k, v, first
        case "query_many":
            for many in (1, 10):
                yield tensor(kv_heads, many, dim), k, v, first
        case "query_fused":
            for many in (1, 10):
                yield tensor(len(head_map), many, dim), k, v, *suffix, head_map, first
        case "decode":
            for many, window in ((1, 0), (1, 30), (1, 7), (10, 0)):
                yield tensor(len(head_map), many, dim), k, v, *suffix, head_map, window
        case "query_sparse":
            yield tensor(kv_heads, dim), k, v, some, np.array([19, 0], np.int32)
        case "query_sparse_fused":
            yield tensor(len(head_map), dim), k, v, some[0], *suffix, head_map
        case _:
            raise ValueError(f"no operation {name}")
