"""What a server did for you, and what it holds.

Hits and misses, tokens and bytes served, prefill time saved (as measured by clients, and as
estimated where none reported a time), sessions, memory and log. A tenant sees its own figures.
"""

from __future__ import annotations

import argparse

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reset", action="store_true", help="set the counters to 0 afterwards")
    add_json_argument(parser)
    add_server_arguments(parser)


def run(options: argparse.Namespace) -> int:
    with told_in_one_line("stats"):
        server = Server(options)
        receipt, held = server.figures("PION.STATS"), server.figures("KV.PREFIX.INFO")
        if options.reset:
            server.ask("PION.STATS", "RESET")
    if options.json:
        show_json({"receipt": receipt, "store": held})
    else:
        _show(server.name, receipt, held)
    return 0


def _show(name: str, receipt: dict[str, str], held: dict[str, str]) -> None:
    from rich import box
    from rich.table import Table

    hits, misses = int(receipt["kvprefix_hits"]), int(receipt["kvprefix_misses"])
    asked = hits + misses
    measured = float(receipt["prefill_seconds_avoided_measured"])
    estimated = float(receipt["prefill_seconds_avoided"]) - measured
    table = Table(title=f"pion-server {name}", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = {
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
    for what, value in rows.items():
        table.add_row(what, value)
    show_table(table)
