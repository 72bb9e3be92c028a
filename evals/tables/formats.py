"""What each storage format does to real K and V, and whether digits survive four bits.

*Error*: `evals.bench.formats_error` on the K and V of a prefix; that module says how.

*Digits*: numbers of sixteen random digits stand in a prefix, and the model is given one, digit by
digit, and must choose each next digit itself (`evals.digits`): from exact K and V, from `mlx4g32`
(four bits, groups of 32, affine, as stored and fetched), from the same with groups of 64, and from
symmetric codes in groups of 32. The last two are no storage formats, only what the design decided
against. Digits chosen right say little with a small model, which is never sure; the probability it
gives the right digit says more.

Expected: fp32 exact; `mlx4g32` makes the right digits more probable than groups of 64 do, changes
what the model knows less, and errs less than either of the other two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from evals.bench import formats_error
from evals.digits import EXACT, GROUPS_64, STORED, SYMMETRIC, measure_digits
from evals.findings import NOT_MEASURED, Bar, Findings, Plot, Quoted, Table
from evals.setting import Setting

#: Speed is processor time: it may run beside others.
TIMED: Final = False

TOKENS: Final = 512
#: Prefixes with digits, and numbers in each.
PREFIXES: Final = 5
NUMBERS: Final = 24


def run(setting: Setting) -> Findings:
    tokens, questions = setting.count(TOKENS, 128), setting.count(8, 2)
    loaded = setting.load()
    measured = formats_error.run(tokens, questions, setting.count(32, 4), loaded)
    prefixes, count = setting.count(PREFIXES), setting.count(NUMBERS, 6)
    digits = measure_digits(*loaded, prefixes, count, setting.seed)
    return _findings(measured, digits)


def _findings(measured: Mapping[str, Any], digits: Mapping[str, Any]) -> Findings:
    formats = measured["formats"]
    by_size = sorted(formats, key=lambda label: formats[label]["row_bytes"])
    count = measured["questions"]
    exact, stored, wide, symmetric = (
        digits["ways"][way] for way in (EXACT, STORED, GROUPS_64, SYMMETRIC)
    )
    points = 100 * (symmetric["keys_relative_error"] - stored["keys_relative_error"])
    gain = digits["gain"]
    return Findings(
        figures={**measured, "digits": digits, "affine_gain_points_on_keys": points},
        tables=[
            _table_of_errors(measured),
            _table_of_answers(measured),
            _table_of_speed(measured),
            _table_of_digits(digits),
        ],
        plots=[
            Plot(
                "error",
                "Mean absolute error of real K and V, as a part of their mean size",
                "storage format, the smallest first",
                "% (logarithmic)",
                {
                    side: [
                        (label, 100 * formats[label][f"{key}_relative_error"])
                        for label in by_size
                        if "protect" not in label and formats[label][f"{key}_relative_error"] > 0
                    ]
                    for side, key in (("K", "keys"), ("V", "values"))
                },
                log=True,
            )
        ],
        bars=[
            Bar("fp32: numbers read back exactly", float(_is_exact(formats["fp32"])), 1.0),
            Bar("fp32: questions answered as cold", formats["fp32"]["answers_agree"], count),
            Bar(
                "right digits' log-probability, mlx4g32 over groups of 64, low end of the interval",
                gain["low"],
                0.0,
                decides=False,
            ),
            Bar(
                "mean change of it, groups of 64 by mlx4g32",
                wide["change"] / stored["change"],
                1.0,
                decides=False,
            ),
        ],
        quoted=[
            Quoted(
                "4 bits, groups of 32 against 64: facts recalled",
                'groups of 64 corrupt digits ("2430-04-22" for "2030-04-22")',
                f"{stored['right']} against {wide['right']} of {exact['tokens']} digits right,"
                f" {exact['right']} from exact K and V; the right digit's log-probability changes"
                f" by {stored['change']:.3f} against {wide['change']:.3f}",
            ),
            Quoted(
                "affine against symmetric, on K",
                "2.92 percentage points less error",
                f"{points:.2f} percentage points less",
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


def _table_of_digits(digits: Mapping[str, Any]) -> Table:
    rows = [
        (
            way,
            f"{one['right']}/{one['tokens']}",
            f"{one['as_exact']}/{one['tokens']}",
            f"{one['log_probability']:.3f}",
            f"{one['change']:.3f}",
            f"{one['keys_relative_error']:.2%}",
            f"{one['values_relative_error']:.2%}",
        )
        for way, one in digits["ways"].items()
    ]
    gain = digits["gain"]
    return Table(
        f"{digits['numbers']} numbers of {digits['digits']} digits copied from a prefix, each digit"
        " given those before it",
        (
            "K and V",
            "digits chosen right",
            "chosen as from exact K and V",
            "log-probability of the right digit",
            "its mean change",
            "mean error of K",
            "of V",
        ),
        rows,
        f"From {STORED} the right digit's log-probability is higher than from {GROUPS_64} by"
        f" {gain['mean']:.3f} (95% interval of the mean {gain['low']:.3f} to {gain['high']:.3f},"
        " bootstrap over numbers).",
    )
