"""What a server did for you, and what it holds.

Hits and misses, tokens and bytes served, prefill time saved (as measured by clients, and as
estimated where none reported a time), sessions, memory and log. A tenant sees its own figures.
Of several workers: the sum, and each one's beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Final

from pion_vllm_mlx.operations.server import (
    Server,
    add_json_argument,
    add_server_arguments,
    duration,
    show_json,
    show_table,
    size,
    told_in_one_line,
)

#: Figures that are not added up: whose they are, and what all workers share.
_WHOSE: Final = {"worker_id", "my_worker_id"}
_COMMON: Final = {
    "uptime_in_seconds",
    "wal_enabled",
    "directory_enabled",
    "directory_entries",
    "directory_workers",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reset", action="store_true", help="set the counters to 0 afterwards")
    add_json_argument(parser)
    add_server_arguments(parser)


def run(options: argparse.Namespace) -> int:
    with told_in_one_line("stats"):
        server = Server(options)
        workers = server.workers()
        receipts = [server.figures("PION.STATS", worker=one) for one in workers]
        stores = [server.figures("KV.PREFIX.INFO", worker=one) for one in workers]
        if options.reset:
            for one in workers:
                server.ask("PION.STATS", "RESET", worker=one)
    each = [{"receipt": r, "store": s} for r, s in zip(receipts, stores, strict=True)]
    whole = each[0] if len(each) == 1 else {"receipt": total(receipts), "store": total(stores)}
    if options.json:
        show_json(whole | ({"workers": each} if len(each) > 1 else {}))
    else:
        _show(server.name, [whole, *(each if len(each) > 1 else [])])
    return 0


def total(figures: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The figures of all workers together: sums, but of what is no amount the largest."""
    found = {}
    for name in figures[0]:
        values = [one[name] for one in figures]
        if name in _WHOSE:
            continue
        if name in _COMMON:
            found[name] = max(values, key=int)
        elif any("." in value for value in values):
            found[name] = f"{sum(map(float, values)):.3f}"
        else:
            found[name] = str(sum(map(int, values)))
    return found


def _show(name: str, columns: Sequence[Mapping[str, Mapping[str, str]]]) -> None:
    from rich import box
    from rich.table import Table

    shown = [_rows(one["receipt"], one["store"]) for one in columns]
    several = len(columns) > 1
    table = Table(title=f"pion-server {name}", box=box.SIMPLE_HEAD, show_header=several)
    table.add_column(style="bold")
    for heading in ("all", *(f"worker {number}" for number in range(len(columns) - 1))):
        table.add_column(heading, justify="right")
    for what in shown[0]:
        table.add_row(what, *(one[what] for one in shown))
    show_table(table)


def _rows(receipt: Mapping[str, str], held: Mapping[str, str]) -> dict[str, str]:
    hits, misses = int(receipt["kvprefix_hits"]), int(receipt["kvprefix_misses"])
    asked = hits + misses
    measured = float(receipt["prefill_seconds_avoided_measured"])
    estimated = float(receipt["prefill_seconds_avoided"]) - measured
    return {
        "up for": duration(int(receipt["uptime_in_seconds"])),
        "hits": f"{hits:,} of {asked:,}" + (f" ({100 * hits / asked:.1f}%)" if asked else ""),
        "tokens served": f"{int(receipt['kvprefix_tokens_served']):,}",
        "bytes served": size(int(receipt["kvprefix_bytes_served"])),
        "prefill saved, measured": f"{measured:,.1f} s",
        "prefill saved, estimated": f"{estimated:,.1f} s",
        "prefixes": f"{int(held['registered_prefixes']):,}",
        "sessions": f"{int(held['vstore_sessions']):,} of {int(held['vstore_max_sessions']):,}",
        "stored": size(int(held["vstore_bytes"])),
        "log": size(int(held["wal_bytes"])),
        "sessions evicted": f"{int(held['vstore_evictions']):,}",
    }
