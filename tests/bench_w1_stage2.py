"""Stage 2 by lane: RESP, binary lane, in process, and vanilla.

python tests/bench_w1_stage2.py [--start] [--prompts 5] [--queries 20] [--length 512]

Measures as `python -m evals.bench stage2` does, whose docstring says what to expect. The design
asks 5 prompts 20 questions each, of Llama-3.2-1B-Instruct-4bit on Apple Silicon:
`--model mlx-community/Llama-3.2-1B-Instruct-4bit`.
"""

from __future__ import annotations

if __name__ == "__main__":
    from pion_vllm_mlx.blas import preload_blas

    preload_blas()

import os
import sys

from evals.bench import stage2
from evals.bench.__main__ import show_tables
from tests.design_script import make_parser, port_of


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--length", type=int, default=stage2.LENGTH, help="tokens of a prompt")
    options = parser.parse_args()
    found = stage2.run(
        options.prompts, options.queries, options.length, options.model, port_of(options)
    )
    show_tables(found)
    sys.stdout.flush()
    # MLX's CPU build may abort while the interpreter exits.
    os._exit(1 if found.failures() else 0)


if __name__ == "__main__":
    main()
