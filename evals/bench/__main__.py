"""Run benchmarks: ``python -m evals.bench [--list] [NAME ...]`` (default: all of them)."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence

import evals.bench
from evals.provenance import describe_in_words, describe_machine, save_result
from evals.registry import load_module, module_names, title_of


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
        path = save_result(f"bench-{name}", machine, module.run())
    except Exception:
        traceback.print_exc()
        return False
    print(f"-- {time.perf_counter() - started:.1f} s, {describe_in_words(machine)}")
    print(f"-- {os.path.relpath(path)}")
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evals.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument("--list", action="store_true", help="only list them")
    options = parser.parse_args(argv)
    known = bench_names()
    if options.list:
        print("\n".join(known))
        return 0
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"unknown benchmark {unknown[0]!r}; there are: {', '.join(known)}")
    failed = [name for name in options.names or known if not run_bench(name)]
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
