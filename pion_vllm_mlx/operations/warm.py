"""Make a stored prefix ready for attention in the server.

Fills the attention engine's slots from the stored rows, so that the first query need not wait.
Heads and width come from the prefix's manifest unless they are given.
"""

from __future__ import annotations

import argparse

from pion_vllm_mlx.operations.server import (
    LONG,
    Failed,
    Server,
    add_server_arguments,
    text_of,
    told_in_one_line,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the prefix, as `ls` shows it")
    parser.add_argument("--heads", type=int, help="key/value heads")
    parser.add_argument("--head-dim", type=int, help="width of one")
    parser.add_argument("--session", help="attention session; default: NAME with _attn behind it")
    add_server_arguments(parser)


def run(options: argparse.Namespace) -> int:
    with told_in_one_line("warm"):
        server = Server(options)
        heads, dim = options.heads, options.head_dim
        if heads is None or dim is None:
            heads, dim = _shape(server, options.name)
        session = options.session or f"{options.name}_attn"
        words = ("KV.PREFIX.WARM", options.name, heads, dim, session)
        reply = text_of(server.ask(*words, patience=LONG))
    layers, _, skipped = reply.partition(" skipped_dim=")
    print(f"{layers} layers ready" + (f", {skipped} of another width left out" if skipped else ""))
    return 0


def _shape(server: Server, name: str) -> tuple[int, int]:
    from pion_vllm_mlx.restore import Miss, find_any_prefix
    from pion_vllm_mlx.transport import Patience, TransportError

    try:
        found = find_any_prefix(server.lane, name.encode(), Patience(first_byte=10))
    except Miss as miss:
        raise Failed("no manifest tells heads and width: give --heads and --head-dim") from miss
    except TransportError as error:
        raise Failed(f"no answer from {server.name}: {error}") from error
    for leaf in found.manifest.leaves:
        if leaf.keys is not None and "keys" in leaf.meta:
            shape = leaf.meta["keys"]
            return int(shape["heads"]), int(shape["widths"][0])
    raise Failed("the prefix has no attention layer")
