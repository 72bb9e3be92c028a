"""The evals themselves, on tiny random models: what they count, and what they notice."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
import numpy as np

from evals import digits
from evals.lanes import APPROXIMATE, LANES
from evals.needles import found_by, plant_needles
from evals.random_models import random_hybrid, random_ids
from evals.setting import Setting
from evals.tables import hybrid, niah, ttft
from pion_patches.attention import is_installed
from pion_vllm_mlx.prefill import prefill

SMALL = Setting(fraction=0.1)


pytestmark = pytest.mark.usefixtures("tiny_evals")


def test_every_lane_says_the_first_token_of_vanilla_and_leaves_no_patch() -> None:
    found = ttft.measure(SMALL, [1400], 2)
    assert found.figures["first_token_agrees"]
    ((_, seconds),) = found.figures["seconds"].items()
    assert set(seconds) == {"A vanilla", *LANES}
    assert all(value > 0 for value in seconds.values())
    assert not found.failures()
    assert not is_installed()


def test_a_hybrid_comes_back_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "random_hybrid", lambda seed: random_hybrid(seed, layers=4))
    found = hybrid.measure(SMALL, [20, 33])
    for one in found.figures["lengths"].values():
        assert one == {"agree": 18, "layers_exact": 4, "layers": 4, "logit_difference": 0.0}
    assert not found.failures()
    assert all("not measured" in line.ours for line in found.quoted)


def test_the_random_hybrid_has_the_real_layer_pattern() -> None:
    kinds = [type(layer).__name__ for layer in random_hybrid(1).make_cache()]
    assert kinds == (["ArraysCache"] * 3 + ["KVCache"]) * 8


def test_one_changed_number_in_a_layer_is_not_the_same_bits() -> None:
    model = random_hybrid(5, layers=4)
    one, other = model.make_cache(), model.make_cache()
    for cache in (one, other):
        prefill(model, random_ids(5, 9), cache, 512)
    assert all(hybrid._same_bits(a, b) for a, b in zip(one, other, strict=True))
    state = np.array(other[0][1])
    state.flat[7] += 1e-3
    other[0][1] = mx.array(state)
    other[3].keys = other[3].keys * 1.001
    other[1], other[2] = other[2], other[1]
    assert not any(hybrid._same_bits(a, b) for a, b in zip(one, other, strict=True))


def test_a_needle_lies_where_it_should() -> None:
    tokenizer = Setting().load()[1]
    _texts = {depth: niah.make_haystack(_Words(tokenizer), 400, depth) for depth in (0, 0.5, 1)}
    places = [text.find(niah.NEEDLE) / len(text) for text in _texts.values()]
    assert places[0] == 0
    assert 0.4 < places[1] < 0.6
    assert places[2] > 0.85


def test_every_lane_answers_as_vanilla_behind_a_haystack() -> None:
    (found,) = niah.measure_model(SMALL, [600], [0.5])
    assert set(found.lanes) == set(LANES)
    assert all(found.lanes.values())
    assert set(found.approximate) == set(APPROXIMATE)
    assert not is_installed()


class _Words:
    """Characters as tokens, whatever they are."""

    def __init__(self, tokenizer: Any) -> None:
        self.eos_token_ids = tokenizer.eos_token_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_planted_needles_are_found_and_others_are_not() -> None:
    found = niah.measure_kernel([4096], 10)
    assert found[4096]["needles"] == found[4096]["blocks"] == found[4096]["dense"] == 10
    k, v = (np.random.default_rng(n).standard_normal((2, 512, 64), np.float32) for n in (1, 2))
    _, answers = plant_needles(k, v, 2, 4)
    assert found_by(np.tile(answers[0], 4), answers[0])
    assert not found_by(np.tile(answers[0], 4), answers[1])


@pytest.mark.parametrize(("group", "most"), [(32, 1.0), (64, 1.25)])
def test_four_bit_variants_err_as_their_groups_say(group: int, most: float) -> None:
    rows = np.random.default_rng(1).standard_normal((64, 192)).astype(np.float32)
    error = np.abs(digits.quantise_affine(rows, group) - rows)
    # At most half a step of a group's range, or the range's own rounding to fp16.
    blocks = rows.reshape(-1, group)
    step = (blocks.max(axis=1) - blocks.min(axis=1)) / 15
    assert (error.reshape(-1, group) <= (step * 0.52 + 1e-3)[:, None]).mean() > 0.99
    assert error.mean() < 0.09 * most


def test_symmetric_codes_err_more_than_affine_ones_off_centre() -> None:
    rows = np.random.default_rng(1).standard_normal((64, 192)).astype(np.float32) + 2
    affine = np.abs(digits.quantise_affine(rows, 32) - rows).mean()
    symmetric = np.abs(digits.quantise_symmetric(rows, 32) - rows).mean()
    assert symmetric > 1.5 * affine
    zeros = np.zeros((2, 64), np.float32)
    assert not digits.quantise_symmetric(zeros, 32).any()
