"""The headline workload through the public API: `PionPromptCache`, five prompts, thirty queries.

pion-server --kvcache -w 1 &
python tests/test_prompt_cache_workload.py --vquant fp16 --prompts 5 --queries 30 --prompt-repeats 8

Expected: hit rate 96.7%, first token as vanilla's for every query compared. The design's times
(846 ms cold, 91 ms warm, 89.2%, 9.2x) are Llama-3.2-1B-Instruct-4bit on Apple Silicon:
`--model mlx-community/Llama-3.2-1B-Instruct-4bit`. On the small model the first token comes at
least 90% sooner from a prefix of 1,024 tokens on.
"""

from __future__ import annotations

import pytest

if __name__ == "__main__":
    from pion_vllm_mlx.blas import preload_blas

    preload_blas()

pytest.importorskip("mlx.core")

from evals.setting import Setting
from evals.tables import workload
from evals.tables.workload import Workload
from tests.design_script import make_parser, port_of, run_script, setting_of

SMALL = Setting(fraction=0.1)


@pytest.mark.usefixtures("tiny_evals")
def test_the_workload_misses_once_a_prompt() -> None:
    found = workload.measure(SMALL, Workload(prompts=3, queries=5, compared=2, prefix_tokens=1400))
    figures = found.figures
    assert figures["hit_rate_percent"] == pytest.approx(80)
    assert (figures["first_token_agrees"], figures["compared"]) == (6, 6)
    assert not found.failures()
    (reduction,) = [bar for bar in found.bars if "1,024" in bar.what]
    assert reduction.measured is None


def test_the_full_workload_has_the_designs_hit_rate() -> None:
    full = Workload()
    assert full.prompts * full.queries == 150
    assert round(100 * (1 - 1 / full.queries), 1) == 96.7
    assert full.prompts * full.compared == 50


@pytest.mark.usefixtures("tiny_evals")
def test_a_prompt_repeated_is_a_longer_prefix() -> None:
    once, thrice = (
        workload.measure(SMALL, Workload(2, 2, 1, vquant="fp16", repeats=n)).figures for n in (1, 3)
    )
    assert thrice["prefix_tokens"] > 2.5 * once["prefix_tokens"]
    assert once["hit_rate_percent"] == thrice["hit_rate_percent"] == 50


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--vquant", default="auto")
    parser.add_argument("--boundary-protect", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=workload.PROMPTS)
    parser.add_argument("--queries", type=int, default=workload.QUERIES)
    parser.add_argument("--prompt-repeats", type=int, default=8)
    parser.add_argument("--compared", type=int, default=workload.COMPARED, help="a prompt")
    options = parser.parse_args()
    load = Workload(
        prompts=options.prompts,
        queries=options.queries,
        compared=min(options.compared, options.queries),
        vquant=options.vquant,
        boundary_protect=options.boundary_protect,
        repeats=options.prompt_repeats,
    )
    port, setting = port_of(options), setting_of(options)
    run_script(lambda: workload.measure(setting, load, port))


if __name__ == "__main__":
    main()
