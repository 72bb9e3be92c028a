"""One byte limit over everything a worker keeps (`--maxmemory`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pion_server.errors import OutOfMemory
from pion_server.store.log import Record


@dataclass(frozen=True, slots=True)
class Victim:
    """Something that can be evicted: its size in bytes, how, and its records on the disk."""

    nbytes: int
    evict: Callable[[], None]
    records: Callable[[], Iterable[Record]] = tuple


Victims: TypeAlias = Callable[[bytes | None], Iterable[Victim]]


class MemoryBudget:
    """Counts what its sources hold and evicts, least recently used first, to make room.

    `limit` None: no limit. Each source is (used bytes, victims in order of eviction); sources
    added first are asked for victims first.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._sources: list[tuple[Callable[[], int], Victims]] = []

    def add_source(self, used: Callable[[], int], victims: Victims) -> None:
        self._sources.append((used, victims))

    @property
    def used(self) -> int:
        return sum(used() for used, _ in self._sources)

    def victims(self, keep: bytes | None, own: Victims | None = None) -> Iterator[Victim]:
        """What may be evicted, in order, leaving namespace `keep` alone; those of `own` first."""
        if own is not None:
            yield from own(keep)
        for _, victims in self._sources:
            if victims != own:
                yield from victims(keep)

    def reserve(
        self, nbytes: int, keep: bytes | None = None, *, own: Victims | None = None
    ) -> None:
        """Make room for `nbytes` more without touching namespace `keep`; at the cost of `own`,
        the victims of who asks, as long as it has any.

        Raises OutOfMemory, having evicted nothing, if that cannot be done.
        """
        if self.limit is None or nbytes <= 0:
            return
        missing = self.used + nbytes - self.limit
        if missing <= 0:
            return
        chosen: list[Victim] = []
        for victim in self.victims(keep, own):
            if missing <= 0:
                break
            if victim.nbytes > 0:
                chosen.append(victim)
                missing -= victim.nbytes
        if missing > 0:
            raise OutOfMemory(
                f"{nbytes} bytes do not fit into --maxmemory {self.limit}: "
                f"{self.used} used and nothing left to evict"
            )
        for victim in chosen:
            victim.evict()
