"""Pion behind a server's memory: what was computed is written behind, and found by its tokens."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from mlx_lm.models.cache import make_prompt_cache

from pion_patches.cache_rebuild import UnsupportedCache
from pion_vllm_mlx.kv_bits import KvBits
from pion_vllm_mlx.lineage import Capture, Lineage, Match
from pion_vllm_mlx.lineage.blocks import floor_block
from pion_vllm_mlx.rates import Rates
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import Lane
from pion_vllm_mlx.transport.endpoint import Endpoint
from pion_vllm_mlx.transport.local import LocalLane

log = logging.getLogger("pion_vllm_mlx")

#: Bytes that may wait to be written; what comes on top is not kept.
_WAITING: Final = 1 << 30
#: Bytes of the conversations that a server which was started anew makes files of at once.
_PREPARED: Final = 1 << 28


@dataclass(frozen=True, slots=True)
class Part:
    """The index of one model, and which of the caches are that model's."""

    index: Lineage
    caches: slice


@dataclass(frozen=True, slots=True)
class PionOffer:
    """What each index found, of as many tokens; they alone can restore it.

    `tokens`: leading tokens that can be restored; 0 where that does not pay.
    """

    found: tuple[tuple[Lineage, Match], ...]
    tokens: int

    @property
    def ids(self) -> Sequence[int]:
        """The tokens it was found for."""
        ids: Sequence[int] = self.found[0][1].asked.ids.tolist()
        return ids

    @property
    def nbytes(self) -> int:
        """Bytes a restore moves, and about what the caches take."""
        return sum(match.nbytes for _, match in self.found)


