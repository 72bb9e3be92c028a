"""SAVE as the running server does it: frozen under the writer lock, written beside the clients."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from pion_server.commands.registry import Args, Context, command
from pion_server.errors import CommandError
from pion_server.state import ServerState


@command("SAVE", min_args=0, max_args=0)
def save(ctx: Context, args: Args) -> str:
    """SAVE

    Accepted for Redis clients: every acknowledged write is in the log already.
    """
    return "OK"


async def save_default(state: ServerState) -> str:
    """Snapshot both stores and empty their logs; one at a time, the next waits its turn."""
    async with state.save_lock:
        async with state.writer_lock:
            saving = await asyncio.to_thread(state.stores.begin_save)
        try:
            await asyncio.to_thread(saving.write)
            async with state.writer_lock:
                await asyncio.to_thread(saving.finish)
        except OSError as error:
            saving.abandon()
            raise CommandError(f"KV.PREFIX.SAVE failed: {error.strerror or error}") from error
        except BaseException:
            saving.abandon()
            raise
    return "OK"


def save_copy(state: ServerState, relative: str) -> Coroutine[Any, Any, str]:
    """An extra snapshot at a path relative to the data directory."""

    async def run() -> str:
        target = state.stores.options.directory / relative
        async with state.save_lock:
            async with state.writer_lock:
                work = await asyncio.to_thread(state.stores.begin_copy, target)
            try:
                await asyncio.to_thread(work)
            except OSError as error:
                raise CommandError(f"KV.PREFIX.SAVE failed: {error.strerror or error}") from error
        return "OK"

    return run()
