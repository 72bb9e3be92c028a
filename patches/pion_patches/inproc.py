"""The in-process lane: prefixes kept as MLX arrays, under a byte budget.

Entries are evaluated when they are captured, so a thread other than the one that computed a prefix
may open it. ``PION_PROMPT_CACHE_NO_INPROC=1`` turns the lane off: nothing is kept, nothing found.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass

from .prefix_entry import PrefixEntry

DEFAULT_BUDGET = 4 << 30
SWITCH = "PION_PROMPT_CACHE_NO_INPROC"


def lane_is_off() -> bool:
    """Read the switch anew each time, so that it can be thrown in a running process."""
    return os.environ.get(SWITCH, "0").strip().lower() not in ("", "0", "false", "no")


@dataclass(frozen=True, slots=True)
class InprocStats:
    entries: int
    nbytes: int
    budget_bytes: int
    hits: int
    misses: int
    evicted: int
    refused: int


def _key(namespace: str | bytes) -> bytes:
    if isinstance(namespace, str):
        return namespace.encode("utf-8", "surrogateescape")
    return bytes(namespace)


class InprocStore:
    """Prefix entries by namespace; the least recently used leave first. Safe to share by threads.

    A namespace may be given as text or as its UTF-8 bytes; both mean the same entry. Evicting an
    entry takes nothing from requests that opened it: their caches hold its rows.
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET) -> None:
        self.budget_bytes = budget_bytes
        self._entries: OrderedDict[bytes, PrefixEntry] = OrderedDict()
        self._nbytes = 0
        self._hits = self._misses = self._evicted = self._refused = 0
        self._lock = threading.Lock()

    def hold(self, namespace: str | bytes, entry: PrefixEntry) -> bool:
        """Keep ``entry``, making room for it; False where the lane is off or it can never fit.

        An entry larger than the whole budget is refused and evicts nothing.
        """
        if lane_is_off():
            return False
        with self._lock:
            if entry.nbytes > self.budget_bytes:
                self._refused += 1
                return False
            self._remove(_key(namespace))
            for dead in [n for n, e in self._entries.items() if e.model() is None]:
                self._remove(dead)
            while self._nbytes + entry.nbytes > self.budget_bytes:
                self._remove(next(iter(self._entries)))
                self._evicted += 1
            self._entries[_key(namespace)] = entry
            self._nbytes += entry.nbytes
        return True

    def get(self, namespace: str | bytes) -> PrefixEntry | None:
        """The entry of ``namespace``, now the most recently used, or None."""
        with self._lock:
            entry = None if lane_is_off() else self._entries.get(_key(namespace))
            if entry is None:
                self._misses += 1
            else:
                self._hits += 1
                self._entries.move_to_end(_key(namespace))
        return entry

    def drop(self, namespace: str | bytes) -> bool:
        """Forget ``namespace``; say whether it was held."""
        with self._lock:
            return self._remove(_key(namespace))

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._nbytes = 0

    def stats(self) -> InprocStats:
        with self._lock:
            return InprocStats(
                entries=len(self._entries),
                nbytes=self._nbytes,
                budget_bytes=self.budget_bytes,
                hits=self._hits,
                misses=self._misses,
                evicted=self._evicted,
                refused=self._refused,
            )

    def __setitem__(self, namespace: str | bytes, entry: PrefixEntry) -> None:
        self.hold(namespace, entry)

    def __getitem__(self, namespace: str | bytes) -> PrefixEntry:
        entry = self.get(namespace)
        if entry is None:
            raise KeyError(namespace)
        return entry

    def __contains__(self, namespace: object) -> bool:
        """Whether it is held; asking does not count as a use."""
        if not isinstance(namespace, str | bytes) or lane_is_off():
            return False
        with self._lock:
            return _key(namespace) in self._entries

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def _remove(self, key: bytes) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._nbytes -= entry.nbytes
        return True
