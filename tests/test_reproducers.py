"""Reproducers and the design's tests: every one is listed, is there, and says what it expects."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REPRODUCERS = sorted((ROOT / "reproducers").glob("*.py"))
LISTED = (ROOT / "reproducers" / "README.md").read_text(encoding="utf-8")
MAP = (ROOT / "docs" / "design_tests.md").read_text(encoding="utf-8")

#: Every test and benchmark the design document names.
NAMED = [
    "bench_bleu_3b_stage2",
    "bench_g2_strict",
    "bench_pion_metal_attention",
    "bench_ttft",
    "bench_w1_stage2",
    "stage0_hybrid_kv_injection",
    "sweep_qwen3_5_warm_ttft",
    "test_attend_d512",
    "test_attend_prefix",
    "test_attend_prefix_batched",
    "test_attend_prefix_lse",
    "test_attend_prefix_merge",
    "test_attend_sparse_auto",
    "test_attend_sparse_auto_fused",
    "test_attend_sparse_kernel",
    "test_dropindex_grace",
    "test_hybrid_retrieval",
    "test_kv_prefix_admission",
    "test_kv_prefix_bleu",
    "test_kv_prefix_cross_instance",
    "test_kv_prefix_lru",
    "test_kv_prefix_mlx",
    "test_kv_prefix_prototype",
    "test_kv_prefix_workload",
    "test_kvprefix_autoredirect",
    "test_kvprefix_xworker",
    "test_lmcache_resp_connector",
    "test_mlx_lm_patch",
    "test_multitenant",
    "test_pion_lmcache",
    "test_prompt_cache_workload",
    "test_ssm_prefix_roundtrip",
    "test_vstore_wal",
    "test_wire_sparse_consumer",
]


@pytest.mark.parametrize("path", REPRODUCERS, ids=lambda path: path.name)
def test_a_reproducer_says_what_to_expect_where_and_how(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source)) or ""
    assert "Expected" in doc
    assert "Hardware: " in doc
    assert f"python reproducers/{path.name}" in doc
    assert f"[{path.name}]({path.name})" in LISTED


def test_the_list_of_reproducers_has_no_others() -> None:
    linked = re.findall(r"\]\((\w+\.py)\)", LISTED)
    assert sorted(linked) == [path.name for path in REPRODUCERS]


def test_the_map_names_every_test_of_the_design_once() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", MAP, re.MULTILINE)
    names = [Path(row).stem for row in rows]
    assert sorted(name for name in names if name != "mlx_lm_patch") == sorted(NAMED)


def test_what_the_map_points_to_is_there() -> None:
    for named, where in re.findall(r"^\| `([^`]+)` \| (.+) \|$", MAP, re.MULTILINE):
        if where.startswith("not yet: "):
            continue
        paths = [named] if where.startswith("the same") else re.findall(r"`([^`]+\.py)`", where)
        assert paths, where
        for path in paths:
            assert (ROOT / path).is_file(), path


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (
            "tests/test_prompt_cache_workload.py",
            ["--vquant", "--prompts", "--queries", "--prompt-repeats"],
        ),
        ("tests/bench_ttft.py", ["--start", "--prompt-tokens", "--runs"]),
        ("tests/test_kv_prefix_bleu.py", ["--questions", "--tokens", "--model"]),
        ("reproducers/stage2_ttft.py", ["--model", "--fraction"]),
    ],
)
def test_scripts_take_the_flags_that_are_printed(script: str, flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for flag in flags:
        assert flag in done.stdout
