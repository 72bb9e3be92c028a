"""ATTEND.*: attention over K/V that stays in the server; KV.PREFIX.WARM, which brings it back."""

from __future__ import annotations

from pion_server.attend.requests import (
    BLOCK_MEAN,
    BlockQuery,
    DenseQuery,
    FusedQuery,
    OneShot,
    SparseQuery,
    Store,
)
from pion_server.attend.sessions import Key, Shape
from pion_server.commands import arguments
from pion_server.commands.arguments import integer
from pion_server.commands.registry import Access, Args, Context, command
from pion_server.errors import BadArgument
from pion_server.payload import Buffer

# What the binary lane can name: layers and head counts are 16 bits there, so they are here.
_LAYERS = _HEADS = 65_535
_SIZES = 2**31 - 1
_WARM_HEADS, _WARM_DIM = 256, 512


@command("ATTEND.PREFIX.STORE", access=Access.TENANT, min_args=7, max_args=9, sids="first")
def store(ctx: Context, args: Args) -> object:
    """ATTEND.PREFIX.STORE <sid> <layer> <H> <N> <D> <K> <V> [GEN <gen>]

    K and V float32 `[H][N][D]`; replaces what the layer had.
    """
    ctx.state.attend.require()
    _, generation = split_generation(args[7:], 0)
    shape = Shape(heads_of(args[2], "H"), positive(args[3], "N"), positive(args[4], "D"))
    request = Store.of(key_of(args), shape, args[5], args[6], generation)

    async def work() -> str:
        await ctx.state.attend.store(request)
        return "OK"

    return work()


@command("ATTEND.PREFIX.LOOKUP", access=Access.TENANT, min_args=2, max_args=2, sids="first")
def lookup(ctx: Context, args: Args) -> str:
    """ATTEND.PREFIX.LOOKUP <sid> <layer>

    `+HIT` (ready), `+COLD` (KV.PREFIX.WARM brings it back) or `+MISS`.
    """
    ctx.state.attend.require()
    return ctx.state.attend.slots.state(key_of(args))


@command("ATTEND.PREFIX.DROP", access=Access.TENANT, min_args=1, max_args=2, sids="first")
def drop(ctx: Context, args: Args) -> int:
    """ATTEND.PREFIX.DROP <sid> [<layer>]

    Forgets a layer, or all of them, cold ones too; answers how many there were.
    """
    ctx.state.attend.require()
    layer = _layer(args[1]) if len(args) > 1 else None
    return ctx.state.attend.drop(arguments.name(args[0]), layer)


@command("ATTEND.PREFIX.QUERY", access=Access.TENANT, min_args=6, max_args=9, sids="first")
def query(ctx: Context, args: Args) -> object:
    """ATTEND.PREFIX.QUERY <sid> <layer> <H> <D> <top_k> <Q> [<fa_window>] [GEN <gen>]

    Q `[H][M][D]`; answers `[H][M][D]` and, for M > 1, the log-sum-exp `[H][M]`.
    """
    ctx.state.attend.require()
    heads, dim = heads_of(args[2], "H"), positive(args[3], "D")
    positive(args[4], "top_k")
    options, generation = split_generation(args[6:], 1)
    window = _window(options)
    request = DenseQuery.of(key_of(args), heads, dim, args[5], window, generation)
    return ctx.state.attend.answer(request)


@command("ATTEND.PREFIX.QUERY_FUSED", access=Access.TENANT, min_args=10, max_args=13, sids="first")
def query_fused(ctx: Context, args: Args) -> object:
    """ATTEND.PREFIX.QUERY_FUSED <sid> <layer> <H_q> <D> <S> <H_kv> <Q> <K> <V> <map> ...

    `... [<fa_window>] [GEN <gen>]`: Q `[H_q][M][D]` over the prefix and a causal suffix K, V
    `[H_kv][S][D]`; answers as Q.
    """
    ctx.state.attend.require()
    heads_q, dim = heads_of(args[2], "H_q"), positive(args[3], "D")
    suffix = integer(args[4], "S_suf", 0, _SIZES)
    heads = heads_q, heads_of(args[5], "H_kv")
    options, generation = split_generation(args[10:], 1)
    window = _window(options)
    request = FusedQuery.of(key_of(args), heads, dim, suffix, args[6:10], window, generation)
    return ctx.state.attend.answer(request)


@command("ATTEND.PREFIX.QUERY_SPARSE", access=Access.TENANT, min_args=8, max_args=11, sids="first")
def query_sparse(ctx: Context, args: Args) -> object:
    """ATTEND.PREFIX.QUERY_SPARSE <sid> <layer> <H> <D> <K_max> <Q> <indices> <counts> ...

    `... [<fa_window>] [GEN <gen>]`: Q `[H][D]`; head h sees the first `counts[h]` (u32) of
    `indices[h]` (i32, `[H][K_max]`).
    """
    ctx.state.attend.require()
    heads, dim = heads_of(args[2], "H"), positive(args[3], "D")
    most = positive(args[4], "K_sparse_max")
    options, generation = split_generation(args[8:], 1)
    window = _window(options)
    request = SparseQuery.of(key_of(args), heads, dim, most, args[5:8], window, generation)
    return ctx.state.attend.answer(request)


