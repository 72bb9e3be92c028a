"""Prefixes this process has already seen, as cache images: the lane that costs no wire at all."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import mlx.core as mx

from pion_patches.cache_rebuild import CacheImage
from pion_vllm_mlx.process_lock import ProcessLock


@dataclass(frozen=True, slots=True)
class Held:
    """An image, and whose it is."""

    ids: tuple[int, ...]
    fingerprint: str
    image: CacheImage
    nbytes: int


class HeldPrefixes:
    """Images by namespace under a byte budget; the least recently used leave first. Thread-safe.

    An image is never handed out itself: a cache rebuilt from it owns what it writes to.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._entries: OrderedDict[bytes, Held] = OrderedDict()
        self._nbytes = 0
        self._lock = ProcessLock()

    def get(
        self, namespace: bytes, ids: tuple[int, ...] | int, fingerprint: str
    ) -> CacheImage | None:
        """The image of exactly these tokens (or this many) computed by this model, or None."""
        held = self.find(namespace, fingerprint)
        if held is None or ids != (len(held.ids) if isinstance(ids, int) else held.ids):
            return None
        return held.image

    def find(self, namespace: bytes, fingerprint: str) -> Held | None:
        """What is held of that model under this name, of whatever tokens, or None."""
        with self._lock:
            held = self._entries.get(namespace)
            if held is None or held.fingerprint != fingerprint:
                return None
            self._entries.move_to_end(namespace)
            return held

    def hold(
        self, namespace: bytes, ids: tuple[int, ...], fingerprint: str, image: CacheImage
    ) -> bool:
        """Keep an image instead of the namespace's older one; False if it exceeds the budget."""
        nbytes = image.nbytes
        if nbytes > self._budget:
            return False
        # Evaluated, any thread may use it; a lazy array belongs to the thread that made it.
        mx.eval(image.arrays())
        with self._lock:
            self._drop(namespace)
            while self._nbytes + nbytes > self._budget:
                self._drop(next(iter(self._entries)))
            self._entries[namespace] = Held(ids, fingerprint, image, nbytes)
            self._nbytes += nbytes
        return True

    def drop(self, namespace: bytes) -> bool:
        """Forget a namespace; False if nothing was held."""
        with self._lock:
            return self._drop(namespace)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._nbytes = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all images held."""
        with self._lock:
            return self._nbytes

    def _drop(self, namespace: bytes) -> bool:
        held = self._entries.pop(namespace, None)
        if held is not None:
            self._nbytes -= held.nbytes
        return held is not None
