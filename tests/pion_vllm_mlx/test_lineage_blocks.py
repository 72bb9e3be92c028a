"""Names of blocks: the same in every process, another for every other meaning."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.lineage import blocks
from pion_vllm_mlx.lineage.blocks import BLOCK, Scope, as_ids, chain, common
from pion_vllm_mlx.lineage.match import Asked

IDS = [(7 * n + 3) % 199 for n in range(2 * BLOCK + 5)]
SCOPE = Scope("a" * 64, adapter="lora", dtype="float32", format="auto,0,float16", tenant="alice")
#: Computed once; another value means that nothing stored before is ever found again.
GOLDEN_ROOT = "ef4eb662e9463dcd9e9df22c74fbc2391d4dd1313ff9a6119957606defc41a7f"
GOLDEN = (
    "ffd40c179fdbb8efcb9f15f42ca1845e60d920e2fa2934d03c1151264ec6ca76",
    "79c4068ef76bc82bb63d4cf3906ac1a35176066b02ff3328e01bc9cd35f9cfcd",
)
#: Loads the one module, without MLX, which takes seconds.
PRINT = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("blocks", sys.argv[1])
blocks = importlib.util.module_from_spec(spec)
sys.modules["blocks"] = blocks
spec.loader.exec_module(blocks)
scope, ids = json.loads(sys.argv[2])
root = blocks.Scope(*scope).root()
print(root.hex(), *(digest.hex() for digest in blocks.chain(root, blocks.as_ids(ids))))
"""


def digests(scope: Scope, ids: list[int]) -> list[str]:
    return [digest.hex() for digest in chain(scope.root(), as_ids(ids))]


def test_digests_are_the_golden_ones() -> None:
    """N01: one golden hex, pinned."""
    assert SCOPE.root().hex() == GOLDEN_ROOT
    assert tuple(digests(SCOPE, IDS)) == GOLDEN


def test_the_documentation_has_the_golden_ones() -> None:
    text = (Path(__file__).parents[2] / "docs" / "lineage.md").read_text()
    assert GOLDEN_ROOT in text
    assert GOLDEN[0] in text


@pytest.mark.parametrize("seed", ["0", "1", None])
def test_digests_are_the_same_in_every_process(seed: str | None) -> None:
    """N01: PYTHONHASHSEED 0, 1 and unset."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    given = json.dumps([dataclasses.astuple(SCOPE), IDS])
    words = [sys.executable, "-c", PRINT, blocks.__file__, given]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [GOLDEN_ROOT, *GOLDEN]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # I02: a salt and an adapter of the same name.
        (Scope("m", tenant="X"), Scope("m", adapter="X")),
        # I03: where one field ends and the next begins.
        (Scope("m", adapter="org_1", tenant="2345"), Scope("m", adapter="org_12345", tenant="")),
        (Scope("m", dtype="float16"), Scope("m", dtype="bfloat16")),
        (Scope("m", format="int8"), Scope("m", format="fp8")),
        (Scope("m"), Scope("n")),
        # I01: two tenants.
        (Scope("m", tenant="t1"), Scope("m", tenant="t2")),
    ],
)
def test_another_scope_gives_other_names(one: Scope, other: Scope) -> None:
    assert not set(digests(one, IDS)) & set(digests(other, IDS))


def test_a_digest_covers_everything_before_it() -> None:
    changed = [IDS[0] + 1, *IDS[1:]]
    assert not set(digests(SCOPE, IDS)) & set(digests(SCOPE, changed))
    later = [*IDS[:BLOCK], IDS[BLOCK] + 1, *IDS[BLOCK + 1 :]]
    assert digests(SCOPE, later)[0] == digests(SCOPE, IDS)[0]
    assert digests(SCOPE, later)[1] != digests(SCOPE, IDS)[1]


def test_the_same_ids_in_any_integer_type_have_the_same_names() -> None:
    """A16: np.int64(5) and 5 are one key; text is none; no ids are a clean miss."""
    root = SCOPE.root()
    plain = Asked.of(root, IDS)
    kinds: list[Any] = [np.array(IDS), [np.int64(token) for token in IDS], tuple(IDS), iter(IDS)]
    for same in kinds:
        assert Asked.of(root, same).digests == plain.digests
    assert Asked.of(root, []).digests == ()
    for wrong in (["5"] * 64, [5.0] * 64, [-1] * 64, [1 << 32] * 64, [[5]] * 64, [True] * 64):
        with pytest.raises(ValueError, match="token ids"):
            Asked.of(root, wrong)  # type: ignore[arg-type]


def test_a_block_that_is_not_whole_has_no_name() -> None:
    assert len(digests(SCOPE, IDS[: BLOCK - 1])) == 0
    assert len(digests(SCOPE, IDS[:BLOCK])) == 1
    assert len(digests(SCOPE, IDS[: 2 * BLOCK - 1])) == 1


@pytest.mark.parametrize(
    ("stored", "asked", "shared"),
    [
        ([82, 46265, 13, 271, 40], [82, 46265, 382, 40], 2),
        ([28919, 271], [53589], 0),
        ([7975, 2257], [50267], 0),
        ([16533, 25, 220, 19, 17], [16533, 25, 220, 2983], 3),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([], [1], 0),
    ],
)
def test_common_ids_of_split_and_joined_tokens(
    stored: list[int], asked: list[int], shared: int
) -> None:
    """L01: the numbers measured with Qwen3's and Llama 3.1's tokenizers."""
    assert common(as_ids(stored), as_ids(asked)) == shared
