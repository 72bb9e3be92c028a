"""What this process has restored or captured: marks by block digest."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from pion_vllm_mlx.lineage.blocks import BLOCK
from pion_vllm_mlx.lineage.match import Asked, Mark
from pion_vllm_mlx.process_lock import ProcessLock

_MOST: Final = 1 << 15
_MOST_REFUSED: Final = 1 << 10
#: Seconds for which rows are not even copied that there was no room for.
_REFUSED: Final = 300.0
#: The start of every prompt.
UNKNOWN: Final = (0, Mark("", ""))


class Known:
    """Block ends from which on a capture has to begin, each with its mark. Thread-safe.

    It may be wrong, as others evict what it knows: a store then finds a gap, and all is forgotten.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._marks: OrderedDict[bytes, Mark] = OrderedDict()
        self._refused: OrderedDict[bytes, float] = OrderedDict()

    def last(self, asked: Asked, most: int) -> tuple[int, Mark]:
        """The last block end known, up to `most` tokens, and its mark; `UNKNOWN` for none."""
        with self._lock:
            for block in range(min(len(asked.digests), most // BLOCK), 0, -1):
                mark = self._marks.get(asked.digests[block - 1])
                if mark is not None:
                    return block * BLOCK, mark
        return UNKNOWN

    def add(self, asked: Asked, ends: Iterable[tuple[int, Mark]]) -> None:
        """Remember block ends of `asked` and their marks."""
        with self._lock:
            for tokens, mark in ends:
                digest = asked.digest_at(tokens)
                self._marks[digest] = mark
                self._marks.move_to_end(digest)
            while len(self._marks) > _MOST:
                self._marks.popitem(last=False)

    def forget(self) -> None:
        """Something was found to be gone."""
        with self._lock:
            self._marks.clear()

    def refuse(self, asked: Asked) -> None:
        """There is no room for `asked`, nor for what begins with its blocks, for a while."""
        if asked.digests:
            with self._lock:
                self._refused[asked.digests[-1]] = time.monotonic() + _REFUSED
                while len(self._refused) > _MOST_REFUSED:
                    self._refused.popitem(last=False)

    def is_refused(self, asked: Asked) -> bool:
        """Whether there was no room for a beginning of `asked`."""
        now = time.monotonic()
        with self._lock:
            return any(self._refused.get(digest, now) > now for digest in asked.digests)
