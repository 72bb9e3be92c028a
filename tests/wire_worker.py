"""A fresh process that holds no prefix: it generates with the patch, through the wire.

    python -m tests.wire_worker JOB.json

After half of the tokens it prints "half" and waits for a line, so that things can happen to the
server meanwhile. What it generated goes to the file the job names.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from pion_patches.remote import RemoteKVCache
from pion_vllm_mlx import (
    PionPromptCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
)
from pion_vllm_mlx.small_model import load_small_model


@dataclass(frozen=True)
class Job:
    """What to generate. `sparse`: settings of ``sparse_full_layers``, None for dense attention."""

    port: int
    namespace: str
    prefix_tokens: int
    rest: list[int]
    count: int
    lanes: list[str]
    outcome: str
    sparse: dict[str, Any] | None = None


def generate(model: Any, job: Job, lane: str) -> dict[str, Any]:
    """Tokens and figures of one lane."""
    port = {"binary": None, "resp": 0}[lane]
    with PionPromptCache(model, port=job.port, stage2=True, binary_port=port, timeout=5) as pc:
        cache = make_pion_prompt_cache(
            model, job.namespace, pc, job.prefix_tokens, sparse_full_layers=job.sparse
        )
        remote = sum(isinstance(one, RemoteKVCache) for one in cache)
        tokens: list[int] = []
        for token, _ in generate_step(
            mx.array(job.rest), model, max_tokens=job.count, prompt_cache=cache
        ):
            tokens.append(int(token))
            if len(tokens) == job.count // 2:
                print("half", flush=True)
                sys.stdin.readline()
        stats, again = pc.stats(), pc.cold_rehydrates_observed
    return {"tokens": tokens, "remote": remote, "stats": stats, "rehydrates": again}


def main(path: Path) -> None:
    job = Job(**json.loads(path.read_text()))
    model, _ = load_small_model()
    install_pion_attention_patch()
    outcome = {lane: generate(model, job, lane) for lane in job.lanes}
    Path(job.outcome).write_text(json.dumps(outcome))


def write_job(path: Path, job: Job) -> None:
    path.write_text(json.dumps(asdict(job)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # A CPU build of MLX may abort while the interpreter shuts down.
    os._exit(0)
