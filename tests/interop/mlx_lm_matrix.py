"""The patches against every supported mlx-lm, each in a virtual environment of its own.

    python tests/interop/mlx_lm_matrix.py [--venvs DIR] [VERSION ...]

Versions are those of mlx-lm (default: the oldest supported one and the newest of each later series
that was tested). Environments are kept and reused under `--venvs`, else temporary. Runs the patch
tests that need no server and no real model, and exits 0 if all passed everywhere.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# mlx-lm, and the mlx it was tested with.
VERSIONS = {"0.31.3": "0.31.2", "0.32.2": "0.32.4"}
ROOT = Path(__file__).parents[2]
TESTS = [
    "test_lse.py",
    "test_patch.py",
    "test_patch_orderings.py",
    "test_attention_stock.py",
    "test_attention_prefix.py",
    "test_attention_report.py",
    "test_attention_families.py",
]


def make_environment(folder: Path, mlx_lm: str) -> Path:
    """Return the interpreter of an environment with that mlx-lm, made if it is not there."""
    python = folder / f"mlx-lm-{mlx_lm}" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    extra = "[cpu]" if sys.platform == "linux" else ""
    wanted = [f"mlx{extra}=={VERSIONS[mlx_lm]}", f"mlx-lm=={mlx_lm}"]
    tools = ["pytest>=8,<10", "pytest-timeout", "hypothesis"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted, *tools], check=True)
    return python


def run_tests(python: Path) -> bool:
    tests = [ROOT / "tests" / "pion_patches" / name for name in TESTS]
    command: list[str | Path] = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    # A BLAS preloaded for this interpreter serves the others just as well.
    return subprocess.run(command, cwd=ROOT, env=os.environ, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="versions of mlx-lm")
    parser.add_argument("--venvs", type=Path, help="where to keep the environments")
    options = parser.parse_args()
    versions = options.versions or list(VERSIONS)
    if unknown := [version for version in versions if version not in VERSIONS]:
        parser.error(f"no mlx is known to go with mlx-lm {unknown[0]}; known: {list(VERSIONS)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.venvs or Path(temporary)
        passed = {}
        for version in versions:
            print(f"== mlx-lm {version}, mlx {VERSIONS[version]}", flush=True)
            passed[version] = run_tests(make_environment(folder, version))
    for version, good in passed.items():
        print(f"mlx-lm {version}: {'passed' if good else 'FAILED'}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
