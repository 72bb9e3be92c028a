"""BLEU acceptance: greedy answers from a stored prefix against standalone mlx-lm.

python tests/test_kv_prefix_bleu.py [--questions 20] [--tokens 50] [--vquant fp16 ...] [--model M]

Expected: 1.000 and 20/20 for lossless formats; the design has 0.969 and 17/20 for fp16.
"""

from __future__ import annotations

from typing import Any

import pytest

if __name__ == "__main__":
    from pion_vllm_mlx.blas import preload_blas

    preload_blas()

pytest.importorskip("mlx.core")

from evals.setting import Setting
from evals.tables import bleu
from evals.tables.bleu import TIERS, Tier
from tests.design_script import make_parser, run_script, setting_of

SMALL = Setting(fraction=0.1)


@pytest.mark.usefixtures("tiny_evals")
def test_bleu_is_1_and_all_identical_where_the_format_keeps_every_bit() -> None:
    found = bleu.measure(SMALL, [Tier("auto"), Tier("fp32"), Tier("turbo2")], 6, 8)
    figures = found.figures["formats"]
    for lossless in ("auto", "fp32"):
        one = figures[lossless]
        assert (one["bleu"], one["identical"], one["first"], one["before"]) == (1.0, 6, 6, 8)
    assert figures["turbo2"]["identical"] < 6
    assert not found.failures()
    assert [len(table.rows) for table in found.tables] == [3, 4, 6]


@pytest.mark.usefixtures("tiny_evals")
def test_bleu_fails_when_a_lossless_answer_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = bleu._Answering._answer

    class Spoiling:
        def __init__(self, reader: Any) -> None:
            self.reader = reader

        def get_or_prefill(self, *words: Any) -> list[Any]:
            cache: list[Any] = self.reader.get_or_prefill(*words)
            cache[0].keys = cache[0].keys * 2
            return cache

    def spoil(self: Any, reader: Any, asked: Any) -> Any:
        spoiling: Any = Spoiling(reader)
        return answer(self, spoiling, asked)

    monkeypatch.setattr(bleu._Answering, "_answer", spoil)
    found = bleu.measure(SMALL, [Tier("auto")], 6, 8)
    assert [bar.what for bar in found.failures()] == ["auto: mean BLEU", "auto: identical"]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=bleu.TOKENS)
    parser.add_argument("--vquant", action="append", help="repeatable (default: every format)")
    parser.add_argument("--boundary-protect", type=int, default=0)
    options = parser.parse_args()
    named = [Tier(name, options.boundary_protect) for name in options.vquant or ()]
    tiers = named or TIERS
    setting = setting_of(options)
    run_script(lambda: bleu.measure(setting, tiers, options.questions, options.tokens))


if __name__ == "__main__":
    main()
