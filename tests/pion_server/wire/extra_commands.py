"""Commands that exist only in tests: one for each way a reply can come about.

Run inside the server process before it starts (`server(extra=…)`).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import zlib
from collections.abc import Iterator
from typing import Any

from pion_server.commands.registry import Access, Args, Context, Flag, command
from pion_server.errors import BadArgument, NotFound
from pion_server.payload import Chunk, FileSpan, Offload, Payload

_PIECE = b"0123456789abcdef" * 4096
_running_writes = 0
_written: list[bytes] = []
_closed = 0


def _stored_file() -> Any:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
    for _ in range(64):
        file.write(_PIECE)
    file.flush()
    return file


_FILE = _stored_file()


@command("T.CRC", access=Access.TENANT, min_args=0)
def crc(ctx: Context, args: Args) -> object:
    """T.CRC <bytes> ..."""
    return [item for arg in args for item in (len(arg), zlib.crc32(arg))]


@command("T.EAGER", access=Access.TENANT, min_args=1, max_args=1)
def eager(ctx: Context, args: Args) -> object:
    """T.EAGER <size>"""
    return b"e" * int(bytes(args[0]))


@command("T.LAZY", access=Access.TENANT, min_args=1, max_args=1)
def lazy(ctx: Context, args: Args) -> Payload:
    """T.LAZY <size>"""
    size = int(bytes(args[0]))

    def chunks() -> Iterator[Chunk]:
        for start in range(0, size, len(_PIECE)):
            yield _PIECE[: min(len(_PIECE), size - start)]

    return Payload(size, chunks)


@command("T.FILE", access=Access.TENANT, min_args=2, max_args=2)
def from_file(ctx: Context, args: Args) -> list[Payload]:
    """T.FILE <spans> <size>"""
    count, size = int(bytes(args[0])), int(bytes(args[1]))
    return [Payload(size, lambda: iter([FileSpan(_FILE, 3, size)]))] * count


@command("T.BROKEN", access=Access.TENANT, min_args=0, max_args=0)
def broken(ctx: Context, args: Args) -> Payload:
    """T.BROKEN"""

    def chunks() -> Iterator[Chunk]:
        yield b"x" * 100
        raise OSError("the disk is gone")

    return Payload(1000, chunks)


@command("T.RAISE", access=Access.TENANT, min_args=1, max_args=1)
def fail(ctx: Context, args: Args) -> object:
    """T.RAISE <here|thread|task|missing|encoding|memory>"""

    def work() -> object:
        raise RuntimeError("planned\r\n+OK")

    async def later() -> object:
        await asyncio.sleep(0)
        raise RuntimeError("planned")

    match bytes(args[0]):
        case b"thread":
            return Offload(work)
        case b"task":
            return later()
        case b"missing":
            raise NotFound("thing not found\r\n+OK")
        case b"encoding":
            return [1, object()]
        case b"memory":
            raise MemoryError
    return work()


@command("T.WAIT", access=Access.TENANT, min_args=2, max_args=2)
async def wait(ctx: Context, args: Args) -> object:
    """T.WAIT <ms> <answer>"""
    await asyncio.sleep(int(bytes(args[0])) / 1000)
    return args[1]


@command("T.WORK", access=Access.TENANT, min_args=2, max_args=2)
def work_in_thread(ctx: Context, args: Args) -> object:
    """T.WORK <ms> <answer>"""
    milliseconds = int(bytes(args[0]))

    def work() -> object:
        time.sleep(milliseconds / 1000)
        return args[1]

    return Offload(work)


@command("T.WRITE", access=Access.TENANT, min_args=2, max_args=2, flags=Flag.WRITE)
def write(ctx: Context, args: Args) -> object:
    """T.WRITE <here|thread|task> <value>

    Answers an error if another write is under way.
    """
    global _running_writes
    if _running_writes:
        raise BadArgument("two writers at a time")
    value = bytes(args[1])

    def finish() -> object:
        global _running_writes
        _written.append(value)
        _running_writes -= 1
        return len(_written)

    def work() -> object:
        time.sleep(0.002)
        return finish()

    async def later() -> object:
        await asyncio.sleep(0.002)
        return finish()

    _running_writes += 1
    match bytes(args[0]):
        case b"thread":
            return Offload(work)
        case b"task":
            return later()
    return finish()


@command("T.WRITTEN", access=Access.TENANT, min_args=0, max_args=0)
def written(ctx: Context, args: Args) -> object:
    """T.WRITTEN"""
    return list(_written)


@command("T.OWN", access=Access.TENANT, min_args=0, max_args=0)
def own(ctx: Context, args: Args) -> object:
    """T.OWN

    Counts, in T.CLOSED, when this connection is gone.
    """

    def note() -> None:
        global _closed
        _closed += 1

    ctx.connection.on_close.append(note)
    return "OK"


@command("T.CLOSED", access=Access.TENANT, min_args=0, max_args=0)
def closed(ctx: Context, args: Args) -> object:
    """T.CLOSED"""
    return _closed


@command("T.NAMES", access=Access.TENANT, min_args=1, names="all")
def names(ctx: Context, args: Args) -> object:
    """T.NAMES <ns> [<ns> ...]"""
    return [bytes(arg) for arg in args]


@command("T.SID", access=Access.TENANT, min_args=2, max_args=2, sids=lambda args: [1])
def sid(ctx: Context, args: Args) -> object:
    """T.SID <option> <sid>"""
    return len(args[1])


@command("T.RSS", access=Access.TENANT, min_args=0, max_args=0)
def resident(ctx: Context, args: Args) -> object:
    """T.RSS"""
    from pion_server.process import rss_bytes

    return rss_bytes()


@command("T.FILES", access=Access.TENANT, min_args=0, max_args=0)
def open_files(ctx: Context, args: Args) -> object:
    """T.FILES"""
    return len(os.listdir("/dev/fd"))
