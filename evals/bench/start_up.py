"""Starting a server on an empty directory: seconds until its ready line.

Expected: under 0.5 s, as a module and as the console script; 0.3 s on a quiet machine. Beside it
stands `python -c pass`, which says how fast the machine is. Whole new processes, taken in turns;
without byte code on disk (PYTHONDONTWRITEBYTECODE in a tree never compiled) half as long again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.rounds import medians

ROUNDS = 15
PASS = "python -c pass"
_WAYS = {
    PASS: [sys.executable, "-c", "print('ready')"],
    "python -m pion_server": [sys.executable, "-m", "pion_server"],
    "pion-server": [str(Path(sys.executable).with_name("pion-server"))],
}


def run() -> Mapping[str, Any]:
    """Median seconds of each way, and as multiples of an interpreter that does nothing."""
    taken: dict[str, list[float]] = {way: [] for way in _WAYS}
    for number in range(ROUNDS + 1):
        for way, words in _WAYS.items():
            took = _seconds_until_ready(words)
            if number:  # the first round is a warm-up
                taken[way].append(took)
    seconds = medians(taken)
    ratios = {way: seconds[way] / seconds[PASS] for way in _WAYS}
    for way in _WAYS:
        print(f"{way:<24}{seconds[way]:>8.3f} s{ratios[way]:>8.1f}x")
    return {"seconds": seconds, "times python -c pass": ratios}


def _seconds_until_ready(words: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory(prefix="pion-bench-") as name:
        started = time.perf_counter()
        process = subprocess.Popen(
            [*words, "--port", "0", "--dir", name], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process, process.stdout:
            if not any("ready" in line for line in process.stdout):
                raise RuntimeError(f"{words[-1]} ended without a ready line")
            seconds = time.perf_counter() - started
            process.terminate()
    return seconds
