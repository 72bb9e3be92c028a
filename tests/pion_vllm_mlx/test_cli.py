"""The command line: help, usage errors, exit statuses, and the demo's own judgement."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pion_vllm_mlx import cli, demo
from pion_vllm_mlx.demo_request import NoOutcome, Outcome, make_prompt, read_outcome

REPOSITORY = Path(__file__).parents[2]
OUTCOME = Outcome(
    hit=True, prefix_tokens=64, ready=0.2, ttft=0.5, store=0.0, fetch=0.1, tokens=[5, 6], text="ok"
)


def run_cli(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pion_vllm_mlx.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for name in cli.SUBCOMMANDS:
        assert f"\n    {name} " in text
    assert "130 interrupted" in text


def test_help_and_blas_need_no_mlx() -> None:
    """Help must come at once, and a BLAS can only be preloaded before MLX is imported."""
    code = (
        "import sys, pion_vllm_mlx.blas, pion_vllm_mlx.cli as c\n"
        "c._build_parser()\n"
        "print([m for m in ('mlx', 'mlx_lm', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_is_the_installed_one() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    done = run_cli("--version")
    assert (done.returncode, done.stdout) == (0, f"pion-vllm-mlx {project['version']}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["demo", "--prefix-tokens", "none"],
        ["demo", "--prefix-tokens", "-5"],
        ["demo", "--prefix-tokens", "15"],
        ["demo", "--unknown"],
    ],
)
def test_wrong_usage_is_status_2_with_the_usage_on_stderr(arguments: list[str]) -> None:
    done = run_cli(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "usage: pion-vllm-mlx" in done.stderr
    assert "Traceback" not in done.stderr


def test_model_that_cannot_be_loaded_is_status_1_and_one_line(tmp_path: Path) -> None:
    done = run_cli("demo", "--model", str(tmp_path / "absent"), "--prefix-tokens", "16")
    assert done.returncode == 1
    assert "pion-vllm-mlx demo: A" in done.stderr.splitlines()[-1]


def test_interrupt_is_status_130_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert cli.main(["demo"]) == 130


def test_terminated_demo_takes_its_children_along(tmp_path: Path) -> None:
    """SIGTERM in the middle of process A: no server, no child and no folder stays behind."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    # A model folder whose config never arrives: process A blocks while it reads the pipe.
    model = tmp_path / "model"
    model.mkdir()
    os.mkfifo(model / "config.json")
    command = [sys.executable, "-m", "pion_vllm_mlx.cli", "demo", "--model", str(model)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    try:
        folder = _wait_for(lambda: next(tmp_path.glob("pion-demo-*"), None))
        _wait_for(lambda: (folder / "A.log").exists() or None)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert not folder.exists()
    assert _processes_naming(str(folder)) == []


@pytest.mark.model
def test_three_processes_and_a_killed_server_give_the_same_tokens() -> None:
    """The demo itself, on a short prefix of the real model."""
    done = run_cli("demo", "--prefix-tokens", "64", timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "50 greedy tokens of A, B, C identical" in lines
    # 30 layers, keys and values, 192 float32 a row.
    assert f"bytes stored {64 * 30 * 2 * 192 * 4:,}" in lines
    assert [line.split()[0] for line in lines if "fetched" in line and " s " in line] == ["B", "C"]


def test_outcomes_as_promised_are_no_problem() -> None:
    assert demo._verdict([replace(OUTCOME, hit=False), OUTCOME, OUTCOME]) is None


@pytest.mark.parametrize(
    ("outcomes", "problem"),
    [
        ([replace(OUTCOME, hit=False), OUTCOME, replace(OUTCOME, tokens=[5, 7])], "differ"),
        (
            [replace(OUTCOME, hit=False), replace(OUTCOME, hit=False), OUTCOME],
            "got miss, miss, hit",
        ),
        ([OUTCOME, OUTCOME, OUTCOME], "got hit, hit, hit"),
    ],
)
def test_other_tokens_or_a_missed_hit_fail_the_demo(outcomes: list[Outcome], problem: str) -> None:
    assert problem in (demo._verdict(outcomes) or "")


def test_outcome_is_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    path.write_text(json.dumps(asdict(OUTCOME)))
    assert read_outcome(path) == OUTCOME


@pytest.mark.parametrize("text", [None, "", '{"hit": tr'])
def test_process_that_wrote_nothing_whole_has_no_outcome(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "outcome.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(NoOutcome, match="ended without a result"):
        read_outcome(path)


def test_error_a_process_wrote_down_is_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    path.write_text(json.dumps({"error": "UnsupportedCache: no"}))
    with pytest.raises(NoOutcome, match="UnsupportedCache: no"):
        read_outcome(path)


class Letters:
    """A tokenizer of one token a character, with a chat template."""

    chat_template = "yes"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool
    ) -> list[int]:
        assert add_generation_prompt
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<reply>")


@pytest.mark.parametrize("length", [16, 1024, 50_000])
def test_prompt_has_exactly_the_asked_prefix_and_ends_with_the_question(length: int) -> None:
    tokenizer: Any = Letters()
    prefix, suffix = make_prompt(tokenizer, length)
    assert len(prefix) == length
    assert tokenizer.decode(prefix).startswith("<user>Handbook o")
    assert tokenizer.decode(suffix).endswith("Which two boats are there?<reply>")


def _wait_for(probe: Any, seconds: float = 30.0) -> Any:
    ends = time.monotonic() + seconds
    while (found := probe()) is None:
        assert time.monotonic() < ends, "gave up waiting"
        time.sleep(0.05)
    return found


def _processes_naming(text: str) -> list[str]:
    lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if text in line]
