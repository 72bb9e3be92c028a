"""Strict numerics: memory saved by each format, attention in the server against the CPU's float64.

Runs `python -m evals.bench strict_numerics`, whose docstring says what to expect.
"""

from __future__ import annotations

import sys

from evals.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["strict_numerics"]))
