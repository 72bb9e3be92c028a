"""Prefixes of this process by their tokens: found, like stored ones, by their longest beginning."""

from __future__ import annotations

from collections import OrderedDict

import mlx.core as mx

from pion_patches.cache_rebuild import CacheImage, cut
from pion_vllm_mlx.lineage.blocks import BLOCK, common
from pion_vllm_mlx.lineage.match import Asked
from pion_vllm_mlx.process_lock import ProcessLock


class HeldBranches:
    """Cache images under a byte budget; the least recently used leave first. Thread-safe.

    An image is never handed out itself: a cache rebuilt from it owns what it writes to.
    """

    def __init__(self, budget: int, *, stateful: bool) -> None:
        """`stateful`: an image can be used as a whole only."""
        self.budget = budget
        self._stateful = stateful
        self._lock = ProcessLock()
        self._entries: OrderedDict[bytes, tuple[Asked, CacheImage]] = OrderedDict()
        #: For the end of each block, the last entry that has it.
        self._blocks: dict[bytes, bytes] = {}
        self._nbytes = 0

    def get(self, asked: Asked) -> CacheImage | None:
        """The longest beginning of `asked` that is held, a block at least, or None."""
        with self._lock:
            tried = set()
            for digest in reversed(asked.digests):
                name = self._blocks.get(digest)
                if name is None or name in tried:
                    continue
                tried.add(name)
                held, image = self._entries[name]
                shared = common(held.ids, asked.ids)
                if shared >= BLOCK and not (self._stateful and shared < image.tokens):
                    self._entries.move_to_end(name)
                    return cut(image, shared)
        return None

    def hold(self, asked: Asked, image: CacheImage) -> None:
        """Keep an image of exactly `asked`, if it has a whole block and fits into the budget."""
        if not asked.digests or image.nbytes > self.budget:
            return
        # Evaluated, any thread may use it; a lazy array belongs to the thread that made it.
        mx.eval(image.arrays())
        with self._lock:
            name = asked.digests[-1]
            self._drop(name)
            while self._nbytes + image.nbytes > self.budget:
                self._drop(next(iter(self._entries)))
            self._entries[name] = (asked, image)
            self._nbytes += image.nbytes
            self._blocks.update(dict.fromkeys(asked.digests, name))

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._blocks.clear()
            self._nbytes = 0

    def _drop(self, name: bytes) -> None:
        if name not in self._entries:
            return
        asked, image = self._entries.pop(name)
        self._nbytes -= image.nbytes
        for digest in asked.digests:
            if self._blocks.get(digest) == name:
                del self._blocks[digest]
