"""Keep prefixes from being evicted, or let them go again.

A pinned prefix stays until it is dropped, whatever else is stored; pins survive a restart.
"""

from __future__ import annotations

import argparse

from pion_vllm_mlx.operations.server import (
    Failed,
    Server,
    add_server_arguments,
    told_in_one_line,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="a prefix, as `ls` shows it")
    parser.add_argument("--off", action="store_true", help="make them ordinary again")
    add_server_arguments(parser)


def run(options: argparse.Namespace) -> int:
    with told_in_one_line("pin"):
        server = Server(options)
        command = "KV.PREFIX.UNPIN" if options.off else "KV.PREFIX.PIN"
        absent = [name for name in options.names if server.ask(command, name) != 1]
        if absent:
            raise Failed(f"the server holds no {', '.join(absent)}")
    print(f"{'unpinned' if options.off else 'pinned'} {len(options.names)}")
    return 0
