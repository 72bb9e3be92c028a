"""Write a snapshot of everything and empty the log.

Not needed for safety: every acknowledged write is in the log already. It makes the log small, the
next start quick, and what it wrote safe from a power cut.
"""

from __future__ import annotations

import argparse
import time

from pion_vllm_mlx.operations.server import LONG, Server, add_server_arguments, told_in_one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--copy-to",
        metavar="PATH",
        help="an extra copy, relative to the server's data directory; the log stays",
    )
    add_server_arguments(parser)


def run(options: argparse.Namespace) -> int:
    with told_in_one_line("save"):
        server = Server(options)
        started = time.monotonic()
        path = (options.copy_to,) if options.copy_to else ()
        server.ask("KV.PREFIX.SAVE", *path, patience=LONG)
    print(f"saved in {time.monotonic() - started:.1f} s")
    return 0
