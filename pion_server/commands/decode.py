"""ATTEND.DECODE.*: suffixes that stay in the server, on both lanes (see `attend.decode`)."""

from __future__ import annotations

import struct

from pion_server.attend.requests import TOKEN_BYTES, DecodeStep, check_token
from pion_server.commands import arguments
from pion_server.commands.arguments import integer
from pion_server.commands.attend import heads_of, key_of, positive, split_generation
from pion_server.commands.frames import frame, sid_first, split
from pion_server.commands.registry import Access, Args, Context, command
from pion_server.errors import BadArgument
from pion_server.payload import Buffer
from pion_server.wire.binary import Unparsable

_SIZES = 2**31 - 1
# sid length, layer, H_q, H_kv, D, 0; N, length, drop, M, S, window; token; generation. Sizes before
# the tensors and the sid behind them, so that the floats lie aligned.
_STEP = struct.Struct("<6H6I16sQ")


@command("ATTEND.DECODE.STEP", access=Access.TENANT, min_args=14, max_args=17, sids="first")
def step(ctx: Context, args: Args) -> object:
    """ATTEND.DECODE.STEP <sid> <layer> <token> <H_q> <D> <H_kv> <N> <length> <drop> <S> <Q> <K> ...

    `... <V> <head_map> [<window>] [GEN <gen>]`: appends K, V `[H_kv][S][D]` to a kept suffix;
    answers `[H_q][M][D]` and the log-sum-exp `[H_q][M]` for Q at its last M positions.
    """
    ctx.state.attend.require()
    options, generation = split_generation(args[14:], 1)
    heads, dim = heads_of(args[3], "H_q"), positive(args[4], "D")
    request = DecodeStep.of(
        key_of(args),
        args[2],
        (heads, heads_of(args[5], "H_kv")),
        dim,
        (
            positive(args[6], "N"),
            integer(args[7], "length", 0, _SIZES),
            integer(args[8], "drop", 0, _SIZES),
        ),
        integer(args[9], "S", 0, _SIZES),
        args[10:14],
        integer(options[0], "window", 0, _SIZES) if options else 0,
        generation,
    )
    return ctx.state.attend.step(request)


@command("ATTEND.DECODE.CLOSE", access=Access.TENANT, min_args=2, max_args=2, sids="first")
def close(ctx: Context, args: Args) -> int:
    """ATTEND.DECODE.CLOSE <sid> <token>

    Forgets the suffixes kept under a token: 1, or 0 if there are none.
    """
    check_token("ATTEND.DECODE.CLOSE", args[1])
    return int(ctx.state.attend.decodes.close((arguments.name(args[0]), bytes(args[1]))))


def _sid_last(body: Buffer) -> Buffer:
    """The sid of a STEP, at the end of its body. Raises Unparsable."""
    length = int.from_bytes(bytes(body[:2]), "little")
    if _STEP.size + length > len(body):
        raise Unparsable("the body ends within its sid")
    return body[len(body) - length :]


@frame(0x40, "ATTEND_DECODE_STEP", sid=_sid_last)
def step_frame(ctx: Context, body: Buffer) -> object:
    """u16 sid length, layer, H_q, H_kv, D, 0, u32 N, length, drop, M, S, window, token, ...

    u64 generation, Q, K, V, head_map, sid. ATTEND.DECODE.STEP: the same checks, the same engine,
    the same bytes.
    """
    sid_length, layer, heads, kv_heads, dim, zero, *sizes, token, generation = _STEP.unpack_from(
        body
    )
    tokens, length, drop, rows, suffix, window = sizes
    blobs, sid = split(
        memoryview(body)[_STEP.size :],
        heads * rows * dim * 4,
        kv_heads * suffix * dim * 4,
        kv_heads * suffix * dim * 4,
        heads,
    )
    if len(sid) != sid_length or zero:
        raise Unparsable("the body is longer or shorter than its sizes say")
    ctx.state.attend.require()
    if 0 in (heads, dim, kv_heads, tokens) or max(sizes) > _SIZES:
        raise BadArgument("H_q, D, H_kv and N must be positive, and all sizes less than 2^31")
    place = tokens, length, drop
    names = (bytes(sid), layer), token, (heads, kv_heads), dim
    request = DecodeStep.of(*names, place, suffix, blobs, window, generation)
    return ctx.state.attend.step(request)


@frame(0x41, "ATTEND_DECODE_CLOSE", sid=sid_first)
def close_frame(ctx: Context, body: Buffer) -> None:
    """u16 sid length, sid, token. ATTEND.DECODE.CLOSE; OK whether or not there was anything."""
    sid = sid_first(body)
    token = bytes(body[2 + len(sid) :])
    if len(token) != TOKEN_BYTES:
        raise Unparsable(f"a token has {TOKEN_BYTES} bytes, not {len(token)}")
    ctx.state.attend.decodes.close((bytes(sid), token))
