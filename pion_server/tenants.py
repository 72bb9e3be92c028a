"""Who may use a server besides its admin, and how much of it is theirs.

Every tenant has stores of its own: a directory `tenants/<name>` with logs, snapshots and exports,
its own attention slots, counters, sequence numbers and limits. So nobody can name, count, evict or
fill out what belongs to somebody else: there is no common table to look into.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pion_server.flag_values import ConfigError, password, size

MOST_TENANTS = 64
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST_PASSWORD = 128
DIRECTORY = "tenants"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A user with stores of its own. `max_bytes`, `max_sessions`: None for a share, see `share`."""

    name: str
    password: str = field(repr=False)
    max_bytes: int | None = None
    max_sessions: int | None = None


@dataclass(frozen=True, slots=True)
class Quota:
    """`--tenant-quota NAME=BYTES[,SESSIONS]`."""

    name: str
    max_bytes: int
    max_sessions: int | None


def tenant(text: str) -> Tenant:
    """Reads `NAME=PASSWORD`."""
    name, equals, word = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise ConfigError("wants NAME=PASSWORD, the name of up to 64 letters, digits, - and _")
    if len(password(word).encode()) > _LONGEST_PASSWORD:
        raise ConfigError(f"wants a password of at most {_LONGEST_PASSWORD} bytes for {name}")
    return Tenant(name, word)


def quota(text: str) -> Quota:
    """Reads `NAME=BYTES[,SESSIONS]`."""
    name, equals, rest = text.partition("=")
    amount, comma, sessions = rest.partition(",")
    if not equals or not amount or (comma and not re.fullmatch(r"[0-9]{1,8}", sessions)):
        raise ConfigError("wants NAME=BYTES or NAME=BYTES,SESSIONS, such as acme=4gb,512")
    if comma and int(sessions) < 2:
        raise ConfigError("wants at least 2 sessions: a prefix has two")
    return Quota(name, size(amount), int(sessions) if comma else None)


def with_quotas(tenants: Sequence[Tenant], quotas: Sequence[Quota]) -> tuple[Tenant, ...]:
    """The tenants with what is theirs. ConfigError for a name given twice or a quota of nobody."""
    by_name = {one.name: one for one in tenants}
    if len(by_name) != len(tenants):
        raise ConfigError("--tenant names a tenant twice")
    if len(tenants) > MOST_TENANTS:
        raise ConfigError(f"--tenant can be given {MOST_TENANTS} times, not {len(tenants)}")
    if len({one.name for one in quotas}) != len(quotas):
        raise ConfigError("--tenant-quota names a tenant twice")
    for one in quotas:
        if one.name not in by_name:
            raise ConfigError(f"--tenant-quota {one.name}: there is no such --tenant")
        known = by_name[one.name]
        by_name[one.name] = Tenant(known.name, known.password, one.max_bytes, one.max_sessions)
    return tuple(by_name.values())


def memory_shares(
    limit: int | None, tenants: Sequence[Tenant]
) -> tuple[int | None, dict[str, int | None]]:
    """`--maxmemory` divided: what the admin has, and each tenant.

    A quota is its tenant's; all others share the rest equally. ConfigError if quotas leave none.
    """
    fixed = {one.name: one.max_bytes for one in tenants if one.max_bytes is not None}
    open_ended = [one.name for one in tenants if one.max_bytes is None]
    shares: dict[str, int | None] = dict(fixed)
    if limit is None:
        return None, shares | dict.fromkeys(open_ended)
    rest = limit - sum(fixed.values())
    if rest <= 0:
        raise ConfigError(
            f"--tenant-quota promises {sum(fixed.values())} bytes, --maxmemory is {limit}"
        )
    part = share(rest, len(open_ended))
    return part, shares | dict.fromkeys(open_ended, part)


def share(limit: int | None, tenants: int) -> int | None:
    """An equal part of a common limit for the admin and each of `tenants`; None is no limit."""
    return None if limit is None else max(1, limit // (tenants + 1))


def directory_of(base: Path, name: str) -> Path:
    """Where a tenant's files are, below a directory of the server's."""
    return base / DIRECTORY / name
