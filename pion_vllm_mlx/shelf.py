"""Where the K/V of retrieved chunks stand: in this process, or on a server that outlives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from pion_patches.cache_rebuild import CacheImage
from pion_vllm_mlx.held import HeldPrefixes
from pion_vllm_mlx.restore import (
    Found,
    Miss,
    Restored,
    check_wanted,
    fetch_prefix,
    find_any_prefix,
    try_to_borrow,
)
from pion_vllm_mlx.storing import Storing
from pion_vllm_mlx.tally import Tally
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import Command, Lane, Patience, TransportError
from pion_vllm_mlx.transport.local import LocalLane

#: The tokens a chunk has to consist of, or None for whatever it consists of.
Ids: TypeAlias = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Volume:
    """A chunk as it stands on a shelf: its tokens, their K/V, and the seconds that took."""

    ids: tuple[int, ...]
    image: CacheImage
    seconds: float = 0.0


class Shelf(Protocol):
    """Chunks by name. Whatever goes wrong with a shelf is an empty place, never an exception."""

    def holds(self, name: bytes, fingerprint: str, ids: Ids) -> bool:
        """Whether `take` has something to return, as far as can be told without reading it."""

    def take(self, name: bytes, fingerprint: str, ids: Ids) -> Volume | None:
        """The chunk of that name computed by that model, if it is of `ids` (None: of any)."""

    def put(self, name: bytes, fingerprint: str, volume: Volume) -> bool:
        """Place a chunk; False if it did not stay."""

    def remove(self, name: bytes) -> bool:
        """Take a chunk away for everyone; False if nothing was there or nobody could be asked."""

    def close(self) -> None:
        """Let go of memory and connections."""

    @property
    def nbytes(self) -> int:
        """Bytes held in this process."""


class ProcessShelf:
    """MLX arrays in this process, under a byte budget; the least recently used leave first."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._held = HeldPrefixes(budget)

    def holds(self, name: bytes, fingerprint: str, ids: Ids) -> bool:
        return self.take(name, fingerprint, ids) is not None

    def take(self, name: bytes, fingerprint: str, ids: Ids) -> Volume | None:
        held = self._held.find(name, fingerprint)
        if held is None or ids not in (None, held.ids):
            return None
        return Volume(held.ids, held.image)

    def put(self, name: bytes, fingerprint: str, volume: Volume) -> bool:
        return self._held.hold(name, volume.ids, fingerprint, volume.image)

    def remove(self, name: bytes) -> bool:
        return self._held.drop(name)

    def close(self) -> None:
        self._held.clear()

    @property
    def nbytes(self) -> int:
        return self._held.nbytes


class ServerShelf:
    """Prefixes on a pion-server: shared by processes and hosts, there after a restart."""

    def __init__(
        self,
        lane: Lane,
        local: LocalLane,
        tier: Tier,
        tally: Tally,
        prefill_step: int,
        timeout: float,
    ) -> None:
        self._lane, self._local = lane, local
        self._tier = tier
        self._tally = tally
        # Synchronous: who ingests a chunk wants it to be there for everyone afterwards.
        self._storing = Storing("sync", lane, tier, tally, prefill_step, patience=0)
        self._quick = Patience(first_byte=timeout, stall=2.0, total=10.0)

    def holds(self, name: bytes, fingerprint: str, ids: Ids) -> bool:
        try:
            self._find(name, fingerprint, ids)
        except (Miss, TransportError):
            return False
        return True

    def take(self, name: bytes, fingerprint: str, ids: Ids) -> Volume | None:
        try:
            wanted = name, ids, fingerprint, self._tier, self._quick
            found, lent = try_to_borrow(self._local, *wanted, self._tally)
            if found is None:
                found = self._find(name, fingerprint, ids)
            if isinstance(lent, Restored):
                restored = lent
            else:
                restored = fetch_prefix(self._lane, name, found, self._quick.first_byte)
                if lent is not None:
                    self._local.tell(lent)
        except (Miss, TransportError):
            return None  # the lane tells about its outages
        self._tally.add("bytes_fetched", restored.nbytes)
        return Volume(found.manifest.ids, restored.image)

    def put(self, name: bytes, fingerprint: str, volume: Volume) -> bool:
        return self._storing.begin(name, volume.ids, fingerprint, volume.image, volume.seconds)()

    def remove(self, name: bytes) -> bool:
        try:
            (reply,) = self._lane.exchange([Command.of("KV.PREFIX.DROP", name)], self._quick)
        except TransportError:
            return False
        return isinstance(reply, int) and reply > 0

    def close(self) -> None:
        self._storing.close()
        self._local.close()

    @property
    def nbytes(self) -> int:
        return 0

    def _find(self, name: bytes, fingerprint: str, ids: Ids) -> Found:
        found = find_any_prefix(self._lane, name, self._quick)
        wanted = len(found.manifest.ids) if ids is None else ids
        check_wanted(found.manifest, wanted, fingerprint, self._tier)
        return found
