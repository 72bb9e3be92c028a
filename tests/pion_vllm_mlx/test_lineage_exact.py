"""Restored from segments and checkpoints, every model continues as a cold run does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from pion_vllm_mlx.prefill import prefill
from tests.pion_patches.shipping import largest_difference
from tests.pion_patches.zoo import ONE_TOKEN_A_CALL, build, families
from tests.pion_vllm_mlx.conversation import STEP, Cold, ids_of, index_of, logits_of, take_turn

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
    return module_server("--vstore-sessions", "4096")


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3_text"])
def test_half_precision_continues_bit_for_bit(shared: Server, family: str, dtype: str) -> None:
    """N03: bfloat16 included."""
    model = build(family, seed=8, dtype=getattr(mx, dtype))
    ids = ids_of(5, 200)
    cold = Cold(model)
    for expected in (0, 200 if family == "llama" else 192):
        turn = take_turn(index_of(shared, model), model, ids)
        assert turn.restored == expected
        assert is_same(model, turn.cache, cold.run(ids, turn.restored, turn.ends))


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_killed_server_has_every_acknowledged_turn(
    server: Callable[..., Server], family: str
) -> None:
    """WIRE 15.11: SIGKILL between turns, a new client each time."""
    model = build(family, seed=9)
    running = server()
    cold = Cold(model)
    ids: list[int] = []
    for number in range(3):
        ids = [*ids, *ids_of(20 + number, 100)]
        turn = take_turn(index_of(running, model), model, ids)
        held = len(ids) - 100 if family == "llama" else (len(ids) - 100) // 64 * 64
        assert turn.restored == held
        assert is_same(model, turn.cache, cold.run(ids, turn.restored, turn.ends))
        running.kill()
        running.restart()


def test_other_weights_under_the_same_name_find_nothing(shared: Server) -> None:
    """E13, J01: the fingerprint is part of every name, and that of the model as it is."""
    model = build("llama", seed=10)
    ids = ids_of(6, 128)
    index = index_of(shared, model)
    take_turn(index, model, ids)
    assert index.find(ids).tokens == 128
    layer = model.model.layers[0].self_attn.v_proj
    layer.weight = layer.weight + 1
    assert index.find(ids).tokens == 0
    assert index_of(shared, build("llama", seed=11)).find(ids).tokens == 0


@pytest.mark.parametrize(
    ("stored", "asked", "shared_ids"),
    [
        ([82, 465, 13, 271, 40], [82, 465, 382, 40], 2),
        ([289, 271], [535], 0),
        ([165, 25, 220, 19, 17], [165, 25, 220, 298], 3),
    ],
)
def test_ids_that_were_split_otherwise_are_computed_anew(
    shared: Server, stored: list[int], asked: list[int], shared_ids: int
) -> None:
    """L01: a generated ending whose text is tokenised otherwise next time; the reuse is the common
    prefix, and the tail is that of the new ids. (The measured cases, with ids this model has.)"""
    model = build("llama", seed=12, vocab_size=600)
    head = ids_of(sum(stored), 140, 600)
    index = index_of(shared, model)
    first = take_turn(index, model, [*head, *stored])
    cold = Cold(model)
    cold.run([*head, *stored], 0, first.ends)
    turn = take_turn(index, model, [*head, *asked])
    assert turn.restored == len(head) + shared_ids
    assert is_same(model, turn.cache, cold.run([*head, *asked], turn.restored, turn.ends))


def test_a_prompt_longer_than_a_segment_is_several(
    shared: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every remainder has a block to be named by."""
    monkeypatch.setattr("pion_vllm_mlx.lineage.drafts.ROWS_A_SEGMENT", 128)
    model = build("llama", seed=13)
    for count in (127, 128, 129, 191, 192, 256, 257, 330):
        ids = ids_of(count, count)
        cold = Cold(model)
        turn = take_turn(index_of(shared, model), model, ids)
        cold.run(ids, 0, turn.ends)
        index = index_of(shared, model)
        match = index.find(ids)
        assert match.tokens == count
        assert match.links[0].segment.start == 0
        assert all(len(link.segment.ids) <= 191 for link in match.links)
        cache = index.restore(match)
        assert cache is not None
        assert is_same(model, cache, cold.run(ids, count, []))


