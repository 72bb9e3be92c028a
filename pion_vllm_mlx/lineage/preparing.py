"""Files of the conversations used last, made before anybody asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pion_vllm_mlx.lineage.borrowing import MOST_FILES, FileLayout, order_of
from pion_vllm_mlx.lineage.search import get_manifest, segment_in, state_in
from pion_vllm_mlx.lineage.tree import Kind, Node
from pion_vllm_mlx.transport import Lane, Patience
from pion_vllm_mlx.transport.local import NotLent

_PATIENCE: Final = Patience(first_byte=5, stall=5, total=30)


def worth_files(nodes: Mapping[bytes, Node], nbytes: int, most: int = MOST_FILES) -> list[bytes]:
    """Names of the first records whose bytes and number stay within the limits.

    Each after those it hangs on, which it is of no use without, and the state at the end of a
    conversation. One that does not fit ends it.
    """
    inner = {node.parent for node in nodes.values() if node.kind is Kind.SEGMENT}
    chosen: dict[bytes, None] = {}
    used = 0
    for node in nodes.values():
        path: list[Node] = []
        # A conversation goes on from the last of its states.
        is_state = node.kind is Kind.STATE and node.parent not in inner
        above: Node | None = node if is_state or node.kind is Kind.SEGMENT else None
        while above is not None and above.name not in chosen and above not in path:
            path.append(above)
            above = nodes.get(above.parent)
        used += sum(each.nbytes for each in path)
        if used > nbytes or len(chosen) + len(path) > most:
            break
        chosen.update((each.name, None) for each in reversed(path))
    return list(chosen)


def order_files(lane: Lane, names: Sequence[bytes]) -> None:
    """Have the server make a file of each record; raises TransportError."""
    if not names:
        return
    replies = lane.exchange([get_manifest(name) for name in names], _PATIENCE)
    orders, segments = [], {}
    for name, reply in zip(names, replies, strict=True):
        segment = segment_in(reply)
        if segment is not None:
            segments[segment.digest] = segment
            if not any(segment.pieces()):
                continue
            try:
                layout = FileLayout.of_rows(segment)
            except NotLent:
                continue
            orders.append(order_of(name, segment.gen, layout))
        elif (held := state_in(reply)) is not None and held[1].digest in segments:
            layout = FileLayout.of_state(segments[held[1].digest])
            orders.append(order_of(name, held[0], layout))
    lane.exchange(orders, _PATIENCE)
