"""The local lane: a prefix as a descriptor, and where the socket is that can carry one."""

from __future__ import annotations

import asyncio
import os
import re

from pion_server.commands import arguments
from pion_server.commands.arguments import integer
from pion_server.commands.registry import Access, Args, Context, command
from pion_server.errors import BadArgument
from pion_server.payload import Handover
from pion_server.state import ServerState
from pion_server.store.lending import BlobWanted, LendRequest, RowsWanted
from pion_server.store.schema import MAX_DIM, MAX_LAYERS, MAX_ROWS
from pion_server.store.tensor_file import ITEM_BYTES, BlockSums, Part

MAX_LAYOUT = 1 << 20
MAX_ROOM = 4096
_MOST_PARTS = 8
# Seconds. Who asks has the rows by now, and is about to compute the first token from them.
_DELAY = 0.5
_CHECKSUM = re.compile(r"[0-9a-f]{16}\Z")
# In the place of a layer's checksum: blocks of all layers have one.
_IN_BLOCKS = "-"


@command("PION.SOCKET", access=Access.TENANT, min_args=0, max_args=1, names="first")
def socket_path(ctx: Context, args: Args) -> object:
    """PION.SOCKET [<ns>]

    For clients on this machine: path of the server's Unix socket, and the server's run id; or null.
    Each of several workers has its own; with a name it is the one of the worker that has it.
    """
    path = ctx.state.unix_socket
    if path is None or not ctx.connection.peer_is_local:
        return None
    return [os.fsencode(path), ctx.state.run_id.encode()]


@command("KV.PREFIX.LEND", access=Access.TENANT, min_args=1, max_args=3, names="first")
def lend(ctx: Context, args: Args) -> object:
    """KV.PREFIX.LEND <ns> [<gen> <layout>]

    Over the Unix socket: `[gen, length, digest of the layout]` of a final safetensors file, whose
    descriptor comes along, or null. With a layout, over TCP too: has the file made, `+OK` at once.
    """
    state, connection = ctx.state, ctx.connection
    if not connection.peer_is_local:
        raise BadArgument("KV.PREFIX.LEND is for clients on this machine, use V.FETCH")
    if len(args) == 2:
        raise BadArgument("KV.PREFIX.LEND requires: <ns> [<gen> <layout>]")
    if len(args) == 3:
        _make_later(state, _request(args))
        return "OK"
    if not connection.takes_descriptors:
        raise BadArgument("KV.PREFIX.LEND needs the Unix socket (PION.SOCKET)")
    found = state.lending.find(arguments.name(args[0]))
    if found is None:
        return None
    state.stats.bytes_served += found.data_bytes
    return Handover([found.gen, found.nbytes, found.digest], found.file)


def _make_later(state: ServerState, request: LendRequest) -> None:
    """Have the file made beside everything else, one at a time, a little later."""
    if not state.lending.begin(request):
        return

    async def make() -> None:
        await asyncio.sleep(_DELAY)
        async with state.export_lock:
            await asyncio.to_thread(state.lending.make, request)

    task = asyncio.get_running_loop().create_task(make())
    state.background.add(task)
    task.add_done_callback(state.background.discard)


def _request(args: Args) -> LendRequest:
    gen = arguments.generation(args[1:])
    if len(args[2]) > MAX_LAYOUT:
        raise BadArgument(f"KV.PREFIX.LEND: a layout has at most {MAX_LAYOUT} bytes")
    rows: list[RowsWanted] = []
    blobs: list[BlobWanted] = []
    blocks: BlockSums | None = None
    seen = set()
    for line in bytes(args[2]).decode("latin-1").split("\n"):
        words = line.split(" ")
        if words[0] in ("k", "v") and 6 <= len(words) <= 5 + _MOST_PARTS:
            rows.append(_rows(words))
        elif words[0] == "s" and len(words) == 4:
            layer = _number(words[1], "layer", 0, 2**32 - 2)
            blobs.append(BlobWanted(layer, _number(words[2], "bytes", 0, 1 << 30), _sum(words[3])))
        elif words[0] == "b" and len(words) == 3 and blocks is None:
            blocks = _blocks(words[1], words[2])
            continue
        else:
            raise BadArgument("KV.PREFIX.LEND: a layout's line begins with k, v, s or, once, b")
        seen.add((words[0], words[1]))
    if len(seen) != len(rows) + len(blobs):
        raise BadArgument("KV.PREFIX.LEND: a layout names every layer once")
    _check_sums(rows, blocks)
    from hashlib import blake2b  # and its OpenSSL: only lending needs them

    digest = blake2b(args[2], digest_size=16).digest()
    return LendRequest(arguments.name(args[0]), gen, digest, tuple(rows), tuple(blobs), blocks)


def _rows(words: list[str]) -> RowsWanted:
    """`side layer rows[+room] xxh3 heads dtype:width [dtype:width …]`, the widths a head's."""
    side, layer, length, checksum, heads, *parts = words
    count, plus, room = length.partition("+")
    number = _number(heads, "heads", 1, MAX_DIM)
    found = []
    for index, text in enumerate(parts):
        dtype, _, width = text.partition(":")
        if dtype not in ITEM_BYTES:
            raise BadArgument("KV.PREFIX.LEND: a part is dtype:width")
        found.append(Part(f".{index}", dtype, number, _number(width, "width", 1, 8 * MAX_DIM)))
    return RowsWanted(
        side,
        _number(layer, "layer", 0, MAX_LAYERS - 1),
        _number(count, "rows", 1, MAX_ROWS),
        None if checksum == _IN_BLOCKS else _sum(checksum),
        tuple(found),
        _number(room, "room", 1, MAX_ROOM) if plus else 0,
    )


def _blocks(rows: str, sums: str) -> BlockSums:
    """`b rows xxh3xxh3…`: 16 digits a block."""
    each = tuple(_sum(sums[at : at + 16]) for at in range(0, len(sums), 16))
    return BlockSums(_number(rows, "rows of a block", 1, MAX_ROWS), each)


def _check_sums(rows: list[RowsWanted], blocks: BlockSums | None) -> None:
    """Every row is covered by one checksum."""
    if any((wanted.checksum is None) != (blocks is not None) for wanted in rows):
        raise BadArgument("KV.PREFIX.LEND: either each layer has a checksum or blocks have")
    if blocks is not None and any(
        -(-wanted.count // blocks.rows) != len(blocks.sums) for wanted in rows
    ):
        raise BadArgument("KV.PREFIX.LEND: another number of checksums than of blocks")


def _number(text: str, what: str, low: int, high: int) -> int:
    return integer(text.encode("latin-1"), what, low, high)


def _sum(text: str) -> str:
    if not _CHECKSUM.match(text):
        raise BadArgument("KV.PREFIX.LEND: a checksum is 16 hex digits")
    return text
