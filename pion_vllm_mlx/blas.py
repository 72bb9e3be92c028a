"""A real BLAS for MLX on Linux.

MLX's CPU wheel for Linux links the Netlib reference BLAS, which multiplies float32 matrices at 2 to
5 GFLOP/s. An OpenBLAS that the dynamic linker finds first makes that 10 to 25 times faster. This
module finds one (the distribution's, else the copy inside numpy behind a small forwarding library
built with the C compiler) and hands it to child processes (``child_environment``) or, before MLX
is imported, to this process (``preload_blas``). On other systems there is nothing to do.

``python -m pion_vllm_mlx.blas`` prints the library to put into ``LD_PRELOAD``, or nothing.
Set ``PION_BLAS`` to a library's path to choose another one, or to ``off`` to preload none.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pion_vllm_mlx.cache_home import cache_home

# Debian and Ubuntu, then Fedora and kin (the pthread build before the serial one), then Arch.
_SYSTEM_LIBRARIES = (
    "/usr/lib/*/openblas-pthread/libopenblas.so.0",
    "/usr/lib/*/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib/libopenblas.so.0",
)

# numpy's wheels carry an OpenBLAS with 64-bit integers under prefixed names; MLX asks for the plain
# names with 32-bit integers. Only the two functions MLX spends its time in are forwarded.
_SHIM_SOURCE = """\
#include <stdint.h>
#define FORWARD(name, target, real)                                                              \\
    extern void target(int, int, int, int64_t, int64_t, int64_t, real, const real *, int64_t,   \\
                       const real *, int64_t, real, real *, int64_t);                            \\
    void name(int order, int ta, int tb, int m, int n, int k, real alpha, const real *a,         \\
              int lda, const real *b, int ldb, real beta, real *c, int ldc) {                    \\
        target(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                     \\
    }
FORWARD(cblas_sgemm, @PREFIX@cblas_sgemm64_, float)
FORWARD(cblas_dgemm, @PREFIX@cblas_dgemm64_, double)
"""


def find_blas() -> Path | None:
    """The library to preload on this machine, or None (another system, or none to be had)."""
    chosen = os.environ.get("PION_BLAS", "")
    if not sys.platform.startswith("linux") or chosen == "off":
        return None
    if chosen:
        return _usable(Path(chosen))
    for pattern in _SYSTEM_LIBRARIES:
        for name in sorted(glob.glob(pattern)):
            if library := _usable(Path(name)):
                return library
    return _numpy_shim()


def child_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of `environ` (default: this process's) in which a child's MLX finds a real BLAS."""
    env = dict(os.environ if environ is None else environ)
    # The linker splits LD_PRELOAD at spaces and colons and knows no quoting.
    if (library := find_blas()) is not None and not set(" :") & set(str(library)):
        others = [name for name in env.get("LD_PRELOAD", "").split(":") if name]
        if str(library) not in others:
            env["LD_PRELOAD"] = ":".join([str(library), *others])
    return env


def preload_blas() -> Path | None:
    """Give this process a real BLAS; returns the library, or None where there is nothing to do.

    Must run before ``mlx`` is first imported: its calls are bound then. Raises RuntimeError after.
    """
    library = find_blas()
    if library is None or str(library) in os.environ.get("LD_PRELOAD", "").split(":"):
        return library
    if "mlx.core" in sys.modules:
        raise RuntimeError("preload_blas() must be called before mlx is imported")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return library


def _usable(library: Path) -> Path | None:
    # A library that cannot be loaded in LD_PRELOAD stops every program from starting: try it here.
    try:
        ctypes.CDLL(str(library)).cblas_sgemm  # noqa: B018
    except (OSError, AttributeError):
        return None
    return library


def _numpy_shim() -> Path | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    openblas = _numpy_openblas()
    if compiler is None or openblas is None:
        return None
    library, prefix = openblas
    source = _SHIM_SOURCE.replace("@PREFIX@", prefix)
    # The shim is bound to one numpy by its run path, so its name carries that file's identity.
    stat = library.stat()
    identity = f"{library}|{stat.st_size}|{stat.st_mtime_ns}|{source}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    shim = cache_home() / "blas" / f"libpionblas-{digest}.so"
    if shim.exists():
        return _usable(shim)
    try:
        shim.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=shim.parent) as folder:
            code, built = Path(folder) / "shim.c", Path(folder) / "shim.so"
            code.write_text(source)
            runpath = f"-Wl,-rpath,{library.parent}"
            command = [compiler, "-O2", "-shared", "-fPIC", str(code), str(library), runpath]
            subprocess.run([*command, "-o", str(built)], check=True, capture_output=True)
            os.replace(built, shim)
    except (OSError, subprocess.CalledProcessError):
        return None
    return _usable(shim)


def _numpy_openblas() -> tuple[Path, str] | None:
    """numpy's own OpenBLAS and the prefix of its names (numpy 2: ``scipy_``, numpy 1: none)."""
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        return None
    for library in sorted(Path(spec.origin).parent.parent.glob("numpy.libs/*openblas*.so*")):
        try:
            symbols = ctypes.CDLL(str(library))
        except OSError:
            continue
        for prefix in ("scipy_", ""):
            if hasattr(symbols, f"{prefix}cblas_sgemm64_"):
                return library, prefix
    return None


def main() -> int:
    """Print the library for ``LD_PRELOAD``; where Linux has none, say on stderr what that costs."""
    library = find_blas()
    if library is not None:
        print(library)
    elif sys.platform.startswith("linux") and os.environ.get("PION_BLAS") != "off":
        print(
            "note: no OpenBLAS found, so MLX multiplies matrices 10 to 25 times slower than it"
            " could (Debian: apt-get install libopenblas0-pthread)",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
