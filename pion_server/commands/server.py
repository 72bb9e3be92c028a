"""Commands about the server itself: the command table, its configuration, its end."""

from __future__ import annotations

from fnmatch import fnmatchcase

from pion_server.commands.registry import (
    COMMANDS,
    Access,
    Args,
    Command,
    Context,
    Flag,
    command,
    find_command,
)
from pion_server.config import Config
from pion_server.errors import BadArgument, printable
from pion_server.slowlog import MOST_ENTRIES
from pion_server.wire.replies import NO_REPLY


@command("COMMAND", access=Access.TENANT, min_args=0)
def command_table(ctx: Context, args: Args) -> object:
    """COMMAND [COUNT | LIST | INFO name ... | DOCS [name ...]]"""
    word = bytes(args[0][:16]).upper() if args else b"INFO"
    names = args[1:]
    known = sorted(COMMANDS.values(), key=lambda row: row.name)
    if word == b"COUNT" and not names:
        return len(known)
    if word == b"LIST" and not names:
        return [row.name.lower().encode() for row in known]
    if word == b"INFO":
        wanted = [find_command(name) for name in names] if names else known
        return [None if row is None else _row(row) for row in wanted]
    if word == b"DOCS":
        chosen = [find_command(name) for name in names] if names else known
        return {row.name.lower().encode(): _docs(row) for row in chosen if row is not None}
    raise BadArgument(f"unknown subcommand or wrong number of arguments for '{printable(word)}'")


def _row(row: Command) -> list[object]:
    flags = ["write" if Flag.WRITE in row.flags else "readonly"]
    flags += ["admin"] if row.admin_only else []
    flags += ["no_auth"] if row.open_to_all else []
    first, last = {"first": (1, 1), "all": (1, -1)}.get(str(row.names or row.sids), (0, 0))
    return [
        row.name.lower().encode(),
        row.arity,
        flags,
        first,
        last,
        int(first > 0),
        [],
        [],
        [],
        [],
    ]


def _docs(row: Command) -> dict[object, object]:
    return {
        b"summary": row.syntax.encode(),
        b"since": b"0.1.0",
        b"group": (b"pion" if row.dotted else b"server"),
    }


@command("CONFIG", access=Access.ADMIN, min_args=1)
def config(ctx: Context, args: Args) -> object:
    """CONFIG GET pattern [pattern ...] | RESETSTAT"""
    word = bytes(args[0][:16]).upper()
    if word == b"GET" and len(args) > 1:
        patterns = [bytes(pattern[:64]).decode("latin-1").lower() for pattern in args[1:]]
        return {
            name.encode(): value.encode()
            for name, value in _parameters(ctx.state.config, ctx.state.port).items()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        }
    if word == b"RESETSTAT" and len(args) == 1:
        for one in ctx.state.everybody:
            one.stats.reset()
        return "OK"
    if word == b"SET":
        raise BadArgument("CONFIG SET is not supported: restart with another flag")
    raise BadArgument(f"unknown subcommand or wrong number of arguments for '{printable(word)}'")


def _parameters(config: Config, port: int) -> dict[str, str]:
    """What CONFIG GET tells, under Redis' names where there is one. Never the password."""
    return {
        "port": str(port),
        "bind": config.bind,
        "dir": str(config.directory.resolve()),
        "databases": "1",
        "save": "",
        "appendonly": "yes" if config.keyspace_log else "no",
        "appendfsync": config.fsync,
        "maxmemory": str(config.max_memory or 0),
        "maxmemory-policy": "allkeys-lru",
        "maxclients": str(config.max_clients),
        "timeout": "0",
        "slowlog-log-slower-than": str(config.slowlog_ms * 1000 or -1),
        "slowlog-max-len": str(MOST_ENTRIES),
        "proto-max-bulk-len": str(512 * 1024 * 1024),
        "vstore-sessions": str(config.vstore_sessions),
        "vstore-log": "yes" if config.vstore_log else "no",
        "max-request": str(config.max_request),
        "max-output": str(config.output_limit),
        "fetch-zero-fill": "yes" if config.fetch_zero_fill else "no",
    }


@command("SHUTDOWN", access=Access.ADMIN, min_args=0, max_args=1)
def shutdown(ctx: Context, args: Args) -> object:
    """SHUTDOWN [NOSAVE | SAVE]

    Both are the same: what was acknowledged is in the log already. No reply; the server closes.
    """
    if args and bytes(args[0][:8]).upper() not in (b"NOSAVE", b"SAVE"):
        raise BadArgument("syntax error")
    ctx.state.stop("SHUTDOWN")
    return NO_REPLY
