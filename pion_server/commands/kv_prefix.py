"""KV.PREFIX.*: prefixes, their two sides and everything that belongs to them."""

from __future__ import annotations

import struct
from functools import partial
from pathlib import PurePosixPath

from pion_server.commands import arguments
from pion_server.commands.arguments import integer, word
from pion_server.commands.registry import Access, Args, Context, Flag, always, command
from pion_server.commands.saving import save_all, save_copies
from pion_server.commands.v import INLINE_BYTES
from pion_server.errors import BadArgument, CommandError, LogFailed
from pion_server.payload import Buffer, Offload
from pion_server.state import ServerState
from pion_server.store.schema import Schema
from pion_server.store.vstore import membership

US_PER_TOKEN = 555
MAX_EXPIRE = 10 * 365 * 86_400


@command(
    "KV.PREFIX.REGISTER",
    access=Access.TENANT,
    min_args=3,
    flags=Flag.WRITE,
    names="first",
    claims=always,
)
def register(ctx: Context, args: Args) -> str:
    """KV.PREFIX.REGISTER <ns> <kv_dim> <vquant> [BLOCKS <size> <count> <hashes>] [PREFILL_MS <ms>]

    Creates or reuses both sides of a prefix.
    """
    schema = arguments.uniform_schema(args[1], args[2])
    return _register(ctx, args[0], (schema, schema), args[3:])


@command(
    "KV.PREFIX.REGISTER.SCHEMA",
    access=Access.TENANT,
    min_args=4,
    flags=Flag.WRITE,
    names="first",
    claims=always,
)
def register_schema(ctx: Context, args: Args) -> str:
    """KV.PREFIX.REGISTER.SCHEMA <ns> <n> <k_spec>*n <v_spec>*n [BLOCKS ...] [PREFILL_MS <ms>]

    As REGISTER, with one specification for each layer of each side.
    """
    count = arguments.layer_count(args[1])
    specs, options = args[2 : 2 + 2 * count], args[2 + 2 * count :]
    # An option is a bare word; a word with "=" in its place is one specification too many.
    surplus = [option for option in options[:1] if b"=" in bytes(option[:64])]
    if len(specs) != 2 * count or surplus:
        raise BadArgument(
            f"KV.PREFIX.REGISTER.SCHEMA {count}: too {'many' if surplus else 'few'} specs, "
            f"{count} for each side expected"
        )
    sides = (arguments.schema_of(specs[:count], 0), arguments.schema_of(specs[count:], 0))
    return _register(ctx, args[0], sides, options)


def _register(ctx: Context, ns: Buffer, schemas: tuple[Schema, Schema], options: Args) -> str:
    blocks, prefill_ms = arguments.register_options(options)
    ctx.state.vstore.register(
        arguments.name(ns), schemas, blocks=blocks, prefill_ms=prefill_ms, owner=ctx.connection
    )
    return "OK"


@command("KV.PREFIX.LOOKUP", access=Access.TENANT, min_args=1, names="first", anywhere=True)
def lookup(ctx: Context, args: Args) -> str:
    """KV.PREFIX.LOOKUP <ns> [TOKENS <n>] [PREFILL_MS <ms>]

    `+HIT` or `+MISS`. The options say what the value receipt credits for a hit.
    """
    tokens, prefill_ms = _receipt_options(args[1:])
    stats, ns = ctx.state.stats, arguments.name(args[0])
    k_side = ctx.state.vstore.lookup(ns)
    if k_side is None and not _is_hit_elsewhere(ctx.state, ns):
        stats.misses += 1
        return "MISS"
    credited = tokens or 0
    if k_side is not None and tokens is None:
        credited = k_side.rows(0)
    if k_side is not None and prefill_ms is None and tokens is None:
        prefill_ms = k_side.prefill_ms
    stats.hits += 1
    stats.tokens_served += credited
    if prefill_ms is not None:
        stats.hits_measured += 1
        stats.prefill_us_measured += prefill_ms * 1000
        stats.prefill_us_saved += prefill_ms * 1000
    else:
        stats.prefill_us_saved += credited * US_PER_TOKEN
    return "HIT"


def _is_hit_elsewhere(state: ServerState, ns: bytes) -> bool:
    found = None if state.homes is None else state.homes.elsewhere(ns)
    return found is not None and found[1].hit


def _receipt_options(args: Args) -> tuple[int | None, int | None]:
    values: dict[str, int] = {}
    for at in range(0, len(args), 2):
        option = word(args[at])
        limits = {"TOKENS": 100_000_000, "PREFILL_MS": arguments.MAX_PREFILL_MS}
        if option not in limits:
            raise BadArgument("KV.PREFIX.LOOKUP: unknown option (TOKENS <n>, PREFILL_MS <ms>)")
        if at + 1 >= len(args):
            raise BadArgument(f"KV.PREFIX.LOOKUP: {option} requires a value")
        values[option] = integer(args[at + 1], option, 0, limits[option])
    return values.get("TOKENS"), values.get("PREFILL_MS")


