"""Results into the documentation: ``python -m evals publish --out FOLDER``.

The newest result of each eval in FOLDER replaces the one in ``docs/results``; from there
``docs/results.md``, ``docs/benchmarks.md``, their plots, and the marked blocks of README and docs
are written:

    <!-- result: NAME N -->
    the table number N (from 0) of that eval's result (`bleu`) or benchmark's
    (`bench-stage2`), and where it was measured
    <!-- end of result -->

    <!-- printed: NAME -->
    what that benchmark's command printed
    <!-- end of printed -->

A test holds the pages to the files, so a number can only change together with its result.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evals.plots import draw_plot
from evals.provenance import describe_in_words
from evals.report import (
    BENCHES,
    EVALS,
    Collection,
    newest_results,
    plot_file,
    render_report,
    render_table,
    subtitle,
)

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "docs" / "results"
#: Pages written whole, and what they are made of.
PAGES: Mapping[Path, Collection] = {
    ROOT / "docs" / "results.md": EVALS,
    ROOT / "docs" / "benchmarks.md": BENCHES,
}
#: Benchmarks of figures alone that README or docs name.
NAMED = ("bench-blas", "bench-demo")

_BLOCK = re.compile(
    r"(<!-- result: (?P<name>[\w-]+) (?P<number>\d+) -->\n)(?P<body>.*?)(<!-- end of result -->)",
    re.DOTALL,
)
_PRINTED = re.compile(
    r"(<!-- printed: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end of printed -->)", re.DOTALL
)


def publish(folder: Path) -> list[Path]:
    """Take over the newest results of `folder` and write all pages; the pages that changed."""
    folder = folder.resolve()
    PUBLISHED.mkdir(parents=True, exist_ok=True)
    for document in _documents(folder):
        for old in PUBLISHED.glob(f"{document['name']}-*.json"):
            if old.name != document["file"]:
                old.unlink()
        if folder != PUBLISHED:
            shutil.copy(folder / document["file"], PUBLISHED / document["file"])
    for name in NAMED:
        paths = sorted(folder.glob(f"{name}-*.json"))
        if paths and folder != PUBLISHED:
            for old in PUBLISHED.glob(f"{name}-*.json"):
                old.unlink()
            shutil.copy(paths[-1], PUBLISHED)
    for old in PUBLISHED.glob("*.png"):
        old.unlink()  # of a plot that may have another name now
    for document in _documents(PUBLISHED):
        for plot in document["result"]["plots"]:
            draw_plot(plot, subtitle(document), PUBLISHED / plot_file(document, plot))
    changed = []
    for path, text in render_pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def render_pages() -> dict[Path, str]:
    """What the results page and every page with blocks must say."""
    pages = {
        page: render_report(newest_results(PUBLISHED, of), "results/", of)
        for page, of in PAGES.items()
    }
    by_name = {one["name"].removeprefix(EVALS.prefix): one for one in _documents(PUBLISHED)}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if path not in PAGES and (_BLOCK.search(text) or _PRINTED.search(text)):
            pages[path] = fill_blocks(text, by_name)
    return pages


def _documents(folder: Path) -> list[dict[str, Any]]:
    return [document for of in PAGES.values() for document in newest_results(folder, of)]


def fill_blocks(text: str, documents: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with every block's body replaced. Raises KeyError for a result that is not there."""

    def fill(block: re.Match[str]) -> str:
        document = documents[block["name"]]
        table = document["result"]["tables"][int(block["number"])]
        return f"{block[1]}\n{render_table(table)}\n{_origin(document)}\n\n{block[5]}"

    def fill_printed(block: re.Match[str]) -> str:
        document = load_result(block["name"])
        shown = f"```text\n{document['result']['printed']}\n```"
        about = {"fraction": 1, "model": ""} | document
        return f"{block[1]}\n{shown}\n\n{_origin(about)}\n\n{block[4]}"

    return _PRINTED.sub(fill_printed, _BLOCK.sub(fill, text))


def blocks_of(text: str) -> list[tuple[int, int]]:
    """First and last line (from 0) of every block, its marks included."""
    return [
        (text.count("\n", 0, block.start()), text.count("\n", 0, block.end()))
        for pattern in (_BLOCK, _PRINTED)
        for block in pattern.finditer(text)
    ]


def load_result(name: str) -> dict[str, Any]:
    """The published document of an eval (`bleu`) or a benchmark (`bench-blas`)."""
    stem = name if name.startswith("bench-") else f"eval-{name}"
    paths = sorted(PUBLISHED.glob(f"{stem}-*.json"))
    if not paths:
        raise FileNotFoundError(f"no result named {stem} in docs/results")
    document: dict[str, Any] = json.loads(paths[-1].read_text(encoding="utf-8"))
    return document


def _origin(document: Mapping[str, Any]) -> str:
    part = "" if document["fraction"] == 1 else f" --fraction {document['fraction']:g}"
    name = document["name"].removeprefix(EVALS.prefix)
    command = f"evals {name}{part}"
    if name.startswith(BENCHES.prefix):
        command = f"evals.bench {name.removeprefix(BENCHES.prefix)}"
    about = f", {document['model']}" if document["model"] else ""
    return (
        f"`python -m {command}`{about}; measured here, CPU:"
        f" {describe_in_words(document['machine'])}."
    )
