"""Pion behind a server's memory: what was computed is written behind, and found by its tokens."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from pion_patches.cache_rebuild import UnsupportedCache
from pion_vllm_mlx.kv_bits import KvBits
from pion_vllm_mlx.lineage import Capture, Lineage, Match
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
class PionOffer:
    """What an index found; it alone can restore it.

    `tokens`: leading tokens that can be restored; 0 where that does not pay.
    """

    lineage: Lineage
    match: Match
    tokens: int

    @property
    def ids(self) -> Sequence[int]:
        """The tokens it was found for."""
        ids: Sequence[int] = self.match.asked.ids.tolist()
        return ids

    @property
    def nbytes(self) -> int:
        """Bytes a restore moves, and about what the caches take."""
        return self.match.nbytes


class PionTier:
    """A `SecondTier`: one index a model, one thread that writes.

    `budget_bytes` is a hard limit on what the index keeps on its server. Prefixes of a model whose
    caches cannot be stored exactly, or that has a draft model, are not kept; that is told once.
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
        self._indexes: dict[Any, Lineage | None] = {}
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
        flags = provider.cli_args
        # What is quantised depends on where the chunks of a prefill ended: those of another size
        # are another prefix.
        chunks = f"chunks of {flags.prefill_step_size}" if flags.kv_bits is not None else ""
        try:
            if provider.draft_model is not None:
                raise UnsupportedCache("a draft model's caches", ())
            lane = self._endpoint.twin()
            index = Lineage(
                provider.model,
                lane,
                self._endpoint.twin(),
                local=LocalLane.beside(lane),
                tier=self._format,
                kv_bits=KvBits(
                    flags.kv_bits,
                    flags.kv_group_size,
                    flags.quantized_kv_start if flags.kv_bits is not None else 0,
                ),
                adapter=chunks,
                budget_bytes=self._budget,
                min_gain=self._gain,
                model_path=_folder(model_key),
                prefill_step=flags.prefill_step_size,
                rates=self.rates,
            )
        except (UnsupportedCache, ValueError) as refusal:
            log.warning("conversations of this model are kept in memory only: %s", refusal)
            self._indexes[model_key] = None
            return
        # Hashes the weights now rather than at the first question.
        index.find([])
        index.reconcile()
        index.prepare(_PREPARED)
        self._used = index.used_bytes
        self._indexes[model_key] = index

    def detach(self, model_key: Any) -> None:
        """Let go of a model; what is stored of it stays."""
        index = self._indexes.pop(model_key, None)
        if index is not None:
            index.close()

    def find(self, model_key: Any, tokens: Sequence[int]) -> PionOffer | None:
        """How much of `tokens` the server holds."""
        index = self._indexes.get(model_key)
        if index is None:
            return None
        match = index.find(tokens)
        return PionOffer(index, match, match.tokens if index.pays(match) else 0)

    def latest(self, model_key: Any) -> PionOffer | None:
        """The conversation that was stored last, whoever did it."""
        index = self._indexes.get(model_key)
        if index is None:
            return None
        lane = self._endpoint.twin()
        self._aside.append(lane)
        beside, match = index.latest(lane)
        return PionOffer(beside, match, match.tokens if beside.pays(match) else 0)

    def restore(self, offer: PionOffer) -> list[Any] | None:
        """The caches, or None."""
        return offer.lineage.restore(offer.match)

    def store(
        self,
        model_key: Any,
        tokens: Sequence[int],
        cache: Sequence[Any],
        *,
        anchor: bool = False,
    ) -> None:
        """Copy what is new of a prefix; the writer sends it."""
        index = self._indexes.get(model_key)
        if index is None:
            return
        if self._bytes_waiting > _WAITING:
            self._dropped += 1
            return
        capture = index.capture(tokens, cache, anchor=anchor)
        if capture is not None:
            with self._lock:
                self._bytes_waiting += capture.nbytes
            self._waiting.put((index, capture))

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """So many tokens were computed in so many seconds: restoring has to be faster."""
        self.rates.add_prefill(tokens, seconds)

    def figures(self) -> Mapping[str, Any]:
        """Counts of all indexes together, by the names of `PionPromptCache.stats`."""
        found: Counter[str] = Counter(stores_dropped=self._dropped)
        for index in list(self._indexes.values()):
            if index is not None:
                stats = index.stats()
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
        for index in self._indexes.values():
            if index is not None:
                index.close()
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


def _folder(model_key: Any) -> str | None:
    path = str(model_key[0]) if isinstance(model_key, tuple) else str(model_key)
    return path if Path(path).exists() else None
