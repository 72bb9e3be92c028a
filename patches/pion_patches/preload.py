"""The conversation stored last, restored at the start: most likely it is the one that goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .second_tier import FIND, SecondTier, restore_seconds
from .token_ids import as_ids, common_length

log = logging.getLogger("pion_patches")


class Preload:
    """Runs once, on a thread of its own.

    `keep(ids, cache)` is called there with what was restored. `most_bytes`: larger ones are left
    to whoever asks for them.
    """

    def __init__(
        self,
        tier: SecondTier,
        model_key: Any,
        keep: Callable[[np.ndarray, list[Any]], None],
        most_bytes: int,
    ) -> None:
        self._tier = tier
        self._key = model_key
        self._keep = keep
        self._most_bytes = most_bytes
        self._ids = as_ids([])
        self._found, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="pion-preload", daemon=True)
        self._thread.start()

    def wait(self, asked: np.ndarray, count: int) -> bool:
        """Wait for it where it brings more of `asked` than `count` tokens; whether it does.

        No longer than a restore of these tokens may take.
        """
        if self._ended.is_set() or not self._found.wait(FIND):
            return False
        gain = common_length(self._ids, asked) - count
        return gain >= max(1, self._tier.min_gain) and self._ended.wait(restore_seconds(gain))

    def finish(self, seconds: float) -> bool:
        """Wait until it has ended, for so many seconds at most; whether it has."""
        return self._ended.wait(seconds)

    def _run(self) -> None:
        try:
            offer = self._tier.latest(self._key)
            if offer is None or offer.tokens < max(1, self._tier.min_gain):
                return
            if offer.nbytes > self._most_bytes:
                return
            self._ids = as_ids(offer.ids)[: offer.tokens]
            self._found.set()
            cache = self._tier.restore(offer)
            if cache is not None:
                self._keep(self._ids, cache)
        except Exception as error:
            log.warning("the last conversation is not restored before it is asked for: %r", error)
        finally:
            self._ended.set()
            self._found.set()
