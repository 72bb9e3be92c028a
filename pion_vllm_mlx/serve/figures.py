"""What /metrics and /v1/pion/stats count. Every series is there from the start, at zero.

No label and no value comes from a prompt, a name space or a client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

APIS: Final = ("chat", "completions", "messages", "responses")
OUTCOMES: Final = ("ok", "refused", "failed", "cancelled")
#: Events of the prompt memory, and of the tier behind it (see their own docstrings).
MEMORY: Final = (
    *("hits", "misses", "memory_tokens", "tier_hits", "tier_tokens", "tier_late", "tier_failed"),
    *("preloaded_tokens", "inserted", "rejected", "incoherent", "inexact", "evicted", "errors"),
)
TIER: Final = (
    *("hits", "hits_local", "misses", "tokens_restored", "bytes_fetched", "given_up"),
    *("stores", "stores_skipped", "stores_failed", "stores_dropped", "oversize"),
    *("bytes_stored", "evictions", "bytes_evicted"),
)
_SECONDS: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)

#: Reads what others count: events of memory and tier, and gauges.
Reading = Callable[[], Mapping[str, Mapping[str, float]]]


class Figures:
    """Counts requests; `reading` is asked at every scrape."""

    def __init__(self, reading: Reading) -> None:
        """`reading` returns ``memory``, ``tier`` and ``gauges``, each by name."""
        self.registry = CollectorRegistry()
        self._reading = reading
        self._lock = threading.Lock()
        make: dict[str, Any] = {"namespace": "pion_serve", "registry": self.registry}
        self._requests = Counter("requests", "Requests", ["api", "outcome"], **make)
        self._prompt = Counter("prompt_tokens", "Prompt tokens", **make)
        self._cached = Counter("cached_tokens", "Prompt tokens that were not computed", **make)
        self._generated = Counter("generated_tokens", "Generated tokens", **make)
        self._first = Histogram(
            "first_token_seconds", "Time to the first token", buckets=_SECONDS, **make
        )
        self._running = Gauge("running_requests", "Requests that are being answered", **make)
        for api in APIS:
            for outcome in OUTCOMES:
                self._requests.labels(api, outcome)
        self.registry.register(self)
        #: Requests that are being answered.
        self.running = 0
        self.totals = {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0}

    def begin(self) -> None:
        """A request is taken up."""
        self._running.inc()
        with self._lock:
            self.running += 1

    def end(
        self,
        api: str,
        outcome: str,
        *,
        prompt: int,
        cached: int,
        generated: int,
        first: float | None,
    ) -> None:
        """A request has ended; `first`: seconds to its first token, None without one."""
        self._running.dec()
        self._requests.labels(api, outcome).inc()
        self._prompt.inc(prompt)
        self._cached.inc(cached)
        self._generated.inc(generated)
        if first is not None:
            self._first.observe(first)
        with self._lock:
            counted = {"requests": 1, "prompt_tokens": prompt, "cached_tokens": cached}
            for name, more in (counted | {"generated_tokens": generated}).items():
                self.totals[name] += more
            self.running -= 1

    def snapshot(self) -> dict[str, Any]:
        """The same as one object."""
        reading = self._reading()
        found: dict[str, Any] = {"requests": dict(self.totals)}
        for name, known in (("memory", MEMORY), ("tier", TIER)):
            found[name] = {event: reading[name].get(event, 0) for event in known}
        return found | {"gauges": dict(reading["gauges"])}

    def exposition(self) -> bytes:
        """The text Prometheus reads."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Any]:
        """What `reading` knows, for the registry."""
        reading = self._reading()
        for name, known in (("memory", MEMORY), ("tier", TIER)):
            family = CounterMetricFamily(
                f"pion_serve_{name}_events", f"Events of the {name}", labels=["event"]
            )
            for event in known:
                family.add_metric([event], float(reading[name].get(event, 0)))
            yield family
        for name, value in reading["gauges"].items():
            yield GaugeMetricFamily(f"pion_serve_{name}", name.replace("_", " "), float(value))
