"""Runs a Metal kernel on the CPU: the source MLX generates, compiled by g++ against our shim.

MLX prints the complete source of a kernel (signature, template arguments) while it traces a
function for export, which needs no Metal. `shim/` gives that source meaning in C++, a fiber a
thread. A launch is repeated in three orders of threads; all must agree to the bit.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

SHIM = Path(__file__).with_name("shim")
ORDERS = {"forward": 0, "backward": 1, "shuffled": 2}
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")

_ATTRIBUTES = {
    "thread_index_in_simdgroup": "uint(shim::current % 32)",
    "simdgroup_index_in_threadgroup": "uint(shim::current / 32)",
    "threadgroup_position_in_grid": "at",
}
_PROGRAM = """#include <metal_stdlib>
{msl}
static void** buffers;
static uint3 at;
static void body() {{ {call}({arguments}); }}
extern "C" int launch(void** given, const uint* groups, int threads, int order, char* message) {{
    buffers = given;
    if (shim::launch(groups, threads, order, at, body)) return 0;
    std::strcpy(message, shim::reason);
    return 1;
}}
"""


class Misbehaviour(Exception):
    """A kernel broke a rule of the shim, or its result depends on the order of threads."""


@dataclass(frozen=True, slots=True)
class Program:
    """Compiled MSL: the library, and what its buffers are called, in order."""

    library: ctypes.CDLL
    buffers: tuple[str, ...]


def generated_source(function: Callable[..., Any], launch: dict[str, Any]) -> str:
    """The Metal source MLX makes of a kernel for the arguments of one call."""
    options = {name: value for name, value in launch.items() if name != "inputs"}

    def call(*inputs: mx.array) -> Any:
        return function(inputs=list(inputs), verbose=True, **options)

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(printed.fileno(), 1)
        try:
            mx.export_function(os.path.join(folder, "kernel.mlxfn"), call, *launch["inputs"])
        finally:
            # MLX prints through C's buffered stdout.
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
        printed.seek(0)
        found = re.search(r"```\n(.*?)```", printed.read().decode(), re.DOTALL)
    assert found is not None, "MLX printed no kernel source"
    return found[1]


def to_cpp(msl: str) -> tuple[str, tuple[str, ...]]:
    """A C++ program that launches the kernel, and the names of its buffers."""
    signature = re.search(r"\[\[kernel\]\] void \w+\((.*?)\)\s*\{", msl, re.DOTALL)
    instance = re.search(r"template \[\[host_name.*?decltype\((.*?)\) .*?;\n", msl, re.DOTALL)
    assert signature is not None
    assert instance is not None
    arguments: list[str] = []
    buffers: list[str] = []
    for declaration, attribute in re.findall(r"([^,]+?)\s*\[\[(.*?)\]\]", signature[1]):
        if not attribute.startswith("buffer"):
            arguments.append(_ATTRIBUTES[attribute])
            continue
        kind, name = declaration.strip().rsplit(" ", 1)
        value = re.sub(r"[*&]", "", kind)
        star = "*" if "&" in kind else ""
        arguments.append(f"{star}static_cast<{value}*>(buffers[{len(buffers)}])")
        buffers.append(name)
    plain = re.sub(r"\[\[.*?\]\]", "", msl.replace(instance[0], ""))
    plain = re.sub(r"\bthreadgroup (\w+) (\w+)\[(.*?)\];", r"SHIM_SHARED(\1, \2, \3);", plain)
    call = instance[1]
    return _PROGRAM.format(msl=plain, call=call, arguments=", ".join(arguments)), tuple(buffers)


def build(msl: str, cache: Path) -> Program:
    """Compile, unless the same program with the same shim was compiled into `cache` before."""
    program, buffers = to_cpp(msl)
    shim = "".join(path.read_text() for path in sorted(SHIM.iterdir()))
    name = hashlib.sha256((shim + program + " ".join(FLAGS)).encode()).hexdigest()[:24]
    library = cache / f"{name}.so"
    if not library.exists():
        source, made = cache / f"{name}.cpp", cache / f"{name}.{os.getpid()}"
        source.write_text(program)
        command = ["g++", *FLAGS, "-x", "c++", f"-I{SHIM}", str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        made.rename(library)
    return Program(_load(library), buffers)


@functools.cache
def _load(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library))


class Guarded:
    """Memory between two pages nobody may touch, its data ending (or beginning) right at one."""

    def __init__(self, data: NDArray[Any], *, at_end: bool, writable: bool) -> None:
        page = mmap.PAGESIZE
        room = -(-max(data.nbytes, 1) // page) * page
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._map = mmap.mmap(-1, room + 2 * page)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._size, self._room = page, room
        self._data = data
        self.address = self._start + page + (room - data.nbytes if at_end else 0)
        ctypes.memmove(self.address, data.ctypes.data, data.nbytes)
        self._protect(self._start, page, 0)
        self._protect(self._start + page + room, page, 0)
        if not writable:
            self._protect(self._start + page, room, mmap.PROT_READ)

    def read(self) -> NDArray[Any]:
        """What is there now."""
        result = np.empty_like(self._data)
        ctypes.memmove(result.ctypes.data, self.address, result.nbytes)
        return result

    def close(self) -> None:
        """Make the pages ordinary again; the memory goes with the object."""
        everything = mmap.PROT_READ | mmap.PROT_WRITE
        self._protect(self._start, self._room + 2 * self._size, everything)

    def _protect(self, address: int, size: int, rights: int) -> None:
        failed = self._libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), rights)
        assert not failed, os.strerror(ctypes.get_errno())


def emulate(
    function: Callable[..., Any], names: list[str], launch: dict[str, Any], cache: Path
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Output and log-sum-exp of one call; raises Misbehaviour.

    `names` are the kernel's inputs, `launch` the arguments of the call.
    """
    program = build(generated_source(function, launch), cache)
    given = {name: np.array(array) for name, array in zip(names, launch["inputs"], strict=True)}
    shapes = {f"{name}_shape": np.array(a.shape, np.int32) for name, a in given.items()}
    results = [_launch(program, given | shapes, launch, order) for order in ORDERS]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            if not np.array_equal(a, b, equal_nan=True):
                raise Misbehaviour("the result depends on the order of threads")
    return results[0]


def _launch(
    program: Program, given: dict[str, NDArray[Any]], launch: dict[str, Any], order: str
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    shapes = zip(("out", "lse"), launch["output_shapes"], strict=True)
    # Neither 0 nor NaN, which a kernel may rightly write: what is left unwritten shows.
    results = {name: np.full(shape, 1e30, np.float32) for name, shape in shapes}
    grid, threads = launch["grid"], launch["threadgroup"][0]
    groups = (ctypes.c_uint * 3)(-(-grid[0] // threads), grid[1], grid[2])
    message = ctypes.create_string_buffer(256)
    with ExitStack() as stack:
        memory = {}
        for name in program.buffers:
            data = results.get(name, given.get(name))
            assert data is not None, f"the kernel wants a buffer {name}"
            at_end = order != "backward"
            memory[name] = Guarded(data, at_end=at_end, writable=name in results)
            stack.callback(memory[name].close)
        pointers = (ctypes.c_void_p * len(memory))(*(one.address for one in memory.values()))
        if program.library.launch(pointers, groups, threads, ORDERS[order], message):
            raise Misbehaviour(message.value.decode())
        return memory["out"].read(), memory["lse"].read()
