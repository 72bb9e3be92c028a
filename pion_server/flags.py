"""The flags of `pion-server` as one table: parsing, the help and the nearest match come from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pion_server.flag_values import (
    MB,
    ConfigError,
    buffer_size,
    fsync_policy,
    log_format,
    name_prefix,
    number,
    password,
    password_file,
    size_or_none,
)
from pion_server.tenants import quota, tenant


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: `read` turns its word into the value of `Config.<field>`.

    Without a `metavar` it takes no word and stands for `value`. `notice` is said when it is used
    and has no effect; `missing` refuses it. `repeated`: it may be given often, and its field
    collects the values.
    """

    names: str
    group: str
    help: str
    field: str | None = None
    metavar: str = ""
    read: Callable[[str], Any] = str
    value: Any = None
    optional: bool = False
    repeated: bool = False
    notice: str | None = None
    missing: bool = False


_NET, _DATA, _LIMITS, _REPORTS = "Network", "Data and durability", "Limits", "Reports"
_ENGINE, _LATER = "Attention engine (with MLX installed)", "Not in this version"
_DEVICE = "attention is on, on MLX's default device"

FLAGS: tuple[Flag, ...] = (
    Flag("-p, --port", _NET, "TCP port, 0: any free one", "port", "N", number(0, 65535)),
    Flag("--bind", _NET, "address; others than loopback need a password", "bind", "ADDRESS"),
    Flag(
        "--unixsocket",
        _NET,
        "socket for clients on this machine (pion.sock in the data directory; none: no socket)",
        "unix_socket",
        "PATH",
        Path,
    ),
    Flag("--requirepass", _NET, "password (others may see it in ps)", "password", "WORD", password),
    Flag(
        "--requirepass-file",
        _NET,
        "password: first line of FILE (or in the environment: PION_REQUIREPASS)",
        "password",
        "FILE",
        password_file,
    ),
    Flag("--tls-port", _NET, "port for TLS clients", "tls_port", "N", number(0, 65534)),
    Flag("--tls-cert", _NET, "certificate chain, PEM", "tls_cert", "FILE", Path),
    Flag("--tls-key", _NET, "its private key, PEM", "tls_key", "FILE", Path),
    Flag("--tls-ca", _NET, "only clients with a certificate of these", "tls_ca", "FILE", Path),
    Flag("--tls-only", _NET, "without TLS from this machine only", "tls_only", value=True),
    Flag(
        "--tenant",
        _NET,
        "a user who sees only what is its own; can be repeated",
        "tenants",
        "NAME=WORD",
        tenant,
        repeated=True,
    ),
    Flag(
        "--tenant-quota",
        _NET,
        "its stored bytes and sessions; can be repeated",
        "quotas",
        "NAME=SIZE[,N]",
        quota,
        repeated=True,
    ),
    Flag(
        "--tenant-strict",
        _NET,
        "tenants may use Redis' commands only",
        "tenant_strict",
        value=True,
    ),
    Flag(
        "--ns-prefix", _NET, "what every name must begin with", "ns_prefix", "PREFIX", name_prefix
    ),
    Flag("--max-clients", _NET, "connections", "max_clients", "N", number(1, 1_000_000)),
    Flag(
        "--max-clients-per-address",
        _NET,
        "connections from one address",
        "clients_per_address",
        "N",
        number(1, 1_000_000),
    ),
    Flag(
        "--auth-timeout",
        _NET,
        "seconds a client has for its password",
        "auth_timeout",
        "SECONDS",
        number(1, 86_400),
    ),
    Flag(
        "--stall-timeout",
        _NET,
        "seconds half a request, or replies nobody takes, may rest",
        "stall_timeout",
        "SECONDS",
        number(1, 86_400),
    ),
    Flag(
        "-w, --workers",
        _NET,
        "worker processes; several have ports of their own above --port",
        "workers",
        "N",
        number(1, 256),
    ),
    Flag("--independent-workers", _NET, "accepted: workers have stores of their own anyway"),
    Flag("--dir", _DATA, "data directory", "directory", "DIR", Path),
    Flag(
        "--fsync",
        _DATA,
        "when acknowledged writes reach the disk itself: always, everysec, no",
        "fsync",
        "WHEN",
        fsync_policy,
    ),
    Flag("--no-wal", _DATA, "no keyspace log; COMMIT refuses", "keyspace_log", value=False),
    Flag("--no-vstore-wal", _DATA, "rows end with the process", "vstore_log", value=False),
    Flag("--no-auto-save", _DATA, "never compact in the background", "auto_save", value=False),
    Flag(
        "--check", _DATA, "verify the files of a stopped server, then exit", "target", "DIR", Path
    ),
    Flag("--repair", _DATA, "the same, and cut what is damaged (kept)", "target", "DIR", Path),
    Flag("--kvcache", _DATA, "accepted: the K/V store is always on"),
    Flag(
        "--vstore-sessions",
        _LIMITS,
        "sessions; a prefix has two",
        "vstore_sessions",
        "N",
        number(2, 10_000_000),
    ),
    Flag(
        "--maxmemory",
        _LIMITS,
        "stored bytes; beyond, the least recently used prefixes go",
        "max_memory",
        "SIZE",
        size_or_none,
    ),
    Flag("--max-disk", _LIMITS, "bytes of log files", "max_disk", "SIZE", size_or_none),
    Flag("--ssm-budget", _LIMITS, "recurrent state", "ssm_budget", "SIZE", size_or_none),
    Flag(
        "--export-budget",
        _LIMITS,
        "exported files; files lent to clients on this machine (those: 1gb unless set)",
        "export_budget",
        "SIZE",
        size_or_none,
    ),
    Flag("--max-request", _LIMITS, "one request", "max_request", "SIZE", buffer_size),
    Flag(
        "--max-output",
        _LIMITS,
        "reply bytes held for a client that does not read",
        "output_limit",
        "SIZE",
        buffer_size,
    ),
    Flag(
        "--fetch-zero-fill",
        _LIMITS,
        "zeros, not null, for rows never written",
        "fetch_zero_fill",
        value=True,
    ),
    Flag(
        "--status-file",
        _REPORTS,
        "1 Hz heartbeat (pion-PORT.status in the data directory)",
        "status_file",
        "PATH",
        Path,
        optional=True,
    ),
    Flag(
        "--crash-log",
        _REPORTS,
        "start and exit lines (pion-PORT.crash.log in the data directory)",
        "crash_log",
        "PATH",
        Path,
        optional=True,
    ),
    Flag(
        "--metrics-port",
        _REPORTS,
        "HTTP port for Prometheus, 0: any free one",
        "metrics_port",
        "N",
        number(0, 65535),
    ),
    Flag(
        "--log-format",
        _REPORTS,
        "lines for people, or json: an object an event on stderr",
        "log_format",
        "FORMAT",
        log_format,
    ),
    Flag(
        "--slowlog-ms",
        _REPORTS,
        "SLOWLOG keeps what took longer, 0: nothing",
        "slowlog_ms",
        "N",
        number(0, 10_000_000),
    ),
    Flag("--no-crash-log", _REPORTS, "no such lines", "crash_log_wanted", value=False),
    Flag("-v, --version", _REPORTS, "print the version", "action", value="version"),
    Flag("-h, --help", _REPORTS, "print this", "action", value="help"),
    Flag("--metal-attention", _ENGINE, "accepted: " + _DEVICE),
    Flag(
        "--metal-attention-fp16",
        _ENGINE,
        "keep K and V as float16, half the memory",
        "attention_fp16",
        value=True,
    ),
    Flag("--cuda-attention", _ENGINE, "accepted: " + _DEVICE),
    Flag("--no-attention", _ENGINE, "ATTEND.* and WARM refuse", "attention", value=False),
    Flag(
        "--fa-window",
        _ENGINE,
        "prefix tokens seen by queries that name no window, 0: all",
        "fa_window",
        "N",
        number(0, 2**31 - 1),
    ),
    Flag(
        "--sdpa-slots",
        _ENGINE,
        "layers kept ready; beyond, the least recently used turn cold",
        "sdpa_slots",
        "N",
        number(1, 1_000_000),
    ),
    Flag(
        "--sdpa-auto-warm",
        _ENGINE,
        "bring cold layers back at a query, not at KV.PREFIX.WARM",
        "sdpa_auto_warm",
        value=True,
    ),
    Flag(
        "--decode-sessions",
        _ENGINE,
        "decode sessions; beyond, the least recently used end",
        "decode_sessions",
        "N",
        number(1, 1_000_000),
    ),
    Flag(
        "--decode-idle",
        _ENGINE,
        "seconds after which an unused decode session ends",
        "decode_idle",
        "SECONDS",
        number(1, 10_000_000),
    ),
    Flag("--wal-size", _LATER, "", metavar="SIZE", missing=True),
    Flag("--wal-max-segments", _LATER, "", metavar="N", missing=True),
    Flag("--wal-full-policy", _LATER, "", metavar="POLICY", missing=True),
)

