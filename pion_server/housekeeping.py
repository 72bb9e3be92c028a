"""What a server does by the clock: fsync each second, expiry, idle sessions, compaction."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from pion_server import journal
from pion_server.commands.saving import save_default
from pion_server.errors import CommandError, LogFailed
from pion_server.state import ServerState

# Compaction starts when this many bytes, and more than the live ones, are dead.
COMPACT_BYTES = 256 << 20
_RETRY_SECONDS = 60.0


def start_housekeeping(state: ServerState) -> list[asyncio.Task[None]]:
    """The background tasks of a running server; cancel them to stop."""
    work: list[Coroutine[Any, Any, None]] = [_expire(state)]
    if state.config.fsync == "everysec":
        work.append(_sync_every_second(state))
    if state.homes is not None:
        work.append(state.homes.keep_settled())
    if state.config.auto_save:
        work.append(_compact(state))
    loop = asyncio.get_running_loop()
    return [loop.create_task(task) for task in work]


async def _expire(state: ServerState) -> None:
    while True:
        await asyncio.sleep(1.0)
        state.attend.decodes.drop_idle()
        if state.keyspace.expiring:
            async with state.writer_lock:
                state.keyspace.forget_expired()
        if state.vstore.expiry:
            async with state.writer_lock:
                try:
                    state.vstore.drop_expired()
                except LogFailed as error:
                    _complain("dropping expired prefixes", error)


async def _sync_every_second(state: ServerState) -> None:
    while True:
        await asyncio.sleep(1.0)
        try:
            # Shared with COMMIT: a flush under way elsewhere must not pass for one's own.
            await state.group_commit.commit()
        except LogFailed as error:
            # The log refuses all further writes by itself; saying it once is enough.
            _complain("fsync", error)
            return


async def _compact(state: ServerState) -> None:
    stores, least = state.stores, COMPACT_BYTES
    # Small records give their bytes back by a SAVE alone, for which there has to be room yet: it
    # does not wait until the limit, or the disk, is full.
    if stores.options.max_disk is not None:
        least = min(least, stores.options.max_disk // 4)
    while True:
        await asyncio.sleep(1.0)
        dead = stores.dead_bytes
        if dead <= stores.live_bytes or dead <= min(least, stores.free_bytes):
            continue
        try:
            await save_default(state)
        except CommandError as error:
            _complain("compaction", error)
            await asyncio.sleep(_RETRY_SECONDS)


def _complain(what: str, error: CommandError) -> None:
    journal.complain(what.split()[0], f"{what}: {error}")
