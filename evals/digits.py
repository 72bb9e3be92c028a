"""Digits copied from a prefix, where K and V have four bits a number or all of them.

A prefix lists numbers of sixteen random digits, which no model knows. Behind a number's name the
model is given its digits one after another and must choose each next one itself. Whether it is
right says most about the model; what a way of keeping K and V does to it shows in the
log-probability of the right digit, number by number against that from exact K and V.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Final, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from evals.bench.formats_error import errors, numbers, through_store
from evals.texts import split_prompt
from pion_patches.cache_rebuild import CacheImage, dismantle, rebuild
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.tier import Tier

F32: TypeAlias = NDArray[np.float32]

DIGITS: Final = 16
_STEP: Final = 512
_BITS: Final = 4
_SYMMETRIC_TOP: Final = 7

EXACT, STORED, GROUPS_64, SYMMETRIC = "exact", "mlx4g32", "groups of 64", "symmetric, groups of 32"


@dataclass(slots=True)
class _Copied:
    """What was chosen from one way of keeping K and V; arrays are `[numbers][DIGITS]`."""

    right: list[NDArray[np.bool_]]
    chosen: list[NDArray[np.int64]]
    log_probability: list[F32]
    errors: list[dict[str, float]]


def measure_digits(
    model: Any, tokenizer: Any, prefixes: int, count: int, seed: int
) -> dict[str, Any]:
    """Digits of `count` numbers in each of `prefixes` prefixes, from each way of keeping them.

    `ways`: of each way digits right, digits as from exact K and V, the mean log-probability of the
    right digit and its mean absolute change, and the errors of K and V. `gain`: the right digit's
    log-probability from mlx4g32 minus that from groups of 64, mean of all numbers and its 95%
    interval, `low` to `high`.
    """
    found = {way: _Copied([], [], [], []) for way in (EXACT, STORED, GROUPS_64, SYMMETRIC)}
    for number in range(prefixes):
        draw = random.Random(seed + number)
        listed = ["".join(draw.choices("0123456789", k=DIGITS)) for _ in range(count)]
        _copy_from_prefix(model, tokenizer, listed, found)
    exact = found[EXACT]
    ways = {way: _figures(one, exact) for way, one in found.items()}
    for way, one in ways.items():
        print(f"{way:<26} {one}", flush=True)
    pairs = zip(found[STORED].log_probability, found[GROUPS_64].log_probability, strict=True)
    gain = interval_of_mean([float((one - other).mean()) for one, other in pairs])
    return {"ways": ways, "gain": gain, "numbers": prefixes * count, "digits": DIGITS}


def _copy_from_prefix(
    model: Any, tokenizer: Any, listed: Sequence[str], found: Mapping[str, _Copied]
) -> None:
    lines = [f"Number {place}: " for place in range(1, len(listed) + 1)]
    text = " ".join(f"{line}{digits}." for line, digits in zip(lines, listed, strict=True))
    ids, suffix = split_prompt(
        tokenizer, f"Remember these numbers. {text}", "Repeat the number exactly."
    )
    cache = make_prompt_cache(model)
    prefill(model, ids, cache, _STEP)
    exact = dismantle(cache, len(ids))
    for way, image in _ways(exact):
        copied = found[way]
        kinds = {
            side: errors(side, numbers(exact, side), numbers(image, side))
            for side in ("keys", "values")
        }
        copied.errors.append({key: value for one in kinds.values() for key, value in one.items()})
        for line, digits in zip(lines, listed, strict=True):
            logits, answer = _copy(model, tokenizer, image, suffix, line, digits)
            chosen = logits.argmax(axis=-1)
            copied.chosen.append(chosen)
            copied.right.append(chosen == answer)
            copied.log_probability.append(logits[np.arange(len(answer)), answer])


def _copy(
    model: Any, tokenizer: Any, image: CacheImage, suffix: Sequence[int], line: str, digits: str
) -> tuple[F32, NDArray[np.int64]]:
    """Log-probabilities `[tokens][vocabulary]` at each token of `digits`, and those tokens."""
    asked = tokenizer.encode(line, add_special_tokens=False)
    whole = tokenizer.encode(f"{line}{digits}", add_special_tokens=False)
    # A tokenizer may join the space with the first digits.
    differs = (n for n, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b)
    answer = np.array(whole[next(differs, len(asked)) :])
    cache = rebuild(make_prompt_cache(model), image)
    logits = model(mx.array([[*suffix, *whole[:-1]]]), cache=cache)[0, -len(answer) :]
    logits = logits.astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)), answer


def _figures(copied: _Copied, exact: _Copied) -> dict[str, float]:
    pairs = list(zip(copied.log_probability, exact.log_probability, strict=True))
    same = zip(copied.chosen, exact.chosen, strict=True)
    return {
        "tokens": sum(len(one) for one in copied.right),
        "right": int(sum(one.sum() for one in copied.right)),
        "as_exact": int(sum((one == other).sum() for one, other in same)),
        "log_probability": mean(float(one.mean()) for one, _ in pairs),
        "change": mean(float(np.abs(one - other).mean()) for one, other in pairs),
    } | {key: mean(one[key] for one in copied.errors) for key in copied.errors[0]}


def interval_of_mean(values: Sequence[float]) -> dict[str, float]:
    """`mean` and its 95% interval, `low` to `high`: percentile bootstrap with a fixed seed."""
    draw = random.Random(0)
    samples = sorted(mean(draw.choices(values, k=len(values))) for _ in range(2000))
    return {"mean": mean(values), "low": samples[50], "high": samples[1949]}


def _ways(exact: CacheImage) -> list[tuple[str, CacheImage]]:
    return [
        (EXACT, exact),
        (STORED, through_store(exact, Tier("mlx4g32")).image),
        (GROUPS_64, _change_rows(exact, lambda rows: quantise_affine(rows, 64))),
        (SYMMETRIC, _change_rows(exact, lambda rows: quantise_symmetric(rows, 32))),
    ]


def _change_rows(image: CacheImage, change: Callable[[F32], F32]) -> CacheImage:
    leaves = []
    for leaf in image.leaves:
        sides = {}
        for side in ("keys", "values"):
            piece = getattr(leaf, side)
            rows = np.array(piece.parts[0], dtype=np.float32)
            sides[side] = replace(piece, parts=(mx.array(change(rows)),))
        leaves.append(replace(leaf, **sides))
    return CacheImage(image.tokens, tuple(leaves))


def quantise_affine(rows: F32, group: int) -> F32:
    """Four bits, a scale and a bias (both fp16) for each `group` numbers of a row; read back."""
    codes, scales, biases = mx.quantize(mx.array(rows), group, _BITS)
    scales, biases = (part.astype(mx.float16).astype(mx.float32) for part in (scales, biases))
    return np.array(mx.dequantize(codes, scales, biases, group, _BITS))


def quantise_symmetric(rows: F32, group: int) -> F32:
    """Four bits around zero, one scale (fp16) for each `group` numbers of a row; read back."""
    blocks = rows.reshape(-1, group)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / _SYMMETRIC_TOP
    scale = np.maximum(scale.astype(np.float16).astype(np.float32), np.float32(1e-8))
    codes = np.clip(np.rint(blocks / scale), -_SYMMETRIC_TOP - 1, _SYMMETRIC_TOP)
    return np.asarray((codes * scale).reshape(rows.shape), dtype=np.float32)
