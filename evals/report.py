"""The report: Markdown and plots from the result files of a folder, and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.findings import NOT_MEASURED
from evals.plots import draw_plot
from evals.provenance import describe_in_words

_HEAD = """\
# Results

Made from the result files beside it by `python -m evals report`; change nothing here by hand.
Figures of the *design document* were measured by others on Apple Silicon, **not here**. Ours come
from the machine named below each table. What lacks hardware or a model is "not measured".
"""


def write_report(folder: Path) -> Path:
    """Write `report.md` and its plots into `folder` from the newest result of each eval in it."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = newest_results(folder)
    for document in documents:
        for plot in document["result"]["plots"]:
            draw_plot(plot, subtitle(document), folder / plot_file(document, plot))
    path = folder / "report.md"
    path.write_text(render_report(documents), encoding="utf-8")
    return path


def newest_results(folder: Path) -> list[dict[str, Any]]:
    """The newest document of each eval in `folder`, by name."""
    newest: dict[str, dict[str, Any]] = {}
    # Two of one second differ in length only: x.json, x-1.json, …
    paths = sorted(folder.glob("eval-*.json"), key=lambda path: (len(path.name), path.name))
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8")) | {"file": path.name}
        before = newest.get(document["name"])
        if before is None or document["machine"]["time"] >= before["machine"]["time"]:
            newest[document["name"]] = document
    return [newest[name] for name in sorted(newest)]


def render_report(documents: Iterable[Mapping[str, Any]], links: str = "") -> str:
    """The Markdown text. links: what stands in front of the names of files."""
    return "\n".join([_HEAD, *(_render_eval(document, links) for document in documents)])


def subtitle(document: Mapping[str, Any]) -> str:
    """What a plot says below its title: model, machine, how much of the full run."""
    part = "" if document["fraction"] == 1 else f", fraction {document['fraction']:g}"
    return f"{document['model']}{part}; measured here, CPU {document['machine']['cpu']}"


def plot_file(document: Mapping[str, Any], plot: Mapping[str, Any]) -> str:
    return f"{document['name'].removeprefix('eval-')}-{plot['name']}.png"


def _render_eval(document: Mapping[str, Any], links: str) -> str:
    result, name = document["result"], document["name"].removeprefix("eval-")
    lines = [f"## {name}: {document['title']}", ""]
    if document["fraction"] != 1:
        lines += [f"Part of the full run: `--fraction {document['fraction']:g}`.", ""]
    lines += [render_findings(result)]
    for plot in result["plots"]:
        lines += [f"![{plot['title']}]({links}{plot_file(document, plot)})", ""]
    for note in result["notes"]:
        lines += [note, ""]
    lines += [
        f"`{document['command']}`: {document['model']}, seed {document['seed']},"
        f" {document['seconds']:.0f} s, [{document['file']}]({links}{document['file']}).",
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
