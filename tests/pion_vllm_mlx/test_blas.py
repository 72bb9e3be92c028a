"""A real BLAS for MLX: found, built, handed on; never one that keeps programs from starting."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pion_vllm_mlx import blas
from pion_vllm_mlx.cache_home import cache_home

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux preloads a BLAS"
)
compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="the shim needs a C compiler")

# Products through every path the shim forwards: transposed, not square, with an epilogue; and which
# library MLX's own symbol came from.
_PRODUCTS = """
import ctypes, sys
if len(sys.argv) > 1:
    from pion_vllm_mlx.blas import preload_blas
    print(preload_blas())
import mlx.core as mx, numpy as np
rng = np.random.default_rng(3)
a, b, c = (rng.standard_normal(s, dtype=np.float32) for s in ((33, 65), (65, 17), (33, 17)))
for got, want in (
    (mx.array(a) @ mx.array(b), a @ b),
    (mx.array(np.ascontiguousarray(a.T)).T @ mx.array(np.ascontiguousarray(b.T)).T, a @ b),
    (mx.addmm(mx.array(c), mx.array(a), mx.array(b), 0.5, 2.0), 2 * c + 0.5 * (a @ b)),
):
    assert np.abs(np.array(got) - want).max() < 1e-4
loaded = open("/proc/self/maps").read()
print("libpionblas" in loaded)
"""


@pytest.fixture
def no_system_blas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without OpenBLAS packages and with an empty cache; returns the cache folder."""
    monkeypatch.setattr(blas, "_SYSTEM_LIBRARIES", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PION_BLAS", raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return tmp_path / "pion" / "blas"


@linux
@compiler
@pytest.mark.parametrize("arguments", [[], ["preload"]])
def test_shim_multiplies_correctly(no_system_blas: Path, arguments: list[str]) -> None:
    shim = blas.find_blas()
    assert shim is not None
    assert shim.parent == no_system_blas
    env = dict(os.environ, PION_BLAS=str(shim))
    if not arguments:
        env["LD_PRELOAD"] = str(shim)
    command = [sys.executable, "-c", _PRODUCTS, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "True"


@linux
@compiler
def test_shim_is_built_once(no_system_blas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = blas.find_blas()
    assert [path.name for path in no_system_blas.iterdir()] == [first and first.name]

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert blas.find_blas() == first


@linux
def test_without_compiler_there_is_a_notice_and_no_path(
    no_system_blas: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert blas.main() == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "apt-get install libopenblas0-pthread" in said.err


@linux
@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_library_that_cannot_be_loaded_is_not_offered(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dynamic linker stops every program when a preloaded library lacks something."""
    broken = tmp_path / "libopenblas.so.0"
    broken.write_bytes(content)
    monkeypatch.setenv("PION_BLAS", str(broken))
    assert blas.find_blas() is None
    assert "LD_PRELOAD" not in blas.child_environment({"PATH": "/bin"})


def test_off_means_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PION_BLAS", "off")
    assert blas.find_blas() is None
    assert blas.child_environment({"A": "1"}) == {"A": "1"}


@pytest.mark.parametrize(
    ("library", "before", "after"),
    [
        ("/lib/blas.so", "", "/lib/blas.so"),
        ("/lib/blas.so", "/lib/other.so", "/lib/blas.so:/lib/other.so"),
        ("/lib/blas.so", "/lib/other.so:/lib/blas.so", "/lib/other.so:/lib/blas.so"),
        ("/home/a b/blas.so", "/lib/other.so", "/lib/other.so"),
    ],
)
def test_child_gets_the_library_once_beside_what_was_there(
    library: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "find_blas", lambda: Path(library))
    env = blas.child_environment({"LD_PRELOAD": before, "HOME": "/h"})
    assert env == {"LD_PRELOAD": after, "HOME": "/h"}


def test_preloading_after_mlx_is_an_error_not_a_silent_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blas, "find_blas", lambda: Path("/lib/blas.so"))
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    with pytest.raises(RuntimeError, match="before mlx is imported"):
        blas.preload_blas()


@pytest.mark.parametrize(
    ("chosen", "platform", "expected"),
    [
        ("/elsewhere", "linux", "/elsewhere/pion"),
        ("relative", "linux", "/home/u/.cache/pion"),
        ("", "linux", "/home/u/.cache/pion"),
        ("", "darwin", "/home/u/Library/Caches/pion"),
    ],
)
def test_cache_home_follows_the_platform(
    chosen: str, platform: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_home() == Path(expected)
