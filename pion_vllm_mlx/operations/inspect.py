"""Show one prefix: its manifest, its pieces, and whether all of them are whole.

--verify reads every piece and compares its checksum, which needs no model.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pion_vllm_mlx.operations.server import (
    Failed,
    Server,
    add_json_argument,
    add_server_arguments,
    show_json,
    show_table,
    size,
    text_of,
    told_in_one_line,
)

if TYPE_CHECKING:
    from pion_vllm_mlx.restore import Found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the prefix, as `ls` shows it")
    parser.add_argument("--verify", action="store_true", help="read and check every piece")
    add_json_argument(parser)
    add_server_arguments(parser)


def run(options: argparse.Namespace) -> int:
    with told_in_one_line("inspect"):
        server = Server(options)
        name = options.name.encode("utf-8", "surrogateescape")
        found = _find(server, name)
        shown = _describe(server, name, found)
        if options.verify:
            shown["verified_bytes"] = _verify(server, name, found)
    if options.json:
        show_json(shown)
    else:
        _show(options.name, shown)
    return 0


def _find(server: Server, name: bytes) -> Found:
    from pion_vllm_mlx.restore import Miss, find_any_prefix
    from pion_vllm_mlx.transport import Patience, TransportError

    try:
        return find_any_prefix(server.lane, name, Patience(first_byte=10))
    except Miss as miss:
        why = {"absent": "no prefix of that name, or one without a manifest"}
        raise Failed(why.get(miss.reason, f"its manifest cannot be read: {miss}")) from miss
    except TransportError as error:
        raise Failed(f"no answer from {server.name}: {error}") from error


def _verify(server: Server, name: bytes, found: Found) -> int:
    from pion_vllm_mlx.restore import Miss, fetch_prefix
    from pion_vllm_mlx.transport import TransportError

    try:
        return fetch_prefix(server.lane, name, found, 60.0, credited=False).nbytes
    except Miss as miss:
        raise Failed(f"damaged or incomplete: {miss}") from miss
    except TransportError as error:
        raise Failed(f"no answer from {server.name}: {error}") from error


def _describe(server: Server, name: bytes, found: Found) -> dict[str, Any]:
    manifest = found.manifest
    pieces = []
    for leaf in manifest.leaves:
        for side, rows in (("keys", leaf.keys), ("values", leaf.values)):
            if rows is not None:
                pieces.append(
                    {
                        "cache": ".".join(map(str, leaf.path)),
                        "class": leaf.kind,
                        "piece": side,
                        "layer": rows.layer,
                        "rows": rows.count,
                        "format": rows.store,
                        "dtype": rows.layout.dtypes[0],
                        "width": rows.layout.widths[0],
                        "checksum": rows.checksum,
                    }
                )
        if leaf.blob is not None:
            pieces.append(
                {
                    "cache": ".".join(map(str, leaf.path)),
                    "class": leaf.kind,
                    "piece": "state",
                    "layer": leaf.blob.layer,
                    "bytes": leaf.blob.nbytes,
                    "checksum": leaf.blob.checksum,
                }
            )
    return {
        "name": text_of(name),
        "generation": found.gen,
        "tokens": len(manifest.ids),
        "model": manifest.fingerprint,
        "prefill_ms": manifest.prefill_ms,
        "prefill_step": manifest.prefill_step,
        "owner": text_of(server.ask("KV.PREFIX.OWNER", name)),
        "first_ids": list(manifest.ids[:16]),
        "pieces": pieces,
    }


def _show(name: str, shown: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    facts = Table(title=name, box=box.SIMPLE_HEAD, show_header=False)
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("tokens", f"{shown['tokens']:,}, beginning {shown['first_ids']}")
    facts.add_row("model", shown["model"])
    facts.add_row("prefill", f"{shown['prefill_ms']:,} ms, {shown['prefill_step']} tokens a chunk")
    facts.add_row("generation", str(shown["generation"]))
    if "verified_bytes" in shown:
        facts.add_row("verified", f"all pieces whole, {size(shown['verified_bytes'])}")
    show_table(facts)
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("cache", "class", "piece", "layer", "rows", "format", "dtype", "width"):
        table.add_column(heading)
    for piece in shown["pieces"]:
        row = [str(piece[key]) for key in ("cache", "class", "piece", "layer")]
        if piece["piece"] == "state":
            row += ["-", size(piece["bytes"]), "-", "-"]
        else:
            row += [str(piece[key]) for key in ("rows", "format", "dtype", "width")]
        table.add_row(*row)
    show_table(table)