@command(
    "KV.PREFIX.DROP",
    access=Access.TENANT,
    min_args=1,
    flags=Flag.WRITE,
    names="all",
    anywhere=True,
)
def drop(ctx: Context, args: Args) -> int:
    """KV.PREFIX.DROP <ns> [<ns> ...]

    Frees both sides, manifest, table and pin; answers of how many anything was held.
    """
    names = [arguments.name(arg) for arg in args]
    dropped = int(ctx.state.vstore.drop_prefixes(names, ctx.connection))
    if not dropped and ctx.state.homes is not None:
        ctx.state.homes.require("KV.PREFIX.DROP", names)
    return dropped


@command(
    "KV.PREFIX.OWNER",
    access=Access.TENANT,
    min_args=1,
    max_args=1,
    names="first",
    anywhere=True,
)
def owner(ctx: Context, args: Args) -> str:
    """KV.PREFIX.OWNER <ns>

    `+<worker>`, with the schema's digest if there is one, or `+-1`.
    """
    ns = arguments.name(args[0])
    if not ctx.state.vstore.holds(ns):
        # Others are told of names that have state or an open fill alone, so it is told here, too.
        found = None if ctx.state.homes is None else ctx.state.homes.find(ns)
        if found is None:
            return "-1"
        return f"{found[0]} {found[1].digest}" if found[1].digest else str(found[0])
    k_side = ctx.state.vstore.table.get(ns + b"_pk")
    digest = k_side.schema.digest() if k_side is not None else 0
    return f"{ctx.state.worker_id} {digest}" if digest else str(ctx.state.worker_id)


@command("KV.PREFIX.BLOCKS", access=Access.TENANT, min_args=1, max_args=1, names="first")
def blocks(ctx: Context, args: Args) -> object:
    """KV.PREFIX.BLOCKS <ns>

    `u32 block_size | u32 block_count | u64 hashes`, little-endian, or `+UNKNOWN`.
    """
    table = ctx.state.vstore.blocks(arguments.name(args[0]))
    if table is None:
        return "UNKNOWN"
    return struct.pack("<II", table.block_size, table.count) + table.hashes


@command("KV.PREFIX.MEMBERSHIP", access=Access.TENANT, min_args=3, max_args=3, names="first")
def member(ctx: Context, args: Args) -> object:
    """KV.PREFIX.MEMBERSHIP <ns> <hash_count> <hash_blob>

    A bitmap: bit i is set iff probe i stands in the namespace's block table; or `+UNKNOWN`.
    """
    probes = arguments.hash_blob(args[1], args[2])
    table = ctx.state.vstore.blocks(arguments.name(args[0]))
    if table is None:
        return "UNKNOWN"
    if len(probes) + len(table.hashes) <= INLINE_BYTES:
        return membership(table, probes)
    return Offload(partial(membership, table, probes))


@command("KV.PREFIX.INFO", access=Access.TENANT, min_args=0, max_args=0)
def info(ctx: Context, args: Args) -> bytes:
    """KV.PREFIX.INFO

    Figures of the stores, `name:value` lines; `vstore_bytes` are live rows as stored.
    """
    state, vstore = ctx.state, ctx.state.vstore
    with vstore.lock:
        sessions = vstore.table.by_sid.items()
        k_rows = [session.rows(0) for sid, session in sessions if sid.endswith(b"_pk")]
    fields = {
        "registered_prefixes": len(k_rows),
        "total_prefix_tokens": sum(k_rows),
        "vstore_sessions": len(vstore.table),
        "vstore_total_fetches": state.total_fetches,
        "vstore_evictions": vstore.evictions,
        "vstore_max_sessions": vstore.table.max_sessions,
        "vstore_bytes": vstore.stored_bytes,
        "wal_enabled": int(vstore.log.durable),
        "wal_bytes": vstore.log.end if vstore.log.durable else 0,
        "wal_appended": vstore.log.appended,
        "wal_replayed": vstore.log.replayed,
        "directory_enabled": int(state.homes is not None),
        "my_worker_id": state.worker_id,
        "directory_entries": state.homes.count() if state.homes is not None else 0,
        "sdpa_warm": state.attend.slots.warm,
        "sdpa_cold": state.attend.slots.cold,
        "sdpa_demotions": state.attend.slots.demotions,
        "sdpa_rehydrates": state.attend.slots.rehydrates,
        "vstore_short_fetches": state.short_fetches,
        "decode_sessions": state.attend.decodes.count,
        "decode_bytes": state.attend.decodes.nbytes,
        "decode_evictions": state.attend.decodes.evictions,
        "directory_workers": state.config.workers,
    }
    return "".join(f"{key}:{value}\r\n" for key, value in fields.items()).encode()


@command("KV.PREFIX.SAVE", access=Access.ADMIN, min_args=0, max_args=1)
def save(ctx: Context, args: Args) -> object:
    """KV.PREFIX.SAVE [<path>]

    Snapshots everything, then empties the log; other clients go on meanwhile. With a path,
    relative to the data directory: an extra copy, recurrent state in `<path>.ssm`, keys in
    `<path>.keys`; the log stays.
    """
    path = bytes(args[0]) if args else b""
    if not path or path == ctx.state.stores.snapshot_path.name.encode():
        return save_all(ctx.state)
    return save_copies(ctx.state, _relative(path))


