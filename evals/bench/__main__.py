"""Run benchmarks: ``python -m evals.bench [--list] [NAME ...]`` (default: all of them).

``python -m evals.bench suite`` runs those that compare lanes and servers, and writes one report
with plots: ``bench-report.md`` beside the results.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import evals.bench
from evals.findings import NOT_MEASURED, Findings
from evals.provenance import RESULTS, describe_in_words, describe_machine, save_result
from evals.registry import load_module, module_names, title_of
from evals.report import BENCHES, write_report

#: What the bench report is made of.
SUITE = (
    "ttft_lanes",
    "restore_local",
    "fetch_throughput",
    "throughput",
    "store_overhead",
    "scaling",
)


def bench_names() -> list[str]:
    """Every benchmark, in alphabetical order."""
    return module_names(evals.bench)


def run_bench(name: str) -> bool:
    """Run one benchmark, print where its result went; False (with a traceback) if it failed."""
    machine = describe_machine()
    started = time.perf_counter()
    try:
        module = load_module(evals.bench, name)
        print(f"\n== {name}: {title_of(module)}", flush=True)
        found = module.run()
        facts: dict[str, Any] = {}
        if isinstance(found, Findings):
            show_tables(found)
            found = found.as_document()
            model = found["model"] or ""
            facts = {"title": title_of(module), "model": model, "fraction": 1, "seed": 0}
            facts["seconds"] = time.perf_counter() - started
        path = save_result(f"bench-{name}", machine, found, RESULTS, **facts)
    except Exception:
        traceback.print_exc()
        return False
    print(f"-- {time.perf_counter() - started:.1f} s, {describe_in_words(machine)}")
    print(f"-- {os.path.relpath(path)}")
    return True


def show_tables(findings: Findings) -> None:
    """Print the tables as people read them, and each bar with its bound and whether it holds."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # Lines of a log are as long as they have to be.
    console = Console(width=None if sys.stdout.isatty() else 160)
    for one in findings.tables:
        table = Table(*map(str, one.columns), title=one.title, box=box.SIMPLE_HEAD)
        for row in one.rows:
            table.add_row(*("-" if cell is None else str(cell) for cell in row))
        console.print(table)
    for bar in findings.bars:
        verdict = "holds" if bar.holds else "MISSED"
        measured = NOT_MEASURED if bar.measured is None else f"{bar.measured:.3g}"
        print(f"bar: {bar.what}: {measured}, at least {bar.least:g}: {verdict}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evals.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument("--list", action="store_true", help="only list them")
    options = parser.parse_args(argv)
    known = bench_names()
    if options.list:
        print("\n".join(known))
        return 0
    names = SUITE if options.names == ["suite"] else options.names or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown benchmark {unknown[0]!r}; there are: suite, {', '.join(known)}")
    failed = [name for name in names if not run_bench(name)]
    if names is SUITE:
        print(os.path.relpath(write_report(RESULTS, BENCHES)))
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