class PionTier:
    """A `SecondTier`: one index a model, its draft model's beside it, one thread that writes.

    `budget_bytes` is a hard limit on what all indexes keep on the server together. Prefixes of a
    model whose caches cannot be stored exactly are not kept; that is told once.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        budget_bytes: int | None = None,
        min_gain: int = 16,
        vquant: str = "auto",
    ) -> None:
        """Nothing is sent yet. ValueError for a `vquant` that is no format."""
        self._endpoint = endpoint
        self._budget = budget_bytes
        self._gain = min_gain
        self._format = Tier(vquant)
        self.rates = Rates()
        self._parts: dict[Any, tuple[Part, ...]] = {}
        #: Lanes beside those of the indexes.
        self._aside: list[Lane] = []
        self._waiting: SimpleQueue[tuple[Lineage, Capture] | None] = SimpleQueue()
        self._bytes_waiting = 0
        self._lock = threading.Lock()
        self._dropped = 0
        self._used = 0
        self._writer = threading.Thread(target=self._write, name="pion-writer", daemon=True)
        self._writer.start()

    def lane(self) -> Endpoint:
        """A connection of its own to the same server, for whoever keeps something else there."""
        return self._endpoint.twin()

    @property
    def min_gain(self) -> int:
        """Fewer tokens than that beyond what memory has are not worth a restore."""
        return self._gain

    def attach(self, model_key: Any, provider: Any) -> None:
        """Index the prefixes of the model that was loaded, in place of one of the same name."""
        self.detach(model_key)
        try:
            whole = len(_caches_of(provider.model))
            parts = [Part(self._index(provider.model, provider, _folder(model_key)), slice(whole))]
            if provider.draft_model is not None:
                draft = self._index(provider.draft_model, provider, _folder(model_key, 2))
                parts.append(Part(draft, slice(whole, None)))
        except (UnsupportedCache, ValueError) as refusal:
            log.warning("conversations of this model are kept in memory only: %s", refusal)
            return
        for part in parts:
            # Hashes the weights now rather than at the first question.
            part.index.find([])
            part.index.reconcile()
            part.index.prepare(_PREPARED)
        self._used = parts[0].index.used_bytes
        self._parts[model_key] = tuple(parts)

    def _index(self, model: Any, provider: Any, folder: str | None) -> Lineage:
        flags, lane = provider.cli_args, self._endpoint.twin()
        bits = flags.kv_bits
        return Lineage(
            model,
            lane,
            self._endpoint.twin(),
            local=LocalLane.beside(lane),
            tier=self._format,
            kv_bits=KvBits(bits, flags.kv_group_size, flags.quantized_kv_start if bits else 0),
            # What is quantised depends on where the chunks of a prefill ended: those of another
            # size are another prefix.
            adapter=f"chunks of {flags.prefill_step_size}" if bits else "",
            budget_bytes=self._budget,
            min_gain=self._gain,
            model_path=folder,
            prefill_step=flags.prefill_step_size,
            rates=self.rates,
        )

    def detach(self, model_key: Any) -> None:
        """Let go of a model; what is stored of it stays."""
        for part in self._parts.pop(model_key, ()):
            part.index.close()

    def find(self, model_key: Any, tokens: Sequence[int]) -> PionOffer | None:
        """How much of `tokens` the server holds, for a model and its draft model alike."""
        parts = self._parts.get(model_key, ())
        found = [(part.index, part.index.find(tokens)) for part in parts]
        least = min((match.tokens for _, match in found), default=0)
        if any(match.tokens != least for _, match in found):
            # Any whole block of a longer one can be had.
            least = floor_block(least)
            found = [(part.index, part.index.find(tokens[:least])) for part in parts]
        pays = all(match.tokens == least and index.pays(match) for index, match in found)
        return PionOffer(tuple(found), least if pays else 0) if found else None

    def latest(self, model_key: Any) -> PionOffer | None:
        """The conversation that was stored last, whoever did it."""
        parts = self._parts.get(model_key, ())
        if len(parts) != 1:
            return None  # what two models stored last need not be the same
        lane = self._endpoint.twin()
        self._aside.append(lane)
        beside, match = parts[0].index.latest(lane)
        return PionOffer(((beside, match),), match.tokens if beside.pays(match) else 0)

    def restore(self, offer: PionOffer) -> list[Any] | None:
        """The caches, or None."""
        restored = [index.restore(match) for index, match in offer.found]
        caches = [cache for cache in restored if cache is not None]
        return list(chain(*caches)) if len(caches) == len(restored) else None

    def store(
        self,
        model_key: Any,
        tokens: Sequence[int],
        cache: Sequence[Any],
        *,
        anchor: bool = False,
    ) -> None:
        """Copy what is new of a prefix; the writer sends it."""
        for part in self._parts.get(model_key, ()):
            if self._bytes_waiting > _WAITING:
                self._dropped += 1
                return
            capture = part.index.capture(tokens, cache[part.caches], anchor=anchor)
            if capture is not None:
                with self._lock:
                    self._bytes_waiting += capture.nbytes
                self._waiting.put((part.index, capture))

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """So many tokens were computed in so many seconds: restoring has to be faster."""
        self.rates.add_prefill(tokens, seconds)

    def figures(self) -> Mapping[str, Any]:
        """Counts of all indexes together, by the names of `PionPromptCache.stats`."""
        found: Counter[str] = Counter(stores_dropped=self._dropped)
        for part in chain(*list(self._parts.values())):
            stats = part.index.stats()
            found.update({n: v for n, v in stats.items() if isinstance(v, int | float)})
        return found | {"bytes_waiting": self._bytes_waiting, "used_bytes": self._used}

    def flush(self, seconds: float) -> bool:
        """Whether all that was taken is written within so many seconds."""
        deadline = time.monotonic() + seconds
        while self._bytes_waiting and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._bytes_waiting

    def close(self) -> None:
        """Write what was taken, for some seconds at most, then let go."""
        self.flush(10.0)
        self._waiting.put(None)
        self._writer.join(1.0)
        for part in chain(*self._parts.values()):
            part.index.close()
        for lane in self._aside:
            lane.close()

    def _write(self) -> None:
        while (work := self._waiting.get()) is not None:
            index, capture = work
            try:
                index.store(capture)
                if self._waiting.empty():
                    # Asked here, where nobody waits for the answer.
                    self._used = index.used_bytes
            except Exception as error:
                log.warning("a prefix was not written: %r", error)
            finally:
                with self._lock:
                    self._bytes_waiting -= capture.nbytes
                # Held until the next one comes otherwise.
                del work, capture


def _caches_of(model: Any) -> list[Any]:
    make: Any = make_prompt_cache
    made: list[Any] = make(model)
    return made


def _folder(model_key: Any, place: int = 0) -> str | None:
    path = str(model_key[place]) if isinstance(model_key, tuple) else str(model_key)
    return path if Path(path).exists() else None
