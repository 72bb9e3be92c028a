"""Kernels of our own where they prove right, the portable path wherever they do not.

A provider of kernels raises for what it cannot do and for what failed its self-check, which runs at
the first call of a kind. That kind (operation, head dimension, type of K) is then the portable
path's for good, said once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

import mlx.core as mx

from pion_server.attend import portable
from pion_server.attend.operations import Operations

Complain: TypeAlias = Callable[[str], None]


def choose_operations(complain: Complain) -> Operations:
    """Metal kernels with the portable path behind them where there is Metal, else plain MLX."""
    if not mx.metal.is_available():
        return portable
    try:
        from pion_server.attend.kernels.provider import kernel_operations

        kernels = kernel_operations(portable)
    except Exception as error:
        complain(f"no Metal kernels, attention runs on plain MLX: {error}")
        return portable
    return with_fallback(kernels, portable, complain)


def with_fallback(kernels: Operations, behind: Operations, complain: Complain) -> Operations:
    """Operations that ask `kernels`, and `behind` for each kind of request they raised at."""
    return cast(Operations, _WithFallback(kernels, behind, complain))


class _WithFallback:
    def __init__(self, kernels: Operations, behind: Operations, complain: Complain) -> None:
        self._kernels = kernels
        self._behind = behind
        self._complain = complain
        self._given_up: set[tuple[str, int, mx.Dtype]] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name, getattr(self._kernels, name), getattr(self._behind, name))

    def _call(
        self,
        name: str,
        kernel: Callable[..., Any],
        plain: Callable[..., Any],
        q: mx.array,
        k: mx.array,
        *rest: Any,
    ) -> Any:
        kind = name, k.shape[2], k.dtype
        if kind not in self._given_up:
            try:
                return kernel(q, k, *rest)
            except Exception as error:
                self._given_up.add(kind)
                self._complain(
                    f"Metal kernel {name} (D={kind[1]}, {kind[2]}) is not used, plain MLX takes "
                    f"its place: {error}"
                )
        return plain(q, k, *rest)
