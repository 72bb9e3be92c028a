"""A real BLAS in front of MLX's own: float32 products on Linux, in fresh interpreters.

Expected: at least 10 times faster than the reference BLAS that MLX's wheel links; nothing to
compare on other systems. One thread each, processor time, so that other load counts little; a
square of 512 and the shapes of a small model's prefill.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from statistics import median
from typing import Any, Final

from pion_vllm_mlx.blas import child_environment, find_blas

#: Rows, inner, columns.
SHAPES: Final = ((512, 512, 512), (512, 576, 1536), (512, 1536, 576))
ROUNDS: Final = 3

_CHILD = """
import json, os, sys, time
import mlx.core as mx
figures = {}
for m, k, n in json.loads(sys.argv[1]):
    a, b = mx.random.normal((m, k)), mx.random.normal((k, n))
    mx.eval(a, b, a @ b)
    started = time.process_time()
    mx.eval(a @ b)
    figures[f"{m}x{k}x{n}"] = 2e-9 * m * k * n / (time.process_time() - started)
print(json.dumps(figures), flush=True)
os._exit(0)
"""


def run() -> Mapping[str, Any]:
    """GFLOP/s of every shape with and without, medians of interleaved rounds, and their ratio."""
    library = find_blas()
    if library is None:
        print("no other BLAS here: not measured")
        return {"library": None}
    found: dict[str, dict[str, list[float]]] = {"without": {}, "with": {}}
    for _ in range(ROUNDS):
        for way, rates in found.items():
            for shape, rate in _measure(way == "with").items():
                rates.setdefault(shape, []).append(rate)
    figures = {}
    for shape in found["with"]:
        both = {way: median(found[way][shape]) for way in found}
        figures[shape] = both | {"ratio": both["with"] / both["without"]}
        print(
            f"{shape:<16}{both['without']:>8.1f}{both['with']:>8.1f} GFLOP/s"
            f"{figures[shape]['ratio']:>8.1f}x"
        )
    least = min(figure["ratio"] for figure in figures.values())
    return {"library": library.name, "shapes": figures, "least_ratio": least}


def _measure(preload: bool) -> dict[str, float]:
    env = child_environment() | {"OPENBLAS_NUM_THREADS": "1"}
    if not preload:
        env.pop("LD_PRELOAD", None)
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(SHAPES)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


if __name__ == "__main__":
    run()
