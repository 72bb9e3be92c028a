"""A second instance is served what the first one computed: shared, not merely cached.

python tests/test_kv_prefix_cross_instance.py [--prefix-tokens 1024] [--tokens 50] [--model M]

Expected: the server says HIT before the second process has done any work; BLEU 1.0000, the same 50
tokens, and again after the server was killed and restarted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

if __name__ == "__main__":
    from pion_vllm_mlx.blas import preload_blas

    preload_blas()

pytest.importorskip("mlx.core")

from evals.setting import Setting
from evals.tables import cross_instance
from tests.design_script import make_parser, run_script, setting_of
from tests.pion_vllm_mlx.model_folder import write_model


def test_a_fresh_process_hits_and_says_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder, "llama", seed=4)
    found = cross_instance.measure(Setting(str(folder)), prefix_tokens=40, tokens=12)
    figures = found.figures
    assert figures["lookups_before_any_work"] == ["HIT"]
    assert [figures[who]["hits"] for who in "abc"] == [0, 1, 1]
    assert [figures[who]["agree"] for who in "abc"] == [12, 12, 12]
    assert [figures[who]["bleu"] for who in "abc"] == [1.0, 1.0, 1.0]
    assert figures["tokens"] == 12
    assert not found.failures()
    json.dumps(found.as_document())


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prefix-tokens", type=int, default=cross_instance.PREFIX_TOKENS)
    parser.add_argument("--tokens", type=int, default=cross_instance.TOKENS)
    options = parser.parse_args()
    setting = setting_of(options)
    run_script(lambda: cross_instance.measure(setting, options.prefix_tokens, options.tokens))


if __name__ == "__main__":
    main()
