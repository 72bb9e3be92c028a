"""From a request to its reply: who may ask, how many arguments, in which order writes go.

Everything a command must not forget happens here and nowhere else.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from pion_server import commands, journal
from pion_server.commands.frames import FRAMES
from pion_server.commands.registry import (
    NAMESPACE_LIMIT,
    SID_LIMIT,
    Args,
    Command,
    Context,
    Positions,
    chosen,
    find_command,
)
from pion_server.errors import (
    AuthRequired,
    BadArgument,
    CommandError,
    NotPermitted,
    OutOfMemory,
    printable,
)
from pion_server.modules import import_modules
from pion_server.payload import Buffer, Offload
from pion_server.state import ServerState
from pion_server.tenants import share
from pion_server.wire.auth import Credentials
from pion_server.wire.binary import Frame
from pion_server.wire.connection import Connection
from pion_server.wire.replies import NO_REPLY

if TYPE_CHECKING:
    from pion_server.workers.homes import Homes

_THREADS = 4
_UNFINISHED = (Offload, CoroutineType)
# An HTTP request a browser was tricked into sending: answering it would run what follows.
_HTTP = frozenset({b"POST", b"HOST:"})


def load_commands() -> None:
    """Import every module of the package, so that its commands are registered."""
    import_modules(commands)


class Dispatcher:
    """The wire's `Service`: executes the commands of all connections, each on its own stores.

    `state` is the admin's, and knows the tenants'.
    """

    def __init__(self, state: ServerState) -> None:
        load_commands()
        self.state = state
        config = state.config
        passwords = {tenant.name: tenant.password for tenant in config.tenants}
        self.credentials = Credentials(config.password, passwords)
        self._slow = config.slowlog_ms / 1000 or math.inf
        self._strict = config.tenant_strict
        self._prefix = config.ns_prefix
        self._contexts: dict[int, Context] = {}
        # Connections of each tenant, and how many one may have: none takes all there are.
        self._clients: Counter[bytes] = Counter()
        self._most_clients = share(config.max_clients, len(config.tenants)) or 1
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pion-work")

    def close(self) -> None:
        """Wait for offloaded work; nothing may be executed afterwards."""
        self._threads.shutdown(wait=True)

    def connected(self, connection: Connection) -> None:
        self._enter(connection, None)
        connection.authenticated = not self.credentials.needed
        self.state.connections[connection.id] = connection

    def _enter(self, connection: Connection, tenant: bytes | None) -> None:
        """From its next command on the connection works on the stores of `tenant`.

        Raises CommandError for a tenant that has as many connections as it may.
        """
        if tenant is not None and tenant != connection.tenant:
            if self._clients[tenant] >= self._most_clients:
                raise CommandError("max number of clients of this tenant reached")
            self._clients[tenant] += 1
        self._count_out(connection, tenant)
        state = self.state if tenant is None else self.state.tenants[tenant]
        connection.authenticated = True
        connection.tenant = tenant
        connection.user = "default" if tenant is None else tenant.decode()
        self._contexts[connection.id] = Context(
            state, connection, self.credentials, partial(self._enter, connection)
        )

    def _count_out(self, connection: Connection, tenant: bytes | None = None) -> None:
        """A connection is no longer the tenant's that it was, unless it is `tenant`."""
        if connection.tenant not in (None, tenant):
            self._clients[connection.tenant] -= 1

    def disconnected(self, connection: Connection) -> None:
        self._count_out(connection)
        del self.state.connections[connection.id]
        del self._contexts[connection.id]
        for state in self.state.everybody:
            state.vstore.manifests.disconnect(connection)
        for callback in connection.on_close:
            try:
                callback()
            except Exception as error:
                journal.fail("internal error", "internal error in on_close", error)

    def execute(
        self, connection: Connection, request: list[Buffer]
    ) -> object | Coroutine[Any, Any, object]:
        """A reply value, or a coroutine of one. Errors are reply values too: it never raises."""
        name, args = request[0], request[1:]
        command = find_command(name)
        ctx = self._contexts[connection.id]
        ctx.state.commands_executed += 1
        started = connection.used(command.name if command is not None else "unknown")
        result: object
        try:
            if command is None:
                if bytes(name[:8]).upper() in _HTTP:
                    connection.closing = True
                    return NO_REPLY
                if not connection.authenticated:
                    raise AuthRequired("Authentication required.")
                raise CommandError(f"unknown command '{printable(name, 128)}'")
            if not (connection.authenticated or command.open_to_all):
                raise AuthRequired("Authentication required.")
            if connection.tenant is not None:
                self._check_permission(command.admin_only or (command.dotted and self._strict))
            _check_arity(command, len(args))
            _check_names(command, command.names, args, "namespace", NAMESPACE_LIMIT, self._prefix)
            _check_names(command, command.sids, args, "sid", SID_LIMIT, self._prefix)
            if ctx.state.homes is None or not command.dotted or command.anywhere:
                result = self._run(command, ctx, args)
            else:
                result = self._run_at_home(command, ctx, args, ctx.state.homes)
            if ctx.state.config.fsync == "always" and command.writes_with(args):
                result = self._commit(command, ctx, result)
        except Exception as error:
            result = _as_reply(error, command.name if command is not None else "?")
        if type(result) is CoroutineType:
            return self._timed(ctx, args, started, result)
        if time.monotonic() - started > self._slow:
            self._note_slow(ctx, args, started)
        return result

    async def _timed(
        self, ctx: Context, args: Args, started: float, result: Coroutine[Any, Any, object]
    ) -> object:
        value = await result
        if time.monotonic() - started > self._slow:
            self._note_slow(ctx, args, started)
        return value

    @staticmethod
    def _note_slow(ctx: Context, args: Args, started: float) -> None:
        connection = ctx.connection
        name = connection.last_command
        # An unknown one may be a mistyped AUTH.
        shown = args if name != "unknown" else ()
        ctx.state.slowlog.note(connection, name, shown, time.monotonic() - started)

    def execute_frame(
        self, connection: Connection, frame: Frame
    ) -> object | Coroutine[Any, Any, object]:
        """The same for a request of the binary lane; errors become statuses there."""
        command = FRAMES.get(frame.command)
        name = command.name if command is not None else f"frame {frame.command:#04x}"
        ctx = self._contexts[connection.id]
        ctx.state.commands_executed += 1
        started = connection.used(name)
        result: object
        try:
            if not (connection.authenticated or (command is not None and command.open_to_all)):
                raise AuthRequired("Authentication required.")
            if command is None or frame.body is None:
                raise CommandError(f"{name} is unknown or too long")
            if connection.tenant is not None:
                self._check_permission(self._strict and not command.open_to_all)
            if command.sid is not None:
                _check_name(name, command.sid(frame.body), "sid", SID_LIMIT, self._prefix)
                if ctx.state.homes is not None and not command.anywhere:
                    ctx.state.homes.require(name, [bytes(command.sid(frame.body))])
            result = command.handler(ctx, frame.body)
            if _is_unfinished(result):
                result = self._finish(name, result)
        except Exception as error:
            result = _as_reply(error, name)
        if type(result) is CoroutineType:
            return self._timed(ctx, [], started, result)
        if time.monotonic() - started > self._slow:
            self._note_slow(ctx, [], started)
        return result

    def _run_at_home(
        self, command: Command, ctx: Context, args: Args, homes: Homes
    ) -> object | Coroutine[Any, Any, object]:
        """Run it if what it is about lives on this worker, or may from now on."""
        names = [bytes(name) for name in chosen(command.names or command.sids, args)]
        if command.claims is None or not command.claims(args):
            homes.require(command.name, names)
            return self._run(command, ctx, args)
        claimed = homes.claim(command.name, names)
        try:
            result = self._run(command, ctx, args)
        except BaseException:
            homes.unclaim(claimed)
            raise
        if isinstance(result, CoroutineType):
            return _unclaim_after(result, homes, claimed)
        homes.unclaim(claimed)
        return result

    @staticmethod
    def _check_permission(refused: bool) -> None:
        if refused:
            raise NotPermitted("this command is not allowed for tenant connections")

    def _run(
        self, command: Command, ctx: Context, args: Args
    ) -> object | Coroutine[Any, Any, object]:
        if not command.writes_with(args):
            result = command.handler(ctx, args)
            return self._finish(command.name, result) if _is_unfinished(result) else result
        lock = ctx.state.writer_lock
        if not lock.try_acquire():
            return self._write_later(command, ctx, args)
        try:
            result = command.handler(ctx, args)
            if not _is_unfinished(result):
                lock.release()
                return result
        except BaseException:
            lock.release()
            raise
        return self._finish_write(command, ctx, result)

    async def _write_later(self, command: Command, ctx: Context, args: Args) -> object:
        await ctx.state.writer_lock.acquire()
        try:
            result = command.handler(ctx, args)
        except Exception as error:
            ctx.state.writer_lock.release()
            return _as_reply(error, command.name)
        return await self._finish_write(command, ctx, result)

    async def _finish_write(self, command: Command, ctx: Context, result: object) -> object:
        """What is left of a write; the lock is held, and free again afterwards."""
        try:
            return await self._finish(command.name, result)
        finally:
            ctx.state.writer_lock.release()

    async def _commit(
        self, command: Command, ctx: Context, result: object | Coroutine[Any, Any, object]
    ) -> object:
        """`--fsync always`: no acknowledgement before the write is on stable storage."""
        if isinstance(result, CoroutineType):
            result = await result
        if isinstance(result, CommandError):
            return result
        try:
            await ctx.state.group_commit.commit()
        except Exception as error:
            return _as_reply(error, command.name)
        return result

    async def _finish(self, name: str, result: object) -> object:
        try:
            if isinstance(result, CoroutineType):
                result = await result
            if isinstance(result, Offload):
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._threads, result.work)
            return result
        except Exception as error:
            return _as_reply(error, name)


