"""What the server does by the clock, and what the flags turn off."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pion_server import housekeeping
from pion_server.commands.saving import save_default
from pion_server.config import Config
from pion_server.housekeeping import start_housekeeping
from pion_server.state import ServerState, open_state
from pion_server.store.opening import Stores
from pion_server.store.schema import uniform

ME = object()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"_expire", "_compact"}),
        ({"auto_save": False}, {"_expire"}),
        ({"fsync": "everysec"}, {"_expire", "_compact", "_sync_every_second"}),
        ({"fsync": "always"}, {"_expire", "_compact"}),
    ],
)
def test_flags_say_what_runs_in_the_background(
    tmp_path: Path, config: dict[str, object], expected: set[str]
) -> None:
    """`--no-auto-save` leaves compaction to KV.PREFIX.SAVE."""
    state = open_state(Config(directory=tmp_path, **config))  # type: ignore[arg-type]

    async def main() -> set[str]:
        tasks = start_housekeeping(state)
        for task in tasks:
            task.cancel()
        return {task.get_coro().__name__ for task in tasks}  # type: ignore[union-attr]

    assert asyncio.run(main()) == expected
    state.close()


@pytest.mark.parametrize(
    ("overwrites", "limit", "max_disk", "free", "compacts"),
    [
        (3, 1, None, 1 << 30, True),
        (0, 1, None, 1 << 30, False),
        (3, 1 << 20, None, 1 << 30, False),
        (3, 1 << 20, 100_000, 1 << 30, True),
        (3, 1 << 20, 1 << 20, 1 << 30, False),
        (3, 1 << 20, None, 20_000, True),
        (0, 1 << 20, None, 0, False),
    ],
)
def test_compaction_waits_for_more_dead_than_live_bytes_and_for_enough_of_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overwrites: int,
    limit: int,
    max_disk: int | None,
    free: int,
    compacts: bool,
) -> None:
    """WIRE.md 11: when dead bytes exceed live bytes and a limit, 256 MB as delivered, or a quarter
    of `--max-disk` where that is less: one that is never reached helps nobody."""
    assert housekeeping.COMPACT_BYTES == 256 << 20
    monkeypatch.setattr(housekeeping, "COMPACT_BYTES", limit)
    state = open_state(Config(directory=tmp_path, max_disk=max_disk))
    state.vstore.create(b"s", uniform("fp32", 32), ME)
    for _ in range(1 + overwrites):
        state.vstore.store(b"s", 0, 0, 100, bytes(100 * 128), owner=ME)
    saved: list[int] = []

    async def sleep(seconds: float) -> None:
        if saved or len(ticks) == 3:
            raise asyncio.CancelledError
        ticks.append(seconds)

    async def save(of: ServerState) -> str:
        saved.append(of.stores.dead_bytes)
        return await save_default(of)

    ticks: list[float] = []
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(housekeeping, "save_default", save)
    monkeypatch.setattr(Stores, "free_bytes", free)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(housekeeping._compact(state))
    assert bool(saved) == compacts
    assert (state.stores.dead_bytes < 12_800) == (compacts or not overwrites)
    state.close()
