"""What the README says can be typed as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.mark.model
def test_examples_miss_then_hit_then_do_without_a_server(
    server: Callable[..., Any], tmp_path: Path
) -> None:
    quick_start, shared_prefix, retrieval = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    running = server()
    script = tmp_path / "example.py"

    def run(code: str) -> list[str]:
        script.write_text(code.replace("port=1974", f"port={running.port}"))
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
        )
        return done.stdout.splitlines()

    first, second = run(quick_start), run(quick_start + shared_prefix + retrieval)
    running.kill()
    third = run(quick_start)
    assert "7 to 10" in first[0]
    assert first[0] == second[0] == third[0]
    assert "'misses': 1, " in first[-1]
    answer, stats = second[: len(first) - 1], second[len(first) - 1]
    assert "'hits': 1, " in stats
    rest = second[len(first) :]
    assert rest[: len(answer)] == answer
    one, several = rest[len(answer) :]
    assert "1612" in one
    assert "37 metres" in several
    assert "'misses': 1, " in third[-1]


def test_every_make_target_named_exists() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", README)) | set(
        re.findall(r"'make ([a-z-]+)", makefile)
    )
    assert {"demo", "test", "check"} <= named
    assert named <= targets


def test_every_file_linked_exists() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []
