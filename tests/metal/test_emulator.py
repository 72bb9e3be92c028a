"""Kernels broken on purpose: each kind of mistake is found, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from pion_server.attend.kernels import Kind, Operands, sources
from tests.metal.emulator import Misbehaviour, emulate
from tests.metal.oracle import attend

BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
UNREACHED = "barrier not reached by all threads of the threadgroup"
OUTSIDE = "device memory out of bounds"
# D = 128 and nine rows: each simdgroup sees several keys, and the last threadgroup is not full.
DIM, ROWS, TOKENS = 128, 9, 21


def problem() -> Operands:
    draw = np.random.default_rng(5)

    def tensor(*shape: int) -> mx.array:
        return mx.array(draw.standard_normal(shape, np.float32))

    return Operands(
        q=tensor(2, ROWS, DIM),
        k=tensor(2, TOKENS, DIM),
        v=tensor(2, TOKENS, DIM),
        head_map=mx.array([0, 1], mx.int32),
    )


def run_changed(
    cache: Path, changes: Iterable[tuple[str, str]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The batched kernel with each text, found once in header and body, replaced by another."""
    parts = {"header": sources.piece("softmax"), "source": sources.source(Kind.BATCHED_Q)}
    for old, new in changes:
        assert sum(part.count(old) for part in parts.values()) == 1, f"not one place: {old}"
        parts = {name: part.replace(old, new) for name, part in parts.items()}
    names = sources.input_names(Kind.BATCHED_Q)
    function = mx.fast.metal_kernel(
        name="changed",
        input_names=names,
        output_names=["out", "lse"],
        source=parts["source"],
        header=parts["header"],
    )
    kernel = sources.select(Kind.BATCHED_Q, DIM, mx.float32)
    assert kernel is not None
    launch = kernel.launch(problem())
    out, lse = emulate(cast(Callable[..., Any], function), names, launch, cache)
    return out[0], lse[0]


def before(text: str, line: str) -> tuple[str, str]:
    """A change that removes the barrier in front of `line`."""
    return f"{BARRIER}\n{text}{line}", f"{text}{line}"


def after_barrier(text: str) -> tuple[str, str]:
    """A change that adds something right after the first barrier."""
    line = f"{BARRIER}\n        float one_top"
    return line, line.replace("\n", f"\n{text}\n")


CONTROLS = {
    "first barrier missing": (
        before("        ", "float one_top"),
        "threadgroup memory read before it was written",
    ),
    "second barrier missing": (
        before("        ", "if (row0 + r < many)"),
        "threadgroup memory read before it was written",
    ),
    "barrier in one lane": (
        after_barrier(f"if (lane == 0) {BARRIER}"),
        UNREACHED,
    ),
    "barrier in one simdgroup": (
        after_barrier(f"if (group == 0) {BARRIER}"),
        UNREACHED,
    ),
    "barrier that orders device memory": (
        (
            f"{BARRIER}\n        float one_top",
            f"{BARRIER.replace('mem_threadgroup', 'mem_device')}\n        float one_top",
        ),
        "this barrier does not order threadgroup memory",
    ),
    "sum in half of the lanes": (
        ("score = metal::simd_sum(score);", "if (key[0] > 0) score = metal::simd_sum(score);"),
        "simdgroup function in divergent code",
    ),
    "read past the end": (("n < tokens", "n < tokens + 1"), OUTSIDE),
    "read before the start": (("n = first + turn", "n = first + turn - 1"), OUTSIDE),
    "write past the end": (("if (row0 + r < many)", "if (row0 + r < many + 1)"), OUTSIDE),
    "write to an input": (
        ("lse[row] =", "const_cast<device float*>(q)[row] = 0;\n                lse[row] ="),
        OUTSIDE,
    ),
    "threadgroup memory past its end": (
        ("parts[group * D + j * 32 + lane] =", "parts[group * D + j * 32 + lane + 1] ="),
        "threadgroup memory out of bounds",
    ),
    "threads that write one cell": (
        ("if (lane == 0) {", "if (lane < 2) {"),
        "race: two threads write a cell since the last barrier",
    ),
    "cell written while others read": (
        (
            "part += parts[g * D + d];",
            "part += parts[g * D + d];\n if (thread_index == 0) parts[1] = 0;",
        ),
        "race: a thread",
    ),
    "output by whoever comes last": (
        ("if (thread_index == 0) {", "out[row * D] = group;\n            if (thread_index == 0) {"),
        "the result depends on the order of threads",
    ),
}


@pytest.mark.parametrize(("change", "complaint"), CONTROLS.values(), ids=CONTROLS.keys())
def test_broken_kernel_is_caught(
    compile_cache: Path, change: tuple[str, str], complaint: str
) -> None:
    with pytest.raises(Misbehaviour, match=complaint):
        run_changed(compile_cache, [change])


def test_race_is_caught_once_memory_was_written(compile_cache: Path) -> None:
    """With the cells filled beforehand a missing barrier is a race, not a first read."""
    filled = "if (lane < GROUPS) { tops[lane] = 0; sums[lane] = 0; }"
    fill = f"    for (int r = 0; r < ROWS; ++r) {{\n        if (group == 0) {{ {filled} }}\n"
    changes = [
        before("        ", "float one_top"),
        (
            "    for (int r = 0; r < ROWS; ++r) {\n        if (lane == 0) {",
            f"{fill}        {BARRIER}\n        if (lane == 0) {{",
        ),
    ]
    with pytest.raises(Misbehaviour, match="race: a thread"):
        run_changed(compile_cache, changes)


def test_wrong_arithmetic_is_seen_by_the_oracle(compile_cache: Path) -> None:
    """Not rescaling what was summed under an earlier maximum breaks no rule, only the answer."""
    out, _ = run_changed(
        compile_cache, [("row.out[j] = row.out[j] * kept +", "row.out[j] = row.out[j] +")]
    )
    expected, _ = attend(problem())
    assert float(np.max(np.abs(out - expected))) > 1e-2


def test_unchanged_kernel_passes(compile_cache: Path) -> None:
    """The controls start from a kernel that breaks nothing."""
    out, _ = run_changed(compile_cache, [])
    expected, _ = attend(problem())
    np.testing.assert_allclose(out, expected, atol=2e-6)
