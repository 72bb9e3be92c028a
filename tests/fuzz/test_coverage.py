"""The targets under atheris, which looks for inputs that reach new code. Nightly."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import DICTIONARY, TARGETS

SECONDS = 30

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("atheris") is None,
        reason="atheris is not installed: pip install -e '.[fuzz]' (Linux)",
    ),
]


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_found_in_a_while_breaks_the_promise(name: str, tmp_path: Path) -> None:
    words = tmp_path / "words"
    quoted = ("".join(f"\\x{byte:02x}" for byte in word) for word in DICTIONARY[name])
    words.write_text("".join(f'"{word}"\n' for word in quoted))
    limits = [f"-max_total_time={SECONDS}", "-rss_limit_mb=2048", "-max_len=2048", "-timeout=20"]
    found = f"-artifact_prefix={tmp_path}/"
    command = [sys.executable, "-m", "tests.fuzz.coverage", name, *limits, found, f"-dict={words}"]
    ended = subprocess.run(
        [*command, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=SECONDS + 200,
        cwd=Path(__file__).parents[2],
    )
    broken = {path.name: path.read_bytes() for path in tmp_path.glob("crash-*")}
    assert ended.returncode == 0, (broken, ended.stderr[-3000:])
    assert "Done " in ended.stderr
