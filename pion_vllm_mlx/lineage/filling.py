"""Storing one record: a fill that readers see whole or not at all."""

from __future__ import annotations

from pion_vllm_mlx.fill import SHORT, Fill, begin
from pion_vllm_mlx.lineage.drafts import Draft
from pion_vllm_mlx.transport import Lane


def write_draft(lane: Lane, draft: Draft) -> bool:
    """Store a record; False if another client is filling it right now.

    Raises StoreFailed when the server refuses a piece, TransportError when it is gone. Either way
    there is no manifest, so nobody takes the half for the whole.
    """
    (begun,) = lane.exchange([begin(draft.name)], SHORT)
    with Fill(lane, draft.name, begun, draft.nbytes) as fill:
        if not fill.is_mine:
            return False
        commands = [command for piece in draft.pieces for command in fill.rows(piece, piece.data)]
        if draft.pieces:
            commands.insert(0, fill.register(draft.pieces, draft.prefill_ms))
        fill.write([*commands, *fill.blobs(draft.blobs)])
        fill.seal(draft.manifest)
    return True
