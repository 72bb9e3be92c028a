"""Every figure in README and docs is tied: to a result file and its command, or to what it is.

A figure is a number with a unit of time, rate or proportion (`9 ms`, `3.2x`, `12 times`, `96.7%`,
`2 GB/s`), one with an exponent (`2.5e-4`) or a count out of a count (`17/20`). Each stands

* in a block or page generated from `docs/results` (see `evals.publish`), or
* on a line that `docs/claims.toml` names: as *measured* (a value of a published result, compared to
  the digits shown), as a *constant* of the code, or as *quoted* from the design document, which the
  text around must say.

Code in fences (`python`, `sh`) makes no claims; text in fences does.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from evals.findings import Findings, Table
from evals.publish import PAGES as WHOLE_PAGES
from evals.publish import PUBLISHED, blocks_of, fill_blocks, load_result, render_pages

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
CLAIMS = tomllib.loads((ROOT / "docs" / "claims.toml").read_text(encoding="utf-8"))

_NUMBER = r"(?<![\w.,])(?P<n>\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)"
_UNITS = "ms|µs|us|ns|s|x|\u00d7|%|[KMG]B/s|tok/s|tokens/s|GFLOP/s|tokens a second|times"
_UNITS += "|seconds|minutes|hours"
FIGURE = re.compile(
    rf"{_NUMBER}\s?(?:{_UNITS})(?![\w/])|(?P<e>\b\d(?:\.\d+)?e-\d+)|\b(?P<of>\d+/\d+)\b"
)


def figures_of(line: str) -> list[str]:
    """The figures of a line as they are written, without their units."""
    return [found["n"] or found["e"] or found["of"] for found in FIGURE.finditer(line)]


def claims_of(text: str) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of every line that has figures and is not generated or code."""
    generated = blocks_of(text)
    fence = ""
    for number, line in enumerate(text.splitlines()):
        if line.startswith("```"):
            fence = "" if fence else line[3:].strip() or "text"
        elif fence in ("python", "sh") or any(a <= number <= b for a, b in generated):
            continue
        elif figures_of(line):
            yield number + 1, line


def entries(page: str, line: str) -> list[tuple[str, dict[str, Any]]]:
    """The entries of claims.toml for a line, with their kind."""
    return [
        (kind, entry)
        for kind, listed in CLAIMS.items()
        for entry in listed
        if entry["page"] == page and entry["line"] in line
    ]


def agrees(shown: str, value: float, least: bool = False) -> bool:
    """Whether `value` rounds to what is shown, or is at least that."""
    digits = shown.replace(",", "")
    if least:
        return value >= float(digits)
    mantissa, _, exponent = digits.partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return abs(value - float(digits)) <= 0.5001 * 10.0**-decimals


def look_up(document: Any, path: str) -> float:
    """`figures.formats.fp16.bleu`, perhaps with ` * 100` behind it."""
    steps, _, factor = path.partition(" * ")
    for step in steps.split("/") if "/" in steps else steps.split("."):
        document = document[step]
    return float(document) * float(factor or 1)


def constant(path: str) -> float:
    """`module:NAME`, of a dictionary its value number N as `module:NAME N`."""
    module, _, rest = path.partition(":")
    name, _, place = rest.partition(" ")
    value = getattr(importlib.import_module(module), name)
    return float(list(value.values())[int(place)] if place else value)


def check(kind: str, entry: dict[str, Any], text: str, number: int, line: str) -> None:
    """Raise AssertionError where the line's figures are not what the entry ties them to."""
    shown = figures_of(line)
    if kind == "quoted":
        around = text.splitlines()[max(number - 4, 0) : number]
        assert "design document" in " ".join(around).lower(), f"{line!r} does not say whose it is"
        assert shown == entry["figures"], line
        return
    assert len(shown) == len(entry["values"]), f"{line!r} has {shown}"
    for figure, path in zip(shown, entry["values"], strict=True):
        if kind == "constant":
            value = constant(path)
            assert agrees(figure, value), f"{figure} in {line!r} is {value} in {path}"
            continue
        document = load_result(entry["result"])
        assert entry["command"] in document["command"], document["command"]
        if "/" in figure:
            first, _, second = path.partition(" of ")
            parts = (look_up(document["result"], part) for part in (first, second))
            assert figure == "/".join(f"{part:.0f}" for part in parts), line
        else:
            value = look_up(document["result"], path)
            assert agrees(figure, value, entry.get("least", False)), (
                f"{figure} in {line!r} is {value} in the result"
            )


