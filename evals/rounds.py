"""Measurements that stay comparable on a busy machine: interleaved rounds, medians, ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleave(
    contestants: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Call every contestant once a round, after one unmeasured round; seconds of each call.

    A machine that is busy for a moment is then busy for all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, call in contestants.items():
            started = time.perf_counter()
            call()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of every contestant's seconds."""
    return {name: statistics.median(values) for name, values in seconds.items()}
