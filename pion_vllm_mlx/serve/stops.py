"""Stop texts in what is generated, wherever they begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

#: Tokens in which the end of a stop text lies.
_TAIL: Final = 64


class StopWatch:
    """Looks for stop texts in an answer that comes piece by piece."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._tail = ""
        self._found: str | None = None

    def add(self, text: str) -> str | None:
        """`text` to the end of the first stop text in it, or None: there is none yet."""
        if not self._stops:
            return None
        known, self._tail = len(self._tail), self._tail + text
        places = [(at, stop) for stop in self._stops if (at := self._tail.find(stop)) >= 0]
        if not places:
            # No more than a stop text that has begun has to be remembered.
            self._tail = self._tail[-(self._longest - 1) :] if self._longest > 1 else ""
            return None
        at, self._found = min(places)
        return text[: at + len(self._found) - known]

    def matched(self, tokens: Sequence[int], tokenizer: Any) -> str | None:
        """The stop text that ended these tokens, or None: the model ended by itself."""
        if self._found is not None or not tokens or tokens[-1] in tokenizer.eos_token_ids:
            return self._found
        text = tokenizer.decode(list(tokens[-_TAIL:]))
        # A token may go on after the text it contains.
        found = [(text.rfind(stop) + len(stop), len(stop), stop) for stop in self._stops]
        return max((f for f in found if f[2] in text), default=(0, 0, None))[2]
