"""Plots from result documents, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

#: As many columns have room for their figures.
_FIGURES: Final = 24


def draw_plot(plot: Mapping[str, Any], subtitle: str, path: Path) -> None:
    """Draw one plot document (`findings.Plot`) into a PNG file.

    Numbers on x make lines with a mark at each point; words make groups of columns.
    """
    figure, axes = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    words = [x for points in plot["series"].values() for x, _ in points if isinstance(x, str)]
    if words:
        _draw_columns(axes, plot["series"])
    else:
        for label, points in plot["series"].items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        ticks = sorted({x for points in plot["series"].values() for x, _ in points})
        axes.set_xticks(ticks, [f"{tick:,.10g}" for tick in ticks])
    if plot["log"]:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axes.margins(y=0.08)
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(plot["x"])
    axes.set_ylabel(plot["y"])
    axes.set_title(f"{plot['title']}\n", loc="left", fontsize=11)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=7.5, color="0.35")
    axes.grid(axis="y", alpha=0.3)
    if len(plot["series"]) > 1:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _draw_columns(axes: Any, series: Mapping[str, Any]) -> None:
    words = list(dict.fromkeys(x for points in series.values() for x, _ in points))
    width = 0.8 / len(series)
    for number, (label, points) in enumerate(series.items()):
        shift = (number - (len(series) - 1) / 2) * width
        places = [words.index(x) + shift for x, _ in points]
        columns = axes.bar(places, [y for _, y in points], width, label=label)
        if sum(map(len, series.values())) <= _FIGURES:
            axes.bar_label(columns, [_short(y) for _, y in points], fontsize=6.5, padding=1)
    turned = max(map(len, words)) * len(words) > 60
    axes.set_xticks(
        range(len(words)),
        words,
        rotation=35 if turned else 0,
        ha="right" if turned else "center",
        fontsize=8,
    )


def _short(value: float) -> str:
    """Three digits, or all before the point; two of what is small."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{3 if abs(value) >= 0.1 else 2}g}"
