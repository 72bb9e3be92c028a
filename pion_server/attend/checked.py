"""Kernels of our own, used only after they agreed with the portable path on a real request.

What a compiler accepted is not yet right on this machine. So the first request of each kind
(operation, head dimension, type of K) is computed both ways; kernels that fail or disagree are
given up for that kind, with one warning, and the portable path answers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import mlx.core as mx
import numpy as np

from pion_server.attend import portable
from pion_server.attend.operations import Operations

Complain: TypeAlias = Callable[[str], None]

# Of the largest value: how far two float32 computations of one attention may lie apart; K and V
# held as float16 are multiplied in that type by some kernels.
_TOLERANCE = {mx.float32: 1e-4, mx.float16: 4e-3}
KERNELS = "pion_server.attend.kernels"


def choose_operations(complain: Complain) -> Operations:
    """Checked Metal kernels where there is Metal, else plain MLX."""
    if not mx.metal.is_available():
        return portable
    try:
        kernels = cast(Operations, importlib.import_module(KERNELS))
    except ImportError as error:
        complain(f"no Metal kernels ({error}): attention runs on plain MLX")
        return portable
    return check_against(kernels, portable, complain)


def check_against(kernels: Operations, reference: Operations, complain: Complain) -> Operations:
    """Operations that ask `kernels` once they have agreed with `reference`."""
    return cast(Operations, _Checked(kernels, reference, complain))


class _Checked:
    def __init__(self, kernels: Operations, reference: Operations, complain: Complain) -> None:
        self._kernels = kernels
        self._reference = reference
        self._complain = complain
        self._trusted: dict[tuple[object, ...], bool] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        ours, theirs = getattr(self._kernels, name), getattr(self._reference, name)
        return functools.partial(self._call, name, ours, theirs)

    def _call(
        self,
        name: str,
        ours: Callable[..., Any],
        theirs: Callable[..., Any],
        q: mx.array,
        k: mx.array,
        *rest: Any,
    ) -> Any:
        kind = name, k.shape[2], k.dtype
        trusted = self._trusted.get(kind)
        if trusted is not None:
            return (ours if trusted else theirs)(q, k, *rest)
        expected = theirs(q, k, *rest)
        try:
            found = ours(q, k, *rest)
            distance = _distance(found, expected)
        except Exception as error:
            return self._give_up(kind, f"failed: {error}", expected)
        if distance is None:  # numbers that prove nothing: ask again next time
            return expected
        if distance > _TOLERANCE[k.dtype]:
            return self._give_up(kind, f"is off by {distance:.1e}", expected)
        self._trusted[kind] = True
        return found

    def _give_up(self, kind: tuple[object, ...], why: str, expected: Any) -> Any:
        self._trusted[kind] = False
        name, dim, dtype = kind
        self._complain(f"Metal kernel {name} (D={dim}, {dtype}) {why}; plain MLX takes its place")
        return expected


def _distance(found: Any, expected: Any) -> float | None:
    """The largest difference in units of the largest value; None if it cannot be told."""
    pairs = (
        [(found, expected)] if isinstance(found, mx.array) else zip(found, expected, strict=True)
    )
    worst = 0.0
    for ours, theirs in pairs:
        mx.eval(ours, theirs)
        a, b = np.array(ours), np.array(theirs)
        if a.shape != b.shape:
            raise ValueError(f"answered {a.shape}, not {b.shape}")
        largest = float(np.max(np.abs(b)))
        if not 0 < largest < np.inf:
            return None
        gap = float(np.max(np.abs(a - b))) / largest
        worst = max(worst, gap if gap == gap else np.inf)
    return worst
