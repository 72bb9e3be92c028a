"""Signals that end a program, put off while it starts a child it has no name for yet."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_later() -> Iterator[None]:
    """Handlers of SIGTERM and SIGINT run at the end of the block instead of within it.

    An exception of theirs in the middle of `subprocess.Popen` leaves a child that nobody ends.
    Handlers run in the main thread only: elsewhere there is nothing to put off.
    """
    waiting: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        waiting.append(number)

    handled = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            # What is ignored here stays so in the child.
            if callable(handler := signal.getsignal(number)):
                handled[number] = handler
                signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for late in waiting:
            signal.raise_signal(late)
