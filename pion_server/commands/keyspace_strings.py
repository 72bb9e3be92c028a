"""GET, SET and their kin: strings of any bytes under plain keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pion_server.commands.arguments import word
from pion_server.commands.keyspace import added, committing, sending, string_at, whole_number
from pion_server.commands.registry import Access, Args, Context, Flag, command
from pion_server.errors import BadArgument
from pion_server.payload import Buffer
from pion_server.store.key_changes import Change
from pion_server.store.key_values import SortedSet, Value, value_bytes, value_length

# What EX, PX, EXAT and PXAT say: milliseconds a unit, and whether counted from now.
_TIMES = {"EX": (1000, True), "PX": (1, True), "EXAT": (1000, False), "PXAT": (1, False)}


@dataclass(slots=True)
class _SetOptions:
    condition: Literal["", "NX", "XX"] = ""
    get: bool = False
    keep_ttl: bool = False
    expires_at: int | None = None


def expiry(ctx: Context, command_name: str, amount: Buffer, unit: int, *, relative: bool) -> int:
    """Milliseconds since the epoch; BadArgument for no integer and for what no clock shows."""
    number = whole_number(amount)
    at = number * unit + (ctx.state.keyspace.now() if relative else 0)
    if not -(2**63) <= at < 2**63:
        raise BadArgument(f"invalid expire time in '{command_name}' command")
    return at


def _set_options(ctx: Context, args: Args) -> _SetOptions:
    options, rest = _SetOptions(), list(args)
    while rest:
        option = word(rest.pop(0))
        timed = options.keep_ttl or options.expires_at is not None
        if option in ("NX", "XX") and options.condition in ("", option):
            options.condition = "NX" if option == "NX" else "XX"
        elif option == "GET":
            options.get = True
        elif option == "KEEPTTL" and options.expires_at is None:
            options.keep_ttl = True
        elif option in _TIMES and rest and not timed:
            unit, relative = _TIMES[option]
            amount = rest.pop(0)
            if whole_number(amount) <= 0:
                raise BadArgument("invalid expire time in 'set' command")
            options.expires_at = expiry(ctx, "set", amount, unit, relative=relative)
        else:
            raise BadArgument("syntax error")
    return options


@command("GET", access=Access.TENANT, min_args=1, max_args=1)
def get(ctx: Context, args: Args) -> object:
    """GET key"""
    value = string_at(ctx.state.keyspace.get(bytes(args[0])))
    return value if value is None else sending([value], lambda values: values[0])


@command("SET", access=Access.TENANT, min_args=2, flags=Flag.WRITE)
def set_(ctx: Context, args: Args) -> object:
    """SET key value [NX|XX] [GET] [EX s|PX ms|EXAT s|PXAT ms|KEEPTTL]"""
    key, value = bytes(args[0]), args[1]
    options = _set_options(ctx, args[2:]) if len(args) > 2 else _SetOptions()
    entry = ctx.state.keyspace.find(key)
    previous = string_at(entry) if options.get else None
    old = None if previous is None else value_bytes(previous)
    if (options.condition == "NX" and entry) or (options.condition == "XX" and not entry):
        return old
    at = entry.expires_at if entry and options.keep_ttl else options.expires_at
    change = Change()
    change.put_string(key, value, at)
    return committing(ctx, change, old if options.get else "OK")


@command("SETNX", access=Access.TENANT, min_args=2, max_args=2, flags=Flag.WRITE)
def setnx(ctx: Context, args: Args) -> object:
    """SETNX key value"""
    key = bytes(args[0])
    if ctx.state.keyspace.find(key) is not None:
        return 0
    change = Change()
    change.put_string(key, args[1])
    return committing(ctx, change, 1)


@command("SETEX", access=Access.TENANT, min_args=3, max_args=3, flags=Flag.WRITE)
def setex(ctx: Context, args: Args) -> object:
    """SETEX key seconds value"""
    if whole_number(args[1]) <= 0:
        raise BadArgument("invalid expire time in 'setex' command")
    change = Change()
    at = expiry(ctx, "setex", args[1], 1000, relative=True)
    change.put_string(bytes(args[0]), args[2], at)
    return committing(ctx, change, "OK")


@command("STRLEN", access=Access.TENANT, min_args=1, max_args=1)
def strlen(ctx: Context, args: Args) -> int:
    """STRLEN key"""
    value = string_at(ctx.state.keyspace.get(bytes(args[0])))
    return 0 if value is None else value_length(value)


@command("MGET", access=Access.TENANT, min_args=1)
def mget(ctx: Context, args: Args) -> object:
    """MGET key [key ...]

    Null for what is missing and for what is no string.
    """
    keyspace = ctx.state.keyspace
    values: list[Value | None] = []
    with keyspace.lock:
        for key in args:
            entry = keyspace.get(bytes(key))
            data = None if entry is None else entry.data
            values.append(None if isinstance(data, (dict, SortedSet)) else data)
    return sending(values, list)


@command("MSET", access=Access.TENANT, min_args=2, flags=Flag.WRITE)
def mset(ctx: Context, args: Args) -> object:
    """MSET key value [key value ...]"""
    if len(args) % 2:
        raise BadArgument("wrong number of arguments for 'mset' command")
    change = Change()
    for key, value in zip(args[::2], args[1::2], strict=True):
        change.put_string(bytes(key), value)
    return committing(ctx, change, "OK")


@command("INCR", access=Access.TENANT, min_args=1, max_args=1, flags=Flag.WRITE)
def incr(ctx: Context, args: Args) -> int:
    """INCR key"""
    return _add(ctx, bytes(args[0]), 1)


@command("DECR", access=Access.TENANT, min_args=1, max_args=1, flags=Flag.WRITE)
def decr(ctx: Context, args: Args) -> int:
    """DECR key"""
    return _add(ctx, bytes(args[0]), -1)


@command("INCRBY", access=Access.TENANT, min_args=2, max_args=2, flags=Flag.WRITE)
def incrby(ctx: Context, args: Args) -> int:
    """INCRBY key increment"""
    return _add(ctx, bytes(args[0]), whole_number(args[1]))


@command("DECRBY", access=Access.TENANT, min_args=2, max_args=2, flags=Flag.WRITE)
def decrby(ctx: Context, args: Args) -> int:
    """DECRBY key decrement"""
    amount = whole_number(args[1])
    if amount == -(2**63):
        raise BadArgument("decrement would overflow")
    return _add(ctx, bytes(args[0]), -amount)


def _add(ctx: Context, key: bytes, more: int) -> int:
    keyspace = ctx.state.keyspace
    entry = keyspace.find(key)
    value = string_at(entry)
    # A number is short: what lies in the log is none.
    held = b"0" if value is None else value if isinstance(value, bytes) else b"large"
    number = added(whole_number(held), more)
    change = Change()
    change.put_string(key, b"%d" % number, entry.expires_at if entry else None)
    keyspace.commit(change)
    return number
