"""Write a snapshot of everything and empty the log, on all workers.

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
        help="an extra copy, relative to the server's data directory; the log stays. Of several "
        "workers each writes its own, PATH.0, PATH.1, …",
    )
    add_server_arguments(parser)


def run(options: argparse.Namespace) -> int:
    with told_in_one_line("save"):
        server = Server(options)
        started = time.monotonic()
        for worker in server.workers():
            path = options.copy_to
            if path and worker is not None:
                path += f".{worker}"
            server.ask("KV.PREFIX.SAVE", *([path] if path else []), patience=LONG, worker=worker)
    print(f"saved in {time.monotonic() - started:.1f} s")
    return 0
