"""What an eval returns: figures for programs; tables, plots and bars for people.

All of it becomes JSON (`Findings.as_document`), and reports are made from that JSON alone, so a
report can be made again, elsewhere, from the result files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

Cell: TypeAlias = str | int | float | None

#: What stands where hardware, a model or a lane is missing. Never a stand-in.
NOT_MEASURED: Final = "not measured"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells below column names; `None` is printed as a dash."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """Points of each series. Lines where x is a number, groups of columns where it is a word."""

    name: str
    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[str | float, float]]]
    log: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise and what was measured: holds if `measured` is at least `least`.

    decides: whether a miss fails the run. Bars on time do not decide: the machine may be busy.
    measured: None where this run could not measure it.
    """

    what: str
    measured: float | None
    least: float
    decides: bool = True

    @property
    def holds(self) -> bool:
        return self.measured is None or self.measured >= self.least


@dataclass(frozen=True, slots=True)
class Quoted:
    """A figure of the design document beside ours, or beside why there is none."""

    what: str
    design: str
    ours: str = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class Findings:
    """The outcome of one eval. `figures` is what claims refer to: names to JSON-able values."""

    figures: Mapping[str, Any]
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    bars: Sequence[Bar] = ()
    quoted: Sequence[Quoted] = ()
    notes: Sequence[str] = field(default=())
    #: What was measured, where it is not the model of the setting.
    model: str | None = None

    def as_document(self) -> dict[str, Any]:
        """Plain lists and dictionaries, with `holds` added to each bar."""
        document = asdict(self)
        document["bars"] = [asdict(bar) | {"holds": bar.holds} for bar in self.bars]
        return document

    def failures(self) -> list[Bar]:
        """The bars that were measured, decide, and do not hold."""
        return [bar for bar in self.bars if bar.decides and not bar.holds]
