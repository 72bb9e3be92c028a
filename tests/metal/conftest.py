"""`run` computes with a kernel: on the GPU where there is Metal, in the emulator elsewhere."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from pion_server.attend.kernels import Kind, Operands, available, sources
from tests.metal.emulator import emulate

Run: TypeAlias = Callable[[Kind, Operands], tuple[NDArray[np.float32], NDArray[np.float32]]]


@pytest.fixture(scope="session")
def compile_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels stay from run to run; skips where none can be compiled."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the Metal emulator needs Linux")
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the Metal kernels with")
    cache = getattr(request.config, "cache", None)
    if cache is not None:  # pytest may run without its cache
        return Path(cache.mkdir("metal-kernels"))
    return tmp_path_factory.mktemp("metal-kernels")


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Run:
    """Output and log-sum-exp of one kernel call."""
    if available():
        return _run_on_metal
    cache = request.getfixturevalue("compile_cache")

    def emulated(kind: Kind, operands: Operands) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        kernel = sources.select(kind, operands.k.shape[2], operands.k.dtype)
        assert kernel is not None
        names = sources.input_names(kind)
        results = emulate(kernel.function, names, kernel.launch(operands), cache)
        out, lse = sources.join(*map(mx.array, results))
        return np.array(out), np.array(lse)

    return emulated


def _run_on_metal(
    kind: Kind, operands: Operands
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    kernel = sources.select(kind, operands.k.shape[2], operands.k.dtype)
    assert kernel is not None
    out, lse = kernel(operands)
    return np.array(out), np.array(lse)
