"""A warning for prompts whose beginning changes with every request: nothing of them is reused."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from pion_patches.token_ids import as_ids, common_length

log = logging.getLogger("pion_vllm_mlx")

#: Requests in a row that have to part at the same place.
_IN_A_ROW: Final = 3
#: A prompt shorter than this is cheap to compute.
_LONG: Final = 128
#: Tokens shown of each of two prompts, and how far apart the places may be.
_SHOWN, _NEAR = 12, 8


class HeadWatch:
    """Tells once. Two conversations that take turns part too, but not again and again at one place
    and then in the same way."""

    def __init__(self) -> None:
        self._last: list[int] = []
        self._places: deque[int] = deque(maxlen=_IN_A_ROW)
        self.told = False

    def note(self, prompt: Sequence[int], decode: Callable[[Any], str]) -> None:
        """Look at a prompt's token ids."""
        last, self._last = self._last, list(prompt)
        if self.told or min(len(last), len(prompt)) < _LONG:
            return
        place = common_length(as_ids(last), as_ids(prompt))
        if place > min(len(last), len(prompt)) // 2 or not _meet(last, prompt, place):
            self._places.clear()
            return
        self._places.append(place)
        if len(self._places) < _IN_A_ROW or max(self._places) - min(self._places) > _NEAR:
            return
        self.told = True
        here = slice(place, place + _SHOWN)
        log.warning(
            "the first %d tokens of the last %d prompts are the same, then each has something of"
            " its own, so nothing after it can be reused: %r here, %r before. Take it out of the"
            " system prompt, or put it at the end.",
            place,
            _IN_A_ROW + 1,
            decode(list(prompt[here])),
            decode(last[here]),
        )


def _meet(one: Sequence[int], other: Sequence[int], place: int) -> bool:
    """Whether two prompts that part at a place go on alike soon after it."""
    window = list(one[place + 32 : place + 48])
    text = list(other[place : place + 96])
    return len(window) == 16 and any(
        text[start : start + 16] == window for start in range(len(text) - 15)
    )
