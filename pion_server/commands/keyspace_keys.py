"""Keys of any type: there or not, for how long, and which ones."""

from __future__ import annotations

from pion_server.commands.arguments import word
from pion_server.commands.glob import matcher
from pion_server.commands.keyspace import committing, whole_number
from pion_server.commands.keyspace_strings import expiry
from pion_server.commands.registry import Access, Args, Context, Flag, command
from pion_server.errors import BadArgument
from pion_server.store.key_changes import Change

# What one SCAN looks through at most, whatever it asks for.
MAX_SCAN = 100_000


@command("DEL", access=Access.TENANT, min_args=1, flags=Flag.WRITE)
def delete(ctx: Context, args: Args) -> object:
    """DEL key [key ...]"""
    return _delete(ctx, args)


@command("UNLINK", access=Access.TENANT, min_args=1, flags=Flag.WRITE)
def unlink(ctx: Context, args: Args) -> object:
    """UNLINK key [key ...]"""
    return _delete(ctx, args)


def _delete(ctx: Context, args: Args) -> object:
    keyspace = ctx.state.keyspace
    change, gone = Change(), dict.fromkeys(map(bytes, args))
    for key in gone:
        if keyspace.find(key) is not None:
            change.delete(key)
    return committing(ctx, change, len(change.operations))


@command("EXISTS", access=Access.TENANT, min_args=1)
def exists(ctx: Context, args: Args) -> int:
    """EXISTS key [key ...]

    How many of them there are. What is there is not evicted during the next ten seconds: who asked
    comes for it now.
    """
    return sum(ctx.state.keyspace.promise(bytes(key)) for key in args)


@command("TYPE", access=Access.TENANT, min_args=1, max_args=1)
def type_of(ctx: Context, args: Args) -> str:
    """TYPE key"""
    entry = ctx.state.keyspace.find(bytes(args[0]))
    return "none" if entry is None else entry.type


@command("EXPIRE", access=Access.TENANT, min_args=2, max_args=3, flags=Flag.WRITE)
def expire(ctx: Context, args: Args) -> object:
    """EXPIRE key seconds [NX|XX|GT|LT]"""
    return _expire(ctx, args, "expire", 1000)


@command("PEXPIRE", access=Access.TENANT, min_args=2, max_args=3, flags=Flag.WRITE)
def pexpire(ctx: Context, args: Args) -> object:
    """PEXPIRE key milliseconds [NX|XX|GT|LT]"""
    return _expire(ctx, args, "pexpire", 1)


def _expire(ctx: Context, args: Args, name: str, unit: int) -> object:
    keyspace = ctx.state.keyspace
    key, condition = bytes(args[0]), word(args[2]) if len(args) > 2 else ""
    if condition not in ("", "NX", "XX", "GT", "LT"):
        raise BadArgument(f"Unsupported option {condition.lower()}")
    at = expiry(ctx, name, args[1], unit, relative=True)
    entry = keyspace.find(key)
    if entry is None or not _may_expire(condition, entry.expires_at, at):
        return 0
    change = Change()
    if at <= keyspace.now():
        change.delete(key)
    else:
        change.set_expiry(key, at)
    return committing(ctx, change, 1)


def _may_expire(condition: str, held: int | None, at: int) -> bool:
    # A key without an expiry lives for ever: nothing is later.
    if condition == "NX":
        return held is None
    if condition == "XX":
        return held is not None
    if condition == "GT":
        return held is not None and at > held
    return condition != "LT" or held is None or at < held


@command("PERSIST", access=Access.TENANT, min_args=1, max_args=1, flags=Flag.WRITE)
def persist(ctx: Context, args: Args) -> object:
    """PERSIST key"""
    key = bytes(args[0])
    entry = ctx.state.keyspace.find(key)
    if entry is None or entry.expires_at is None:
        return 0
    change = Change()
    change.set_expiry(key, None)
    return committing(ctx, change, 1)


@command("TTL", access=Access.TENANT, min_args=1, max_args=1)
def ttl(ctx: Context, args: Args) -> int:
    """TTL key

    Seconds left; -1 without an expiry, -2 without a key.
    """
    left = _left(ctx, args)
    return left if left < 0 else (left + 500) // 1000


@command("PTTL", access=Access.TENANT, min_args=1, max_args=1)
def pttl(ctx: Context, args: Args) -> int:
    """PTTL key"""
    return _left(ctx, args)


def _left(ctx: Context, args: Args) -> int:
    keyspace = ctx.state.keyspace
    entry = keyspace.find(bytes(args[0]))
    if entry is None:
        return -2
    return -1 if entry.expires_at is None else max(0, entry.expires_at - keyspace.now())


@command("KEYS", access=Access.TENANT, min_args=1, max_args=1)
def keys(ctx: Context, args: Args) -> list[bytes]:
    """KEYS pattern"""
    matches = matcher(bytes(args[0]))
    return [key for key in ctx.state.keyspace.names() if matches(key)]


@command("SCAN", access=Access.TENANT, min_args=1)
def scan(ctx: Context, args: Args) -> object:
    """SCAN cursor [MATCH pattern] [COUNT count] [TYPE type]

    The next cursor, 0 at the end, and some keys. A key that is there all the time is among them
    once.
    """
    cursor = bytes(args[0][:21])
    if not cursor.isdigit() or int(cursor) >= 2**64:
        raise BadArgument("invalid cursor")
    pattern, count, wanted = b"*", 10, ""
    if len(args) % 2 == 0:
        raise BadArgument("syntax error")
    for option, value in zip(args[1::2], args[2::2], strict=True):
        match word(option):
            case "MATCH":
                pattern = bytes(value)
            case "COUNT":
                count = whole_number(value)
                if count < 1:
                    raise BadArgument("syntax error")
            case "TYPE":
                wanted = word(value).lower()
            case _:
                raise BadArgument("syntax error")
    keyspace, matches = ctx.state.keyspace, matcher(pattern)
    following, found = keyspace.scan(int(cursor), min(count, MAX_SCAN))
    chosen = [key for key in found if matches(key)]
    if wanted:
        entries = [(key, keyspace.find(key)) for key in chosen]
        chosen = [key for key, entry in entries if entry is not None and entry.type == wanted]
    return [b"%d" % following, chosen]


@command("DBSIZE", access=Access.TENANT, min_args=0, max_args=0)
def dbsize(ctx: Context, args: Args) -> int:
    """DBSIZE"""
    return len(ctx.state.keyspace)


@command("FLUSHALL", access=Access.TENANT, min_args=0, max_args=1, flags=Flag.WRITE)
def flushall(ctx: Context, args: Args) -> object:
    """FLUSHALL [ASYNC | SYNC]

    Forgets all keys. Rows and recurrent state stay.
    """
    return _flush(ctx, args)


@command("FLUSHDB", access=Access.TENANT, min_args=0, max_args=1, flags=Flag.WRITE)
def flushdb(ctx: Context, args: Args) -> object:
    """FLUSHDB [ASYNC | SYNC]"""
    return _flush(ctx, args)


def _flush(ctx: Context, args: Args) -> object:
    if args and word(args[0]) not in ("ASYNC", "SYNC"):
        raise BadArgument("syntax error")
    change = Change()
    change.clear()
    return committing(ctx, change, "OK")
