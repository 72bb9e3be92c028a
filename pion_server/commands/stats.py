"""PION.STATS and INFO: the value receipt and the server's figures."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable

from pion_server import __version__
from pion_server.commands.arguments import word
from pion_server.commands.registry import Access, Args, Context, command
from pion_server.state import ServerState
from pion_server.wire.replies import Verbatim


def _seconds(microseconds: int) -> str:
    """`<s>.<mmm>`, truncated."""
    return f"{microseconds // 1_000_000}.{microseconds // 1000 % 1000:03d}"


def receipt(state: ServerState) -> dict[str, int | str]:
    """The 16 fields of PION.STATS in their order."""
    stats = state.stats
    return {
        "worker_id": state.worker_id,
        "uptime_in_seconds": int(state.uptime),
        "kvprefix_hits": stats.hits,
        "kvprefix_misses": stats.misses,
        "kvprefix_hits_measured": stats.hits_measured,
        "kvprefix_tokens_served": stats.tokens_served,
        "kvprefix_bytes_served": stats.bytes_served,
        "kvprefix_prefill_us_saved": stats.prefill_us_saved,
        "kvprefix_prefill_us_measured": stats.prefill_us_measured,
        "prefill_seconds_avoided": _seconds(stats.prefill_us_saved),
        "prefill_seconds_avoided_measured": _seconds(stats.prefill_us_measured),
        "semantic_hits": 0,
        "semantic_misses": 0,
        "moe_hits": 0,
        "moe_misses": 0,
        "vector_queries": 0,
    }


@command("PION.STATS", access=Access.TENANT, min_args=0)
def stats(ctx: Context, args: Args) -> object:
    """PION.STATS [RESET]

    What the prefix cache did: hits, tokens and bytes served, prefill time skipped.
    """
    if args and word(args[0]) == "RESET":
        ctx.state.stats.reset()
        return "OK"
    return {
        key.encode(): value if isinstance(value, int) else value.encode()
        for key, value in receipt(ctx.state).items()
    }


def resident_bytes() -> int:
    """Resident set size now."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_bytes()


def peak_bytes() -> int:
    """The largest resident set size so far (ru_maxrss: bytes on macOS, KiB elsewhere)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _server(state: ServerState) -> dict[str, object]:
    system = os.uname()
    return {
        "redis_version": "7.0.0",
        "redis_mode": "standalone",
        "pion_version": f"{__version__}+py",
        "os": f"{system.sysname} {system.release} {system.machine}",
        "arch_bits": 64,
        "process_id": os.getpid(),
        "run_id": state.run_id,
        "tcp_port": state.port,
        "uptime_in_seconds": int(state.uptime),
        "uptime_in_days": int(state.uptime) // 86_400,
    }


def _clients(state: ServerState) -> dict[str, object]:
    everyone = state.connections.values()
    shown = [one for one in everyone if not state.tenant or one.user == state.tenant]
    return {"connected_clients": len(shown), "maxclients": state.config.max_clients}


def _memory(state: ServerState) -> dict[str, object]:
    if state.tenant:
        # What the process takes says something about the others.
        used = state.stores.budget.used
        return {"used_memory": used, "used_memory_peak": used, "stored_bytes": used}
    used = resident_bytes()
    return {
        "used_memory": used,
        "used_memory_rss": used,
        "used_memory_peak": max(used, peak_bytes()),
        "maxmemory": state.config.max_memory or 0,
        "maxmemory_policy": "allkeys-lru",
        "stored_bytes": state.stores.budget.used,
    }


def _persistence(state: ServerState) -> dict[str, object]:
    vlog, slog, klog = state.stores.logs
    return {
        "loading": 0,
        "vstore_wal_bytes": vlog.end if vlog.durable else 0,
        "vstore_snapshot_bytes": vlog.snapshot_bytes,
        "ssm_wal_bytes": slog.end,
        "ssm_snapshot_bytes": slog.snapshot_bytes,
        "keyspace_wal_bytes": klog.end if klog.durable else 0,
        "keyspace_snapshot_bytes": klog.snapshot_bytes,
        "dead_bytes": state.stores.dead_bytes,
        "log_failed": int(any(log.failed for log in state.stores.logs)),
    }


def _stats(state: ServerState) -> dict[str, object]:
    return {
        "total_commands_processed": state.commands_executed,
        "evicted_sessions": state.vstore.evictions,
        "evicted_states": state.ssm.evictions,
        "evicted_keys": state.keyspace.evictions,
        "expired_keys": state.keyspace.expirations,
        "saturated_values": state.vstore.saturated_values,
    }


def _replication(_: ServerState) -> dict[str, object]:
    return {"role": "master", "connected_slaves": 0}


def _cpu(state: ServerState) -> dict[str, object]:
    if state.tenant:
        return {}
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"used_cpu_sys": f"{usage.ru_stime:.6f}", "used_cpu_user": f"{usage.ru_utime:.6f}"}


def _cluster(_: ServerState) -> dict[str, object]:
    return {"cluster_enabled": 0}


def _pion(state: ServerState) -> dict[str, object]:
    fields = receipt(state)
    hidden = ("uptime_in_seconds", "kvprefix_prefill_us_saved", "kvprefix_prefill_us_measured")
    shown = {key: value for key, value in fields.items() if key not in hidden}
    return {"stats_scope": "worker", **shown}


def _keyspace(state: ServerState) -> dict[str, object]:
    keys = state.keyspace
    return {"db0": f"keys={len(keys)},expires={keys.expiring},avg_ttl=0"} if len(keys) else {}


def _tenants(state: ServerState) -> dict[str, object]:
    """For the admin: a line for each tenant, of its stores alone."""
    return {
        own.tenant: f"sessions={len(own.vstore.table)},bytes={own.stores.budget.used},"
        f"hits={own.stats.hits},misses={own.stats.misses}"
        for own in state.tenants.values()
    }


SECTIONS: dict[str, Callable[[ServerState], dict[str, object]]] = {
    "Server": _server,
    "Clients": _clients,
    "Memory": _memory,
    "Persistence": _persistence,
    "Stats": _stats,
    "Replication": _replication,
    "CPU": _cpu,
    "Cluster": _cluster,
    "Pion": _pion,
    "Keyspace": _keyspace,
    "Tenants": _tenants,
}
EVERYTHING = {"ALL", "DEFAULT", "EVERYTHING"}


@command("INFO", access=Access.TENANT, min_args=0)
def info(ctx: Context, args: Args) -> Verbatim:
    """INFO [section ...]

    The server in Redis' sections, and `# Pion`: the value receipt.
    """
    wanted = {word(arg) for arg in args} or EVERYTHING
    chosen = [n for n in SECTIONS if wanted & EVERYTHING or n.upper() in wanted]
    blocks = []
    for title in chosen:
        fields = SECTIONS[title](ctx.state)
        if not fields and title == "Tenants":
            continue
        blocks.append(f"# {title}\r\n" + "".join(f"{k}:{v}\r\n" for k, v in fields.items()))
    return Verbatim("\r\n".join(blocks))
