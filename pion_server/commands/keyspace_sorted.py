"""Sorted sets: members ordered by score, then by their bytes."""

from __future__ import annotations

import math

from pion_server.commands.arguments import word
from pion_server.commands.keyspace import (
    committing,
    score,
    score_reply,
    sorted_set_at,
    whole_number,
)
from pion_server.commands.registry import Access, Args, Context, Flag, command
from pion_server.errors import BadArgument
from pion_server.store.key_changes import Change

_ZADD_OPTIONS = {"NX", "XX", "GT", "LT", "CH", "INCR"}


@command("ZADD", access=Access.TENANT, min_args=3, flags=Flag.WRITE)
def zadd(ctx: Context, args: Args) -> object:
    """ZADD key [NX|XX] [GT|LT] [CH] [INCR] score member [score member ...]

    The number of members that are new (with CH: or moved); with INCR the score, or null.
    """
    key = bytes(args[0])
    options, pairs = _zadd_options(args[1:])
    members = [(bytes(m), score(s)) for s, m in zip(pairs[::2], pairs[1::2], strict=True)]
    held = sorted_set_at(ctx.state.keyspace.find(key))
    scores = held.scores if held is not None else {}
    made: dict[bytes, float] = {}
    new = moved = 0
    result: float | None = None
    for member, number in members:
        old = made.get(member, scores.get(member))
        if "INCR" in options and old is not None:
            number = _sum(old, number)
        if not _wanted(options, old, number):
            continue
        result = number
        new += old is None
        moved += old is not None and old != number
        if old is None or old != number:
            made[member] = number
    change = Change()
    if made:
        change.put_members(key, made.items(), fresh=held is None)
    if "INCR" in options:
        reply = None if result is None else score_reply(result, ctx.connection.protocol)
        return committing(ctx, change, reply)
    return committing(ctx, change, new + moved if "CH" in options else new)


def _zadd_options(args: Args) -> tuple[set[str], Args]:
    options: set[str] = set()
    while len(options) < len(args) and word(args[len(options)]) in _ZADD_OPTIONS - options:
        options.add(word(args[len(options)]))
    pairs = args[len(options) :]
    if not pairs or len(pairs) % 2:
        raise BadArgument("syntax error")
    if {"NX", "XX"} <= options:
        raise BadArgument("XX and NX options at the same time are not compatible")
    if len({"NX", "GT", "LT"} & options) > 1:
        raise BadArgument("GT, LT, and/or NX options at the same time are not compatible")
    if "INCR" in options and len(pairs) > 2:
        raise BadArgument("INCR option supports a single increment-element pair")
    return options, pairs


def _wanted(options: set[str], old: float | None, number: float) -> bool:
    if old is None:
        return "XX" not in options
    if "NX" in options:
        return False
    return not (("GT" in options and number <= old) or ("LT" in options and number >= old))


def _sum(old: float, more: float) -> float:
    total = old + more
    if math.isnan(total):
        raise BadArgument("resulting score is not a number (NaN)")
    return total


@command("ZREM", access=Access.TENANT, min_args=2, flags=Flag.WRITE)
def zrem(ctx: Context, args: Args) -> object:
    """ZREM key member [member ...]"""
    key = bytes(args[0])
    held = sorted_set_at(ctx.state.keyspace.find(key))
    scores = held.scores if held is not None else {}
    gone = list(dict.fromkeys(member for member in map(bytes, args[1:]) if member in scores))
    change = Change()
    if gone and len(gone) == len(scores):
        change.delete(key)
    elif gone:
        change.remove_members(key, gone)
    return committing(ctx, change, len(gone))


@command("ZRANGE", access=Access.TENANT, min_args=3)
def zrange(ctx: Context, args: Args) -> object:
    """ZRANGE key start stop [REV] [WITHSCORES]

    By rank; ranges by score or by member are not supported.
    """
    words = [word(option) for option in args[3:]]
    if not set(words) <= {"REV", "WITHSCORES"}:
        raise BadArgument("syntax error")
    first, last = whole_number(args[1]), whole_number(args[2])
    keyspace = ctx.state.keyspace
    with keyspace.lock:
        held = sorted_set_at(keyspace.get(bytes(args[0])))
        found = [] if held is None else held.range(first, last, reverse="REV" in words)
    if "WITHSCORES" not in words:
        return [member for _, member in found]
    protocol = ctx.connection.protocol
    pairs = [[member, score_reply(number, protocol)] for number, member in found]
    return pairs if protocol >= 3 else [item for pair in pairs for item in pair]


@command("ZSCORE", access=Access.TENANT, min_args=2, max_args=2)
def zscore(ctx: Context, args: Args) -> object:
    """ZSCORE key member"""
    held = sorted_set_at(ctx.state.keyspace.get(bytes(args[0])))
    number = None if held is None else held.scores.get(bytes(args[1]))
    return None if number is None else score_reply(number, ctx.connection.protocol)


@command("ZCARD", access=Access.TENANT, min_args=1, max_args=1)
def zcard(ctx: Context, args: Args) -> int:
    """ZCARD key"""
    held = sorted_set_at(ctx.state.keyspace.get(bytes(args[0])))
    return 0 if held is None else len(held)
