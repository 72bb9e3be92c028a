"""Measurements that stay comparable on a busy machine: interleaved rounds, medians, ratios."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence


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


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """`ratio`, the median of the rounds' own ratios, and its 95% interval, `low` to `high`.

    Percentile bootstrap of 2,000 samples with a fixed seed. What disturbs a whole round cancels.
    """
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    samples = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {"ratio": statistics.median(ratios), "low": samples[50], "high": samples[1949]}
