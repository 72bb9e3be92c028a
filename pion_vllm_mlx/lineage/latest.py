"""The conversation that was stored last: its token ids, from the records alone."""

from __future__ import annotations

from typing import Final

from pion_vllm_mlx.lineage.eviction import rows_in
from pion_vllm_mlx.lineage.records import Segment
from pion_vllm_mlx.lineage.search import get_manifest, segment_in
from pion_vllm_mlx.transport import Command, Lane, Patience

#: Records looked at, the last stored first: a turn is several.
_NEWEST: Final = 16
#: Segments of one conversation that are followed.
_LONGEST: Final = 4096

Ids = tuple[int, ...]


def latest_ids(lane: Lane, start: bytes, fingerprint: str, patience: Patience) -> Ids:
    """The ids of the conversation stored last; () for none. Raises TransportError.

    start: what the names of its segments begin with. It is the longest one that goes on from the
    record stored last: generations grow, while ages are as good as equal after a restart.
    """
    (listed,) = lane.exchange([Command.of("KV.PREFIX.LIST", start)], patience)
    rows = sorted((row for row in rows_in(listed) if row.gen > 0), key=lambda row: -row.gen)
    names = [row.name for row in rows[:_NEWEST]]
    replies = lane.exchange([get_manifest(name) for name in names], patience) if names else []
    found = zip(names, map(segment_in, replies), strict=True)
    known = {name: segment for name, segment in found if segment is not None}
    last: Ids = ()
    for segment in list(known.values()):
        if segment.fingerprint == fingerprint:
            ids = _ids_to(lane, start, segment, known, patience)
            if len(ids) > len(last) and ids[: len(last)] == last:
                last = ids
    return last


def _ids_to(
    lane: Lane, start: bytes, segment: Segment, known: dict[bytes, Segment], patience: Patience
) -> Ids:
    """All ids up to a segment's end; () if one below it is not there."""
    parts: list[Ids] = [segment.ids]
    while segment.start and len(parts) < _LONGEST:
        name = start + segment.parent.encode()
        if name not in known:
            below = segment_in(lane.exchange([get_manifest(name)], patience)[0])
            if below is None:
                return ()
            known[name] = below
        below, end = known[name], segment.start
        if not below.start < end <= below.end:
            return ()
        parts.append(below.ids[: end - below.start])
        segment = below
    return tuple(token for part in reversed(parts) for token in part)
