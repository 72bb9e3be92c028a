"""SSM.PREFIX.*: recurrent state as opaque blobs."""

from __future__ import annotations

from collections.abc import Iterator

from pion_server.commands import arguments
from pion_server.commands.arguments import integer, word
from pion_server.commands.registry import Access, Args, Context, Flag, always, command
from pion_server.commands.v import INLINE_BYTES
from pion_server.errors import BadArgument
from pion_server.payload import Chunk, FileSpan, Offload, Payload
from pion_server.store.log import Record

MAX_LAYER = 2**32 - 2


@command(
    "SSM.PREFIX.STORE",
    access=Access.TENANT,
    min_args=3,
    max_args=5,
    flags=Flag.WRITE,
    names="first",
    claims=always,
)
def store(ctx: Context, args: Args) -> object:
    """SSM.PREFIX.STORE <sid> <layer> <state_blob> [GEN <gen>]

    Keeps an opaque blob, replacing what the layer had; an empty one is not a missing one.
    """
    sid, layer, blob = arguments.name(args[0]), _layer(args[1]), args[2]
    gen = None
    if len(args) > 3:
        if word(args[3]) != "GEN":
            raise BadArgument("SSM.PREFIX.STORE: unknown option, GEN <gen> expected")
        gen = arguments.generation(args[4:])
    ssm = ctx.state.ssm

    def work() -> str:
        ssm.store(sid, layer, blob, gen=gen, owner=ctx.connection)
        return "OK"

    return work() if len(blob) <= INLINE_BYTES else Offload(work)


@command("SSM.PREFIX.FETCH", access=Access.TENANT, min_args=2, max_args=2, names="first")
def fetch(ctx: Context, args: Args) -> object:
    """SSM.PREFIX.FETCH <sid> <layer>

    The blob, or null.
    """
    record: Record | None = ctx.state.ssm.fetch(arguments.name(args[0]), _layer(args[1]))
    if record is None:
        return None
    held = record

    def work() -> Payload:
        held.verify()
        file, offset = held.where
        span = FileSpan(file, offset, held.length)

        def chunks() -> Iterator[Chunk]:
            # It holds the record: what is being sent is not given back to the disk.
            if held.length:
                yield span

        return Payload(held.length, chunks)

    return work() if held.verified or held.length <= INLINE_BYTES else Offload(work)


@command(
    "SSM.PREFIX.DROP", access=Access.TENANT, min_args=1, max_args=2, flags=Flag.WRITE, names="first"
)
def drop(ctx: Context, args: Args) -> str:
    """SSM.PREFIX.DROP <sid> [<layer>]

    Without a layer: all of them.
    """
    layer = _layer(args[1]) if len(args) == 2 else None
    ctx.state.ssm.drop(arguments.name(args[0]), layer, owner=ctx.connection)
    return "OK"


def _layer(value: object) -> int:
    return integer(value, "layer", 0, MAX_LAYER)  # type: ignore[arg-type]
