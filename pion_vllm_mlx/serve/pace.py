"""How long mlx_lm.server computes before it looks at new and cancelled requests again."""

from __future__ import annotations

import time
from typing import Any

from mlx_lm.server import TimeBudget

#: Steps, one a look, after a cancellation: the step it fell into, and the one that notices.
_HURRIED = 3


class Pace(TimeBudget):
    """mlx_lm.server's half second a turn, cut to single steps when somebody has given up.

    `beat` is the time (`time.monotonic`) of the last sign of life.
    """

    def __init__(self) -> None:
        initialise: Any = super().__init__
        initialise()
        self.beat = time.monotonic()
        self.steps = 0
        #: Whether a look after every step is wanted.
        self.attentive = False
        self._hurried = 0
        self._stepped = False

    def hurry(self) -> None:
        """Have the next steps followed by a look at who is still there."""
        self._hurried = _HURRIED

    def __iter__(self) -> Any:
        self._stepped = False
        start: Any = super().__iter__
        return start()

    def __next__(self) -> Any:
        self.beat = time.monotonic()
        if self._stepped and (self._hurried > 0 or self.attentive):
            self._hurried = max(0, self._hurried - 1)
            raise StopIteration
        advance: Any = super().__next__
        advance()
        self._stepped = True
        self.steps += 1
