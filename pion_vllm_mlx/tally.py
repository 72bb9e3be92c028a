"""What a client did: counters that threads may share."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from pion_vllm_mlx.process_lock import ProcessLock

log = logging.getLogger("pion_vllm_mlx")


class Tally:
    """Counts and milliseconds, and which troubles were already told."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._counts: Counter[str] = Counter()
        self._milliseconds: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._not_lent: Counter[str] = Counter()
        self._told: set[str] = set()

    def add(self, name: str, count: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += count

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add to a total of milliseconds."""
        with self._lock:
            self._milliseconds[name] += seconds * 1000  # type: ignore[assignment]

    def add_miss(self, reason: str) -> None:
        """Count a miss and why it was one."""
        with self._lock:
            self._counts["misses"] += 1
            self._misses[reason] += 1

    def add_not_lent(self, reason: str) -> None:
        """Count a prefix that came over the network though the server may be on this machine."""
        with self._lock:
            self._not_lent[reason] += 1

    def warn_once(self, trouble: str, message: str, *values: object) -> None:
        """Log one warning until `settle(trouble)`; it rarely changes from call to call."""
        with self._lock:
            if trouble in self._told:
                return
            self._told.add(trouble)
        log.warning(message, *values)

    def wonder(self, what: str, error: Exception) -> None:
        """Tell once about an error that no case foresees; the call goes on without."""
        text = f"{type(error).__name__}: {error}"
        self.warn_once(what, "%s, going on without: %s", what, text)

    def settle(self, trouble: str) -> None:
        """A trouble is over: the next one of its kind is told again."""
        with self._lock:
            self._told.discard(trouble)

    def snapshot(self) -> dict[str, Any]:
        """All figures at one moment."""
        with self._lock:
            hits, misses = self._counts["hits"], self._counts["misses"]
            return {
                "hits": hits,
                "misses": misses,
                "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
                "miss_reasons": dict(self._misses),
                "not_lent": dict(self._not_lent),
                **{name: self._counts[name] for name in _COUNTS},
                **{name: round(self._milliseconds[name], 3) for name in _TIMES},
            }


_COUNTS = (
    "hits_in_process",
    "hits_local",
    "tokens_restored",
    "bytes_fetched",
    "stores",
    "stores_skipped",
    "stores_failed",
    "bytes_stored",
    "wire_prefixes",
    "wire_losses",
    "attend_binary",
    "attend_resp",
    "given_up",
    "oversize",
    "evictions",
    "bytes_evicted",
)
_TIMES = ("fetch_ms_total", "store_ms_total", "prefill_ms_total", "attend_ms_total")
