"""The parent of several workers: binds the ports, starts workers, restarts those that crash.

It serves nobody itself. Workers inherit the listening sockets, which stay open here: a client that
connects to a crashed worker's own port waits until the next one is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import sys
import time
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass, field

from pion_server import journal
from pion_server.config import Config, config_of_worker
from pion_server.doors import Doors, bind_doors
from pion_server.flag_values import ConfigError
from pion_server.serving import announce, reports_of
from pion_server.status import CrashLog, StatusFile
from pion_server.store.files import DirectoryInUse, DirectoryLock
from pion_server.tls_door import TlsDoor
from pion_server.workers.child import EVERYBODY_ENDS, GO, OPENED, SERVING, DoorNumbers, Launch
from pion_server.workers.names import make_table, remove_table

# Seconds. The workers of a parent that was killed need a moment to notice it.
_LOCK_PATIENCE = 10.0
# A worker that does not live for as long is restarted later and later.
_SHORT_LIFE = 10.0
_LONGEST_PAUSE = 10.0


def serve_with_workers(config: Config) -> int:
    """Serve until told to stop; the exit status. Raises ConfigError, DirectoryInUse."""
    lock = _lock(config)
    try:
        doors = bind_doors(config)
        tls = TlsDoor.of(config)
        _note_left_over(config)
        make_table(config.directory)
        lock.share()
        status, crash_log = reports_of(config, doors.port)
        crash_log.note_start(status.read())
        status.write("starting")
        parent = _Parent(config, doors, None if tls is None else tls.doors, status, crash_log)
        try:
            reason = asyncio.run(parent.run())
        except BaseException as error:
            status.write("failed")
            crash_log.note_exit(1, type(error).__name__)
            raise
        remove_table(config.directory)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"cannot serve the data in {config.directory}: {error}") from error
    finally:
        lock.close()
    status.write("stopped")
    crash_log.note_exit(0, reason)
    journal.tell("stopped", f"pion-server stopped ({reason})", reason=reason)
    return 0


def _lock(config: Config) -> DirectoryLock:
    deadline = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            return DirectoryLock(config.directory)
        except DirectoryInUse:
            if time.monotonic() > deadline or not _was_orphaned(config):
                raise
            time.sleep(0.05)


def _was_orphaned(config: Config) -> bool:
    """Whether the parent that wrote its process number into the lock file is gone."""
    try:
        os.kill(int((config.directory / "pion.lock").read_text()), 0)
    except (OSError, ValueError):
        return True
    return False


def _note_left_over(config: Config) -> None:
    """Say so where a server of more workers has left files that nobody serves now."""
    found = {
        int(path.suffix[1:])
        for path in config.directory.glob("pion.vstore.wal.*")
        if path.suffix[1:].isdigit() and int(path.suffix[1:]) >= config.workers
    }
    if found:
        journal.complain(
            "workers",
            f"what workers {', '.join(map(str, sorted(found)))} have stored is not "
            f"served by {config.workers} workers",
        )


@dataclass(slots=True)
class _Worker:
    """A place among the workers, and who has it now."""

    number: int
    process: Process | None = None
    started_at: float = 0.0
    serving: asyncio.Event = field(default_factory=asyncio.Event)


class _Parent:
    """The workers of one server. One event loop."""

    def __init__(
        self,
        config: Config,
        doors: Doors,
        tls_doors: Doors | None,
        status: StatusFile,
        crash_log: CrashLog,
    ) -> None:
        self._config = config
        self._doors, self._tls_doors = doors, tls_doors
        self._status, self._crash_log = status, crash_log
        self._workers = [_Worker(number) for number in range(config.workers)]
        self._opened = 0
        self._go = asyncio.Event()
        self._stopped: asyncio.Future[str]
        self._failed = False

    async def run(self) -> str:
        """Start all, say so, keep them running; why it ended. ConfigError if one cannot start."""
        loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number.name)
        tasks = [loop.create_task(self._keep(worker)) for worker in self._workers]
        serving = loop.create_task(self._announce())
        reason = await self._stopped
        serving.cancel()
        self._status.write("stopping")
        # Those that do not serve yet see the end of their input instead.
        await asyncio.gather(*tasks)
        if self._failed:
            raise ConfigError(reason)
        return reason

    def _stop(self, reason: str) -> None:
        if self._stopped.done():
            return
        self._stopped.set_result(reason)
        for worker in self._workers:
            process = worker.process
            if process is None or process.returncode is not None:
                continue
            if worker.serving.is_set():
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            assert process.stdin is not None
            process.stdin.close()

    async def _announce(self) -> None:
        for worker in self._workers:
            await worker.serving.wait()
        self._status.write("running")
        tls_port = None if self._tls_doors is None else self._tls_doors.port
        announce(self._config, self._doors.port, tls_port)
        await self._status.beat()

    async def _keep(self, worker: _Worker) -> None:
        """A worker, and after its crash the next one, until the server stops."""
        pause = 0.0
        while not self._stopped.done():
            code = await self._run(worker)
            worker.process = None
            if self._stopped.done():
                return
            if code == EVERYBODY_ENDS:
                self._stop("SHUTDOWN")
                return
            if not self._go.is_set():
                self._failed = True
                self._stop(f"worker {worker.number} could not start")
                return
            lived = time.monotonic() - worker.started_at
            pause = 0.0 if lived > _SHORT_LIFE else min(2 * pause + 0.1, _LONGEST_PAUSE)
            self._crash_log.note(f"worker={worker.number} code={code} uptime_s={lived:.0f}")
            text = f"worker {worker.number} ended ({code}), the next one starts"
            journal.complain("worker", text, level="error", worker=worker.number, code=code)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._stopped), pause)

    async def _run(self, worker: _Worker) -> int:
        """Start a worker and wait for its end; the exit status, negative for a signal's number."""
        worker.serving = worker.serving if not worker.serving.is_set() else asyncio.Event()
        worker.started_at = time.monotonic()
        reports, report = os.pipe()
        launch = self._launch(worker.number, report)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "pion_server.workers.child",
                stdin=PIPE,
                env=_environment(),
                pass_fds=launch.descriptors,
                # A terminal's Ctrl-C is for the parent, which passes it on.
                process_group=0,
            )
        finally:
            os.close(report)
        worker.process = process
        assert process.stdin is not None
        process.stdin.write(launch.pack())
        listening = asyncio.create_task(self._listen(worker, process, reports))
        if self._stopped.done():
            process.stdin.close()
        code = await process.wait()
        await listening
        return code

    def _launch(self, number: int, report: int) -> Launch:
        tls = self._tls_doors
        return Launch(
            number,
            config_of_worker(self._config, number),
            DoorNumbers.of(self._doors.of_worker(number)),
            None if tls is None else DoorNumbers.of(tls.of_worker(number)),
            report,
        )

    async def _listen(self, worker: _Worker, process: Process, reports: int) -> None:
        """Take a worker's reports, and let it serve once all have opened their stores."""
        reader = asyncio.StreamReader()
        pipe = os.fdopen(reports, "rb")
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        while word := await reader.read(1):
            if word == OPENED:
                self._opened += 1
                if self._opened == len(self._workers):
                    self._go.set()
                going = asyncio.create_task(self._let_go(process))
            elif word == SERVING:
                worker.serving.set()
                await going

    async def _let_go(self, process: Process) -> None:
        await self._go.wait()
        assert process.stdin is not None
        if not process.stdin.is_closing():
            process.stdin.write(GO)


def _environment() -> dict[str, str]:
    """Workers import what the parent does, from wherever they are started."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return os.environ | {"PYTHONPATH": path}