# Flags of other servers that mean nothing here; scripts that pass them go on working.
IGNORED = (
    "--io-threads",
    "--epoll",
    "--iouring",
    "--moe-cache",
    "--dim",
    "--max-elements",
    "--auto-embed",
    "--no-auto-embed",
    "--no-auto-detect",
    "--blob-threshold",
    "--no-blob-tier",
    "--profile",
    "--cluster",
)

_BY_NAME = {name: flag for flag in FLAGS for name in flag.names.split(", ")}


def find_flag(name: str) -> Flag:
    """The flag of that name; ConfigError with the nearest one otherwise."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    import difflib

    near = difflib.get_close_matches(name, [*_BY_NAME, *IGNORED], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "-h lists all flags"
    raise ConfigError(f"unknown {'flag' if name.startswith('-') else 'word'} {name!r}; {hint}")


def is_ignored(name: str) -> bool:
    """Whether a flag is another server's, `--cluster…` in all its forms included."""
    return name in IGNORED or name.startswith("--cluster")


def help_text(defaults: object) -> str:
    """What `-h` prints; `defaults` has the fields' default values as attributes."""
    lines = ["usage: pion-server [flags]", "", "Keeps the K/V and recurrent state of LLM prefixes."]
    for group in dict.fromkeys(flag.group for flag in FLAGS):
        lines += ["", f"{group}:"]
        for flag in FLAGS:
            if flag.group == group:
                word = f"{flag.names} {flag.metavar}".rstrip()
                lines.append(f"  {word:<26}{flag.help}{_default(flag, defaults)}".rstrip())
    lines += ["", f"Other servers' flags, ignored with a notice: {' '.join(IGNORED)}"]
    return "\n".join(lines) + "\n"


def _default(flag: Flag, defaults: object) -> str:
    value = getattr(defaults, flag.field or "", None)
    if value is None or not flag.metavar:
        return ""
    if isinstance(value, int) and value >= MB:
        value = f"{value // MB}mb"
    return f" [{value}]"
