"""Head to head: attention in the server against bare MLX, as the design measures it.

Runs `python -m evals.bench attend`, whose docstring says what to expect.
"""

from __future__ import annotations

import sys

from evals.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["attend"]))
