"""Time to first token: A vanilla cold, B cache rebuild, C the attention patch.

python tests/bench_ttft.py [--start] [--prompt-tokens 2048] [--runs 5]

Measures as `python -m evals ttft` does, at one length; that docstring says what A, B and C are. The
design's is Llama-3.2-1B-Instruct-4bit at 2,048 tokens on Apple Silicon: 1,530, 84 and 30 ms
(`--model mlx-community/Llama-3.2-1B-Instruct-4bit`).
"""

from __future__ import annotations

if __name__ == "__main__":
    from pion_vllm_mlx.blas import preload_blas

    preload_blas()

from evals.tables import ttft
from tests.design_script import make_parser, port_of, run_script, setting_of


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=ttft.RUNS)
    options = parser.parse_args()
    port = port_of(options)
    run_script(
        lambda: ttft.measure(setting_of(options), [options.prompt_tokens], options.runs, port)
    )


if __name__ == "__main__":
    main()