def _relative(path: bytes) -> str:
    text = path.decode("utf-8", "replace")
    pure = PurePosixPath(text)
    bad = len(path) > 255 or any(ord(c) < 32 or ord(c) == 127 or c == "\ufffd" for c in text)
    if bad or pure.is_absolute() or ".." in pure.parts or text.startswith("~"):
        raise BadArgument("KV.PREFIX.SAVE: path must be relative, without '..' or control bytes")
    if pure.name.startswith(("pion.", "pion-")) or pure.name == "":
        raise BadArgument("KV.PREFIX.SAVE: path must be relative and no name of the server's own")
    return str(pure)


@command("KV.PREFIX.COMMIT", access=Access.ADMIN, min_args=0, max_args=0)
def commit(ctx: Context, args: Args) -> object:
    """KV.PREFIX.COMMIT

    `+OK` once everything acknowledged is on stable storage.
    """
    if not ctx.state.config.keyspace_log:
        raise CommandError("KV.PREFIX.COMMIT needs the log, which --no-wal turned off")
    return _commit(ctx.state)


async def _commit(state: ServerState) -> str:
    try:
        for one in state.everybody:
            await one.group_commit.commit()
    except LogFailed as error:
        raise CommandError(f"KV.PREFIX.COMMIT failed: {str(error)[8:]}") from error
    return "OK"


def _only_gets(args: Args) -> bool:
    """Every hit begins with a GET: it must not queue behind other clients' stores."""
    return word(args[1]) == "GET"


def _begins(args: Args) -> bool:
    return word(args[1]) == "BEGIN"


@command(
    "KV.PREFIX.META",
    access=Access.TENANT,
    min_args=2,
    max_args=4,
    flags=Flag.WRITE,
    names="first",
    reads=_only_gets,
    claims=_begins,
    args="<ns> BEGIN | SET <gen> <blob> | ABORT <gen> | GET",
)
def meta(ctx: Context, args: Args) -> object:
    """KV.PREFIX.META <ns> BEGIN | SET <gen> <blob> | ABORT <gen> | GET

    A manifest, written last, says that a prefix is complete; a fill is the lease to write one.
    """
    manifests, ns, action = ctx.state.vstore.manifests, arguments.name(args[0]), word(args[1])
    counts = {"BEGIN": 2, "SET": 4, "ABORT": 3, "GET": 2}
    if action not in counts:
        raise BadArgument("KV.PREFIX.META: unknown subcommand (BEGIN, SET, ABORT or GET)")
    if len(args) != counts[action]:
        raise BadArgument(f"KV.PREFIX.META {action}: wrong number of arguments")
    if action == "GET":
        found = manifests.get(ns)
        return None if found is None else [found[0], found[1]]
    if action == "BEGIN":
        gen = int(manifests.begin(ns, ctx.connection))
        if gen:
            # Slots made of the rows before are not this fill's.
            ctx.state.attend.drop_namespace(ns)
        return gen
    gen = arguments.generation(args[2:])
    if action == "ABORT":
        manifests.abort(ns, gen)
    else:
        manifests.set(ns, gen, args[3])
    return "OK"


@command(
    "KV.PREFIX.PIN", access=Access.TENANT, min_args=1, max_args=1, flags=Flag.WRITE, names="first"
)
def pin(ctx: Context, args: Args) -> int:
    """KV.PREFIX.PIN <ns>

    A pinned prefix is never evicted: 1, or 0 if it is not held.
    """
    return int(ctx.state.vstore.pin(arguments.name(args[0]), True))


@command(
    "KV.PREFIX.UNPIN", access=Access.TENANT, min_args=1, max_args=1, flags=Flag.WRITE, names="first"
)
def unpin(ctx: Context, args: Args) -> int:
    """KV.PREFIX.UNPIN <ns>

    Makes it ordinary again: 1, or 0 if it is not held.
    """
    return int(ctx.state.vstore.pin(arguments.name(args[0]), False))


@command(
    "KV.PREFIX.EXPIRE",
    access=Access.TENANT,
    min_args=2,
    max_args=2,
    flags=Flag.WRITE,
    names="first",
)
def expire(ctx: Context, args: Args) -> int:
    """KV.PREFIX.EXPIRE <ns> <seconds>

    Drops the prefix after that time: 1, or 0 if it is not held.
    """
    seconds = integer(args[1], "seconds", 1, MAX_EXPIRE)
    return int(ctx.state.vstore.expire(arguments.name(args[0]), seconds))


@command(
    "KV.PREFIX.ADMIT",
    access=Access.TENANT,
    min_args=1,
    max_args=1,
    flags=Flag.WRITE,
    names="first",
    anywhere=True,
)
def admit(ctx: Context, args: Args) -> int:
    """KV.PREFIX.ADMIT <ns>

    Adds one to the namespace's miss counter and answers it: processes share n-hit admission.
    """
    ns, homes = arguments.name(args[0]), ctx.state.homes
    return int(ctx.state.vstore.admit(ns) if homes is None else homes.admit(ns))
