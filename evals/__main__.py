"""Run evals: ``python -m evals NAME...`` or ``python -m evals all``; then write the report.

Every run leaves a new JSON file in the output folder, never over an older one. ``report.md`` and
the plots beside it are made from the newest file of each eval there, so they can always be made
again: ``python -m evals report --out FOLDER``.

Evals whose results do not depend on time say so (``TIMED = False``). With ``--processes 2`` they
come first, two at once, and what is timed has the machine to itself afterwards.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import evals.tables
from evals.provenance import RESULTS
from evals.publish import publish
from evals.registry import load_module, module_names, title_of
from evals.report import write_report
from evals.running import run_evals
from evals.setting import SEED, Setting
from pion_vllm_mlx.blas import preload_blas

_WORDS = ("all", "report", "publish")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    known = module_names(evals.tables)
    if options.list:
        for name in known:
            print(f"{name:<16}{title_of(load_module(evals.tables, name))}")
        return 0
    setting = Setting(options.model, options.fraction, options.seed)
    folder = Path(options.out)
    if "publish" in options.names:
        pages = publish(folder)
        print("\n".join(os.path.relpath(page) for page in pages) or "nothing changed")
        return 0
    names = [name for name in options.names if name != "report"]
    if "all" in names or not options.names:
        names = known
    failed = run_evals(names, setting, folder, options.processes)
    print(f"\n{os.path.relpath(write_report(folder))}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    known = module_names(evals.tables)
    parser = argparse.ArgumentParser(prog="python -m evals", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(known)}; all (the default); report: no eval, only the report of a folder;"
        " publish: a folder's results into docs",
    )
    parser.add_argument("--list", action="store_true", help="only list the evals")
    parser.add_argument(
        "--model", metavar="PATH_OR_ID", help="for mlx_lm.load (default: SmolLM2-135M in float32)"
    )
    parser.add_argument(
        "--fraction",
        type=float,
        default=1.0,
        metavar="F",
        help="part of the full run, above 0 to 1 (default: %(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="evals at once of those that are not timed (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=SEED, help="default: %(default)s")
    parser.add_argument(
        "--out", default=str(RESULTS), metavar="FOLDER", help="default: evals/results"
    )
    options = parser.parse_args(argv)
    if options.processes < 1:
        parser.error("--processes is 1 or more")
    if not 0 < options.fraction <= 1:
        parser.error("--fraction is above 0 and at most 1")
    if unknown := [name for name in options.names if name not in (*known, *_WORDS)]:
        parser.error(f"unknown eval {unknown[0]!r}; there are: {', '.join(known)}")
    return options


if __name__ == "__main__":
    preload_blas()
    status = main()
    # MLX's CPU build may abort while the interpreter exits; everything is written.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
