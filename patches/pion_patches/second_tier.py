"""Where a prompt memory looks beyond its own process, and the fence it looks through.

A second tier is somebody else's disk and network, so it is never trusted with the thread that
serves every stream: its questions run on a thread of their own, and an answer that is late, or
an error, is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from typing import Any, Final, Protocol, TypeVar

log = logging.getLogger("pion_patches")

#: Seconds the question "how much of this do you hold" may take.
FIND: Final = 0.5
#: Seconds a restore may take: at least, at most, and for each token it spares.
RESTORE_LEAST, RESTORE_MOST, RESTORE_A_TOKEN = 0.5, 10.0, 0.001

T = TypeVar("T")


class Offer(Protocol):
    """What a tier could restore."""

    @property
    def tokens(self) -> int:
        """How many leading tokens of those asked for; 0 for none."""


class LatestOffer(Offer, Protocol):
    """The conversation a tier was given last."""

    @property
    def ids(self) -> Sequence[int]:
        """Its tokens."""

    @property
    def nbytes(self) -> int:
        """About the bytes of its caches."""


class SecondTier(Protocol):
    """A store behind the memory. `find` and `restore` run on one thread, not the caller's."""

    @property
    def min_gain(self) -> int:
        """Fewer tokens than that beyond what memory has are not worth a restore."""

    def attach(self, model_key: Any, provider: Any) -> None:
        """A model was loaded; on the generation thread. `provider`: mlx_lm.server's."""

    def detach(self, model_key: Any) -> None:
        """That model is gone: hold nothing of it any more, and keep what was stored."""

    def find(self, model_key: Any, tokens: Sequence[int]) -> Offer | None:
        """How much of `tokens` is held, in one round trip."""

    def restore(self, offer: Any) -> list[Any] | None:
        """Evaluated caches of exactly ``offer.tokens`` tokens, the caller's own."""

    def latest(self, model_key: Any) -> LatestOffer | None:
        """The conversation stored last. On a third thread, as is the restore of what it offers."""

    def store(
        self, model_key: Any, tokens: Sequence[int], cache: Sequence[Any], *, anchor: bool
    ) -> None:
        """Keep a prefix. On the generation thread: take what is needed, write it elsewhere.

        `cache` holds exactly `tokens` and is not the tier's to change. `anchor`: other
        conversations are expected to begin with these tokens, too.
        """

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """So many tokens were computed in so many seconds: restoring has to be faster."""

    def close(self) -> None:
        """Finish what was taken, then let go."""


class Fence:
    """Runs one question at a time on a thread of its own, and waits no longer than it may."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pion-second-tier")
        self._running: Future[Any] | None = None
        self._lock = threading.Lock()
        self.late = 0
        self.failed = 0

    def ask(self, question: Callable[..., T], *arguments: Any, seconds: float) -> T | None:
        """The answer, or None: the tier failed, is late, or still busy with a late one."""
        with self._lock:
            if self._running is not None and not self._running.done():
                self.late += 1
                return None
            self._running = running = self._thread.submit(question, *arguments)
        try:
            answer: T = running.result(seconds)
        except TooLate:
            self.late += 1
            return None
        except Exception as error:
            self.failed += 1
            if self.failed == 1:
                log.warning("the second tier fails, going on without: %r", error)
            return None
        return answer

    def close(self) -> None:
        """Wait for nothing."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def restore_seconds(gain: int) -> float:
    """How long a restore that spares `gain` tokens may hold up its stream."""
    return min(RESTORE_MOST, max(RESTORE_LEAST, gain * RESTORE_A_TOKEN))
