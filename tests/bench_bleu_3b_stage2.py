"""BLEU by lane: a cache rebuilt from the store against attention to a prefix kept elsewhere.

python tests/bench_bleu_3b_stage2.py [--questions 20] [--tokens 50] [--model M]

Expected: rebuilt caches 1.000 and 20/20 (lossless); shared prefixes say standalone's first token
every time and, in float32, all the others. The design measures Llama-3.2-3B-Instruct-4bit on
Apple Silicon: `--model mlx-community/Llama-3.2-3B-Instruct-4bit`; the default is the small model.
"""

from __future__ import annotations

if __name__ == "__main__":
    from pion_vllm_mlx.blas import preload_blas

    preload_blas()

from statistics import mean

from evals.findings import Bar, Findings, Table
from evals.tables import bleu
from tests.design_script import make_parser, run_script, setting_of


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=bleu.TOKENS)
    options = parser.parse_args()
    setting = setting_of(options)

    def measure() -> Findings:
        found = bleu.measure_lanes(setting, options.questions, options.tokens)
        rows = [
            (
                lane,
                f"{mean(one.bleu for one in answers):.3f}",
                f"{sum(one.first for one in answers)}/{len(answers)}",
                f"{sum(one.identical for one in answers)}/{len(answers)}",
            )
            for lane, answers in found.items()
        ]
        least = min(sum(one.first for one in answers) for answers in found.values())
        return Findings(
            figures={},
            tables=[Table("By lane", ("lane", "mean BLEU", "first token", "identical"), rows)],
            bars=[Bar("first token as standalone, least", least, options.questions)],
        )

    run_script(measure)


if __name__ == "__main__":
    main()
