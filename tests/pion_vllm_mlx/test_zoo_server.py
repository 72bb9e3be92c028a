"""Every model family of mlx-lm through a real server: stored by one process, restored by another.

One process builds each model, prefills and stores through `PionPromptCache`, and continues from
its own cache. The server is killed and restarted. A fresh process builds the models again, gets
every prefix from the server and continues: the largest difference of any logit is exactly 0.0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pion_patches.shipping import largest_difference
from tests.pion_patches.zoo import CHUNK, RECENT, WINDOW, families, left_out
from tests.pion_vllm_mlx.zoo_worker import Case, Job, write_job

Server = Any
ROOT = Path(__file__).parents[2]
#: Far more seconds than a process takes, alone.
PATIENCE = 600
#: Two sessions a prefix; the default, 256 in all, would evict the first ones.
ROOM = ("--vstore-sessions", "1024")
pytestmark = pytest.mark.timeout(2 * PATIENCE + 60)

WHOLE = [Case(family) for family in families]
#: One family a cache shape, without experts, whose weights a CPU gathers in float32 only.
HALVES = [
    Case(family, dtype, changes=changes)
    for family, changes in {
        "llama": {},
        "gemma3": {},
        "gemma3n": {},
        "qwen3_5": {},
        "mamba2": {},
        "rwkv7": {},
        "baichuan_m1": {},
        "recurrent_gemma": {},
        "deepseek_v3": {"first_k_dense_replace": 4},
        "llama4": {"interleave_moe_layer_step": 5},
    }.items()
    for dtype in ("float16", "bfloat16")
]
#: A07: windows, chunks and the 256-row steps of a buffer end at these lengths.
BOUNDARIES = [
    Case(family, prefix=prefix)
    for family in ("llama", "gemma3_text", "qwen3_5", "baichuan_m1", "llama4")
    for prefix in sorted({1, WINDOW - 1, WINDOW, WINDOW + 1, 255, 256, 257, CHUNK + 1})
]
CASES = [*WHOLE, *HALVES, *BOUNDARIES]
#: Those that cannot run are skipped with MLX's own words.
ALL_HALVES = [Case(family, dtype) for family in families for dtype in ("float16", "bfloat16")]


@dataclass(frozen=True)
class Outcomes:
    """What both processes of a run wrote."""

    directory: Path
    stored: dict[str, Any]
    restored: dict[str, Any]

    def check(self, case: Case) -> None:
        """Fail unless the case was stored, hit, and continued bit for bit; skip what cannot run."""
        stored, restored = self.stored[case.name], self.restored[case.name]
        if "unrunnable" in stored:
            pytest.skip(stored["unrunnable"])
        assert "stats" in stored, stored
        assert "stats" in restored, restored
        assert stored["stats"]["misses"] == stored["stats"]["stores"] == 1
        assert stored["prefilled"] == [case.prefix]
        assert stored["matters"], "the continuation is the same without the prefix"
        assert restored["stats"]["hits"] == 1
        assert restored["stats"]["hits_in_process"] == restored["stats"]["misses"] == 0
        assert restored["stats"]["tokens_restored"] == case.prefix
        assert restored["stats"]["prefill_ms_total"] == 0
        assert restored["prefilled"] == []
        cold, warm = (
            np.load(self.directory / f"{case.name}@{role}.npy") for role in ("store", "restore")
        )
        assert largest_difference(warm, cold) == 0.0


def run_both(server: Server, directory: Path, cases: Sequence[Case]) -> Outcomes:
    """The storing process, a killed and restarted server, the restoring process."""
    job = directory / "job.json"
    write_job(job, Job(server.port, str(directory), cases))
    stored = run_worker("store", job)
    server.kill()
    server.restart()
    return Outcomes(directory, stored, run_worker("restore", job))


def run_worker(role: str, job: Path) -> dict[str, Any]:
    """A process's report; its exit status says nothing, for a CPU build of MLX may abort."""
    subprocess.run(
        [sys.executable, "-m", "tests.pion_vllm_mlx.zoo_worker", role, str(job)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "patches")])},
        timeout=PATIENCE,
        check=False,
    )
    report: dict[str, Any] = json.loads((job.parent / f"{role}.json").read_text())
    return report


def tell(report: dict[str, Any]) -> Counter[str]:
    """How many cases went which way, printed with every reason."""
    counts = Counter("run" if "stats" in each else next(iter(each)) for each in report.values())
    reasons = Counter(next(iter(each.values())) for each in report.values() if "stats" not in each)
    print(f"{dict(counts)}; reasons: {dict(reasons)}; not built: {left_out}")
    return counts


@pytest.fixture(scope="module")
def outcomes(
    module_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    return run_both(module_server(*ROOM), tmp_path_factory.mktemp("zoo"), CASES)


@pytest.fixture(scope="module")
def halves(
    module_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    return run_both(module_server(*ROOM), tmp_path_factory.mktemp("halves"), ALL_HALVES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_family_restored_in_a_fresh_process_continues_bit_for_bit(
    outcomes: Outcomes, case: Case
) -> None:
    outcomes.check(case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", ALL_HALVES, ids=lambda case: case.name)
def test_family_restored_in_half_precision_continues_bit_for_bit(
    halves: Outcomes, case: Case
) -> None:
    halves.check(case)


def test_no_family_that_runs_is_refused(outcomes: Outcomes) -> None:
    """The count of the zoo; a family mlx-lm has and this test has not is left out for a reason."""
    counts = tell(outcomes.restored)
    assert counts == {"run": len(CASES)}
    assert len(WHOLE) >= (124 if RECENT else 100)


@pytest.mark.nightly
def test_families_without_half_precision_are_those_with_experts(halves: Outcomes) -> None:
    """MLX gathers the experts' weights in float32 only on a CPU."""
    counts = tell(halves.restored)
    assert counts.keys() == {"run", "unrunnable"}
    assert counts["run"] >= (154 if RECENT else 100)
