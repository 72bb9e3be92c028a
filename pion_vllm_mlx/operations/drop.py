"""Delete prefixes from a server, for everybody and for good."""

from __future__ import annotations

import argparse

from pion_vllm_mlx.operations.ls import list_prefixes
from pion_vllm_mlx.operations.server import (
    Failed,
    Server,
    add_server_arguments,
    size,
    told_in_one_line,
)
from pion_vllm_mlx.transport import Command, ServerError

_AT_ONCE = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="a prefix, as `ls` shows it")
    parser.add_argument(
        "--start", metavar="TEXT", help="all prefixes whose names begin with this; wants --yes"
    )
    parser.add_argument("--yes", action="store_true", help="without it, --start only counts")
    add_server_arguments(parser)


def run(options: argparse.Namespace) -> int:
    with told_in_one_line("drop"):
        if not options.names and options.start is None:
            raise Failed("name the prefixes to drop, or --start TEXT")
        server = Server(options)
        names = [name.encode("utf-8", "surrogateescape") for name in options.names]
        if options.start is not None:
            start = options.start.encode("utf-8", "surrogateescape")
            found = list_prefixes(server, start)
            total = size(sum(row["bytes"] for row in found))
            if not options.yes:
                print(f"{len(found)} prefixes, {total}; --yes drops them")
                return 0
            names += [row["name"].encode() for row in found]
        dropped = 0
        for at in range(0, len(names), _AT_ONCE):
            # One command each: they may live on several workers.
            commands = [Command.of("KV.PREFIX.DROP", name) for name in names[at : at + _AT_ONCE]]
            for reply in server.ask_all(commands):
                if isinstance(reply, ServerError):
                    raise Failed(f"the server says: {reply}")
                dropped += reply if isinstance(reply, int) else 0
        if not dropped:
            raise Failed("the server holds none of them")
    print(f"dropped {dropped}")
    return 0