def test_a_cache_of_another_run_is_not_taken_for_the_stored_one(shared: Server) -> None:
    """The same tokens in other chunks differ in last bits: what follows is not stored on top of
    the other run's rows, and a third client gets one run or the other."""
    model = build("llama", seed=14)
    ids = ids_of(7, 320)
    index = index_of(shared, model)
    take_turn(index, model, ids[:192], step=48)
    other: list[Any] = Cold(model).run(ids, 0, [320], step=80)
    capture = index.capture(ids, other)
    assert capture is not None
    assert capture.start == 0
    assert index.store(capture) == "other"
    assert index.find(ids).tokens == 192


def test_a_capture_takes_only_what_is_new(shared: Server) -> None:
    """E16: a turn copies and sends its own rows, not the conversation's."""
    model = build("llama", seed=15)
    ids = ids_of(8, 512)
    index = index_of(shared, model)
    take_turn(index, model, ids[:448])
    fresh = index_of(shared, model)
    cache = fresh.restore(fresh.find(ids))
    assert cache is not None
    prefill(model, ids[448:], cache, STEP)
    capture = fresh.capture(ids, cache)
    assert capture is not None
    assert capture.start == 448
    row_bytes = 4 * 2 * 2 * 16 * 4  # layers, sides, heads, head_dim, float32
    assert capture.nbytes == 64 * row_bytes
    assert fresh.capture(ids, cache) is None
    assert fresh.store(capture) == "stored"
    assert fresh.store(capture) == "known"


@pytest.mark.parametrize("family", ATTENTION)
def test_turns_of_less_than_a_block_are_found_to_the_token(shared: Server, family: str) -> None:
    """A prompt and its answer often add a few tokens only: a restart loses none of them."""
    model = build(family, seed=16)
    ids = ids_of(9, 420)
    index, cold = index_of(shared, model), Cold(model)
    for count in (150, 170, 185, 190, 230, 290, 310, 315, 320):
        turn = take_turn(index, model, ids[:count])
        cold.run(ids[:count], turn.restored, turn.ends)
        found = index_of(shared, model).find(ids)
        # Once more with blocks before them; where all their names are taken, they wait.
        assert found.tokens == {185: 170, 190: 170, 310: 290, 315: 290}.get(count, count)
    fresh = index_of(shared, model)
    turn = take_turn(fresh, model, ids)
    assert turn.restored == 320
    assert is_same(model, turn.cache, cold.run(ids, 320, turn.ends))
    assert index_of(shared, model).find(ids).tokens == 420


def test_a_branch_is_not_given_up_for_a_few_tokens_of_another(shared: Server) -> None:
    """The name of the block before them may be a longer conversation's, which others rest on."""
    model = build("llama", seed=17)
    long, trunk = ids_of(10, 500), ids_of(10, 500)[:150]
    index = index_of(shared, model)
    take_turn(index, model, trunk[:64])
    take_turn(index, model, long[:300])
    take_turn(index, model, long)
    other = [*long[:132], *ids_of(11, 20)]
    take_turn(index, model, other)
    for fresh in (index, index_of(shared, model)):
        assert fresh.find(long).tokens == 500
        assert fresh.find(other).tokens >= 132


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(set(families) - set(ONE_TOKEN_A_CALL)))
def test_every_family_resumes_a_growing_conversation_bit_for_bit(
    shared: Server, family: str
) -> None:
    model = build(family, seed=1)
    first = ids_of(1, 150)
    second = [*first, *ids_of(2, 60)]
    cold = Cold(model)
    restored = []
    for ids in (first, second, second):
        index = index_of(shared, model)
        turn = take_turn(index, model, ids)
        restored.append(turn.restored)
        whole = cold.run(ids, turn.restored, turn.ends)
        one, other = logits_of(model, turn.cache), logits_of(model, whole)
        assert largest_difference(one, other) == 0.0
        assert index.stats()["stores_failed"] == 0
    assert restored == ([0, 128, 192] if index.stateful else [0, 150, 210])
