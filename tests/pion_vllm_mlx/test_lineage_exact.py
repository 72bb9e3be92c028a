"""Restored from segments and checkpoints, every model continues as a cold run does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.pion_patches.shipping import largest_difference
from tests.pion_patches.zoo import build
from tests.pion_vllm_mlx.conversation import Cold, ids_of, index_of, logits_of, take_turn

Server = Any
ATTENTION = ("llama", "deepseek_v3")
STATEFUL = (
    "gemma3_text",
    "gemma3n",
    "qwen3_5",
    "mamba",
    "mamba2",
    "gpt_oss",
    "rwkv7",
    "llama4",
)


@pytest.fixture(scope="module")
def shared(module_server: Callable[..., Server]) -> Server:
    return module_server("--vstore-sessions", "1024")


def is_same(model: Any, cache: list[Any], cold: list[Any]) -> bool:
    """Not one bit of any logit differs; and the prefix matters to them."""
    one, other = logits_of(model, cache), logits_of(model, cold)
    empty = logits_of(model, Cold(model).run([], 0, []))
    assert largest_difference(empty, other) > 1e-4
    return largest_difference(one, other) == 0.0


@pytest.mark.parametrize("family", [*ATTENTION, *STATEFUL])
def test_turns_and_branches_in_clients_of_their_own_continue_bit_for_bit(
    shared: Server, family: str
) -> None:
    """C01, C02, C05, B01, B07, A07: growing, branching, repeated and shorter prompts."""
    model = build(family, seed=7)
    first = ids_of(1, 150)
    second = [*first, *ids_of(2, 130)]
    branch, third = [*second[:210], *ids_of(3, 90)], [*second[:210], *ids_of(4, 50)]
    cold = Cold(model)
    restored = []
    for ids in (first, second, branch, second, branch, third, first[:100]):
        index = index_of(shared, model)
        turn = take_turn(index, model, ids)
        restored.append(turn.restored)
        assert is_same(model, turn.cache, cold.run(ids, turn.restored, turn.ends)), restored
        assert index.stats()["tokens_restored"] == turn.restored
        stateful = index.stateful
        index.close()
    assert stateful == (family in STATEFUL)
    # To the token; or to the last block end that a checkpoint was made at, of which a branch
    # makes one where it leaves.
    whole = [0, 150, 210, 280, 300, 210, 100]
    assert restored == ([0, 128, 128, 256, 256, 192, 0] if stateful else whole)
