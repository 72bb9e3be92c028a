"""The commands of the binary lane: a code, a body, and the same engine as RESP's commands.

    @frame(0x24, "ATTEND_PREFIX_QUERY_FUSED", sid=_sid)
    def query_fused(ctx: Context, body: Buffer) -> object: ...

A function answers bytes or None (OK without any), or a coroutine of one, and refuses by raising a
CommandError: the wire makes a status of it. `sid` finds the session a body names, which dispatch
checks as it does RESP's; `anywhere`: each of several workers answers, not its owner alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pion_server.attend.requests import FusedQuery
from pion_server.commands.registry import Context
from pion_server.errors import BadArgument
from pion_server.payload import Buffer
from pion_server.wire.binary import Unparsable

Handler: TypeAlias = Callable[[Context, Buffer], object]

_U16 = struct.Struct("<H")
_FUSED = struct.Struct("<HHHHII")  # layer, H_q, D, H_kv, M, S_suf: behind the sid
_WINDOW = struct.Struct("<I")
_HOME = struct.Struct("<3H")
_DEFAULT_WINDOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class FrameCommand:
    """One row of the table."""

    name: str
    handler: Handler
    sid: Callable[[Buffer], Buffer] | None
    open_to_all: bool
    anywhere: bool


FRAMES: dict[int, FrameCommand] = {}


def frame(
    code: int,
    name: str,
    *,
    sid: Callable[[Buffer], Buffer] | None = None,
    open_to_all: bool = False,
    anywhere: bool = False,
) -> Callable[[Handler], Handler]:
    """Register the decorated function as the binary lane's command `code`."""

    def register(handler: Handler) -> Handler:
        if code in FRAMES:
            raise ValueError(f"two frames have the code {code:#x}")
        FRAMES[code] = FrameCommand(name, handler, sid, open_to_all, anywhere)
        return handler

    return register


@frame(0xFF, "PING")
def ping(ctx: Context, body: Buffer) -> None:
    """The client's probe; whatever body it has means nothing."""


@frame(0x37, "AUTH", open_to_all=True)
def auth(ctx: Context, body: Buffer) -> object:
    """A tenant's name, NUL and password; or the admin's password.

    Of a name that is no tenant's only the password counts; one that has a NUL itself is sent
    alone.
    """
    word = bytes(body)
    name, _, rest = word.partition(b"\0")
    tenant = ctx.credentials.tenant(name) if rest else None
    candidates = (rest,) if tenant is not None else (word, rest or word)
    refusal = ctx.credentials.check(tenant, *candidates)
    if refusal is None:
        ctx.enter(tenant)
    return refusal


def sid_first(body: Buffer) -> Buffer:
    """The sid of a body that begins with u16 length and sid. Raises Unparsable."""
    stop = _U16.size + (_U16.unpack_from(body)[0] if len(body) >= _U16.size else len(body))
    if stop > len(body):
        raise Unparsable("the body ends within its sid")
    return body[_U16.size : stop]


@frame(0x38, "ATTEND_PREFIX_HOME", sid=sid_first, anywhere=True)
def find_home(ctx: Context, body: Buffer) -> bytes:
    """sid: u16 worker to ask about it, u16 this worker, u16 how many there are.

    An ERROR cannot say that a session lives on another worker: who got one asks here. What nobody
    holds is this worker's as far as anybody knows.
    """
    sid = bytes(sid_first(body))
    if len(body) != _U16.size + len(sid):
        raise Unparsable("the body is longer than its sid")
    here, homes = ctx.state.worker_id, ctx.state.homes
    found = None if homes is None else homes.elsewhere(sid, "ATTEND")
    return _HOME.pack(here if found is None else found[0], here, ctx.state.config.workers)


@frame(0x24, "ATTEND_PREFIX_QUERY_FUSED", sid=sid_first)
def query_fused(ctx: Context, body: Buffer) -> object:
    """sid, u16 layer, H_q, D, H_kv, u32 M, S_suf, Q, K_suf, V_suf, head_map, [u32 fa_window].

    ATTEND.PREFIX.QUERY_FUSED: the same checks, the same engine, the same bytes.
    """
    sid = sid_first(body)
    start = _U16.size + len(sid)
    if len(body) < start + _FUSED.size:
        raise Unparsable("the body ends within its sizes")
    layer, heads, dim, kv_heads, rows, suffix = _FUSED.unpack_from(body, start)
    blobs, rest = split(
        memoryview(body)[start + _FUSED.size :],
        heads * rows * dim * 4,
        kv_heads * suffix * dim * 4,
        kv_heads * suffix * dim * 4,
        heads,
    )
    if len(rest) not in (0, _WINDOW.size):
        raise Unparsable(f"{len(rest)} bytes behind the head_map")
    window = _WINDOW.unpack(rest)[0] if rest else _DEFAULT_WINDOW
    ctx.state.attend.require()
    if 0 in (heads, dim, kv_heads, rows):
        raise BadArgument("H_q, D, H_kv and M must be positive")
    request = FusedQuery.of(
        (bytes(sid), layer),
        (heads, kv_heads),
        dim,
        suffix,
        blobs,
        None if window == _DEFAULT_WINDOW else window,
    )
    return ctx.state.attend.answer(request)


def split(body: memoryview, *sizes: int) -> tuple[list[Buffer], memoryview]:
    """Parts of these sizes and what is left. Raises Unparsable."""
    if sum(sizes) > len(body):
        raise Unparsable(f"the body's sizes ask for {sum(sizes)} bytes, it has {len(body)}")
    parts: list[Buffer] = []
    for size in sizes:
        parts.append(body[:size])
        body = body[size:]
    return parts, body
