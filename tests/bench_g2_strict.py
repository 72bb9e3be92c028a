"""Strict numerics: memory saved by each format, attention in the server against the CPU's float64.

Runs `python -m evals.bench strict_numerics`, whose docstring says what to expect.
"""

from __future__ import annotations

from evals.reproduce import reproduce_bench

if __name__ == "__main__":
    reproduce_bench("strict_numerics")
