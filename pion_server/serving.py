"""Bind, open the stores, serve until told to stop; or check the files of a stopped server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pion_server import __version__, journal
from pion_server.collector import look_once
from pion_server.commands.dispatch import Dispatcher
from pion_server.config import Config
from pion_server.doors import LOOPBACK, Doors, bind_doors, start_listening
from pion_server.errors import LogFailed
from pion_server.flag_values import ConfigError
from pion_server.housekeeping import start_housekeeping
from pion_server.preloading import start_preloading
from pion_server.process import keep_talking, raise_file_limit
from pion_server.state import ServerState, open_state
from pion_server.status import CrashLog, StatusFile
from pion_server.store.files import DirectoryInUse
from pion_server.store.log import ForeignFile
from pion_server.tls_door import TlsDoor
from pion_server.unix_door import open_unix_door
from pion_server.wire.lane import binary_lane, resp_lane
from pion_server.wire.server import ACCEPTS_A_TURN, Server

if TYPE_CHECKING:
    from pion_server.metrics_door import MetricsDoor

# Descriptors beside the clients' own: log and snapshot files, the loop, the standard three.
_SPARE_FILES = 256
# What a client of the TLS port takes: its socket, and the pair that its bytes pass through.
_TLS_CLIENT_FILES = 3
# Handshakes under way, at both its ports.
_TLS_FILES = 1024
_LEAST_CLIENTS = 16


def run(config: Config) -> int:
    """Do what the configuration asks for; the exit status. ConfigError if it cannot be done."""
    try:
        return _check(config) if config.action in ("check", "repair") else _serve(config)
    except (DirectoryInUse, ForeignFile, FileNotFoundError, LogFailed) as error:
        raise ConfigError(str(error)) from error


def _check(config: Config) -> int:
    """0 if every record is whole, 1 otherwise; each problem is one line."""
    from pion_server.store.checking import check_directory

    assert config.target is not None
    report = check_directory(
        config.target,
        repair=config.action == "repair",
        progress=lambda name: print(f"checking {name}", file=sys.stderr),
    )
    for problem in report.problems:
        print(problem)
    print(
        f"{report.files} files, {report.records} records, {report.nbytes} bytes: "
        f"{len(report.problems) or 'no'} problem{'' if len(report.problems) == 1 else 's'}"
    )
    return 1 if report.problems else 0


def _serve(config: Config) -> int:
    config = prepare(config)
    if config.workers > 1:
        from pion_server.workers.parent import serve_with_workers

        return serve_with_workers(config)
    doors = bind_doors(config)
    entrances = Entrances(doors, TlsDoor.of(config), metrics_door(config))
    state = open_data(config, doors.port)
    status, crash_log = reports_of(config, doors.port)
    crash_log.note_start(status.read())
    status.write("starting")
    tls, metrics = entrances.tls, entrances.metrics
    reached = partial(
        announce,
        config,
        doors.port,
        None if tls is None else tls.doors.port,
        None if metrics is None else metrics.port,
    )
    try:
        reason = run_loop(config, state, entrances, status, reached)
    except BaseException as error:
        status.write("failed")
        crash_log.note_exit(1, type(error).__name__)
        raise
    status.write("stopped")
    crash_log.note_exit(0, reason)
    journal.tell("stopped", f"pion-server stopped ({reason})", reason=reason)
    return 0


def _with_room_for_clients(config: Config) -> Config:
    """The configuration with as many clients as there can be open files for.

    So the server never finds itself without a descriptor for a log, or a module to import.
    """
    each, spare = 1, _SPARE_FILES
    if config.tls_port is not None:
        each, spare = _TLS_CLIENT_FILES, spare + _TLS_FILES
    files = raise_file_limit(each * config.max_clients + spare)
    fitting = max((files - spare) // each, _LEAST_CLIENTS)
    if fitting >= config.max_clients:
        return config
    if config.max_clients != Config().max_clients:  # the default is no promise
        text = f"{fitting} clients, not --max-clients {config.max_clients}: {files} open files"
        journal.complain("clients", text)
    return replace(config, max_clients=fitting)


@dataclass(frozen=True, slots=True)
class Entrances:
    """Where clients come in, all of them bound."""

    doors: Doors
    tls: TlsDoor | None
    metrics: MetricsDoor | None


def metrics_door(config: Config) -> MetricsDoor | None:
    """What `--metrics-port` asks for. Raises ConfigError."""
    if config.metrics_port is None:
        return None
    from pion_server.metrics_door import MetricsDoor

    return MetricsDoor(config, config.metrics_port)


def prepare(config: Config) -> Config:
    """What a process that serves does first; the configuration that it can keep to."""
    os.umask(0o077)
    keep_talking()
    journal.choose(config.log_format)
    for notice in config.notices:
        journal.complain("flag", notice)
    return _with_room_for_clients(config)


def open_data(config: Config, port: int, worker: int = 0) -> ServerState:
    """The state of a server, or of one of its workers, on `port`. Raises ConfigError."""
    try:
        state = open_state(config, worker)
    except OSError as error:
        where = error.filename or config.directory
        raise ConfigError(f"cannot open the data in {where}: {error.strerror or error}") from error
    for one in state.everybody:
        one.port = port
    return state


def reports_of(config: Config, port: int) -> tuple[StatusFile, CrashLog]:
    """The status file and the crash log, where the flags say or in the data directory."""
    default = config.directory / f"pion-{port}"
    status = config.status_file or default.with_name(f"{default.name}.status")
    crash_log = config.crash_log or default.with_name(f"{default.name}.crash.log")
    wanted = crash_log if config.crash_log_wanted else None
    return StatusFile(status, port), CrashLog(wanted, port)


def run_loop(
    config: Config,
    state: ServerState,
    entrances: Entrances,
    status: StatusFile,
    reached: Callable[[], None],
) -> str:
    """Serve on uvloop where there is one; why the server stopped.

    `reached` is called once clients are let in.
    """
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_serve_until_stopped(config, state, entrances, status, reached))


async def _serve_until_stopped(
    config: Config,
    state: ServerState,
    entrances: Entrances,
    status: StatusFile,
    reached: Callable[[], None],
) -> str:
    loop = asyncio.get_running_loop()
    journal.watch_loop(loop)
    stopped: asyncio.Future[str] = loop.create_future()

    def stop(reason: str) -> None:
        if not stopped.done():
            stopped.set_result(reason)

    state.stop = stop
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    dispatcher = Dispatcher(state)
    server = Server(
        dispatcher,
        max_clients=config.max_clients,
        per_address=config.clients_per_address,
        output_limit=config.output_limit,
        input_limit=config.max_request,
        auth_timeout=config.auth_timeout,
        accepts_a_turn=1 if config.workers > 1 else ACCEPTS_A_TURN,
    )
    doors, tls, metrics = entrances.doors, entrances.tls, entrances.metrics
    start_listening(config, doors)
    resp = resp_lane(dispatcher, config.max_request, config.stall_timeout)
    binary = binary_lane(dispatcher, config.max_request, config.stall_timeout)
    for listener in doors.resp:
        server.listen(listener, resp)
    for listener in doors.binary:
        server.listen(listener, binary)
    if tls is not None:
        tls.open(server, resp, binary)
    if metrics is not None:
        await metrics.open(state, server, dispatcher.credentials)
    suffix = f".{state.worker_id}" if config.workers > 1 else ""
    unix_door, notice = open_unix_door(config, suffix)
    if notice:
        journal.complain("unix socket", notice)
    if unix_door is not None:
        for one in state.everybody:
            one.unix_socket = unix_door.path
        server.listen(unix_door.socket, resp)
    background = [loop.create_task(status.beat())]
    for one in state.everybody:
        background += start_housekeeping(one)
    status.write("running")
    reached()
    start_preloading()
    # Everything made so far lives as long as the process: the collector need not look at it.
    gc.freeze()
    look_once()
    reason = await stopped
    status.write("stopping")
    if unix_door is not None:
        unix_door.remove()
    await server.stop()
    # A compaction of our own is waited for: its thread cannot be cancelled, and must not find
    # the stores closed.
    async with contextlib.AsyncExitStack() as saves:
        for one in state.everybody:
            await saves.enter_async_context(one.save_lock)
        for task in background:
            task.cancel()
    dispatcher.close()
    state.close()
    return reason


def announce(
    config: Config, port: int, tls_port: int | None = None, metrics_port: int | None = None
) -> None:
    """The line that says where clients are served."""
    bind = LOOPBACK if config.tls_only else config.bind
    facts = [f"pid {os.getpid()}", f"version {__version__}", f"data {config.directory.resolve()}"]
    fields: dict[str, object] = {"bind": bind, "port": port, "pid": os.getpid()}
    if metrics_port is not None:
        fields["metrics_port"] = metrics_port
        facts.append(f"metrics on {bind}:{metrics_port}")
    if tls_port is not None:
        fields["tls_port"] = tls_port
        facts.append(f"TLS on {config.bind}:{tls_port}")
    if config.workers > 1:
        fields["workers"] = config.workers
        facts.append(f"{config.workers} workers")
    text = f"pion-server ready on {bind}:{port} ({', '.join(facts)})"
    journal.tell("ready", text, version=__version__, **fields)
