"""Kernels that raise are replaced by the portable path, for their kind of request, said once."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from pion_server.attend import fallback, portable
from pion_server.attend.operations import Operations


class Kernels:
    """Portable operations marked by an offset; those in `broken` raise."""

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.broken:
                raise ValueError("no such kernel")
            return getattr(portable, name)(*arguments) + 1000

        return call


def ask(operations: Operations, dim: int = 32) -> float:
    ones = mx.ones((1, 4, dim))
    return float(operations.query_one(mx.ones((1, dim)), ones, ones, 0)[0, 0])


def test_kernels_answer_while_they_work() -> None:
    said: list[str] = []
    operations = fallback.with_fallback(cast(Operations, Kernels()), portable, said.append)
    assert ask(operations) == 1001
    assert said == []


def test_a_kernel_that_raises_is_asked_once_for_each_kind() -> None:
    said: list[str] = []
    kernels = Kernels("query_one")
    operations = fallback.with_fallback(cast(Operations, kernels), portable, said.append)
    assert [ask(operations), ask(operations), ask(operations, 64)] == [1, 1, 1]
    assert kernels.calls == ["query_one"] * 2
    assert [text.split(" is not used")[0] for text in said] == [
        "Metal kernel query_one (D=32, mlx.core.float32)",
        "Metal kernel query_one (D=64, mlx.core.float32)",
    ]
    tokens, ones = np.zeros(1, np.int32), mx.ones((1, 4, 32))
    none = mx.zeros((1, 0, 32))
    found = operations.query_sparse_fused(mx.ones((1, 32)), ones, ones, tokens, none, none, tokens)
    assert float(found[0, 0]) == 1001  # the other operations stay with the kernels


def test_without_metal_there_is_only_the_portable_path() -> None:
    said: list[str] = []
    chosen = fallback.choose_operations(said.append)
    assert (chosen is portable) is not mx.metal.is_available()
    assert said == []
