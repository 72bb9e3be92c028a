"""List the prefixes a server holds, with all its workers.

Each with its tokens, bytes of rows and of recurrent state, format, the model that computed it, how
long that took and how long ago it was last used. Without a manifest (other clients write none, a
half-written prefix has none yet) only bytes and age are known.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

from pion_vllm_mlx.operations.server import (
    Failed,
    Server,
    add_json_argument,
    add_server_arguments,
    duration,
    show_json,
    show_table,
    size,
    text_of,
    told_in_one_line,
)
from pion_vllm_mlx.transport import Buffer, Command
from pion_vllm_mlx.transport.homes import Worker

_KEYS: Final = {"age": "idle_ms", "size": "bytes", "tokens": "tokens"}
#: Manifests read in one pipeline: each may have megabytes.
_AT_ONCE: Final = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("start", nargs="?", default="", help="only names that begin with this")
    parser.add_argument(
        "--sort", choices=sorted(_KEYS), default="age", help="default: age, longest unused last"
    )
    add_json_argument(parser)
    add_server_arguments(parser)


def run(options: argparse.Namespace) -> int:
    with told_in_one_line("ls"):
        found = list_prefixes(Server(options), options.start.encode("utf-8", "surrogateescape"))
    key = _KEYS[options.sort]
    found.sort(key=lambda row: row[key] or 0, reverse=options.sort != "age")
    if options.json:
        show_json(found)
    else:
        _show(found)
    return 0


def list_prefixes(server: Server, start: bytes) -> list[dict[str, Any]]:
    """What `ls --json` prints: one object a namespace. Raises Failed."""
    from rich.console import Console
    from rich.progress import track

    listed: list[tuple[Worker, Any]] = []
    for worker in server.workers():
        reply = server.ask("KV.PREFIX.LIST", start, worker=worker)
        if not isinstance(reply, list):
            raise Failed("KV.PREFIX.LIST answers an array")
        listed += [(worker, one) for one in reply]
    rows: list[dict[str, Any]] = []
    parts = range(0, len(listed), _AT_ONCE)
    quiet = len(listed) <= 4 * _AT_ONCE
    console = Console(stderr=True)
    for at in track(parts, "reading manifests", console=console, transient=True, disable=quiet):
        part = listed[at : at + _AT_ONCE]
        described = _describe_all(server, [one for _, one in part])
        rows += [row | {"worker": worker} for (worker, _), row in zip(part, described, strict=True)]
    return rows


def _describe_all(server: Server, listed: Sequence[Any]) -> list[dict[str, Any]]:
    with_manifest = [name for name, _, _, gen, _ in listed if gen > 0]
    commands = [Command.of("KV.PREFIX.META", name, "GET") for name in with_manifest]
    replies = server.ask_all(commands) if commands else []
    manifests = {
        bytes(name): reply[1]
        for name, reply in zip(with_manifest, replies, strict=True)
        if isinstance(reply, list) and len(reply) == 2
    }
    return [_describe(one, manifests.get(bytes(one[0]))) for one in listed]


def _describe(listed: Sequence[Any], blob: Any) -> dict[str, Any]:
    name, rows, state, gen, idle = listed
    described: dict[str, Any] = {
        "name": text_of(name),
        "bytes": rows + state,
        "row_bytes": rows,
        "state_bytes": state,
        "complete": gen > 0,
        "being_filled": gen < 0,
        "idle_ms": idle,
        "tokens": None,
        "format": None,
        "model": None,
        "prefill_ms": None,
    }
    if blob is not None:
        described |= read_outline(blob)
    return described


def read_outline(blob: Buffer) -> dict[str, Any]:
    """What any kind of manifest of ours says about its prefix; empty for one that is not."""
    import json

    try:
        # The server's copy is checked by whoever restores it; here it is only shown.
        kind, _, body = bytes(blob).partition(b"\n")
        fields = json.loads(body)
        leaves = fields.get("leaves", [])
        stores = {
            side["store"]
            for leaf in leaves
            for side in (leaf.get("keys"), leaf.get("values"))
            if side
        }
        return {
            "kind": kind.split()[0].decode(),
            "tokens": fields.get("tokens"),
            "format": ", ".join(sorted(stores)) or None,
            "model": fields.get("model"),
            "prefill_ms": fields.get("prefill_ms"),
            "layers": len(leaves),
        }
    except (ValueError, KeyError, AttributeError, TypeError, IndexError):
        return {}


def _show(found: Sequence[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("prefix", overflow="fold")
    several = any(row["worker"] is not None for row in found)
    headings = ("tokens", "bytes", "format", "model", "prefill", "unused for")
    for heading in (*headings, "worker") if several else headings:
        table.add_column(heading, justify="right")
    for row in found:
        name = row["name"] if row["complete"] else f"{row['name']} ({_lack(row)})"
        table.add_row(
            name,
            f"{row['tokens']:,}" if row["tokens"] else "-",
            size(row["bytes"]),
            row["format"] or "-",
            (row["model"] or "-")[:8],
            f"{row['prefill_ms'] / 1000:.2f} s" if row["prefill_ms"] else "-",
            duration(row["idle_ms"] / 1000),
            *([str(row["worker"])] if several else []),
        )
    show_table(table)
    print(f"{len(found)} prefixes, {size(sum(row['bytes'] for row in found))}")


def _lack(row: dict[str, Any]) -> str:
    return "being stored" if row["being_filled"] else "no manifest"
