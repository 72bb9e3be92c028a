"""Restore or recompute: how fast this client prefills and restores, and which of both is sooner.

Moving estimates of what was measured here; what was never measured is tried, and what is expected
to take a moment only is not worth the question. A transfer under way is watched: it is given up as
soon as what is left of it, at the speed of the last moments, takes longer than computing everything
would. ``PION_PROMPT_CACHE_ALWAYS_RESTORE=1`` turns all of this off.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from pion_vllm_mlx.process_lock import ProcessLock

#: What an earlier measurement still counts when a new one comes.
_MEMORY: Final = 0.7
#: Tokens of a prefill below which it says little about longer ones.
_FEW: Final = 32
#: Transfers below this tell how long a restore takes to begin, larger ones how fast bytes come.
_LARGE: Final = 1 << 20
#: How much better a restore is thought to be after each one that was skipped, so that it is tried
#: again after a while: a network does not stay slow for ever.
_HOPE: Final = 1.1
#: Seconds of a transfer that its speed is judged by, and that no restore is skipped to save.
WINDOW: Final = 0.25
SWITCH: Final = "PION_PROMPT_CACHE_ALWAYS_RESTORE"


class Rates:
    """Moving estimates of one client, for any thread. Seconds, tokens, bytes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = ProcessLock()
        self._prefill = _Ratio()
        self._restore = _Ratio()
        self._latency = _Ratio()

    def add_prefill(self, tokens: int, seconds: float) -> None:
        """So many tokens were computed in so many seconds.

        A few tokens take about as long as a few more, so they tell something only as long as
        nothing else is known.
        """
        with self._lock:
            if tokens >= _FEW or not self._prefill.is_known:
                self._prefill.add(tokens, seconds)

    def add_restore(self, nbytes: int, seconds: float) -> None:
        """So many bytes were restored, from the first command to caches that can be used."""
        with self._lock:
            if nbytes < _LARGE:
                self._latency.add(1, seconds)
            else:
                self._restore.add(nbytes, seconds)

    def prefill_seconds(self, tokens: int, otherwise: float | None = None) -> float | None:
        """How long computing `tokens` takes; `otherwise` if nothing was ever computed here."""
        with self._lock:
            return self._prefill.seconds(tokens, otherwise)

    def restore_seconds(self, nbytes: int) -> float | None:
        """How long restoring `nbytes` takes; None if nothing of the kind was ever restored."""
        with self._lock:
            begin = self._latency.seconds(1, None)
            if nbytes < _LARGE and begin is not None:
                return begin
            moved = self._restore.seconds(nbytes, None)
            return None if moved is None else max(moved, begin or 0.0)

    def pays(self, tokens: int, nbytes: int, otherwise: float | None = None) -> bool:
        """Whether restoring is expected to be sooner than computing; True where unknown.

        `otherwise`: seconds the prefill took whoever stored the prefix.
        """
        prefill, restore = self.prefill_seconds(tokens, otherwise), self.restore_seconds(nbytes)
        if prefill is None or restore is None or restore < max(prefill, WINDOW) or _is_off():
            return True
        with self._lock:
            for ratio in (self._restore, self._latency):
                ratio.speed_up(_HOPE)
        return False

    def watch(self, tokens: int, nbytes: int, otherwise: float | None = None) -> Watch | None:
        """A watch over one transfer; None as long as nobody knows how long computing takes."""
        prefill = self.prefill_seconds(tokens, otherwise)
        return None if prefill is None or _is_off() else Watch(nbytes, prefill, self._clock)


def _is_off() -> bool:
    return os.environ.get(SWITCH, "") not in ("", "0")


class _Ratio:
    """Amounts over seconds, older ones counting less."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        if amount > 0 and seconds >= 0:
            self._amount = _MEMORY * self._amount + amount
            self._seconds = _MEMORY * self._seconds + seconds

    @property
    def is_known(self) -> bool:
        return self._amount > 0

    def seconds(self, amount: float, otherwise: float | None) -> float | None:
        return otherwise if not self._amount else self._seconds * amount / self._amount

    def speed_up(self, factor: float) -> None:
        self._seconds /= factor


class Watch:
    """Told of the bytes of one transfer as they come; says whether to go on.

    `nbytes` in all; `prefill`: seconds computing them takes instead. Nothing is said about the
    first quarter of a second.
    """

    def __init__(self, nbytes: int, prefill: float, clock: Callable[[], float]) -> None:
        self._left = nbytes
        self._prefill = prefill
        self._clock = clock
        #: When the last moments' bytes came: (time, bytes then left), oldest first.
        self._marks: deque[tuple[float, int]] = deque()

    def __call__(self, received: int) -> bool:
        """Whether the rest, `received` bytes after the last call, is worth waiting for."""
        now = self._clock()
        self._left -= received
        self._marks.append((now, self._left))
        # One mark older than the window stays: it is where the window's speed is measured from.
        while len(self._marks) > 1 and now - self._marks[1][0] >= WINDOW:
            self._marks.popleft()
        since, left_then = self._marks[0]
        if self._left <= 0 or now - since < WINDOW:
            return True
        came = left_then - self._left
        return came > 0 and self._left * (now - since) <= self._prefill * came
