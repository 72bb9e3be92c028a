"""One prompt, five storage formats: what a restored prefix answers, against one never stored.

python tests/test_kv_prefix_mlx.py [--model mlx-community/Llama-3.2-1B-Instruct-4bit]

Expected: fp16 answers as standalone; int8, fp8, mlx4g32 and turbo4 as they are (see bleu).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if __name__ == "__main__":
    from pion_vllm_mlx.blas import preload_blas

    preload_blas()

pytest.importorskip("mlx.core")

import mlx.core as mx
import numpy as np

from evals.tables import bleu
from evals.tables.bleu import Tier
from pion_vllm_mlx import PionPromptCache
from tests.design_script import make_parser, run_script, setting_of
from tests.pion_vllm_mlx.tiny import PREFIX, SUFFIX, tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import ServerProcess

#: The formats, and the least cosine of the logits after a prefix that went through them.
CONFIGURATIONS = {"fp16": 0.999999, "int8": 0.9999, "fp8": 0.999, "mlx4g32": 0.98, "turbo4": 0.98}


@pytest.fixture(scope="module")
def running(module_server: Callable[..., ServerProcess]) -> ServerProcess:
    return module_server("--kvcache", "-w", "1")


def logits(model: Any, cache: list[Any]) -> np.ndarray[Any, Any]:
    return np.array(model(mx.array([SUFFIX]), cache=cache)[0, -1].astype(mx.float32))


@pytest.mark.parametrize("vquant", CONFIGURATIONS)
def test_a_prefix_restored_from_each_format_answers_as_near_as_it_may(
    running: ServerProcess, vquant: str
) -> None:
    model = tiny_llama(dtype=mx.float16) if vquant == "fp16" else tiny_llama()
    with PionPromptCache(
        model, vquant=vquant, port=running.port, held_bytes=0, store="sync", timeout=5
    ) as pc:
        cold = logits(model, pc.get_or_prefill(PREFIX, f"one-{vquant}"))
        warm = logits(model, pc.get_or_prefill(PREFIX, f"one-{vquant}"))
        assert (pc.stats()["misses"], pc.stats()["hits"]) == (1, 1)
    cosine = float(cold @ warm / (np.linalg.norm(cold) * np.linalg.norm(warm)))
    assert cosine >= CONFIGURATIONS[vquant]
    assert warm.argmax() == cold.argmax()
    if vquant == "fp16":
        np.testing.assert_array_equal(warm, cold)


def main() -> None:
    options = make_parser(__doc__).parse_args()
    tiers = [Tier(name) for name in CONFIGURATIONS]
    setting = setting_of(options)
    run_script(lambda: bleu.measure(setting, tiers, questions=1, tokens=bleu.TOKENS))


if __name__ == "__main__":
    main()
