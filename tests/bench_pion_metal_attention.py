"""Head to head: attention in the server against bare MLX, as the design measures it.

Runs `python -m evals.bench attend`, whose docstring says what to expect.
"""

from __future__ import annotations

from evals.reproduce import reproduce_bench

if __name__ == "__main__":
    reproduce_bench("attend")
