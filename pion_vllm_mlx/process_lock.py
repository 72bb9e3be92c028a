"""Locks that a forked child finds open."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any


class ProcessLock:
    """A lock of one process. After a fork the child has one of its own.

    A plain lock that another thread holds at the moment of a fork stays held in the child for
    ever: that thread is not there.
    """

    def __init__(self, *, reentrant: bool = False) -> None:
        self._make: Callable[[], Any] = threading.RLock if reentrant else threading.Lock
        self._pid = os.getpid()
        self._lock = self._make()

    def acquire(self, blocking: bool = True) -> bool:
        """As `threading.Lock.acquire`."""
        return bool(self._own().acquire(blocking))

    def release(self) -> None:
        """As `threading.Lock.release`."""
        self._lock.release()

    def __enter__(self) -> None:
        self._own().acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()

    def _own(self) -> Any:
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), self._make()
        return self._lock
