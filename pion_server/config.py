"""A server's configuration, and how a command line becomes one."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pion_server.flag_values import MB, ConfigError
from pion_server.flags import Flag, find_flag, is_ignored
from pion_server.tenants import Tenant, directory_of, memory_shares, share, with_quotas

# Fields that two flags, or one flag twice, must not set.
_ONCE = ("password", "target")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that is fixed at start. Sizes are bytes; a limit of None is no limit."""

    port: int = 1974
    bind: str = "127.0.0.1"
    directory: Path = Path(".")
    unix_socket: Path | None = None
    password: str | None = field(default=None, repr=False)
    tls_port: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    tls_only: bool = False
    tenants: tuple[Tenant, ...] = ()
    tenant_strict: bool = False
    ns_prefix: bytes = b""
    max_clients: int = 10_000
    clients_per_address: int | None = None
    auth_timeout: int = 10
    stall_timeout: int = 60
    max_request: int = 1024 * MB
    output_limit: int = 256 * MB
    workers: int = 1
    max_memory: int | None = None
    max_disk: int | None = None
    vstore_sessions: int = 256
    fetch_zero_fill: bool = False
    ssm_budget: int | None = None
    export_budget: int | None = None
    export_directory: Path | None = None
    attention: bool = True
    attention_fp16: bool = False
    fa_window: int = 0
    sdpa_slots: int = 256
    sdpa_auto_warm: bool = False
    decode_sessions: int = 256
    decode_idle: int = 600
    keyspace_log: bool = True
    vstore_log: bool = True
    auto_save: bool = True
    fsync: Literal["always", "everysec", "no"] = "no"
    status_file: Path | None = None
    crash_log: Path | None = None
    crash_log_wanted: bool = True
    metrics_port: int | None = None
    log_format: Literal["text", "json"] = "text"
    slowlog_ms: int = 10
    # What to do instead of serving; check and repair have a `target` directory.
    action: Literal["serve", "version", "help", "check", "repair"] = "serve"
    target: Path | None = None
    notices: tuple[str, ...] = ()


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Config:
    """The configuration a command line asks for; ConfigError for one that cannot be served."""
    words = list(argv)
    values: dict[str, Any] = {}
    notices: list[str] = []
    setters: dict[str, str] = {}
    while words:
        name, equals, text = words.pop(0).partition("=")
        attached = text if equals else None
        if is_ignored(name):
            while attached is None and words and not words[0].startswith("-"):
                words.pop(0)
            notices.append(f"{name} means nothing to this server and is ignored")
            continue
        flag = find_flag(name)
        if flag.missing:
            raise ConfigError(f"{name} is not available in this version")
        value = _take_value(flag, name, attached, words)
        if flag.notice is not None:
            notices.append(f"{name} has no effect: {flag.notice}")
        elif flag.field is not None and value is not None:
            if flag.repeated:
                value = (*values.get(flag.field, ()), value)
            if flag.field in _ONCE and flag.field in setters:
                raise ConfigError(f"{setters[flag.field]} and {name} cannot be given together")
            setters[flag.field] = name
            values[flag.field] = value
            if flag.field == "target":
                values["action"] = name.lstrip("-")
    _complete(values, os.environ if environ is None else environ)
    quotas = values.pop("quotas", ())
    if quotas or "tenants" in values:
        values["tenants"] = with_quotas(values.get("tenants", ()), quotas)
    config = Config(**values, notices=tuple(notices))
    _check(config)
    return config


def _take_value(flag: Flag, name: str, attached: str | None, words: list[str]) -> Any:
    if not flag.metavar:
        if attached is not None:
            raise ConfigError(f"{name} takes no value")
        return flag.value
    if attached is None:
        if words and (words[0] == "-" or not words[0].startswith("-")):
            attached = words.pop(0)
        elif flag.optional:
            return None
        else:
            raise ConfigError(f"{name} wants a value: {flag.metavar}")
    try:
        return flag.read(attached)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}") from None


def _complete(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """What the environment adds; a flag wins over it."""
    if environ.get("PION_REQUIREPASS"):
        values.setdefault("password", environ["PION_REQUIREPASS"])
    if environ.get("PION_EXPORT_DIR"):
        values["export_directory"] = Path(environ["PION_EXPORT_DIR"])


def _check(config: Config) -> None:
    if config.action != "serve":
        return
    if config.workers > 1 and config.metrics_port == 0:
        raise ConfigError("--metrics-port 0 goes with one worker: each has a port of its own")
    files = (config.tls_cert, config.tls_key)
    if config.tls_port is not None and None in files:
        raise ConfigError("--tls-port needs --tls-cert and --tls-key")
    if config.tls_port is None and (any(files) or config.tls_ca or config.tls_only):
        raise ConfigError("--tls-cert, --tls-key, --tls-ca and --tls-only go with --tls-port")
    if config.tenants and config.password is None:
        raise ConfigError("--tenant needs an admin's password too: set --requirepass-file")
    memory_shares(config.max_memory, config.tenants)
    if config.password is None and not is_loopback(config.bind):
        raise ConfigError(
            f"--bind {config.bind} without a password would serve everybody: "
            "set --requirepass-file, or bind 127.0.0.1"
        )


def config_of(config: Config, tenant: Tenant) -> Config:
    """The configuration of one tenant's stores: its own directories and its part of the limits."""
    count = len(config.tenants)
    exports = config.export_directory
    return replace(
        config,
        directory=directory_of(config.directory, tenant.name),
        max_memory=memory_shares(config.max_memory, config.tenants)[1][tenant.name],
        vstore_sessions=tenant.max_sessions or config.vstore_sessions,
        max_disk=share(config.max_disk, count),
        ssm_budget=share(config.ssm_budget, count),
        export_budget=share(config.export_budget, count),
        export_directory=None if exports is None else directory_of(exports, tenant.name),
    )


def config_of_worker(config: Config, worker: int) -> Config:
    """The configuration of one of several workers: an equal part of the limits in bytes, and the
    metrics port plus its number."""
    count = config.workers

    def part(limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // count)

    def tenants_part(tenant: Tenant) -> Tenant:
        sessions = tenant.max_sessions
        return replace(
            tenant,
            max_bytes=part(tenant.max_bytes),
            max_sessions=None if sessions is None else max(2, -(-sessions // count)),
        )

    return replace(
        config,
        tenants=tuple(tenants_part(tenant) for tenant in config.tenants),
        max_memory=part(config.max_memory),
        max_disk=part(config.max_disk),
        ssm_budget=part(config.ssm_budget),
        export_budget=part(config.export_budget),
        metrics_port=None if config.metrics_port is None else config.metrics_port + worker,
        notices=(),
    )


def config_of_admin(config: Config) -> Config:
    """What tenants leave to the admin."""
    count = len(config.tenants)
    return replace(
        config,
        max_memory=memory_shares(config.max_memory, config.tenants)[0],
        max_disk=share(config.max_disk, count),
        ssm_budget=share(config.ssm_budget, count),
        export_budget=share(config.export_budget, count),
    )


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """The addresses a bind word stands for; ConfigError when it stands for none."""
    name = {"*": "0.0.0.0", "": "0.0.0.0"}.get(host, host.strip("[]"))
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--bind {host}: {getattr(error, 'strerror', error)}") from None
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def is_loopback(host: str) -> bool:
    """Whether every address of `host` can be reached from this machine only."""
    return all(
        ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback
        for _, address in resolve(host, 0)
    )
