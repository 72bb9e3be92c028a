"""The frame: what a run leaves, what a report says, and that nothing is written over."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

import evals.bench
import evals.tables
from evals.__main__ import main
from evals.findings import Bar, Findings, Plot, Quoted, Table
from evals.provenance import describe_machine, save_result
from evals.registry import load_module, module_names, title_of
from evals.report import newest_results, write_report
from evals.running import run_eval
from evals.setting import Setting
from evals.texts import DATA, read_long_text, read_prompts, read_queries

FINDINGS = Findings(
    figures={"bleu": 0.5},
    tables=[Table("A table", ("a", "b"), [("x|y", 0.12345), (None, 12345.6)], "A note.")],
    plots=[
        Plot("lines", "Lines", "tokens", "ms", {"one": [(1, 2.0), (2, 3.0)]}, log=True),
        Plot("words", "Words", "format", "BLEU", {"a": [("fp16", 1.0)], "b": [("fp16", 0.4)]}),
    ],
    bars=[Bar("held", 1.0, 1.0), Bar("slow", 2.0, 3.0, decides=False), Bar("absent", None, 1.0)],
    quoted=[Quoted("speed", "9 ms", "7 ms"), Quoted("on a Mac", "5 ms")],
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """An eval named `bleu` that finds `fake.findings`, or fails where that is an exception."""
    fake = types.SimpleNamespace(findings=FINDINGS, setting=None)

    def run(setting: Setting) -> Findings:
        fake.setting = setting
        if isinstance(fake.findings, Exception):
            raise fake.findings
        found: Findings = fake.findings
        return found

    module: Any = types.ModuleType("fake", "A fake eval.\n\nMore.")
    module.run = run
    monkeypatch.setattr("evals.running.load_module", lambda package, name: module)
    return fake


def test_every_eval_of_the_house_is_there_and_says_what_it_expects() -> None:
    wanted = {"bleu", "cross_instance", "formats", "hybrid", "niah", "ttft", "workload"}
    assert wanted <= set(module_names(evals.tables))
    for name in module_names(evals.tables):
        module = load_module(evals.tables, name)
        assert callable(module.run)
        assert title_of(module).endswith(".")
        assert "Expected" in (module.__doc__ or "")
    assert "formats_error" in module_names(evals.bench)


def test_a_run_leaves_json_with_its_environment_then_a_report(
    fake: types.SimpleNamespace, tmp_path: Path
) -> None:
    assert main(["bleu", "--fraction", "0.5", "--seed", "7", "--out", str(tmp_path)]) == 0
    assert fake.setting == Setting(None, 0.5, 7)
    (path,) = tmp_path.glob("eval-bleu-*.json")
    document = json.loads(path.read_text())
    assert document["result"]["figures"] == {"bleu": 0.5}
    assert (document["fraction"], document["seed"]) == (0.5, 7)
    assert {"cpu", "system", "versions", "revision", "python"} <= set(document["machine"])
    assert document["command"].startswith("python ")
    report = (tmp_path / "report.md").read_text()
    for text in (
        "## bleu: A fake eval.",
        "Part of the full run: `--fraction 0.5`",
        "| x\\|y | 0.1235 |",
        "| - | 12346 |",
        "| held | at least 1 | 1 | holds |",
        "| slow | at least 3 | 2 | **missed** |",
        "| absent | at least 1 | not measured |  |",
        "design document, Apple Silicon, not measured here",
        "| speed | 9 ms | 7 ms |",
        "| on a Mac | 5 ms | not measured |",
        "![Lines](bleu-lines.png)",
        path.name,
    ):
        assert text in report
    assert (tmp_path / "bleu-lines.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "bleu-words.png").stat().st_size > 5000


def test_a_command_is_told_without_folders_of_this_machine(
    fake: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["/usr/bin/python3", "-m", "evals", "bleu", "--out", "/home/me/full", "--seed=/x/7"]
    monkeypatch.setattr("sys.orig_argv", words)
    fake.findings = Findings(figures={}, model="a random model")
    assert run_eval("bleu", Setting(), tmp_path)
    (document,) = newest_results(tmp_path)
    assert document["command"] == "python -m evals bleu --out full --seed=7"
    assert document["model"] == "a random model"


def test_nothing_is_written_over(tmp_path: Path) -> None:
    machine = describe_machine()
    paths = [save_result("eval-x", machine, {"n": n}, tmp_path) for n in range(3)]
    assert len(set(paths)) == 3
    assert [json.loads(path.read_text())["result"]["n"] for path in paths] == [0, 1, 2]


def test_the_report_takes_the_newest_result_of_each_eval(
    fake: types.SimpleNamespace, tmp_path: Path
) -> None:
    for number in range(3):
        fake.findings = Findings(figures={"number": number})
        assert run_eval("bleu", Setting(), tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 3
    (newest,) = newest_results(tmp_path)
    assert newest["result"]["figures"] == {"number": 2}


def test_a_report_is_made_again_from_the_files_alone(
    fake: types.SimpleNamespace, tmp_path: Path
) -> None:
    assert main(["bleu", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    (tmp_path / "report.md").unlink()
    fake.findings = RuntimeError("must not be run")
    assert main(["report", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "report.md").read_text() == text


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        (Findings(figures={}, bars=[Bar("exact", 0.9, 1.0)]), 1),
        (Findings(figures={}, bars=[Bar("time", 0.9, 1.0, decides=False)]), 0),
        (Findings(figures={}, bars=[Bar("absent", None, 1.0)]), 0),
        (RuntimeError("no server"), 1),
    ],
)
def test_only_a_failure_or_a_missed_bar_that_decides_fails_the_run(
    fake: types.SimpleNamespace, tmp_path: Path, findings: Any, status: int
) -> None:
    fake.findings = findings
    assert main(["bleu", "--out", str(tmp_path)]) == status


def test_an_unknown_eval_and_a_senseless_fraction_are_refused(tmp_path: Path) -> None:
    for argv in (["nothing"], ["bleu", "--fraction", "0"], ["bleu", "--fraction", "2"]):
        with pytest.raises(SystemExit):
            main([*argv, "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="fraction"):
        Setting(fraction=1.5)


def test_a_fraction_scales_counts_but_never_to_nothing() -> None:
    assert Setting(fraction=0.1).count(20) == 2
    assert Setting(fraction=0.01).count(20) == 1
    assert Setting(fraction=0.1).count(1024, 256) == 256
    assert Setting().count(20, 30) == 20
    assert Setting(fraction=0.3).take("abcde") == ["a", "b"]


def test_a_report_of_an_empty_folder_says_so_little_and_does_not_fail(tmp_path: Path) -> None:
    assert write_report(tmp_path / "new").read_text().startswith("# Results")


def test_the_data_are_twenty_questions_on_five_prompts_with_licences_named() -> None:
    prompts = read_prompts()
    assert len(prompts) == 5
    assert sum(len(prompt.questions) for prompt in prompts) == 20
    assert len({question for prompt in prompts for question in prompt.questions}) == 20
    queries = read_queries(prompts[0], 30)
    assert len(set(queries)) == 30
    assert queries[:4] == list(prompts[0].questions)
    readme = (DATA / "README.md").read_text()
    for path in DATA.iterdir():
        assert path.name == "README.md" or f"`{path.name}`" in readme
    assert len(read_long_text()) > 60_000
