"""Files of the conversations used last, made before anybody asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pion_vllm_mlx.lineage.borrowing import MOST_FILES, SegmentLayout
from pion_vllm_mlx.lineage.eviction import Node
from pion_vllm_mlx.lineage.match import Link
from pion_vllm_mlx.lineage.search import get_manifest, segment_in
from pion_vllm_mlx.transport import Lane, Patience
from pion_vllm_mlx.transport.local import NotLent

_PATIENCE: Final = Patience(first_byte=5, stall=5, total=30)


def used_last(nodes: Mapping[bytes, Node], nbytes: int, most: int = MOST_FILES) -> list[bytes]:
    """Names of records whose bytes and number stay within the limits, used last first.

    Whole conversations: each record after those it hangs on. One that does not fit ends it.
    """
    chosen: dict[bytes, None] = {}
    used = 0
    for node in sorted(nodes.values(), key=lambda node: node.unused):
        path: list[Node] = []
        above: Node | None = None if node.is_trace else node
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
    orders = []
    for name, reply in zip(names, replies, strict=True):
        segment = segment_in(reply)
        if segment is not None:
            try:
                orders.append(Link(name, segment, 0).lend(SegmentLayout(segment).text))
            except NotLent:
                continue
    lane.exchange(orders, _PATIENCE)
