"""Which writes are done on the event loop: small ones, and larger ones while the disk keeps up.

A thread takes as long to wake up as a megabyte takes to reach the kernel, so for one blob after
another of a prefix threads are twice as slow. A disk that falls behind is another matter: the
kernel then holds up whoever writes, and that must not be the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Bytes, and the seconds they take at most where all is well.
LARGEST = 1 << 20
LONG = 0.005
# Seconds for which threads do it after one that took long.
PAUSE = 1.0


class Pace:
    """Measures what is done on the loop; one for the process, whose disk it is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._resume_at = 0.0

    def allows(self, nbytes: int) -> bool:
        """Whether a write of so many bytes may be done at once."""
        return nbytes <= LARGEST and self._clock() >= self._resume_at

    def run(self, work: Callable[[], T]) -> T:
        """Do it now, and remember if it took long."""
        started = self._clock()
        try:
            return work()
        finally:
            ended = self._clock()
            if ended - started > LONG:
                self._resume_at = ended + PAUSE


pace = Pace()