@pytest.mark.parametrize("page", [page for page in PAGES if ROOT / page not in WHOLE_PAGES])
def test_every_figure_is_tied(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    loose = []
    for number, line in claims_of(text):
        found = entries(page, line)
        if len(found) != 1:
            loose.append(f"{page}:{number}: {len(found)} entries for {figures_of(line)}: {line}")
            continue
        check(*found[0], text, number, line)
    assert loose == []


def test_every_entry_names_one_line_that_is_there() -> None:
    for listed in CLAIMS.values():
        for entry in listed:
            lines = (ROOT / entry["page"]).read_text(encoding="utf-8").splitlines()
            assert sum(entry["line"] in line for line in lines) == 1, entry


def test_pages_say_what_the_published_results_say() -> None:
    """`python -m evals publish --out docs/results` writes them."""
    for page, wanted in render_pages().items():
        assert page.read_text(encoding="utf-8") == wanted, page


def test_every_published_result_names_machine_revision_command_and_seed() -> None:
    paths = list(PUBLISHED.glob("*.json"))
    assert paths
    for path in paths:
        document = load_result(path.name.rpartition("-")[0].removeprefix("eval-"))
        assert {"cpu", "system", "python", "versions", "revision"} <= set(document["machine"])
        assert document["command"].startswith("python ")
        if path.name.startswith("eval-"):
            assert {"seed", "fraction", "model", "seconds"} <= set(document)
        for folder in ("/work", "/tmp", "/home", "/root"):
            assert f"{folder}/" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "figures"),
    [
        ("a fetch takes 9 ms, 3.2x less", ["9", "3.2"]),
        ("96.7% of 1,024 tokens in 1,530 µs", ["96.7", "1,530"]),
        ("error 2.5e-4, 17/20 answers, 12 times", ["2.5e-4", "17/20", "12"]),
        ("0.38 GB/s and 20 tokens/s", ["0.38", "20"]),
        ("D = 1024 and port 1974, layers 0 to 31, 4 bytes", []),
        ("version 0.32.4, arXiv:2406.10774, RFC 2119", []),
    ],
)
def test_a_figure_is_a_number_with_a_unit(line: str, figures: list[str]) -> None:
    assert figures_of(line) == figures


def test_an_untied_figure_is_found_and_code_makes_no_claims() -> None:
    text = "A hit takes 3 ms.\n```python\nx = 1  # 9 ms\n```\n```text\n7 ms\n```\n"
    assert [number for number, _ in claims_of(text)] == [1, 6]
    block = "<!-- result: x 0 -->\n\n| 3 ms |\n\n<!-- end of result -->\nand 4 ms\n"
    assert [line for _, line in claims_of(block)] == ["and 4 ms"]


@pytest.mark.parametrize(
    ("shown", "value", "holds"),
    [
        ("9", 9.4, True),
        ("9", 9.6, False),
        ("9.40", 9.404, True),
        ("9.40", 9.41, False),
        ("2.5e-4", 2.46e-4, True),
        ("2.5e-4", 2.6e-4, False),
        ("1,530", 1530.2, True),
    ],
)
def test_a_value_is_compared_to_the_digits_shown(shown: str, value: float, holds: bool) -> None:
    assert agrees(shown, value) == holds


def test_a_bound_holds_from_there_on() -> None:
    assert agrees("20", 23.4, least=True)
    assert not agrees("20", 19.9, least=True)


def test_a_wrong_quotation_and_a_silent_one_are_errors() -> None:
    entry = {"page": "x", "line": "9 ms", "figures": ["9"]}
    check("quoted", entry, "From the design document:\n9 ms", 2, "9 ms")
    for text, line in (("9 ms", "9 ms"), ("From the design document:\n8 ms", "8 ms")):
        with pytest.raises(AssertionError):
            check("quoted", entry, text, len(text.splitlines()), line)


def test_blocks_are_filled_from_the_result_of_that_name() -> None:
    document = {
        "name": "eval-x",
        "fraction": 0.5,
        "model": "tiny",
        "machine": load_result("bleu")["machine"],
        "result": Findings({}, [Table("T", ("a",), [("7 ms",)])]).as_document(),
    }
    text = "one\n<!-- result: x 0 -->\nold\n<!-- end of result -->\ntwo\n"
    filled = fill_blocks(text, {"x": document})
    assert "| 7 ms |" in filled
    assert "old" not in filled
    assert "`python -m evals x --fraction 0.5`, tiny; measured here" in filled
    assert fill_blocks(filled, {"x": document}) == filled
    with pytest.raises(KeyError):
        fill_blocks(text, {})
