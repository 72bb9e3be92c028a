"""The order of SCAN: by age of the key, so that a cursor is a number and needs no memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

# Gone keys leave their place empty until there are this many more of them than of the others.
_SLACK = 1024


class ScanOrder:
    """Keys by the number they got when they were made. `number_of` tells a key's, None: gone.

    A key that is there during a whole scan is returned exactly once, whatever comes and goes.
    """

    def __init__(self, number_of: Callable[[bytes], int | None]) -> None:
        self._number_of = number_of
        self._numbered: list[tuple[int, bytes]] = []
        self._last = 0

    def add(self, key: bytes, held: int) -> int:
        """A new key's number; `held`: how many keys there are."""
        if len(self._numbered) > 2 * held + _SLACK:
            self._numbered = [
                pair for pair in self._numbered if self._number_of(pair[1]) == pair[0]
            ]
        self._last += 1
        self._numbered.append((self._last, key))
        return self._last

    def clear(self) -> None:
        """All keys are gone; the next ones are younger than any cursor."""
        self._numbered = []

    def after(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """The keys of the next `count` places behind `cursor`, and the next cursor or 0."""
        start = bisect_right(self._numbered, cursor, key=lambda pair: pair[0])
        places = self._numbered[start : start + count]
        more = start + count < len(self._numbered)
        keys = [key for number, key in places if self._number_of(key) == number]
        return (places[-1][0] if more else 0), keys
