"""The generated Metal source type-checks with Metal's rules for address spaces.

g++ knows one address space, so the emulator accepts a thread pointer where a device pointer is
due. Clang's C++ for OpenCL does not. Skipped unless the `libclang` package is installed.
"""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from pion_server.attend.kernels import Kind, sources
from pion_server.attend.kernels.sources import DTYPES
from tests.metal.cases import cases
from tests.metal.emulator import SHIM, generated_source

cindex = pytest.importorskip("clang.cindex", reason="libclang is not installed")

SPACES = {
    "device": "__global",
    "constant": "__constant",
    "threadgroup": "__local",
    "thread": "__private",
}
OPTIONS = (
    "-x",
    "clcpp",
    "-cl-std=CLC++2021",
    "--target=spir64",
    "-cl-no-stdinc",
    "-Wall",
    "-Wextra",
)


def to_opencl(msl: str) -> str:
    """The kernel as C++ for OpenCL, with its template arguments: no template is a kernel there."""
    instance = re.search(r"template \[\[host_name.*?decltype\(\w+<(.*?)>\) .*?;\n", msl, re.DOTALL)
    parameters = re.search(r"template <([^>]*)>\n\[\[kernel\]\]", msl)
    assert instance is not None
    assert parameters is not None
    filled = ""
    for parameter, value in zip(parameters[1].split(","), instance[1].split(","), strict=True):
        kind, name = parameter.split()
        filled += f"typedef {value} {name};\n" if kind == "typename" else ""
        filled += f"constexpr {kind} {name} = {value};\n" if kind != "typename" else ""
    body = msl.replace(instance[0], "").replace(parameters[0], f"{filled}__kernel")
    body = re.sub(r"\[\[.*?\]\]|#include <.*?>", "", body)
    # A constant reference cannot be a kernel argument there; such a value can.
    body = re.sub(r"const constant (\w+)& (\w+)", r"const \1 \2", body)
    for ours, theirs in SPACES.items():
        body = re.sub(rf"\b{ours}\b", theirs, body)
    return (SHIM / "types.clcpp").read_text() + body


def complaints(msl: str) -> list[str]:
    """Clang's warnings and errors."""
    program = to_opencl(msl)
    unit = cindex.Index.create().parse(
        "kernel.clcpp", args=list(OPTIONS), unsaved_files=[("kernel.clcpp", program)]
    )
    return [f"{one.location.line}: {one.spelling}" for one in unit.diagnostics]


def generated(kind: Kind, dim: int, dtype: mx.Dtype) -> str:
    kernel = sources.select(kind, dim, dtype)
    assert kernel is not None
    _, operands = next(cases(kind, dim, dtype))
    return generated_source(kernel.function, kernel.launch(operands))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", Kind)
def test_kernel_type_checks(kind: Kind, dtype: mx.Dtype) -> None:
    assert complaints(generated(kind, 96, dtype)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("const device T* keys = k", "const thread T* keys = k"),
        ("q + (size_t(head)", "queries + (size_t(head)"),
        ("    threadgroup float tops[GROUPS];", "    threadgroup float* tops = rows[0].out;"),
    ],
)
def test_pointer_into_another_address_space_is_found(old: str, new: str) -> None:
    source = generated(Kind.BATCHED_Q, 64, mx.float32)
    assert source.count(old) == 1
    assert complaints(source.replace(old, new))
