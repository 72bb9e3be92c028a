"""The one thread that computes: MLX arrays and streams belong to the thread that made them."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class EngineThread:
    """Runs one piece of work at a time, in the order asked. Starts at the first.

    It never ends: MLX's CPU build can abort at interpreter exit once a thread that computed has
    ended. As a daemon it does not keep the process alive either.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` there; a future of the calling loop with what it returns or raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                settle, outcome = _succeed, work()
            except BaseException as error:
                settle, outcome = _fail, error  # type: ignore[assignment]
            with contextlib.suppress(RuntimeError):  # a closed loop: nobody waits any more
                loop.call_soon_threadsafe(settle, future, outcome)

        self._work.put(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pion-attend", daemon=True)
            self._thread.start()
        return future

    def _run(self) -> None:
        while True:
            self._work.get()()


def _succeed(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
