"""The attention patch on a real model: a fresh process generates what vanilla mlx-lm does.

python tests/test_mlx_lm_patch.py      # as pytest runs it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.small_model import load_small_model
from tests.pion_patches.test_attention_model import QUESTION, SYSTEM
from tests.wire_worker import Job, write_job

ROOT = Path(__file__).parents[1]
NAMESPACE = "library"
TOKENS = 50


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=count)]


def run_worker(job: Path, at_half: Callable[[], None]) -> dict[str, Any]:
    """What the worker wrote; `at_half` is called once for each lane."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.wire_worker", str(job)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "patches")])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        for line in worker.stdout:
            if line == "half\n":
                at_half()
                worker.stdin.write("\n")
                worker.stdin.flush()
    outcome: dict[str, Any] = json.loads(Path(json.loads(job.read_text())["outcome"]).read_text())
    return outcome


@pytest.mark.model
def test_a_fresh_process_generates_through_the_wire_what_vanilla_does(
    server: Callable[..., Any], tmp_path: Path
) -> None:
    """50 greedy tokens on either lane, the server killed and restarted half-way."""
    model, tokenizer = load_small_model()
    prefix, rest = tokenizer.encode(SYSTEM), tokenizer.encode(QUESTION)
    vanilla = greedy(model, prefix + rest, TOKENS)
    running = server("--kvcache", "--metal-attention", "-w", "1")
    with PionPromptCache(model, port=running.port, stage2=True, timeout=5) as pc:
        pc.get_or_prefill(prefix, NAMESPACE)
        assert pc.flush()
        assert pc.lookup(NAMESPACE)

    def kill_and_restart() -> None:
        running.kill()
        running.restart()

    job = tmp_path / "job.json"
    lanes = ["binary", "resp"]
    outcome = str(tmp_path / "outcome.json")
    write_job(job, Job(running.port, NAMESPACE, len(prefix), rest, TOKENS, lanes, outcome))
    said = run_worker(job, kill_and_restart)
    for lane in lanes:
        one, stats = said[lane], said[lane]["stats"]
        assert one["tokens"] == vanilla
        assert one["remote"] == 30
        assert one["rehydrates"] >= 1
        assert stats["misses"] == stats["wire_losses"] == stats["bytes_fetched"] == 0
        assert stats[f"attend_{lane}"] >= 30 * TOKENS
        assert stats["attend_binary"] + stats["attend_resp"] == stats[f"attend_{lane}"]


if __name__ == "__main__":
    sys.path.insert(0, os.fspath(ROOT))
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
