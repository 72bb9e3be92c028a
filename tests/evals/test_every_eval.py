"""A small fraction of every eval, with the real model, as `python -m evals` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("matplotlib")

import evals.tables
from evals.registry import module_names
from pion_vllm_mlx.blas import child_environment

ROOT = Path(__file__).parents[2]


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", module_names(evals.tables))
def test_an_eval_ends_with_a_result_a_report_and_its_deciding_bars_held(
    name: str, tmp_path: Path
) -> None:
    flags = ["--fraction", "0.05", "--processes", "2", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "evals", name, *flags],
        cwd=ROOT,
        env=os.environ | child_environment(),
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (path,) = tmp_path.glob(f"eval-{name}-*.json")
    document = json.loads(path.read_text())
    assert document["fraction"] == 0.05
    told = f"python -m evals {name} --fraction 0.05 --processes 2 --out {tmp_path.name}"
    assert document["command"] == told
    assert document["result"]["figures"]
    assert f"## {name}:" in (tmp_path / "report.md").read_text()
