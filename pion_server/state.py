"""Everything one server process holds, and the one place where it is put together."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from pion_server import journal
from pion_server.attend.service import Attention
from pion_server.config import Config, config_of, config_of_admin
from pion_server.slowlog import SlowLog
from pion_server.store.export import Exports
from pion_server.store.keyspace import Keyspace
from pion_server.store.lending import Lending
from pion_server.store.opening import StoreOptions, Stores, open_stores
from pion_server.store.ssm import SsmStore
from pion_server.store.vstore import VStore
from pion_server.wire.connection import Connection

if TYPE_CHECKING:
    from pion_server.workers.homes import Homes


class WriterLock:
    """One writer at a time, first come, first served. For one event loop; holds no thread.

    Unlike `asyncio.Lock` it can be tried without an await, which lets a short write run at once.
    """

    __slots__ = ("_held", "_waiting")

    def __init__(self) -> None:
        self._held = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def held(self) -> bool:
        return self._held

    def try_acquire(self) -> bool:
        """Take the lock if it is free."""
        if self._held:
            return False
        self._held = True
        return True

    async def acquire(self) -> None:
        """Take the lock, after everybody who asked before."""
        if self.try_acquire():
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Hand the lock to the next in line, or free it."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._held = False

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()


class GroupCommit:
    """Many writers, one fsync: whoever joins while one runs waits for the next."""

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        self._turn = WriterLock()
        self._open: asyncio.Task[None] | None = None

    async def commit(self) -> None:
        """Return once everything applied before this call is on stable storage.

        Raises LogFailed.
        """
        if self._open is None:
            self._open = asyncio.get_running_loop().create_task(self._flush())
        await asyncio.shield(self._open)

    async def _flush(self) -> None:
        async with self._turn:
            self._open = None
            await asyncio.to_thread(self._sync)


@dataclass(slots=True)
class Stats:
    """The counters of WIRE.md section 9; all go back to 0 on a reset."""

    hits: int = 0
    misses: int = 0
    hits_measured: int = 0
    tokens_served: int = 0
    bytes_served: int = 0
    prefill_us_saved: int = 0
    prefill_us_measured: int = 0

    def reset(self) -> None:
        for counter in fields(self):
            setattr(self, counter.name, 0)


@dataclass(slots=True)
class ServerState:
    """What the commands of one user share: the admin's, or a tenant's own.

    Changed on the event loop's thread only. `tenants` is empty but in the admin's.
    """

    config: Config
    stores: Stores
    tenant: str = ""
    worker_id: int = 0
    run_id: str = field(default_factory=lambda: os.urandom(20).hex())
    started_at: float = field(default_factory=time.monotonic)
    stats: Stats = field(default_factory=Stats)
    writer_lock: WriterLock = field(default_factory=WriterLock)
    connections: dict[int, Connection] = field(default_factory=dict)
    commands_executed: int = 0
    # Set once the server listens: the port really bound, and how to ask for a graceful end.
    port: int = 0
    unix_socket: Path | None = None
    stop: Callable[[str], None] = lambda reason: None
    save_lock: WriterLock = field(default_factory=WriterLock)
    export_lock: WriterLock = field(default_factory=WriterLock)
    exports: Exports = field(init=False)
    lending: Lending = field(init=False)
    background: set[asyncio.Task[None]] = field(default_factory=set)
    group_commit: GroupCommit = field(init=False)
    attend: Attention = field(init=False)
    total_fetches: int = 0
    short_fetches: int = 0
    slowlog: SlowLog = field(default_factory=SlowLog)
    tenants: dict[bytes, ServerState] = field(default_factory=dict)
    # Of a server of several workers: which of them holds what.
    homes: Homes | None = None

    def __post_init__(self) -> None:
        self.group_commit = GroupCommit(self.stores.sync)
        self.exports = Exports(
            self.vstore,
            self.config.directory,
            directory=self.config.export_directory,
            worker=self.worker_id,
            budget=self.config.export_budget,
        )
        self.lending = Lending(
            self.vstore,
            self.ssm,
            self.config.export_directory or self.config.directory / "pion-export",
            budget=self.config.export_budget,
        )
        self.attend = Attention(self.config, self.vstore, self.writer_lock)

    @property
    def everybody(self) -> tuple[ServerState, ...]:
        """This one, and the tenants'."""
        return self, *self.tenants.values()

    @property
    def vstore(self) -> VStore:
        return self.stores.vstore

    @property
    def ssm(self) -> SsmStore:
        return self.stores.ssm

    @property
    def keyspace(self) -> Keyspace:
        return self.stores.keyspace

    @property
    def uptime(self) -> float:
        """Seconds since the process opened its stores."""
        return time.monotonic() - self.started_at

    def close(self) -> None:
        """Close everybody's stores; their acknowledged writes are on disk already."""
        for state in self.everybody:
            state.stores.close()
            if state.homes is not None:
                state.homes.close()


def open_state(config: Config, worker: int = 0) -> ServerState:
    """Lock and load the data directory (0700), and each tenant's, and hand out the whole.

    `worker`: which one of `config.workers` this is. Raises DirectoryInUse, ForeignFile or OSError;
    what was cut or lost is told on stderr.
    """
    names = config.directory
    state = _open_one(config_of_admin(config), worker, names)
    try:
        for tenant in config.tenants:
            own = _open_one(config_of(config, tenant), worker, names, tenant.name)
            own.run_id, own.started_at = state.run_id, state.started_at
            own.connections = state.connections
            state.tenants[tenant.name.encode()] = own
    except BaseException:
        state.close()
        raise
    return state


def _open_one(config: Config, worker: int, names: Path, tenant: str = "") -> ServerState:
    stores = open_stores(
        StoreOptions(
            config.directory,
            worker,
            max_sessions=config.vstore_sessions,
            max_memory=config.max_memory,
            ssm_budget=config.ssm_budget,
            max_disk=config.max_disk,
            vstore_log=config.vstore_log,
            keyspace_log=config.keyspace_log,
            shared=config.workers > 1,
        )
    )
    for notice in stores.notices:
        journal.complain("recovery", notice, tenant=tenant)
    replayed = sum(log.replayed for log in stores.logs)
    held = f"{len(stores.vstore.table)} sessions" + (f" of tenant {tenant}" if tenant else "")
    journal.tell("replayed", f"WAL replayed {replayed} records, {held}", records=replayed)
    state = ServerState(config, stores, tenant, worker)
    if config.workers > 1:
        from pion_server.workers.homes import Homes
        from pion_server.workers.names import Names

        state.homes = Homes(Names(names, tenant, worker), state.vstore, state.ssm)
    return state
