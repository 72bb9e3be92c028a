"""What `--metrics-port` tells: every figure of the server, as Prometheus text.

Figures only: no name of a prefix and no text of a prompt is among them. All series are there from
the start, those of a tenant with its name as a label. `prometheus_client` is imported by the first
scrape.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from pion_server import __version__
from pion_server.process import rss_bytes
from pion_server.state import ServerState
from pion_server.wire.server import Server

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "pion_"

Kind = Literal["counter", "gauge"]


class Figure(NamedTuple):
    """One metric, its name without `pion_` and `_total`, and its value for each `tenant`.

    The admin's tenant is empty: to Prometheus, no label. None: it is the process's.
    """

    name: str
    kind: Kind
    help: str
    values: dict[str | None, float]


class _Row(NamedTuple):
    """A figure of one user's stores. Counters of PION.STATS start anew at its RESET."""

    name: str
    kind: Kind
    help: str
    read: Callable[[ServerState], float]


_OF_STORES = (
    _Row("commands", "counter", "Commands executed", lambda s: s.commands_executed),
    _Row("slow_commands", "counter", "Those above --slowlog-ms", lambda s: s.slowlog.total),
    _Row("prefix_hits", "counter", "Prefixes found", lambda s: s.stats.hits),
    _Row("prefix_misses", "counter", "Prefixes asked for in vain", lambda s: s.stats.misses),
    _Row("prefix_tokens_served", "counter", "Tokens not computed", lambda s: s.stats.tokens_served),
    _Row("prefix_bytes_served", "counter", "Bytes of K and V sent", lambda s: s.stats.bytes_served),
    _Row(
        "prefill_seconds_saved",
        "counter",
        "Prefill time skipped",
        lambda s: s.stats.prefill_us_saved / 1e6,
    ),
    _Row("rows_fetched", "counter", "Rows asked for, times layers", lambda s: s.total_fetches),
    _Row("short_fetches", "counter", "Fetches that found rows missing", lambda s: s.short_fetches),
    _Row("sessions", "gauge", "Sessions held; a prefix has two", lambda s: len(s.vstore.table)),
    _Row("sessions_limit", "gauge", "--vstore-sessions", lambda s: s.config.vstore_sessions),
    _Row("sessions_evicted", "counter", "Sessions evicted", lambda s: s.vstore.evictions),
    _Row("states_evicted", "counter", "Recurrent states evicted", lambda s: s.ssm.evictions),
    _Row("keys", "gauge", "Keys of the keyspace", lambda s: len(s.keyspace)),
    _Row("keys_evicted", "counter", "Keys evicted", lambda s: s.keyspace.evictions),
    _Row("keys_expired", "counter", "Keys expired", lambda s: s.keyspace.expirations),
    _Row("stored_bytes", "gauge", "Bytes stored", lambda s: s.stores.budget.used),
    _Row("stored_bytes_limit", "gauge", "--maxmemory, 0: none", lambda s: s.config.max_memory or 0),
    _Row("disk_bytes", "gauge", "Bytes of logs and snapshots", lambda s: s.stores.disk_bytes),
    _Row("disk_bytes_limit", "gauge", "--max-disk, 0: none", lambda s: s.config.max_disk or 0),
    _Row("dead_bytes", "gauge", "Bytes of them to be compacted", lambda s: s.stores.dead_bytes),
    _Row(
        "log_failed",
        "gauge",
        "1: a log cannot be written, so that writes are refused",
        lambda s: any(log.failed for log in s.stores.logs),
    ),
    _Row("decode_bytes", "gauge", "Memory of decode sessions", lambda s: s.attend.decodes.nbytes),
)


def figures(state: ServerState, server: Server) -> list[Figure]:
    """Every figure as it is now. On the event loop's thread."""
    owners = {own.tenant: own for own in state.everybody}
    own = [
        Figure(row.name, row.kind, row.help, {name: row.read(s) for name, s in owners.items()})
        for row in _OF_STORES
    ]
    return [*_of_process(state, server), *own]


def _of_process(state: ServerState, server: Server) -> Iterator[Figure]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    rows: tuple[tuple[str, Kind, str, float], ...] = (
        ("uptime_seconds", "gauge", "Seconds since the start", state.uptime),
        ("resident_bytes", "gauge", "Memory of the process", rss_bytes()),
        ("cpu_seconds", "counter", "Processor time", usage.ru_utime + usage.ru_stime),
        ("clients", "gauge", "Connections open", len(state.connections)),
        ("clients_limit", "gauge", "--max-clients", server.max_clients),
        ("clients_accepted", "counter", "Connections accepted", server.connections_accepted),
        ("clients_turned_away", "counter", "Connections there was no room for", server.turned_away),
        (
            "clients_unauthenticated_dropped",
            "counter",
            "Connections closed for want of a password",
            server.strangers_dropped,
        ),
        ("clients_stalled", "counter", "Connections closed after --stall-timeout", server.stalled),
        ("queued_reply_bytes", "gauge", "Replies not taken yet", server.queued_bytes),
        ("received_bytes", "gauge", "Requests not complete yet", server.received_bytes),
    )
    return (Figure(name, kind, text, {None: value}) for name, kind, text, value in rows)


def expose(all_figures: Iterable[Figure]) -> bytes:
    """The text of `CONTENT_TYPE`. For any thread."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

    def family(figure: Figure) -> Metric:
        labels = [] if None in figure.values else ["tenant"]
        kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
        metric = kind(_PREFIX + figure.name, figure.help, labels=labels)
        for tenant, value in figure.values.items():
            metric.add_metric([] if tenant is None else [tenant], value)
        return metric

    class All(Collector):
        def collect(self) -> Iterator[Metric]:
            yield InfoMetricFamily("pion", "This server", {"version": __version__})
            yield from map(family, all_figures)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(All())
    return generate_latest(registry)
