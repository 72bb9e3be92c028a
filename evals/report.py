"""The report: Markdown and plots from the result files of a folder, and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evals.findings import NOT_MEASURED
from evals.plots import draw_plot
from evals.provenance import describe_in_words

_HEAD = """\
# Results

Made from the result files beside it by `python -m evals report`; change nothing here by hand.
Figures of the *design document* were measured by others on Apple Silicon, **not here**. Ours come
from the machine named below each table. What lacks hardware or a model is "not measured".
"""

_BENCH_HEAD = """\
# Benchmarks

Made from the result files beside it by `python -m evals.bench suite`; change nothing here by hand.
Repetitions are interleaved; intervals are 95% of the median (bootstrap). A bar on a ratio holds
where its interval reaches it. Absolute times are of the machine named below each table, and of its
load.
"""


@dataclass(frozen=True, slots=True)
class Collection:
    """The results of one command: how their names begin, and the page made of them."""

    prefix: str
    page: str
    head: str


EVALS: Final = Collection("eval-", "report.md", _HEAD)
BENCHES: Final = Collection("bench-", "bench-report.md", _BENCH_HEAD)


def write_report(folder: Path, collection: Collection = EVALS) -> Path:
    """Write a page and its plots into `folder` from the newest results in it."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = newest_results(folder, collection)
    for document in documents:
        for plot in document["result"]["plots"]:
            draw_plot(plot, subtitle(document), folder / plot_file(document, plot))
    path = folder / collection.page
    path.write_text(render_report(documents, collection=collection), encoding="utf-8")
    return path


def newest_results(folder: Path, collection: Collection = EVALS) -> list[dict[str, Any]]:
    """The newest document of each measurement in `folder` that a page can be made of, by name."""
    newest: dict[str, dict[str, Any]] = {}
    # Two of one second differ in length only: x.json, x-1.json, …
    paths = sorted(
        folder.glob(f"{collection.prefix}*.json"), key=lambda path: (len(path.name), path.name)
    )
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8")) | {"file": path.name}
        if "tables" not in document["result"]:
            continue  # a benchmark of figures alone
        before = newest.get(document["name"])
        if before is None or document["machine"]["time"] >= before["machine"]["time"]:
            newest[document["name"]] = document
    return [newest[name] for name in sorted(newest)]


def render_report(
    documents: Iterable[Mapping[str, Any]], links: str = "", collection: Collection = EVALS
) -> str:
    """The Markdown text. links: what stands in front of the names of files."""
    return "\n".join([collection.head, *(_render_eval(document, links) for document in documents)])


def subtitle(document: Mapping[str, Any]) -> str:
    """What a plot says below its title: model, machine, how much of the full run."""
    part = "" if document["fraction"] == 1 else f", fraction {document['fraction']:g}"
    about = f"{document['model']}{part}; " if document["model"] else ""
    return f"{about}measured here, CPU {document['machine']['cpu']}"


def plot_file(document: Mapping[str, Any], plot: Mapping[str, Any]) -> str:
    return f"{_short(document)}-{plot['name']}.png"


def _short(document: Mapping[str, Any]) -> str:
    name: str = document["name"]
    return name.removeprefix(EVALS.prefix)


def _render_eval(document: Mapping[str, Any], links: str) -> str:
    result, name = document["result"], _short(document).removeprefix(BENCHES.prefix)
    lines = [f"## {name}: {document['title']}", ""]
    if document["fraction"] != 1:
        lines += [f"Part of the full run: `--fraction {document['fraction']:g}`.", ""]
    lines += [render_findings(result)]
    for plot in result["plots"]:
        lines += [f"![{plot['title']}]({links}{plot_file(document, plot)})", ""]
    for note in result["notes"]:
        lines += [note, ""]
    about = f"{document['model']}, seed {document['seed']}, " if document["model"] else ""
    lines += [
        f"`{document['command']}`: {about}"
        f"{document['seconds']:.0f} s, [{document['file']}]({links}{document['file']}).",
        "",
        f"Measured here, CPU: {describe_in_words(document['machine'])}.",
        "",
    ]
    return "\n".join(lines)


def render_findings(result: Mapping[str, Any]) -> str:
    """Tables, bars and the design's figures beside ours, of one document of `Findings`."""
    lines = []
    for table in result["tables"]:
        lines += [render_table(table)]
    lines += [*_render_bars(result["bars"]), *_render_quoted(result["quoted"])]
    return "\n".join(lines)


def render_table(table: Mapping[str, Any]) -> str:
    """Title, rows and note of one table, and an empty line."""
    lines = [f"**{table['title']}**", "", *_rows(table["columns"], table["rows"]), ""]
    lines += [table["note"], ""] if table["note"] else []
    return "\n".join(lines)


def _render_bars(bars: Sequence[Mapping[str, Any]]) -> list[str]:
    if not bars:
        return []
    rows = [
        (
            bar["what"],
            f"at least {_cell(bar['least'])}",
            NOT_MEASURED if bar["measured"] is None else bar["measured"],
            "" if bar["measured"] is None else ("holds" if bar["holds"] else "**missed**"),
        )
        for bar in bars
    ]
    return ["**Bars**", "", *_rows(("bar", "wanted", "measured here", ""), rows), ""]


def _render_quoted(quoted: Sequence[Mapping[str, Any]]) -> list[str]:
    if not quoted:
        return []
    columns = ("figure", "design document, Apple Silicon, not measured here", "measured here, CPU")
    rows = [(one["what"], one["design"], one["ours"]) for one in quoted]
    return ["**Beside the design document**", "", *_rows(columns, rows), ""]


def _rows(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return lines


def _cell(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return str(cell).replace("|", "\\|")
