"""V.*: sessions of rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from pion_server.commands import arguments
from pion_server.commands.arguments import integer, word
from pion_server.commands.pace import pace
from pion_server.commands.registry import Access, Args, Context, Flag, always, command
from pion_server.errors import BadArgument
from pion_server.formats import InputType
from pion_server.payload import Offload, Payload
from pion_server.store.rows import StoredRows
from pion_server.store.schema import MAX_DIM, MAX_LAYERS, MAX_ROWS, Schema
from pion_server.store.sessions import Session

# Work on more bytes than this leaves the event loop, so that others are not kept waiting.
INLINE_BYTES = 1 << 18


@command(
    "V.CREATE",
    access=Access.TENANT,
    min_args=2,
    flags=Flag.WRITE,
    sids="first",
    claims=always,
    args="<session_id> <value_dim> [VQUANT <format>] | [<default_dim>] SCHEMA <n> <spec> ...",
)
def create(ctx: Context, args: Args) -> int:
    """V.CREATE <sid> <dim> [VQUANT <fmt>] | <sid> [<default_dim>] SCHEMA <n> <spec> ...

    One format and width for all layers, or one specification a layer
    (`fmt=fp16,dim=512,rope=64`). Answers the session's index; an existing session of the same
    shape keeps its rows.
    """
    index = ctx.state.vstore.create(arguments.name(args[0]), _schema(args[1:]), ctx.connection)
    return int(index)


def _schema(args: Args) -> Schema:
    if word(args[0]) == "SCHEMA":
        return _layers(args[1:], 0)
    if len(args) > 1 and word(args[1]) == "SCHEMA":
        return _layers(args[2:], integer(args[0], "default_dim", 0, MAX_DIM))
    if len(args) == 1:
        return arguments.uniform_schema(args[0], b"int8")
    if word(args[1]) != "VQUANT":
        raise BadArgument("V.CREATE: unknown extra word, VQUANT or SCHEMA expected")
    if len(args) == 2:
        raise BadArgument("V.CREATE: VQUANT without value")
    if len(args) > 3:
        raise BadArgument("V.CREATE: unknown extra word after VQUANT <format>")
    return arguments.uniform_schema(args[0], args[2])


def _layers(args: Args, default_dim: int) -> Schema:
    if not args:
        raise BadArgument("V.CREATE: SCHEMA layer count missing")
    count = arguments.layer_count(args[0])
    specs = args[1:]
    if len(specs) != count:
        raise BadArgument(
            f"V.CREATE: SCHEMA {count} with too {'few' if len(specs) < count else 'many'} "
            f"specs ({len(specs)})"
        )
    return arguments.schema_of(specs, default_dim)


@command("V.STOREBATCH", access=Access.TENANT, min_args=5, flags=Flag.WRITE, sids="first")
def storebatch(ctx: Context, args: Args) -> object:
    """V.STOREBATCH <sid> <layer> <start> <count> <blob> [FMT F32|F16|BF16|PACKED] [GEN <gen>]

    Rows [start, start+count), row-major `[count][dim]`; acknowledged means with the kernel.
    """
    vstore = ctx.state.vstore
    sid = arguments.name(args[0])
    layer = integer(args[1], "layer_id", 0, MAX_LAYERS - 1)
    start = integer(args[2], "start", 0, MAX_ROWS)
    count = integer(args[3], "count", 1, MAX_ROWS)
    blob = args[4]
    kind, gen = _store_options(args[5:])

    def work() -> str:
        vstore.store(sid, layer, start, count, blob, input=kind, gen=gen, owner=ctx.connection)
        return "OK"

    if kind is None and pace.allows(len(blob)):
        return pace.run(work)
    return work() if len(blob) <= INLINE_BYTES else Offload(work)


def _store_options(args: Args) -> tuple[InputType | None, int | None]:
    kind: InputType | None = InputType.F32
    gen, at = None, 0
    while at < len(args):
        option = word(args[at])
        if option == "GEN":
            gen = arguments.generation(args[at + 1 :])
        elif option == "FMT" and at + 1 < len(args):
            kind = _input_type(word(args[at + 1]))
        else:
            raise BadArgument("V.STOREBATCH: unknown option, FMT <type> or GEN <gen> expected")
        at += 2
    return kind, gen


def _input_type(text: str) -> InputType | None:
    if text == "PACKED":
        return None
    if text not in InputType.__members__:
        raise BadArgument("V.STOREBATCH: unknown FMT (F32, F16, BF16 or PACKED)")
    return InputType[text]


@command("V.FETCH", access=Access.TENANT, min_args=3, sids="first")
def fetch(ctx: Context, args: Args) -> object:
    """V.FETCH <sid> <layer> <id> ... | <layer> RANGE <start> <end> | BATCH <start> <end> [<layers>]

    RANGE and BATCH take `FMT NATIVE|PACKED`; `end` is exclusive. Rows as float32, or 16-bit words
    (NATIVE, fp16 layers), or stored bytes (PACKED). A layer that lacks any asked row is null.
    """
    if word(args[1]) == "BATCH":
        return _fetch_batch(ctx, args)
    if word(args[2]) == "RANGE":
        return _fetch_range(ctx, args)
    return _fetch_ids(ctx, args)


def _fetch_ids(ctx: Context, args: Args) -> object:
    sid = arguments.name(args[0])
    session = ctx.state.vstore.session(sid)
    layer = integer(args[1], "layer_id", 0, MAX_LAYERS - 1)
    if any(word(arg) == "FMT" for arg in args[2:]):
        raise BadArgument("FMT requires the RANGE or BATCH form")
    if any(not len(arg) for arg in args[2:]):
        raise BadArgument("no token IDs")
    ids = [integer(arg, "token id", 0, MAX_ROWS - 1) for arg in args[2:]]
    _refuse_raw(session, [layer], "F32")
    rows = ctx.state.vstore.rows_by_id(sid, layer, ids, fill=_fills(ctx, "F32"))
    return _answer(ctx, [rows], len(ids), "F32", lambda values: values[0])


def _fetch_range(ctx: Context, args: Args) -> object:
    if len(args) < 5:
        raise BadArgument("V.FETCH RANGE requires: <start> <end> [FMT NATIVE|PACKED]")
    sid = arguments.name(args[0])
    session = ctx.state.vstore.session(sid)
    layer = integer(args[1], "layer_id", 0, MAX_LAYERS - 1)
    start, end = _bounds(args[3], args[4], "RANGE")
    form = _reply_format(args[5:])
    _refuse_raw(session, [layer], form)
    rows = ctx.state.vstore.rows(sid, layer, start, end, fill=_fills(ctx, form))
    return _answer(ctx, [rows], end - start, form, lambda values: values[0])


def _fetch_batch(ctx: Context, args: Args) -> object:
    if len(args) < 4:
        raise BadArgument("V.FETCH BATCH requires: <start> <end> [<layers>] [FMT NATIVE|PACKED]")
    vstore, sid = ctx.state.vstore, arguments.name(args[0])
    session = vstore.session(sid)
    start, end = _bounds(args[2], args[3], "BATCH invalid range")
    rest, asked = args[4:], 0
    if rest and word(rest[0]) != "FMT":
        asked, rest = integer(rest[0], "num_layers", 0), rest[1:]
    form = _reply_format(rest)
    fill = _fills(ctx, form)
    with vstore.lock:
        stored = session.num_layers
        if not stored:
            raise BadArgument("V.FETCH BATCH: session has no stored layers")
        layers = range(asked if 0 < asked <= stored else stored)
        _refuse_raw(session, layers, form)
        rows = [vstore.rows(sid, layer, start, end, fill=fill) for layer in layers]
    return _answer(ctx, rows, end - start, form, list)


def _bounds(start: object, end: object, what: str) -> tuple[int, int]:
    first = integer(start, f"{what} start")  # type: ignore[arg-type]
    last = integer(end, f"{what} end")  # type: ignore[arg-type]
    if first < 0 or last <= first or last > MAX_ROWS:
        raise BadArgument(f"invalid {what}: [{first}, {last}) (0 <= start < end <= {MAX_ROWS})")
    return first, last


def _reply_format(args: Args) -> str:
    if not args:
        return "F32"
    if word(args[0]) != "FMT" or len(args) != 2 or word(args[1]) not in ("NATIVE", "PACKED"):
        raise BadArgument("V.FETCH: unknown FMT (NATIVE or PACKED)")
    return word(args[1])


def _refuse_raw(session: Session, layers: Sequence[int], form: str) -> None:
    if form != "PACKED" and session.schema.has_raw(layers):
        raise BadArgument("raw rows are fetched with FMT PACKED only")


def _fills(ctx: Context, form: str) -> bool:
    return bool(ctx.state.config.fetch_zero_fill) and form != "PACKED"


def _answer(
    ctx: Context,
    layers: list[StoredRows | None],
    rows_asked: int,
    form: str,
    shape: Callable[[list[Payload | None]], object],
) -> object:
    """Count the fetch, verify what it touches (in a thread if that reads much), and reply."""
    state = ctx.state
    held = [rows for rows in layers if rows is not None]
    state.total_fetches += rows_asked * len(layers)
    state.short_fetches += sum(rows is None or rows.filled for rows in layers)
    replies = [None if rows is None else _payload(rows, form) for rows in layers]

    def verify() -> None:
        for rows in held:
            rows.verify()

    def finish() -> object:
        state.stats.bytes_served += sum(reply.nbytes for reply in replies if reply)
        return shape(replies)

    if sum(rows.unverified_bytes for rows in held) > INLINE_BYTES:
        return _answer_later(verify, finish)
    verify()
    return finish()


async def _answer_later(verify: Callable[[], None], finish: Callable[[], object]) -> object:
    """Long reads in a thread, counters on the loop: they belong to it."""
    await asyncio.to_thread(verify)
    return finish()


def _payload(rows: StoredRows, form: str) -> Payload:
    if form == "PACKED" or (form == "NATIVE" and rows.format.name == "fp16"):
        return rows.packed()
    return rows.decoded()


@command("V.INFO", access=Access.TENANT, min_args=0, max_args=1, sids="first")
def info(ctx: Context, args: Args) -> bytes:
    """V.INFO [<sid>]

    Of one session: its shape and the token count of each layer. Touches nothing.
    """
    vstore = ctx.state.vstore
    with vstore.lock:
        if args:
            return _lines(_describe(vstore.session(arguments.name(args[0]))))
        total = sum(session.total_rows for session in vstore.table)
        sessions = len(vstore.table)
    return _lines(
        [
            ("enabled", 1),
            ("sessions", sessions),
            ("total_tokens", total),
            ("total_fetches", ctx.state.total_fetches),
        ]
    )


def _describe(session: Session) -> list[tuple[str, object]]:
    schema = session.schema
    fields: list[tuple[str, object]] = [
        ("session_idx", session.index),
        ("value_dim", schema.default.dim),
        ("v_format", schema.default.fmt),
        ("num_layers", session.num_layers),
        ("schema", "heterogeneous" if schema.heterogeneous else "uniform"),
    ]
    for index in range(session.num_layers):
        fields.append((f"layer_{index}_tokens", session.rows(index)))
        if schema.heterogeneous:
            spec = schema.layers[index]
            fields += [(f"layer_{index}_dim", spec.dim), (f"layer_{index}_fmt", spec.fmt)]
            fields += [(f"layer_{index}_rope", spec.rope)] if spec.rope else []
    fields.append(("total_tokens", session.total_rows))
    return fields


def _lines(fields: Iterable[tuple[str, object]]) -> bytes:
    return "".join(f"{key}:{value}\r\n" for key, value in fields).encode()


@command("V.DROP", access=Access.TENANT, min_args=1, flags=Flag.WRITE, sids="all", anywhere=True)
def drop(ctx: Context, args: Args) -> int:
    """V.DROP <sid> [<sid> ...]

    Raw sids; answers how many sessions were dropped.
    """
    sids = [arguments.name(arg) for arg in args]
    dropped = int(ctx.state.vstore.drop_sessions(sids, ctx.connection))
    if not dropped and ctx.state.homes is not None:
        ctx.state.homes.require("V.DROP", sids)
    return dropped


@command("V.SNAPSHOT", access=Access.TENANT, min_args=1, max_args=1, flags=Flag.WRITE, sids="first")
def snapshot(ctx: Context, args: Args) -> int:
    """V.SNAPSHOT <sid>

    Remembers the row counts of every layer; answers the snapshot's id.
    """
    return int(ctx.state.vstore.snapshot(arguments.name(args[0])))


@command("V.RESTORE", access=Access.TENANT, min_args=2, max_args=2, flags=Flag.WRITE, sids="first")
def restore(ctx: Context, args: Args) -> str:
    """V.RESTORE <sid> <snap_id>

    Every layer's count becomes the smaller of now and then.
    """
    number = _snapshot_id(args[1])
    ctx.state.vstore.restore(arguments.name(args[0]), number, ctx.connection)
    return "OK"


@command("V.COMMIT", access=Access.TENANT, min_args=2, max_args=2, flags=Flag.WRITE, sids="first")
def commit(ctx: Context, args: Args) -> int:
    """V.COMMIT <sid> <snap_id>

    Forgets a snapshot: 1, or 0 if it is unknown.
    """
    return int(ctx.state.vstore.release(arguments.name(args[0]), _snapshot_id(args[1])))


def _snapshot_id(value: object) -> int:
    number = integer(value, "snap_id")  # type: ignore[arg-type]
    if number <= 0:
        raise BadArgument("snap_id must be positive")
    return number
