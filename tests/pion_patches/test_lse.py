"""Attention with log-sum-exp, the merge, and attention in parts, against numpy in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_patches import split
from pion_patches.lse import attend_with_lse, merge
from pion_patches.split import SplitRows, attend_parts
from tests.pion_patches.attention_reference import reference_attention, window_visible

TOLERANCE = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
F64 = np.float64


@dataclass
class Problem:
    """Random inputs, in MLX and (the same values) in float64, cut after ``prefix`` keys."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    prefix: int
    scale: float
    mask: Any
    visible: Any
    additive: Any
    sinks: mx.array | None

    @property
    def parts(self) -> list[tuple[mx.array, mx.array]]:
        cut = self.prefix
        return [
            (self.keys[:, :, :cut], self.values[:, :, :cut]),
            (self.keys[:, :, cut:], self.values[:, :, cut:]),
        ]

    def expected(self) -> tuple[Any, Any]:
        return reference_attention(
            to_float64(self.queries),
            to_float64(self.keys),
            to_float64(self.values),
            self.scale,
            self.visible,
            self.additive,
            None if self.sinks is None else to_float64(self.sinks),
        )


def to_float64(array: mx.array) -> Any:
    return np.array(array.astype(mx.float32)).astype(F64)


@st.composite
def problems(draw: st.DrawFn, max_batch: int = 3) -> Problem:
    batch = draw(st.integers(1, max_batch))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    suffix = draw(st.integers(0, 9))
    prefix = draw(st.integers(0, 33))
    total = prefix + suffix
    rows = draw(st.integers(1, max(1, total)))
    dim, value_dim = draw(st.sampled_from([(4, 4), (8, 5), (16, 16), (3, 8)]))
    dtype = draw(st.sampled_from([mx.float32, mx.float16, mx.bfloat16]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

    kind = draw(st.sampled_from(["none", "causal", "window", "padding", "additive", "holes"]))
    mask: Any = None
    visible = additive = None
    if kind == "causal" and total:
        mask, visible = "causal", window_visible(rows, total, None)
    elif kind == "window" and total:
        visible = window_visible(rows, total, draw(st.integers(1, total + 1)))
        mask = mx.array(visible)
    elif kind == "padding":
        left = rng.integers(0, total + 1, size=(batch, 1, 1, 1))
        visible = (np.arange(total) >= left) & np.ones((rows, 1), dtype=bool)
        mask = mx.array(visible)
    elif kind == "additive":
        bias = rng.standard_normal((1, kv_heads * group, rows, total)).astype(np.float32)
        bias[rng.random(bias.shape) < 0.3] = -np.inf
        mask, additive = mx.array(bias), bias.astype(F64)
    elif kind == "holes":  # fully masked rows included
        visible = rng.random((batch, 1, rows, total)) < draw(st.sampled_from([0.0, 0.2, 0.8]))
        mask = mx.array(visible)
    heads = kv_heads * group
    return Problem(
        queries=normal(batch, heads, rows, dim) * draw(st.sampled_from([1, 4])),
        keys=normal(batch, kv_heads, total, dim),
        values=normal(batch, kv_heads, total, value_dim),
        prefix=prefix,
        scale=draw(st.sampled_from([dim**-0.5, 0.25, 1.0])),
        mask=mask,
        visible=visible,
        additive=additive,
        sinks=normal(heads) if draw(st.booleans()) else None,
    )


def assert_close(found: mx.array, expected: Any, dtype: mx.Dtype = mx.float32) -> None:
    np.testing.assert_allclose(
        to_float64(found), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@settings(max_examples=120, deadline=None)
@given(problems(), st.sampled_from([None, 1, 5, 64]))
def test_attention_and_its_log_sum_exp_match_float64_in_every_tiling(
    problem: Problem, tile: int | None
) -> None:
    problem.sinks = None
    out, lse = attend_with_lse(
        problem.queries,
        problem.keys,
        problem.values,
        scale=problem.scale,
        mask=problem.mask,
        tile=tile,
    )
    expected_out, expected_lse = problem.expected()
    assert out.dtype == lse.dtype == mx.float32
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)


@settings(max_examples=80, deadline=None)
@given(problems())
def test_merging_two_halves_with_sinks_is_attention_over_both(problem: Problem) -> None:
    halves = []
    for (keys, values), (start, stop) in zip(
        problem.parts, [(0, problem.prefix), (problem.prefix, problem.keys.shape[2])], strict=True
    ):
        columns: Any = None
        if problem.additive is not None:
            columns = problem.mask[..., start:stop]
        elif problem.visible is not None:
            columns = mx.array(problem.visible)[..., start:stop]
        halves.append(
            attend_with_lse(problem.queries, keys, values, scale=problem.scale, mask=columns)
        )
    out, lse = merge(halves, problem.sinks)
    expected_out, expected_lse = problem.expected()
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("joint_bytes", [1 << 30, 0], ids=["joint", "merged"])
def test_attention_in_parts_matches_float64(
    joint_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "JOINT_BYTES", joint_bytes)

    @settings(max_examples=120, deadline=None)
    @given(problems())
    def check(problem: Problem) -> None:
        out = attend_parts(
            problem.queries, problem.parts, problem.scale, problem.mask, problem.sinks
        )
        assert out.dtype == problem.queries.dtype
        assert_close(out, problem.expected()[0], out.dtype)

    check()


@pytest.mark.parametrize("joint_bytes", [1 << 30, 0], ids=["joint", "merged"])
def test_a_prefix_of_batch_one_serves_every_request_of_a_batch(
    joint_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "JOINT_BYTES", joint_bytes)
    rng = np.random.default_rng(3)
    q, pk, pv = (rng.standard_normal(s) for s in [(4, 6, 2, 8), (1, 2, 11, 8), (1, 2, 11, 8)])
    sk, sv = rng.standard_normal((4, 2, 5, 8)), rng.standard_normal((4, 2, 5, 8))
    handle_k, handle_v = (
        SplitRows((mx.array(p.astype(np.float32)), mx.array(s.astype(np.float32))))
        for p, s in [(pk, sk), (pv, sv)]
    )
    assert handle_k.shape == (4, 2, 16, 8)
    out = handle_k.pion_attend(
        mx.array(q.astype(np.float32)), handle_v, scale=0.3, mask="causal", sinks=None
    )
    full_k = np.concatenate([np.repeat(pk, 4, 0), sk], axis=2)
    full_v = np.concatenate([np.repeat(pv, 4, 0), sv], axis=2)
    expected, _ = reference_attention(q, full_k, full_v, 0.3, window_visible(2, 16, None))
    assert_close(out, expected)


@pytest.mark.parametrize("joint_bytes", [1 << 30, 0], ids=["joint", "merged"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("masked", [False, True])
def test_a_query_that_is_not_finite_spoils_its_own_rows_and_no_other(
    bad: float, masked: bool, joint_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of one sign can make every score of the bad row -inf: it must not pass for masked."""
    monkeypatch.setattr(split, "JOINT_BYTES", joint_bytes)
    rng = np.random.default_rng(5)
    q = rng.standard_normal((2, 4, 3, 8)).astype(np.float32)
    k = np.abs(rng.standard_normal((2, 2, 12, 8))).astype(np.float32) + 0.1
    v = rng.standard_normal((2, 2, 12, 8)).astype(np.float32)
    broken = q.copy()
    broken[1, 2, 1, 0] = bad
    mask: Any = mx.array(window_visible(3, 12, 6)) if masked else "causal"
    parts = [(mx.array(k[:, :, :7]), mx.array(v[:, :, :7]))]
    parts.append((mx.array(k[:, :, 7:]), mx.array(v[:, :, 7:])))
    found = np.array(attend_parts(mx.array(broken), parts, 0.5, mask))
    clean = np.array(attend_parts(mx.array(q), parts, 0.5, mask))
    assert np.isnan(found[1, 2, 1]).all()
    found[1, 2, 1] = clean[1, 2, 1]
    np.testing.assert_array_equal(found, clean)


def test_no_keys_at_all_give_zero_and_minus_infinity() -> None:
    q, empty = mx.ones((1, 2, 3, 4)), mx.zeros((1, 1, 0, 4))
    out, lse = attend_with_lse(q, empty, empty, scale=1.0)
    assert out.tolist() == mx.zeros((1, 2, 3, 4)).tolist()
    assert np.all(np.array(lse) == -np.inf)
    merged, merged_lse = merge([(out, lse), (out, lse)])
    assert merged.tolist() == out.tolist()
    assert np.all(np.array(merged_lse) == -np.inf)


def test_merging_with_an_empty_part_changes_no_bit() -> None:
    mx.random.seed(1)
    q, k, v = (mx.random.normal((1, 2, 3, 8)) for _ in range(3))
    out, lse = attend_with_lse(q, k, v, scale=0.3)
    nothing = attend_with_lse(q, k[:, :, :0], v[:, :, :0], scale=0.3)
    merged, merged_lse = merge([nothing, (out, lse)])
    assert merged.tolist() == out.tolist()
    assert merged_lse.tolist() == lse.tolist()


def test_scores_far_beyond_float16_range_stay_exact() -> None:
    q = mx.full((1, 1, 1, 4), 200.0, dtype=mx.float16)
    k = mx.concatenate([mx.full((1, 1, 1, 4), 300.0), mx.full((1, 1, 1, 4), 299.0)], axis=2)
    v = mx.array([[[[1.0, 0, 0, 0], [0, 1.0, 0, 0]]]])
    out, lse = attend_with_lse(q, k.astype(mx.float16), v.astype(mx.float16), scale=1.0)
    assert out.tolist() == [[[[1.0, 0.0, 0.0, 0.0]]]]
    assert lse.item() == 240000.0


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("diagonal", "unknown attention mask"),
        (mx.ones((3, 5), dtype=mx.bool_), "does not broadcast"),
        (mx.ones((1, 3, 2, 6), dtype=mx.bool_), "does not broadcast"),
        (mx.ones((1, 1, 1, 2, 6), dtype=mx.bool_), "does not broadcast"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Any, words: str) -> None:
    q, k = mx.zeros((1, 2, 2, 4)), mx.zeros((1, 2, 6, 4))
    with pytest.raises(ValueError, match=words):
        attend_with_lse(q, k, k, scale=1.0, mask=mask)


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        attend_with_lse(
            mx.zeros((1, 3, 1, 4)), mx.zeros((1, 2, 6, 4)), mx.zeros((1, 2, 6, 4)), scale=1.0
        )


def test_long_keys_are_scored_in_tiles_of_bounded_memory() -> None:
    rows, total = 256, 32768
    q, k = mx.random.normal((1, 4, rows, 8)), mx.random.normal((1, 1, total, 8))
    mx.eval(q, k)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(attend_with_lse(q, k, k, scale=0.3))
    all_scores = 4 * rows * total * 4  # 128 MiB, and their exponentials as much again
    assert mx.get_peak_memory() - before < all_scores // 2
