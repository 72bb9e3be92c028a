"""What each storage format does to real K and V, and whether digits survive four bits.

*Error*: `evals.bench.formats_error` on the K and V of a prefix; that module says how.

*Digits*: a prefix states twelve facts that end in a number. After a fact's beginning the model is
given the right number, digit by digit, and must choose each digit itself: from exact K and V, from
`mlx4g32` (four bits, groups of 32, affine, as stored and fetched), from the same with groups of 64,
and from symmetric codes in groups of 32. The last two are no storage formats, only what the design
decided against.

Expected: fp32 exact; `mlx4g32` keeps no fewer digits than groups of 64, and errs less than either
of the other two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from evals.bench import formats_error
from evals.bench.formats_error import errors, numbers, through_store
from evals.findings import NOT_MEASURED, Bar, Findings, Plot, Quoted, Table
from evals.setting import Setting
from evals.texts import read_long_text, read_records, split_prompt
from pion_patches.cache_rebuild import CacheImage, dismantle, rebuild
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.tier import Tier

F32: TypeAlias = NDArray[np.float32]

TOKENS: Final = 512
_STEP: Final = 512
_BITS: Final = 4
_SYMMETRIC_TOP: Final = 7

EXACT, STORED, GROUPS_64, SYMMETRIC = "exact", "mlx4g32", "groups of 64", "symmetric, groups of 32"


def run(setting: Setting) -> Findings:
    tokens, questions = setting.count(TOKENS, 128), setting.count(8, 2)
    loaded = setting.load()
    measured = formats_error.run(tokens, questions, setting.count(32, 4), loaded)
    digits = measure_digits(*loaded, setting.count(12, 4), setting.count(TOKENS, 128))
    return _findings(measured, digits)


def measure_digits(model: Any, tokenizer: Any, facts: int, tokens: int) -> dict[str, Any]:
    """Digits chosen right from each way of keeping K and V, and what it does to K and V."""
    records = read_records("numbers")[:facts]
    text = " ".join(f"{one['stem']}{one['number']}." for one in records)
    # Long enough that the facts are not the last thing read.
    filler = read_long_text()[: 4 * tokens]
    ids, _ = split_prompt(tokenizer, f"Remember these facts. {text}\n\n{filler}", "A")
    cache = make_prompt_cache(model)
    prefill(model, ids, cache, _STEP)
    exact = dismantle(cache, len(ids))
    found: dict[str, dict[str, float]] = {}
    for way, image in _ways(exact):
        right = total = 0
        for one in records:
            chosen = _count_digits(model, tokenizer, image, one["stem"], one["number"])
            right, total = right + chosen[0], total + chosen[1]
        found[way] = {"digits_right": right, "digits": total}
        for side in ("keys", "values"):
            found[way] |= errors(side, numbers(exact, side), numbers(image, side))
        print(f"{way:<26} digits {right}/{total}", flush=True)
    return found


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


def _count_digits(
    model: Any, tokenizer: Any, image: CacheImage, stem: str, number: str
) -> tuple[int, int]:
    """How many digits of `number` are chosen, given all before them, and how many there are."""
    _, suffix = split_prompt(tokenizer, "A", "Repeat the fact exactly.")
    lead = tokenizer.encode(stem.strip(), add_special_tokens=False)
    whole = tokenizer.encode(f"{stem}{number}", add_special_tokens=False)
    shared = next((i for i, (a, b) in enumerate(zip(lead, whole, strict=False)) if a != b), None)
    start = len(lead) if shared is None else shared
    cache = rebuild(make_prompt_cache(model), image)
    ids = [*suffix, *whole]
    logits = np.array(model(mx.array([ids]), cache=cache)[0].astype(mx.float32))
    right = total = 0
    for place in range(start, len(whole)):
        if any(letter.isdigit() for letter in tokenizer.decode([whole[place]])):
            total += 1
            right += int(logits[len(suffix) + place - 1].argmax()) == whole[place]
    return right, total


def _findings(measured: Mapping[str, Any], digits: Mapping[str, Any]) -> Findings:
    formats = measured["formats"]
    count = measured["questions"]
    recall = [
        (
            way,
            f"{one['digits_right']}/{one['digits']}",
            f"{one['keys_relative_error']:.2%}",
            f"{one['values_relative_error']:.2%}",
        )
        for way, one in digits.items()
    ]
    exact, stored, wide = (digits[way] for way in (EXACT, STORED, GROUPS_64))
    gain = 100 * (digits[SYMMETRIC]["keys_relative_error"] - stored["keys_relative_error"])
    return Findings(
        figures={**measured, "digits": digits, "affine_gain_points_on_keys": gain},
        tables=[
            _table_of_errors(measured),
            _table_of_answers(measured),
            _table_of_speed(measured),
            _table_of_digits(recall),
        ],
        plots=[
            Plot(
                "error",
                "Mean absolute error of real K and V, as a part of their mean size",
                "storage format",
                "% (logarithmic)",
                {
                    side: [
                        (label, 100 * one[f"{key}_relative_error"])
                        for label, one in formats.items()
                        if "protect" not in label and one[f"{key}_relative_error"] > 0
                    ]
                    for side, key in (("K", "keys"), ("V", "values"))
                },
                log=True,
            )
        ],
        bars=[
            Bar("fp32: numbers read back exactly", float(_is_exact(formats["fp32"])), 1.0),
            Bar("fp32: questions answered as cold", formats["fp32"]["answers_agree"], count),
            Bar("digits: mlx4g32 against groups of 64", *_digits(stored, wide), decides=False),
        ],
        quoted=[
            Quoted(
                "4 bits, groups of 32 against 64: facts recalled",
                'groups of 64 corrupt digits ("2430-04-22" for "2030-04-22")',
                f"{stored['digits_right']} against {wide['digits_right']} of {exact['digits']}"
                f" digits; exact K and V: {exact['digits_right']}",
            ),
            Quoted(
                "affine against symmetric, on K",
                "2.92 percentage points less error",
                f"{gain:.2f} percentage points less",
            ),
            Quoted(
                "mean absolute error: mlx4g32, turbo4",
                "0.038, 0.047 (on the same input)",
                f"K {formats['mlx4g32']['keys_mean_abs_error']:.3f},"
                f" {formats['turbo4']['keys_mean_abs_error']:.3f}; V"
                f" {formats['mlx4g32']['values_mean_abs_error']:.3f},"
                f" {formats['turbo4']['values_mean_abs_error']:.3f}",
            ),
            Quoted(
                "an 86,580-token prefix of a 4B model in 16 GB",
                "fits as mlx4g32; as fp16 12.5 GB",
                f"{NOT_MEASURED} (no such model here)",
            ),
        ],
    )


def _is_exact(figure: Mapping[str, float]) -> bool:
    return figure["keys_max_error"] == figure["values_max_error"] == 0


def _digits(stored: Mapping[str, int], wide: Mapping[str, int]) -> tuple[int, int]:
    return stored["digits_right"], wide["digits_right"]


def _where(measured: Mapping[str, Any]) -> str:
    return f"{measured['layers']} layers, {measured['tokens']} tokens, rows of {measured['width']}"


def _table_of_errors(measured: Mapping[str, Any]) -> Table:
    rows = [
        (
            label,
            f"{one['row_bytes']:.0f}",
            f"{one['ratio_to_fp16']:.2f}",
            *(
                f"{one[f'{side}_mean_abs_error']:.1e} ({one[f'{side}_relative_error']:.2%})"
                for side in ("keys", "values")
            ),
            *(f"{one[f'{side}_max_error']:.1e}" for side in ("keys", "values")),
        )
        for label, one in measured["formats"].items()
    ]
    return Table(
        f"Error of K and V: {_where(measured)}",
        ("format", "bytes a row", "to fp16", "mean error of K", "of V", "largest of K", "of V"),
        rows,
        "In brackets as a part of the mean absolute value.",
    )


def _table_of_answers(measured: Mapping[str, Any]) -> Table:
    count, places = measured["questions"], measured["questions"] * measured["answer_tokens"]
    rows = [
        (
            label,
            f"{one['first_token_agrees']:.0f}/{count}",
            f"{one['tokens_before_difference']:.1f}",
            f"{one['answers_agree']:.0f}/{count}",
            f"{one['tokens_agree']:.0f}/{places}",
        )
        for label, one in measured["formats"].items()
        if "answers_agree" in one
    ]
    return Table(
        f"{count} questions of {measured['answer_tokens']} tokens, against the exact cache",
        ("format", "first token", "tokens before a difference", "answers", "tokens"),
        rows,
        "Tokens: chosen again when the cold run's own tokens stand before them.",
    )


def _table_of_speed(measured: Mapping[str, Any]) -> Table:
    rows = [
        (label, f"{one['encode_gb_per_s']:.2f} GB/s", f"{one['decode_gb_per_s']:.2f} GB/s")
        for label, one in measured["formats"].items()
        if "encode_gb_per_s" in one
    ]
    return Table(
        "Speed on one core, bytes of float32, processor time",
        ("format", "encode", "decode"),
        rows,
        "Rows of 1,024 normal numbers.",
    )


def _table_of_digits(rows: Sequence[Sequence[str]]) -> Table:
    columns = ("K and V", "digits chosen right", "mean error of K", "of V")
    return Table("Digits recalled from a prefix, each given those before it", columns, rows)
