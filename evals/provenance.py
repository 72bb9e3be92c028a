"""Where a measurement was taken: machine, versions, revision. And results that are never lost."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("mlx", "mlx-lm", "numpy", "hiredis", "redis", "uvloop", "sacrebleu", "datasets")


def describe_machine() -> dict[str, Any]:
    """CPU, memory, system, versions, git revision and load now, all JSON-able."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {_kernel()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "blas": _blas_name(),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS"),
        "revision": _revision(),
        "load_1min": round(os.getloadavg()[0], 2),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def describe_in_words(machine: Mapping[str, Any]) -> str:
    """One line to put under a table."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB,"
        f" {machine['system']}; Python {machine['python']}, {versions};"
        f" BLAS {machine['blas'] or 'as built'} ({machine['blas_threads'] or 'all'} threads);"
        f" revision {machine['revision']}; load {machine['load_1min']}"
    )


def command_line() -> str:
    """How this process was called, without where on this machine folders lie."""
    return " ".join(["python", *map(_without_folder, sys.orig_argv[1:])])


def _without_folder(word: str) -> str:
    flag, equals, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
    return f"{flag}{equals}{Path(value).name if value.startswith('/') else value}"


def save_result(
    name: str,
    machine: Mapping[str, Any],
    result: Mapping[str, Any],
    folder: Path = RESULTS,
    **facts: Any,
) -> Path:
    """Write ``<folder>/<name>-<time>.json`` and return its path; never over an older file.

    facts: what else belongs to the run, such as the model and the seed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stamp = str(machine["time"]).replace(":", "").replace("-", "")
    document = {
        "name": name,
        "command": command_line(),
        "machine": machine,
        **facts,
        "result": result,
    }
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    for number in range(1000):
        path = folder / f"{name}-{stamp}{f'-{number}' if number else ''}.json"
        try:
            with path.open("x") as file:
                file.write(text)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"a thousand results named {name}-{stamp}")


def _blas_name() -> str | None:
    """The library in front of MLX's own, preloaded by the linker or by `preload_blas`."""
    if preloaded := os.environ.get("LD_PRELOAD", ""):
        return Path(preloaded.split(":")[0]).name
    if sys.platform != "linux":
        return None
    from pion_vllm_mlx.blas import find_blas

    library = find_blas()
    mapped = Path("/proc/self/maps").read_text()
    return library.name if library and str(library.resolve()) in mapped else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _revision() -> str:
    revision = _output(["git", "rev-parse", "--short", "HEAD"]) or "unknown"
    return f"{revision}+changes" if _output(["git", "status", "--porcelain", "-uno"]) else revision


def _kernel() -> str:
    """Its number. Who built it, which may follow, says nothing about a figure."""
    return platform.release().partition("-")[0]


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
