"""Where prefills stop, and how far apart."""

from __future__ import annotations

import pytest

from pion_patches.checkpoints import ROWLESS_STRIDE, STRIDE, choose_stops, cut_segments, stride_of
from pion_patches.prompt_memory import ANCHOR, BLOCK
from tests.pion_patches.zoo import families


def test_stops_are_wishes_their_blocks_and_strides() -> None:
    stops = choose_stops(1300, {600: "system", 1290: "user"})
    assert stops == {512: BLOCK, 576: ANCHOR, 600: "system", 1024: BLOCK, 1280: BLOCK, 1290: "user"}
    assert choose_stops(200, {100: "assistant"}) == {100: "assistant", 192: BLOCK}
    assert choose_stops(40, {10: "system", 40: "user", 0: "user"}) == {10: "system"}
    assert choose_stops(5000, {}, stride=2048) == {2048: BLOCK, 4096: BLOCK, 4992: BLOCK}


def test_segments_are_cut_and_keep_their_kinds() -> None:
    segments, kinds = cut_segments(
        [[1, 2, 3], [4, 5, 6, 7]], ["system", "user"], {2: BLOCK, 5: BLOCK}
    )
    assert segments == [[1, 2], [3], [4, 5], [6, 7]]
    assert kinds == [BLOCK, "system", BLOCK, "user"]
    same = cut_segments([[1, 2, 3]], ["assistant"], {3: BLOCK})
    assert same == ([[1, 2, 3]], ["assistant"])


def test_states_of_a_long_prompt_weigh_no_more_than_its_rows() -> None:
    """E16: a model with narrow rows and wide states stops less often."""
    assert stride_of(families["gemma3_text"]()) == STRIDE
    assert stride_of(families["mamba2"]()) == ROWLESS_STRIDE
    model = families["qwen3_5"]()
    text = model.language_model.args
    rows = 2 * text.num_key_value_heads * text.head_dim * 4
    states = 3 * text.linear_num_value_heads * text.linear_value_head_dim * text.linear_key_head_dim
    stride = stride_of(model)
    assert stride % 64 == 0
    assert stride >= states * 4 // rows
    assert stride == pytest.approx(max(STRIDE, states * 4 / rows), abs=200)
