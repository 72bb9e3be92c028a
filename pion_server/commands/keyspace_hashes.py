"""Hashes: fields with values of any bytes under one key."""

from __future__ import annotations

from pion_server.commands.keyspace import added, committing, hash_at, sending, whole_number
from pion_server.commands.registry import Access, Args, Context, Flag, command
from pion_server.errors import BadArgument
from pion_server.payload import Buffer
from pion_server.store.key_changes import Change
from pion_server.store.key_values import Value


@command("HSET", access=Access.TENANT, min_args=3, flags=Flag.WRITE)
def hset(ctx: Context, args: Args) -> object:
    """HSET key field value [field value ...]

    The number of fields that are new.
    """
    change, fresh = _put(ctx, "hset", args)
    return committing(ctx, change, fresh)


@command("HMSET", access=Access.TENANT, min_args=3, flags=Flag.WRITE)
def hmset(ctx: Context, args: Args) -> object:
    """HMSET key field value [field value ...]"""
    change, _ = _put(ctx, "hmset", args)
    return committing(ctx, change, "OK")


def _put(ctx: Context, name: str, args: Args) -> tuple[Change, int]:
    if len(args) % 2 == 0:
        raise BadArgument(f"wrong number of arguments for '{name}' command")
    key = bytes(args[0])
    held = hash_at(ctx.state.keyspace.find(key))
    # Of a field named twice the last value counts, as if it had been set after the other.
    fields: dict[bytes, Buffer] = {}
    for field, value in zip(args[1::2], args[2::2], strict=True):
        fields[bytes(field)] = value
    change = Change()
    change.put_fields(key, fields.items(), fresh=held is None)
    return change, sum(field not in (held or {}) for field in fields)


@command("HSETNX", access=Access.TENANT, min_args=3, max_args=3, flags=Flag.WRITE)
def hsetnx(ctx: Context, args: Args) -> object:
    """HSETNX key field value"""
    key, field = bytes(args[0]), bytes(args[1])
    held = hash_at(ctx.state.keyspace.find(key))
    if held is not None and field in held:
        return 0
    change = Change()
    change.put_fields(key, [(field, args[2])], fresh=held is None)
    return committing(ctx, change, 1)


@command("HGET", access=Access.TENANT, min_args=2, max_args=2)
def hget(ctx: Context, args: Args) -> object:
    """HGET key field"""
    held = hash_at(ctx.state.keyspace.get(bytes(args[0]))) or {}
    return sending([held.get(bytes(args[1]))], lambda values: values[0])


@command("HMGET", access=Access.TENANT, min_args=2)
def hmget(ctx: Context, args: Args) -> object:
    """HMGET key field [field ...]"""
    keyspace = ctx.state.keyspace
    with keyspace.lock:
        held = hash_at(keyspace.get(bytes(args[0]))) or {}
        values = [held.get(bytes(field)) for field in args[1:]]
    return sending(values, list)


@command("HGETALL", access=Access.TENANT, min_args=1, max_args=1)
def hgetall(ctx: Context, args: Args) -> object:
    """HGETALL key"""
    fields = _fields(ctx, args)
    values: list[Value | None] = list(fields.values())
    return sending(values, lambda found: dict(zip(fields, found, strict=True)))


@command("HKEYS", access=Access.TENANT, min_args=1, max_args=1)
def hkeys(ctx: Context, args: Args) -> list[bytes]:
    """HKEYS key"""
    return list(_fields(ctx, args))


@command("HVALS", access=Access.TENANT, min_args=1, max_args=1)
def hvals(ctx: Context, args: Args) -> object:
    """HVALS key"""
    return sending(list(_fields(ctx, args).values()), list)


@command("HLEN", access=Access.TENANT, min_args=1, max_args=1)
def hlen(ctx: Context, args: Args) -> int:
    """HLEN key"""
    return len(hash_at(ctx.state.keyspace.get(bytes(args[0]))) or ())


@command("HEXISTS", access=Access.TENANT, min_args=2, max_args=2)
def hexists(ctx: Context, args: Args) -> int:
    """HEXISTS key field"""
    held = hash_at(ctx.state.keyspace.get(bytes(args[0])))
    return int(held is not None and bytes(args[1]) in held)


@command("HDEL", access=Access.TENANT, min_args=2, flags=Flag.WRITE)
def hdel(ctx: Context, args: Args) -> object:
    """HDEL key field [field ...]"""
    key = bytes(args[0])
    held = hash_at(ctx.state.keyspace.find(key)) or {}
    gone = list(dict.fromkeys(field for field in map(bytes, args[1:]) if field in held))
    change = Change()
    if gone and len(gone) == len(held):
        change.delete(key)
    elif gone:
        change.remove_fields(key, gone)
    return committing(ctx, change, len(gone))


@command("HINCRBY", access=Access.TENANT, min_args=3, max_args=3, flags=Flag.WRITE)
def hincrby(ctx: Context, args: Args) -> int:
    """HINCRBY key field increment"""
    key, field, more = bytes(args[0]), bytes(args[1]), whole_number(args[2])
    held = hash_at(ctx.state.keyspace.find(key))
    value = (held or {}).get(field, b"0")
    text = value if isinstance(value, bytes) else b"large"
    number = added(whole_number(text, "hash value is not an integer"), more)
    change = Change()
    change.put_fields(key, [(field, b"%d" % number)], fresh=held is None)
    ctx.state.keyspace.commit(change)
    return number


def _fields(ctx: Context, args: Args) -> dict[bytes, Value]:
    keyspace = ctx.state.keyspace
    with keyspace.lock:
        return dict(hash_at(keyspace.get(bytes(args[0]))) or {})
