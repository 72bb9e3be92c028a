"""SAVE as the running server does it: frozen under the writer lock, written beside the clients."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from pion_server.collector import collector_paused
from pion_server.commands.registry import Access, Args, Context, command
from pion_server.errors import CommandError
from pion_server.state import ServerState

# How long writers wait at once while the index learns where everything lies now.
ADOPT_SECONDS = 0.005


@command("SAVE", access=Access.ADMIN, min_args=0, max_args=0)
def save(ctx: Context, args: Args) -> str:
    """SAVE

    Accepted for Redis clients: every acknowledged write is in the log already.
    """
    return "OK"


async def save_all(state: ServerState) -> str:
    """Snapshot the admin's stores and every tenant's, one after another."""
    for one in state.everybody:
        await save_default(one)
    return "OK"


async def save_copies(state: ServerState, relative: str) -> str:
    """Extra snapshots, each at a path relative to its own data directory."""
    for one in state.everybody:
        await save_copy(one, relative)
    return "OK"


async def save_default(state: ServerState) -> str:
    """Snapshot both stores and empty their logs; one at a time, the next waits its turn."""
    async with state.save_lock:
        with collector_paused():
            await _save(state)
    return "OK"


async def _save(state: ServerState) -> None:
    async with state.writer_lock:
        saving = await asyncio.to_thread(state.stores.begin_save)
    try:
        await asyncio.to_thread(saving.write)
        async with state.writer_lock:
            await asyncio.to_thread(saving.finish)
        adopted = False
        while not adopted:
            async with state.writer_lock:
                adopted = await asyncio.to_thread(saving.adopt, ADOPT_SECONDS)
    except OSError as error:
        saving.abandon()
        raise _failed(error) from error
    except BaseException:
        saving.abandon()
        raise
    finally:
        await asyncio.to_thread(saving.take_apart)


def save_copy(state: ServerState, relative: str) -> Coroutine[Any, Any, str]:
    """Extra snapshots at a path relative to the data directory."""

    async def run() -> str:
        target = state.stores.options.directory / relative
        async with state.save_lock:
            with collector_paused():
                async with state.writer_lock:
                    copying = await asyncio.to_thread(state.stores.begin_copy, target)
                try:
                    await asyncio.to_thread(copying.write)
                except OSError as error:
                    raise _failed(error) from error
                finally:
                    await asyncio.to_thread(copying.take_apart)
        return "OK"

    return run()


def _failed(error: OSError) -> CommandError:
    return CommandError(f"KV.PREFIX.SAVE failed: {error.strerror or error}")
