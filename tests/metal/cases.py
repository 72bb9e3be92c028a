"""Small attention problems for the kernels, the awkward ones among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from pion_server.attend.kernels import Kind, Operands

HEAD_MAP = (1, 0, 0, 1)
KV_HEADS = 2
# Fewer than 8 numbers come to a kernel in another address space: lists here are longer.
LISTED = 12


def cases(kind: Kind, dim: int, dtype: mx.Dtype) -> Iterator[tuple[str, Operands]]:
    """Named problems for one kernel."""
    match kind:
        case Kind.Q1:
            sizes = [("one token", 1, 0), ("whole", 77, 0), ("window", 77, 50), ("none seen", 5, 5)]
            for name, tokens, first in sizes:
                yield name, _operands(dim, dtype, 1, tokens, first=first)
        case Kind.BATCHED_Q:
            for many, tokens, first in ((1, 40, 0), (3, 1, 0), (8, 40, 39), (17, 40, 3), (2, 5, 5)):
                yield (
                    f"{many} rows, tokens {first} to {tokens}",
                    _operands(dim, dtype, many, tokens, first=first),
                )
        case Kind.BATCHED_Q_FUSED:
            shapes = [
                ("no suffix", 3, 20, 0),
                ("no suffix, one row", 1, 20, 0),
                ("decode", 1, 20, 9),
                ("chunk", 9, 20, 9),
                ("more rows than suffix", 9, 20, 5),
                ("longer suffix", 4, 1, 21),
            ]
            for name, many, tokens, suffix in shapes:
                yield name, _operands(dim, dtype, many, tokens, first=tokens // 3, suffix=suffix)
            yield "prefix hidden", _operands(dim, dtype, 9, 20, first=20, suffix=5)
            yield "none seen", _operands(dim, dtype, 9, 20, first=20, suffix=0)
        case Kind.Q1_SPARSE:
            for name, lists, counts in _lists():
                yield name, _operands(dim, dtype, 1, 33, first=4, lists=lists, counts=counts)
        case Kind.Q1_SPARSE_FUSED:
            for name, lists, counts in _lists():
                for suffix in (0, 7):
                    yield (
                        f"{name}, suffix of {suffix}",
                        _operands(dim, dtype, 1, 33, lists=lists, counts=counts, suffix=suffix),
                    )


def long_case(kind: Kind) -> Operands:
    """More keys than one threadgroup is given."""
    if kind.listed:
        lists = np.random.default_rng(4).integers(0, 600, (len(HEAD_MAP), 2050), np.int32)
        counts = [2050, 0, 1, 2050]
        return _operands(32, mx.float32, 1, 600, lists=lists, counts=counts)
    suffix = 100 if kind.fused else None
    return _operands(32, mx.float32, 2 if kind.fused else 1, 2050, suffix=suffix)


def _lists() -> Iterator[tuple[str, np.ndarray[Any, Any], list[int]]]:
    draw = np.random.default_rng(3)
    heads = len(HEAD_MAP)
    lists = draw.integers(0, 33, (heads, LISTED), np.int32)
    lists[0, 2:5] = lists[0, 1]
    lists[1, ::2] = [-1, 33, 34, 2**31 - 1, -(2**31), 3]
    yield "lists", lists, [LISTED, LISTED, 5, LISTED + 7]
    yield "empty lists", lists, [0, LISTED, 0, 1]
    yield "one list", np.sort(lists[2:3]), [LISTED]


def _operands(
    dim: int,
    dtype: mx.Dtype,
    many: int,
    tokens: int,
    *,
    first: int = 0,
    suffix: int | None = None,
    lists: np.ndarray[Any, Any] | None = None,
    counts: list[int] | None = None,
) -> Operands:
    draw = np.random.default_rng([dim, many, tokens])

    def tensor(*shape: int) -> mx.array:
        return mx.array(draw.standard_normal(shape, np.float32))

    fused = suffix is not None
    return Operands(
        q=tensor(len(HEAD_MAP), many, dim),
        k=tensor(KV_HEADS, tokens, dim).astype(dtype),
        v=tensor(KV_HEADS, tokens, dim).astype(dtype),
        head_map=mx.array(HEAD_MAP, mx.int32),
        first=first,
        indices=mx.array(lists) if lists is not None else None,
        counts=mx.array(counts, mx.int32) if counts is not None else None,
        suffix_k=tensor(KV_HEADS, suffix or 0, dim) if fused else None,
        suffix_v=tensor(KV_HEADS, suffix or 0, dim) if fused else None,
    )
