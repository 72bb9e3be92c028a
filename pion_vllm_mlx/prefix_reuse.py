"""A prompt cache without namespaces: whatever of a prompt was computed before is restored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pion_patches.cache_rebuild import CacheImage, UnsupportedCache, dismantle, rebuild
from pion_patches.inproc import lane_is_off
from pion_vllm_mlx.kv_bits import KvBits
from pion_vllm_mlx.lineage import Capture, Lineage
from pion_vllm_mlx.lineage.held import HeldBranches
from pion_vllm_mlx.prefill import Progress, prefill
from pion_vllm_mlx.process_lock import ProcessLock
from pion_vllm_mlx.storing import Storing
from pion_vllm_mlx.tally import Tally


@dataclass(frozen=True, slots=True)
class Found:
    """Caches, the tokens they hold, and how many leading ids were ever seen."""

    cache: list[Any]
    tokens: int
    seen: int


class PrefixReuse:
    """The longest beginning that is known, here or on the server, then the model for the rest."""

    def __init__(
        self,
        model: Any,
        index: Lineage,
        tally: Tally,
        *,
        storing: Storing,
        kv_bits: KvBits,
        prefill_step: int,
        held_bytes: int,
        computing: ProcessLock,
    ) -> None:
        """`storing`: whose lane `index` stores through; `computing`: held while the model runs."""
        self._model, self._index, self._tally = model, index, tally
        self._storing, self._kv_bits, self._prefill_step = storing, kv_bits, prefill_step
        self._held = HeldBranches(held_bytes, stateful=index.stateful)
        self._computing = computing

    def get(self, ids: Sequence[int], progress: Progress | None) -> list[Any]:
        """Caches that hold exactly `ids`, the caller's own."""
        found = self._find(ids)
        if found.tokens == len(ids):
            return found.cache
        with self._computing:  # a model's forward takes every core it can get
            found = self._meanwhile(ids, found)
            cache, start = found.cache, found.tokens
            if start == len(ids):
                return cache
            pauses = self._index.checkpoints(start, len(ids), at=[found.seen])
            ends = [*pauses, len(ids)] if pauses[-1:] != (len(ids),) else list(pauses)
            captures = self._compute(ids, cache, start, ends, progress)
            self._keep(ids, cache)
        for capture, seconds in captures:
            self._send(capture, seconds)
        return cache

    def clear(self) -> None:
        """Forget what is held."""
        self._held.clear()

    def _find(self, ids: Sequence[int]) -> Found:
        """The longest beginning known: held here, or else on the server."""
        image = None if lane_is_off() else self._held.get(self._index.asked(ids))
        held = image.tokens if image is not None else 0
        match = None if held == len(ids) else self._index.find(ids)
        seen = held if match is None else max(held, match.seen)
        if image is not None and (match is None or match.tokens <= held):
            cache = self._rebuilt(image)
            if cache is not None:
                return Found(cache, held, seen)
        match = match or self._index.find(ids)
        cache = self._index.restore(match)
        if cache is not None:
            return Found(cache, match.tokens, seen)
        # Caches become quantised on the way, as mlx-lm's do, so they begin as they are.
        return Found(KvBits().template(self._model, 0), 0, seen)

    def _meanwhile(self, ids: Sequence[int], found: Found) -> Found:
        """What another thread has computed while this one waited for its turn, if it is more."""
        image = None if lane_is_off() else self._held.get(self._index.asked(ids))
        if image is None or image.tokens <= found.tokens:
            return found
        cache = self._rebuilt(image)
        return found if cache is None else Found(cache, image.tokens, found.seen)

    def _rebuilt(self, image: CacheImage) -> list[Any] | None:
        try:
            cache = rebuild(self._kv_bits.template(self._model, image.tokens), image)
        except Exception as error:
            self._held.clear()
            self._tally.wonder("a prefix held in process could not be rebuilt", error)
            return None
        self._tally.add("hits")
        self._tally.add("hits_in_process")
        self._tally.add("tokens_restored", image.tokens)
        return cache

    def _compute(
        self,
        ids: Sequence[int],
        cache: list[Any],
        start: int,
        ends: Sequence[int],
        progress: Progress | None,
    ) -> list[tuple[Capture, float]]:
        """Run `ids[start:]` through the model, with a capture at each of `ends`."""
        captures = []
        since = 0.0
        for end in ends:
            report = None if progress is None else _shifted(progress, start, len(ids))
            step, bits = self._prefill_step, self._kv_bits
            seconds = prefill(self._model, ids[start:end], cache, step, report, bits)
            self._index.rates.add_prefill(end - start, seconds)
            self._tally.add_seconds("prefill_ms_total", seconds)
            since += seconds
            capture = None if self._storing.mode == "off" else self._index.capture(ids[:end], cache)
            if capture is not None:
                captures.append((capture, since))
                since = 0.0
            start = end
        return captures

    def _keep(self, ids: Sequence[int], cache: list[Any]) -> None:
        if lane_is_off() or not self._held.budget:
            return
        try:
            self._held.hold(self._index.asked(ids), dismantle(cache, len(ids)))
        except UnsupportedCache as refusal:
            self._tally.warn_once("unsupported", "a prefix cannot be kept: %s", refusal)
        except Exception as error:
            self._tally.wonder("a prefix could not be kept", error)

    def _send(self, capture: Capture, seconds: float) -> None:
        def store() -> bool:
            started = time.perf_counter()
            outcome = self._index.store(capture, seconds)
            self._tally.add_seconds("store_ms_total", time.perf_counter() - started)
            return outcome not in ("failed", "gap")

        # Each rests on the one before it: none replaces another.
        self._storing.run(object(), store, capture.nbytes, seconds)


def _shifted(progress: Progress, start: int, total: int) -> Progress:
    """Progress over the whole prompt, of which the first tokens were restored."""
    return lambda done, _: progress(start + done, total)
