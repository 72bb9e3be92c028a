"""Storing one record: a fill that readers see whole or not at all.

META BEGIN → REGISTER.SCHEMA → rows or blobs, each with the fill's generation → META SET
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

from pion_vllm_mlx.lineage.drafts import Draft
from pion_vllm_mlx.ship import ROWS_A_COMMAND, StoreFailed, session_id
from pion_vllm_mlx.transport import (
    Command,
    Lane,
    Patience,
    ProtocolError,
    ServerError,
    TransportError,
)

_SHORT: Final = Patience(first_byte=2, stall=2, total=5)
#: Bytes a second that a server, its disk and the way there manage even on a bad day.
_SLOWEST: Final = 4 << 20


def write_draft(lane: Lane, draft: Draft) -> bool:
    """Store a record; False if another client is filling it right now.

    Raises StoreFailed when the server refuses a piece, TransportError when it is gone. Either way
    there is no manifest, so nobody takes the half for the whole.
    """
    (gen,) = lane.exchange([Command.of("KV.PREFIX.META", draft.name, "BEGIN")], _SHORT)
    if gen == 0:
        return False
    if isinstance(gen, ServerError):
        raise StoreFailed(gen.code, str(gen))
    if not isinstance(gen, int) or gen < 0:
        raise ProtocolError("META BEGIN answers an integer")
    seconds = draft.nbytes / _SLOWEST
    patience = Patience(first_byte=10 + seconds, stall=10, total=30 + 2 * seconds)
    try:
        if draft.pieces or draft.blobs:
            _expect_ok(lane, [*_register(draft), *_writes(draft, gen)], patience)
        manifest = Command.of("KV.PREFIX.META", draft.name, "SET", gen, draft.manifest)
        _expect_ok(lane, [manifest], patience)
    except StoreFailed:
        abort = Command.of("KV.PREFIX.META", draft.name, "ABORT", gen)
        with contextlib.suppress(TransportError):
            lane.exchange([abort], _SHORT, retry=False)
        raise
    return True


def _register(draft: Draft) -> list[Command]:
    if not draft.pieces:
        return []
    layers = 1 + max(piece.layer for piece in draft.pieces)
    # A leaf may have one side only; its layer is declared on the other and stays empty.
    sides = {side: ["fmt=raw,dim=1"] * layers for side in ("keys", "values")}
    for piece in draft.pieces:
        sides[piece.side][piece.layer] = piece.spec
    measured = ("PREFILL_MS", draft.prefill_ms) if draft.prefill_ms > 0 else ()
    specs = (*sides["keys"], *sides["values"])
    return [Command.of("KV.PREFIX.REGISTER.SCHEMA", draft.name, layers, *specs, *measured)]


def _writes(draft: Draft, gen: int) -> Iterator[Command]:
    for piece in draft.pieces:
        sid, width = session_id(draft.name, piece.side), len(piece.data) // draft.rows
        for start in range(0, draft.rows, ROWS_A_COMMAND):
            count = min(ROWS_A_COMMAND, draft.rows - start)
            blob = piece.data[start * width : (start + count) * width]
            span = (piece.layer, start, count)
            yield Command.of("V.STOREBATCH", sid, *span, blob, "FMT", "PACKED", "GEN", gen)
    for index, state in draft.blobs:
        yield Command.of("SSM.PREFIX.STORE", draft.name, index, state, "GEN", gen)


def _expect_ok(lane: Lane, commands: Sequence[Command], patience: Patience) -> None:
    for reply in lane.exchange(commands, patience, retry=False):
        if isinstance(reply, ServerError):
            raise StoreFailed(reply.code, str(reply))
        if reply != "OK":
            raise ProtocolError("a store is answered by OK")
