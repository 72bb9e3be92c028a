"""Prefixes under names: held in this process, else read from the server, else computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from pion_patches.cache_rebuild import (
    CacheImage,
    RebuildError,
    UnsupportedCache,
    dismantle,
    rebuild,
)
from pion_patches.inproc import lane_is_off
from pion_vllm_mlx.held import HeldPrefixes
from pion_vllm_mlx.kv_bits import KvBits
from pion_vllm_mlx.prefill import Progress, prefill
from pion_vllm_mlx.process_lock import ProcessLock
from pion_vllm_mlx.rates import Rates
from pion_vllm_mlx.restore import (
    Miss,
    Restored,
    fetch_prefix,
    find_prefix,
    try_to_borrow,
)
from pion_vllm_mlx.stage2 import Stage2
from pion_vllm_mlx.storing import Storing
from pion_vllm_mlx.tally import Tally
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import GivenUp, Lane, Patience, TransportError
from pion_vllm_mlx.transport.local import LocalLane

#: Misses by which what is stored is not what its manifest says.
_DAMAGE: Final = ("manifest", "rows", "checksum", "rebuild")


class NamedPrefixes:
    """The prefixes of one model by namespace. Never raises for what is wrong with a server."""

    def __init__(
        self,
        model: Any,
        lane: Lane,
        local: LocalLane,
        tier: Tier,
        tally: Tally,
        storing: Storing,
        stage2: Stage2 | None,
        *,
        held: HeldPrefixes,
        kv_bits: KvBits,
        prefill_step: int,
        timeout: float,
        rates: Rates,
        computing: ProcessLock,
    ) -> None:
        """`computing`: held while the model runs. The rest as for `PionPromptCache`."""
        self._model, self._lane, self._tier, self._tally = model, lane, tier, tally
        self._local = local
        self._storing, self._stage2 = storing, stage2
        self.held, self.rates = held, rates
        self._kv_bits, self._prefill_step, self._timeout = kv_bits, prefill_step, timeout
        self._computing = computing

    def get(
        self, name: bytes, ids: tuple[int, ...], fingerprint: str, progress: Progress | None
    ) -> list[Any]:
        """Caches that hold exactly `ids`, the caller's own."""
        cache = self._from_process(name, ids, fingerprint)
        damaged = 0
        if cache is None:
            cache, damaged = self._from_server(name, ids, fingerprint, self.rates)
        if cache is None:
            cache = self._from_model(name, ids, fingerprint, progress, damaged)
        return cache

    def restore(self, name: bytes, tokens: int, fingerprint: str) -> list[Any] | None:
        """Caches of the `tokens` tokens kept under this name, or None."""
        cache = self._from_process(name, tokens, fingerprint)
        return cache if cache is not None else self._from_server(name, tokens, fingerprint)[0]

    def clear(self) -> None:
        """Forget what is held in this process."""
        self.held.clear()

    def _from_process(
        self, name: bytes, ids: tuple[int, ...] | int, fingerprint: str
    ) -> list[Any] | None:
        image = None if lane_is_off() else self.held.get(name, ids, fingerprint)
        if image is None:
            return None
        try:
            cache = rebuild(self._template(image.tokens), image)
        except Exception as error:
            self.held.drop(name)
            self._tally.wonder("a prefix held in process could not be rebuilt", error)
            return None
        self._tally.add("hits")
        self._tally.add("hits_in_process")
        self._tally.add("tokens_restored", image.tokens)
        return cache

    def _from_server(
        self,
        name: bytes,
        ids: tuple[int, ...] | int,
        fingerprint: str,
        rates: Rates | None = None,
    ) -> tuple[list[Any] | None, int]:
        """A restored cache or None; then also the generation of a manifest found to be wrong.

        With `rates` only if it is likely to be sooner than a prefill.
        """
        started = time.perf_counter()
        gen = 0
        try:
            wanted = name, ids, fingerprint, self._tier, self._quick()
            found, lent = try_to_borrow(self._local, *wanted, self._tally)
            if found is None:
                found = find_prefix(self._lane, name, ids, fingerprint, self._tier, self._quick())
            gen = found.gen
            if isinstance(lent, Restored):
                restored = lent
            else:
                restored = fetch_prefix(self._lane, name, found, self._timeout, rates=rates)
                if lent is not None:
                    self._local.tell(lent)
            cache = rebuild(self._template(restored.image.tokens), restored.image)
        except Miss as miss:
            self._tally.add_miss(miss.reason)
            return None, gen if miss.reason in _DAMAGE else 0
        except GivenUp:
            self._tally.add_miss("slower")
            self._tally.add("given_up")
            return None, 0
        except TransportError:
            self._tally.add_miss("unavailable")
            return None, 0
        except RebuildError:
            self._tally.add_miss("rebuild")
            return None, gen
        except Exception as error:
            self._tally.add_miss("error")
            self._tally.wonder("a stored prefix could not be rebuilt", error)
            return None, gen
        seconds = time.perf_counter() - started
        if restored is not lent:  # of what comes over the network
            self.rates.add_restore(restored.nbytes, seconds)
        self._tally.add_seconds("fetch_ms_total", seconds)
        self._tally.add("hits")
        self._tally.add("tokens_restored", restored.image.tokens)
        self._tally.add("bytes_fetched", restored.nbytes)
        self._hold(name, found.manifest.ids, fingerprint, restored.image)
        return cache, 0

    def _from_model(
        self,
        name: bytes,
        ids: tuple[int, ...],
        fingerprint: str,
        progress: Progress | None,
        damaged: int,
    ) -> list[Any]:
        # One thread at a time: a forward pass takes every core it can get.
        with self._computing:
            cache = self._from_process(name, ids, fingerprint)  # another thread computed it?
            if cache is not None:
                return cache
            # Caches become quantised on the way, as mlx-lm's do, so they begin as they are.
            cache = KvBits().template(self._model, 0)
            step, kv_bits = self._prefill_step, self._kv_bits
            seconds = prefill(self._model, ids, cache, step, progress, kv_bits)
            self.rates.add_prefill(len(ids), seconds)
            self._tally.add_seconds("prefill_ms_total", seconds)
            image = self._image_of(cache, len(ids))
            stored = None
            if image is not None:
                stored = self._begin_storing(name, ids, fingerprint, image, seconds, damaged)
        if stored is not None:
            stored()
        return cache

    def _begin_storing(
        self,
        name: bytes,
        ids: tuple[int, ...],
        fingerprint: str,
        image: CacheImage,
        seconds: float,
        damaged: int,
    ) -> Callable[[], bool] | None:
        """Keep the image here and begin to store it, the rest of which is what is returned."""
        try:
            stage2 = self._stage2
            then = stage2.push(name, ids, fingerprint, image) if stage2 is not None else None
            stored = self._storing.begin(name, ids, fingerprint, image, seconds, damaged, then)
        except Exception as error:
            self._tally.wonder("a prefix could not be stored", error)
            self._tally.add("stores_failed")
            return None
        self._hold(name, ids, fingerprint, image)
        return stored

    def _image_of(self, cache: list[Any], tokens: int) -> CacheImage | None:
        try:
            return dismantle(cache, tokens, wait=False)
        except UnsupportedCache as refusal:
            # Its classes are known, so it is this state: NaN, say. The caller still has use for it.
            self._tally.warn_once("unsupported", "a prefix cannot be stored: %s", refusal)
        except Exception as error:
            self._tally.wonder("a prefix could not be stored", error)
        self._tally.add("stores_failed")
        return None

    def _hold(self, name: bytes, ids: tuple[int, ...], fingerprint: str, image: CacheImage) -> None:
        if not lane_is_off():
            self.held.hold(name, ids, fingerprint, image)

    def _template(self, tokens: int) -> list[Any]:
        return self._kv_bits.template(self._model, tokens)

    def _quick(self) -> Patience:
        return Patience(first_byte=self._timeout, stall=2.0, total=10.0)
