"""The attention patch in every order of importing, patching and unpatching."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.pion_patches import patch_orderings


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str | None]:
    done = subprocess.run(
        [sys.executable, patch_orderings.__file__],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", patch_orderings.ORDERINGS)
def test_ordering(name: str, verdicts: dict[str, str | None]) -> None:
    """CASES O10: patched and unpatched state is right in both, plain caches bit for bit."""
    assert verdicts[name] is None, verdicts[name]
