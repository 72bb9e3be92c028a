"""One process of the zoo test: gets a prefix of each tiny model, continues, writes both down.

    python -m tests.pion_vllm_mlx.zoo_worker store JOB.json
    python -m tests.pion_vllm_mlx.zoo_worker restore JOB.json

The job names a server's port, the cases, and a directory for what comes out: for each case the
logits (`<case>@<role>.npy`), and one report (`<role>.json`) written last, whole or not at all.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from pion_vllm_mlx import PionPromptCache, UnsupportedCache
from tests.pion_patches.shipping import DTYPES, continuation, largest_difference, token_ids
from tests.pion_patches.zoo import ONE_TOKEN_A_CALL, build

#: Weights no CPU build gathers in half precision.
NO_HALF = "GatherMM"
SEED = 1
#: Generous: the first answer of a server on a busy machine may take long.
PATIENT = 20.0


@dataclass(frozen=True)
class Case:
    """A model of the zoo and a prefix for it. `changes` are fields of its configuration."""

    family: str
    dtype: str = "float32"
    prefix: int = 40
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Unique within a run; a file name and a namespace."""
        return f"{self.family}-{self.dtype}-{self.prefix}"


@dataclass(frozen=True)
class Job:
    """What a process is asked for."""

    port: int
    directory: str
    cases: Sequence[Case]


def read_job(path: Path) -> Job:
    """The job in a file that `write_job` wrote."""
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return Job(loaded["port"], loaded["directory"], [Case(**case) for case in loaded["cases"]])


def write_job(path: Path, job: Job) -> None:
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")


def run_case(role: str, job: Job, case: Case) -> dict[str, Any]:
    """Get the prefix of one case, from the model or from the server, and continue 20 tokens."""
    model = _model_of(case.family, case.dtype, tuple(case.changes.items()))
    step = 1 if case.family in ONE_TOKEN_A_CALL else 512
    prefilled: list[int] = []
    try:
        with PionPromptCache(
            model,
            port=job.port,
            timeout=PATIENT,
            prefill_step_size=step,
            held_bytes=0,
            store="sync",
        ) as pc:
            cache = pc.get_or_prefill(
                token_ids(0, case.prefix), case.name, lambda done, _: prefilled.append(done)
            )
            stats = pc.stats()
    except UnsupportedCache as refusal:
        return {"refused": str(refusal)}
    except RuntimeError as error:
        if NO_HALF in str(error) and case.dtype != "float32":
            return {"unrunnable": str(error)}
        raise
    logits = continuation(case.family, model, cache, case.prefix)
    np.save(Path(job.directory) / f"{case.name}@{role}.npy", logits)
    outcome: dict[str, Any] = {"stats": stats, "prefilled": prefilled[-1:]}
    if role == "store":
        # What the model says without the prefix: were it the same, the test would show nothing.
        empty = continuation(case.family, model, make_prompt_cache(model), case.prefix, (1,))
        outcome["matters"] = largest_difference(empty, logits[:1]) > 1e-4
    return outcome


@functools.lru_cache(maxsize=1)
def _model_of(family: str, dtype: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    """Cases of one model follow each other: building it is the longer part of most."""
    return build(family, seed=SEED, dtype=DTYPES[dtype], **dict(changes))


def main(role: str, path: Path) -> None:
    """Run every case of a job; what fails is in the report under `error`."""
    job = read_job(path)
    report: dict[str, Any] = {}
    for case in job.cases:
        try:
            report[case.name] = run_case(role, job, case)
        except Exception as error:
            report[case.name] = {"error": f"{type(error).__name__}: {error}"}
        mx.clear_cache()
    partial = Path(job.directory) / f"{role}.partial"
    partial.write_text(json.dumps(report), encoding="utf-8")
    partial.rename(partial.with_suffix(".json"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    # A CPU build of MLX may abort while the interpreter shuts down.
    os._exit(0)
