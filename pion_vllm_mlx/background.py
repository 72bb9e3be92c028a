"""Jobs that run after the call that asked for them: one thread, a bounded queue, a bounded wait.

The thread is a daemon, so nothing keeps an interpreter from ending; instead its end waits for the
jobs, and no longer than each queue's own bound.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: Seconds without a job after which the thread ends; the next job starts another.
_IDLE: Final = 5.0
#: The caller's own work comes first (Linux only: elsewhere a thread has no priority of its own).
_NICENESS: Final = 10


@dataclass(frozen=True, slots=True)
class Job:
    """Work, what it is about, the memory it holds on to, and when it may begin (monotonic)."""

    key: object
    work: Callable[[], bool]
    nbytes: int
    begin_at: float


class Background:
    """A queue and its thread. Thread-safe; in a forked child it is empty.

    `limit`: bytes that waiting and running jobs may hold together; one job alone may hold more.
    `patience`: seconds that the end of the interpreter waits for the jobs.
    """

    _jobs: list[Job]
    _running: Job | None
    _thread: threading.Thread | None

    def __init__(self, limit: int, patience: float, give_up: Callable[[], None]) -> None:
        """`give_up` ends a running job early, when the interpreter ends; it must not wait."""
        self._limit = limit
        self.patience = patience
        self._give_up = give_up
        self._begin()
        _queues.add(self)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._jobs = []
        self._running = None
        self._thread = None
        self._hurried = 0
        self._failed = False

    def submit(self, job: Job) -> tuple[bool, int]:
        """Queue a job; whether there was room, and how many it replaced.

        A job that waits is replaced by a newer one of its key, which makes it superfluous. Raises
        RuntimeError where no thread can be started.
        """
        with self._mine():
            kept = [waiting for waiting in self._jobs if waiting.key != job.key]
            replaced = len(self._jobs) - len(kept)
            held = sum(waiting.nbytes for waiting in (*kept, self._running) if waiting)
            if held and held + job.nbytes > self._limit:
                return False, 0
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pion-store", daemon=True)
                thread.start()
                self._thread = thread
            self._jobs = [*kept, job]
            self._changed.notify_all()
            return True, replaced

    @property
    def busy(self) -> bool:
        """Whether a job waits or runs."""
        with self._mine():
            return bool(self._jobs) or self._running is not None

    def flush(self, timeout: float) -> bool:
        """Wait until every job so far has ended; True if so and none failed since the last flush.

        Jobs that wait for a better moment begin at once.
        """
        deadline = time.monotonic() + timeout
        with self._mine():
            self._hurried += 1
            self._changed.notify_all()
            try:
                while self._jobs or self._running is not None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    self._changed.wait(left)
                failed, self._failed = self._failed, False
                return not failed
            finally:
                self._hurried -= 1

    def drop(self) -> int:
        """Forget the jobs that have not begun; how many those were."""
        with self._mine():
            dropped, self._jobs = len(self._jobs), []
            self._changed.notify_all()
            return dropped

    def abandon(self) -> int:
        """Forget what waits and end what runs; how many jobs waited."""
        dropped = self.drop()
        if self._running is not None:
            self._give_up()
        return dropped

    def _mine(self) -> threading.Condition:
        """The condition, of this process: a forked child has neither the thread nor its jobs."""
        if self._pid != os.getpid():
            self._begin()
        return self._changed

    def _run(self) -> None:
        _be_nice()
        while (job := self._next()) is not None:
            try:
                succeeded = job.work()
            except Exception:
                succeeded = False
            with self._changed:
                self._running = None
                self._failed = self._failed or not succeeded
                self._changed.notify_all()
            del job  # and with it the memory, before the wait for the next one

    def _next(self) -> Job | None:
        """Wait for a job and mark it as running; None after a while without any."""
        idle_until = time.monotonic() + _IDLE
        with self._changed:
            while True:
                now = time.monotonic()
                if self._jobs:
                    wait = 0.0 if self._hurried else self._jobs[0].begin_at - now
                    if wait <= 0:
                        self._running = self._jobs.pop(0)
                        return self._running
                elif now >= idle_until:
                    self._thread = None
                    return None
                else:
                    wait = idle_until - now
                self._changed.wait(wait)


def _be_nice() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


_queues: weakref.WeakSet[Background] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """Give every queue its time, all of them at once, then end what still runs."""
    started = time.monotonic()
    for queue in list(_queues):
        left = queue.patience - (time.monotonic() - started)
        if not queue.flush(max(0.0, left)):
            queue.abandon()
