"""KV.PREFIX.LIST: what is held, for clients that run their own eviction policy."""

from __future__ import annotations

import time

from pion_server.commands.registry import Access, Args, Context, command
from pion_server.payload import Offload
from pion_server.state import ServerState
from pion_server.store.sessions import namespace_of

_FILLING = -1


@command("KV.PREFIX.LIST", access=Access.TENANT, min_args=0, max_args=1)
def list_prefixes(ctx: Context, args: Args) -> Offload:
    """KV.PREFIX.LIST [<start>]

    Each namespace that begins with these bytes, longest unused first: name, bytes of rows, bytes of
    state, generation (0: no manifest, -1: being filled), milliseconds unused. Touches nothing.
    """
    start = bytes(args[0]) if args else b""
    return Offload(lambda: _list(ctx.state, start))


def _list(state: ServerState, start: bytes) -> list[list[object]]:
    rows: dict[bytes, int] = {}
    used: dict[bytes, float] = {}
    vstore, manifests = state.vstore, state.vstore.manifests
    with vstore.lock:
        for pair in vstore.table.oldest_pairs():
            ns = namespace_of(pair[0])
            if ns is not None and ns.startswith(start):
                rows[ns] = sum(vstore.session(sid).stored_bytes for sid in pair)
                used[ns] = vstore.table.used_at(pair[0])
    blobs = {}
    for sid, nbytes, touched in state.ssm.held():
        if sid.startswith(start):
            blobs[sid] = nbytes
            used[sid] = max(touched, used.get(sid, 0.0))
    # A namespace of a manifest alone has no age of its own.
    gens = {ns: found.gen for ns, found in list(manifests.by_ns.items()) if ns.startswith(start)}
    now = time.monotonic()
    found = []
    for ns in sorted(used.keys() | gens.keys(), key=lambda ns: (used.get(ns, 0.0), ns)):
        gen = _FILLING if manifests.fill(ns) is not None else gens.get(ns, 0)
        idle = round(1000 * (now - used[ns])) if ns in used else 0
        found.append([ns, rows.get(ns, 0), blobs.get(ns, 0), gen, idle])
    return found