@command(
    "ATTEND.PREFIX.QUERY_SPARSE_AUTO",
    access=Access.TENANT,
    min_args=9,
    max_args=13,
    sids="first",
    args="<sid> <layer> <H_q> <D> <B> <K_top> <H_kv> <Q> <head_map> [<fa_window>] [<selector>] "
    "[GEN <gen>]",
)
def query_sparse_auto(ctx: Context, args: Args) -> object:
    """ATTEND.PREFIX.QUERY_SPARSE_AUTO <sid> <layer> <H_q> <D> <B> <K_top> <H_kv> <Q> <map> ...

    Q `[H_q][D]` over the `K_top` best blocks of `B` tokens and the last one.
    """
    ctx.state.attend.require()
    blobs = [args[7], b"", b"", args[8]]
    return ctx.state.attend.answer(_block_query("QUERY_SPARSE_AUTO", args, 0, blobs, args[9:]))


@command(
    "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED",
    access=Access.TENANT,
    min_args=12,
    max_args=16,
    sids="first",
    args="<sid> <layer> <H_q> <D> <B> <K_top> <H_kv> <S> <Q> <K> <V> <head_map> "
    "[<fa_window>] [<selector>] [GEN <gen>]",
)
def query_sparse_auto_fused(ctx: Context, args: Args) -> object:
    """ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED <sid> <layer> <H_q> <D> <B> <K_top> <H_kv> <S> <Q> ...

    As QUERY_SPARSE_AUTO, with a suffix K, V `[H_kv][S][D]` seen whole, in one softmax.
    """
    ctx.state.attend.require()
    suffix = integer(args[7], "S_suf", 0, _SIZES)
    name = "QUERY_SPARSE_AUTO_FUSED"
    return ctx.state.attend.answer(_block_query(name, args, suffix, args[8:12], args[12:]))


@command("ATTEND.QUERYBATCH", access=Access.TENANT, min_args=7, max_args=7)
def querybatch(ctx: Context, args: Args) -> object:
    """ATTEND.QUERYBATCH <H> <N> <D> <top_k> <Q> <K> <V>

    One-shot: Q `[H][D]` over K, V `[H][N][D]`, the `top_k` highest scores of each head.
    """
    ctx.state.attend.require()
    shape = Shape(heads_of(args[0], "H"), positive(args[1], "N"), positive(args[2], "D"))
    request = OneShot.of(shape, positive(args[3], "top_k"), args[4:7])
    return ctx.state.attend.answer_once(request)


@command(
    "KV.PREFIX.WARM",
    access=Access.TENANT,
    min_args=3,
    max_args=4,
    names="first",
    sids=lambda args: (3,) if len(args) > 3 else (),
)
def warm(ctx: Context, args: Args) -> object:
    """KV.PREFIX.WARM <ns> <H> <D> [<attend_sid>]

    Fills attention slots from stored rows: `+<layers>`, with ` skipped_dim=<n>` for layers of
    another width.
    """
    attend = ctx.state.attend
    attend.require()
    heads = integer(args[1], "H", 1, _WARM_HEADS)
    dim = integer(args[2], "D", 1, _WARM_DIM)
    ns = arguments.name(args[0])
    sid = arguments.name(args[3]) if len(args) > 3 else ns

    async def work() -> str:
        warmed, skipped = await attend.warm(ns, heads, dim, sid)
        return f"{warmed} skipped_dim={skipped}" if skipped else str(warmed)

    return work()


def _block_query(
    name: str, args: Args, suffix: int, blobs: list[Buffer], options: Args
) -> BlockQuery:
    heads_q, dim = heads_of(args[2], "H_q"), positive(args[3], "D")
    blocks = positive(args[4], "B"), positive(args[5], "K_top")
    heads = heads_q, heads_of(args[6], "H_kv")
    options, generation = split_generation(options, 2)
    selector = integer(options[1], "selector_id") if len(options) > 1 else BLOCK_MEAN
    return BlockQuery.of(
        f"ATTEND.PREFIX.{name}",
        key_of(args),
        heads,
        dim,
        blocks,
        suffix,
        blobs,
        _window(options[:1]),
        selector,
        generation,
    )


def key_of(args: Args) -> Key:
    return arguments.name(args[0]), _layer(args[1])


def _layer(value: Buffer) -> int:
    return integer(value, "layer_id", 0, _LAYERS)


def heads_of(value: Buffer, what: str) -> int:
    return integer(value, what, 1, _HEADS)


def positive(value: Buffer, what: str) -> int:
    return integer(value, what, 1, _SIZES)


def split_generation(options: Args, most: int) -> tuple[Args, int]:
    """The options, at most so many, without `GEN <gen>` at their end; and that, 0 if not given."""
    generation = 0
    if len(options) > 1 and arguments.word(options[-2]) == "GEN":
        options, generation = options[:-2], arguments.generation(options[-1:])
    if len(options) > most:
        raise BadArgument("too many options, or GEN <gen> is not the last")
    return options, generation


def _window(options: Args) -> int | None:
    """Tokens, 0 for no window; None (the server's default) if absent or negative."""
    width = integer(options[0], "fa_window") if options else -1
    return width if width >= 0 else None
