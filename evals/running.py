"""Running evals, one after another or some at once, and keeping what they find."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import evals.tables
from evals.provenance import command_line, describe_in_words, describe_machine, save_result
from evals.registry import load_module, title_of
from evals.setting import Setting
from pion_vllm_mlx.blas import preload_blas


def run_eval(name: str, setting: Setting, folder: Path, command: str | None = None) -> bool:
    """Run one eval and save what it found; False if it failed or missed a bar that decides.

    command: the command line that led here, where it is not this process's own.
    """
    machine = describe_machine()
    started = time.perf_counter()
    try:
        module = load_module(evals.tables, name)
        print(f"\n== {name}: {title_of(module)}", flush=True)
        findings = module.run(setting)
        path = save_result(
            f"eval-{name}",
            machine,
            findings.as_document(),
            folder,
            title=title_of(module),
            model=findings.model or setting.model_name,
            fraction=setting.fraction,
            seed=setting.seed,
            seconds=round(time.perf_counter() - started, 1),
            command=command or command_line(),
        )
    except Exception:
        traceback.print_exc()
        return False
    print(f"-- {time.perf_counter() - started:.1f} s, {describe_in_words(machine)}")
    print(f"-- {os.path.relpath(path)}", flush=True)
    for bar in findings.failures():
        print(f"-- MISSED: {bar.what}: {bar.measured} is less than {bar.least}", file=sys.stderr)
    return not findings.failures()


def run_evals(names: Sequence[str], setting: Setting, folder: Path, processes: int) -> list[str]:
    """Run evals, those that are not timed first and in so many processes; the failed ones."""
    done: dict[str, bool] = {}
    # A named model is a large one: it is not loaded twice.
    if processes > 1 and setting.model is None:
        untimed = [name for name in names if not _is_timed(name)]
        pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=preload_blas)
        with pool:
            running = {
                name: pool.submit(run_eval, name, setting, folder, command_line())
                for name in untimed
            }
            done = {name: outcome.result() for name, outcome in running.items()}
    for name in names:
        if name not in done:
            done[name] = run_eval(name, setting, folder)
    return [name for name in names if not done[name]]


def _is_timed(name: str) -> bool:
    return bool(getattr(load_module(evals.tables, name), "TIMED", True))
