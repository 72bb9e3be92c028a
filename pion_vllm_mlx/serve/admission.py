"""Requests that begin alike and come at once: the first computes, the others wait for that part.

mlx_lm.server computes a shared beginning as often as it is asked for at the same time, since none
of the requests has left it in the prompt cache yet. That is time, and it is more: rows of two
computations differ in their last bits, and only one of them can be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pion_patches.token_ids import as_ids, common_length
from pion_vllm_mlx.serve.channel import Channel

#: A common beginning that is shorter is computed again.
_WORTH: Final = 128

#: mlx_lm.server's: the channel, the request, its arguments.
Request = tuple[Channel, Any, Any]


@dataclass(frozen=True, slots=True)
class _Prompt:
    channel: Channel
    tokens: np.ndarray


class Admission:
    """Keeps back what would repeat a prompt under way. For the generation thread alone."""

    def __init__(self, known: Callable[[Sequence[int]], int]) -> None:
        """`known(tokens)`: how many leading tokens the prompt cache can resume after."""
        self._known = known
        self._running: list[_Prompt] = []
        self._waiting: list[tuple[Request, np.ndarray]] = []

    @property
    def waiting(self) -> bool:
        """Whether anything is kept back."""
        return bool(self._waiting)

    def offer(self, request: Request, tokens: Sequence[int]) -> bool:
        """Whether a request may go on; if not, `take` gives it out later."""
        prompt = as_ids(tokens)
        if self._repeats(prompt):
            self._waiting.append((request, prompt))
            return False
        self._running.append(_Prompt(request[0], prompt))
        return True

    def take(self) -> Request | None:
        """One that was kept back and may go on now; those nobody waits for are dropped."""
        self._waiting = [item for item in self._waiting if not item[0][0].cancelled]
        for place, (request, prompt) in enumerate(self._waiting):
            if not self._repeats(prompt):
                del self._waiting[place]
                self._running.append(_Prompt(request[0], prompt))
                return request
        return None

    def _repeats(self, prompt: np.ndarray) -> bool:
        """Whether a prompt under way is about to leave a longer beginning than is known."""
        self._running = [other for other in self._running if other.channel.prefilling]
        common = max((common_length(other.tokens, prompt) for other in self._running), default=0)
        return common >= _WORTH and common - self._known(prompt.tolist()) >= _WORTH
