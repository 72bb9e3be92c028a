"""V.EXPORT: rows as a file that a client on this machine maps."""

from __future__ import annotations

import asyncio
import os

from pion_server.commands import arguments
from pion_server.commands.arguments import integer, word
from pion_server.commands.registry import Access, Args, Context, command
from pion_server.errors import BadArgument, CommandError
from pion_server.store.export import ExportRequest
from pion_server.store.schema import MAX_DIM, MAX_LAYERS, MAX_ROWS

# Attempts at a file of sessions that change while it is written.
_ATTEMPTS = 3


@command("V.EXPORT", access=Access.TENANT, min_args=7, max_args=9, sids=lambda args: (0, 1))
async def export(ctx: Context, args: Args) -> bytes:
    """V.EXPORT <k_sid> <v_sid> <start> <end> <num_layers> <n_kv_heads> <head_dim> [FMT STORED]

    Absolute path of a safetensors file with tensors `k.<layer>`, `v.<layer>`, `[1, heads, n, dim]`,
    for clients on this machine; F16, or as the formats keep them (STORED).
    """
    if not ctx.connection.peer_is_local:
        raise BadArgument("V.EXPORT is for clients on this machine, use V.FETCH")
    request = _export_request(args)
    exports, state = ctx.state.exports, ctx.state
    async with state.export_lock:
        for _ in range(_ATTEMPTS):
            found = exports.find(request)
            if found is None:
                draft = exports.prepare(request)
                found = await asyncio.to_thread(exports.write, draft)
            if found is not None:
                state.stats.bytes_served += found.data_bytes
                return os.fsencode(found.path)
    raise CommandError("V.EXPORT: the sessions kept changing while they were written")


def _export_request(args: Args) -> ExportRequest:
    start = integer(args[2], "start")
    end = integer(args[3], "end")
    if start < 0 or end <= start or end > MAX_ROWS:
        raise BadArgument(f"V.EXPORT: invalid range [{start}, {end}) (at most {MAX_ROWS} rows)")
    layers = integer(args[4], "num_layers", 1, MAX_LAYERS)
    heads = integer(args[5], "n_kv_heads", 1, MAX_DIM)
    head_dim = integer(args[6], "head_dim", 1, MAX_DIM)
    options = [word(arg) for arg in args[7:]]
    if options not in ([], ["FMT", "STORED"]):
        raise BadArgument("V.EXPORT: unknown option, FMT STORED expected")
    sids = arguments.name(args[0]), arguments.name(args[1])
    return ExportRequest(*sids, start, end, layers, heads, head_dim, stored=bool(options))
