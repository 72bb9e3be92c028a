"""Encode and decode speed of every storage format, in GB/s of fp32 on one core.

Expected: 0.3 GB/s or more in both directions, for each format. F32 rows of 1,024 normal numbers;
processor time of the one thread that does the work, best of several rounds, so that other load on
the machine counts little. Decoding includes the page faults of its fresh output.

    python -m evals.bench.formats_speed [--megabytes 64]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pion_server.formats import Format, InputType, format_names, make_format
from pion_server.payload import Buffer

FLOOR_GB_PER_S = 0.3
_DIM = 1024
_ROPE = 128
_ROUNDS = 7


def run(megabytes: int = 64) -> Mapping[str, Any]:
    """Measure, print the table, return `{"floor_gb_per_s", "megabytes", "formats"}`."""
    count = max(1, megabytes * 2**20 // (4 * _DIM))
    values = np.random.default_rng(0).standard_normal((count, _DIM), dtype=np.float32)
    print(f"{'format':<20} {'bytes/row':>9} {'mean error':>10} {'encode':>8} {'decode':>8}  GB/s")
    figures = {}
    for name in format_names():
        if name == "raw":
            continue
        made = make_format(name, _DIM, _ROPE if name == "bf16_rope_fp8_body" else 0)
        figures[name] = figure = _measure_format(made, values)
        print(
            f"{name:<20} {figure['row_bytes']:>9} {figure['mean_abs_error']:>10.2e}"
            f" {figure['encode_gb_per_s']:>8.2f} {figure['decode_gb_per_s']:>8.2f}",
            flush=True,
        )
    return {"floor_gb_per_s": FLOOR_GB_PER_S, "megabytes": megabytes, "formats": figures}


def _measure_format(made: Format, values: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, Any]:
    blob = memoryview(values.tobytes())
    stored = made.encode(blob, len(values), InputType.F32)
    error = float(np.abs(made.decode(stored) - values).mean(dtype=np.float64))
    # fp32 hands on the very bytes it was given, both ways: a copy stands for its work.
    verbatim = made.native is InputType.F32
    encode = _best_seconds(
        lambda: _touch(made.encode(blob, len(values), InputType.F32).body, verbatim)
    )
    decode = _best_seconds(lambda: _touch(made.decode(stored).data, verbatim))
    return {
        "row_bytes": made.row_bytes,
        "mean_abs_error": error,
        "encode_gb_per_s": blob.nbytes / encode / 1e9,
        "decode_gb_per_s": blob.nbytes / decode / 1e9,
    }


def _touch(data: Buffer, copy: bool) -> None:
    if copy:
        np.array(np.frombuffer(data, dtype=np.uint8))


def _best_seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.thread_time()
        work()
        best = min(best, time.thread_time() - started)
    return max(best, 1e-9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64, help="fp32 bytes a format (64)")
    run(parser.parse_args().megabytes)