async def _unclaim_after(
    result: Coroutine[Any, Any, object], homes: Homes, claimed: list[bytes]
) -> object:
    try:
        return await result
    finally:
        homes.unclaim(claimed)


def _is_unfinished(result: object) -> bool:
    return isinstance(result, _UNFINISHED)


def _check_arity(command: Command, count: int) -> None:
    if count >= command.min_args and (command.max_args is None or count <= command.max_args):
        return
    if command.dotted:
        raise BadArgument(f"{command.name} requires: {command.arguments or 'no arguments'}")
    raise BadArgument(f"wrong number of arguments for '{command.name.lower()}' command")


def _check_names(
    command: Command, positions: Positions, args: Args, kind: str, limit: int, prefix: bytes
) -> None:
    for name in chosen(positions, args):
        _check_name(command.name, name, kind, limit, prefix)


def _check_name(command: str, name: Buffer, kind: str, limit: int, prefix: bytes) -> None:
    if not 1 <= len(name) <= limit:
        raise BadArgument(f"{command}: a {kind} must have 1 to {limit} bytes")
    if prefix and bytes(name[: len(prefix)]) != prefix:
        required = printable(prefix, 128)
        raise BadArgument(f"namespace must start with required prefix '{required}' ({command})")


def _as_reply(error: Exception, name: str) -> CommandError:
    if isinstance(error, CommandError):
        # Its frames hold the request and, by way of the caller's, itself: a cycle that would keep
        # a refused blob in memory until the collector comes by.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return error
    if isinstance(error, MemoryError):
        return OutOfMemory(f"{name}: the process is out of memory")
    journal.fail("internal error", f"internal error in {name}", error, command=name)
    return CommandError(f"internal error in {name}: {type(error).__name__}")
