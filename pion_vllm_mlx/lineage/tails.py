"""Tokens after the last block end, too few to have a name of their own.

They are kept once more with blocks before them, so that a restart loses none of them.
"""

from __future__ import annotations

from typing import Final

from pion_vllm_mlx.lineage.blocks import BLOCK, floor_block
from pion_vllm_mlx.lineage.capture import Capture
from pion_vllm_mlx.lineage.known import Known
from pion_vllm_mlx.lineage.match import Asked, Mark
from pion_vllm_mlx.lineage.search import get_manifest, segment_in
from pion_vllm_mlx.transport import Lane, Patience

#: Tokens that are stored once more, at most.
_MOST: Final = 4 * BLOCK


def before_tail(known: Known, asked: Asked) -> tuple[int, Mark]:
    """Where a capture of `asked` and its tail begins; the last block end if nothing is known of
    the blocks before it."""
    end = floor_block(len(asked.ids))
    for start in range(max(0, end - _MOST), end, BLOCK):
        begun = known.last(asked, start)
        if begun[0] == start:
            return begun
    return end, Mark("", "")


def tail_start(lane: Lane, capture: Capture, patience: Patience) -> int | None:
    """The last place before a tail whose name is free; None where there is none.

    Whatever has such a name may be a longer branch, and is worth more than a few tokens. Raises
    TransportError.
    """
    end = floor_block(capture.tokens)
    starts = range(end - BLOCK, max(capture.start, end - _MOST) - 1, -BLOCK)
    names = [capture.asked.segment_at(start) for start in starts]
    replies = lane.exchange([get_manifest(name) for name in names], patience)
    found = zip(starts, map(segment_in, replies), strict=True)
    return next((start for start, segment in found if segment is None), None)
