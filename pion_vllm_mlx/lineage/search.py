"""Finding what is stored of a token list: one pipelined round trip over all its names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from pion_vllm_mlx.lineage.blocks import BLOCK
from pion_vllm_mlx.lineage.match import Asked, Match, match_rows, match_state
from pion_vllm_mlx.lineage.records import Segment, read_segment
from pion_vllm_mlx.manifest_fields import ManifestError
from pion_vllm_mlx.pieces import row_format
from pion_vllm_mlx.transport import Command, Lane, Patience, Reply

_MOST_LAYERS: Final = 256


def search(
    lane: Lane, asked: Asked, fingerprint: str, patience: Patience, *, stateful: bool
) -> Match:
    """The longest stored prefix of `asked`; raises TransportError.

    Whatever is absent, damaged, of another model or about other tokens ends the match before it.
    """
    starts = range(0, len(asked.digests) * BLOCK, BLOCK)
    if not starts:
        return Match(asked)
    if not stateful:
        names = [asked.segment_at(start) for start in starts]
        replies = lane.exchange([get_manifest(name) for name in names], patience)
        found = _segments(zip(starts, replies, strict=True), asked.digest_after, fingerprint)
        return match_rows(asked, {s: each for s, each in found.items() if each.start == s})
    ends = [start + BLOCK for start in starts]
    names = [asked.checkpoint_at(end) for end in ends] + [asked.trace_at(s) for s in starts]
    replies = lane.exchange([get_manifest(name) for name in names], patience)
    states = zip(ends, replies, strict=False)
    traces = zip(starts, replies[len(ends) :], strict=True)
    return match_state(
        asked,
        _segments(states, asked.digest_at, fingerprint),
        _segments(traces, asked.digest_after, fingerprint),
    )


def get_manifest(name: bytes) -> Command:
    """The command that reads a record's manifest."""
    return Command.of("KV.PREFIX.META", name, "GET")


def segment_in(reply: Reply) -> Segment | None:
    """The segment of a META GET's reply; None for anything else."""
    match reply:
        case [int() as gen, bytes() | bytearray() | memoryview() as blob]:
            try:
                return replace(read_segment(blob), gen=gen)
            except ManifestError:
                return None
    return None


def _segments(
    replies: Iterable[tuple[int, Reply]], digest_of: Callable[[int], bytes], fingerprint: str
) -> dict[int, Segment]:
    """The sound ones, by the position they were asked for."""
    found = {}
    for position, reply in replies:
        segment = segment_in(reply)
        if (
            segment is not None
            and segment.digest == digest_of(position).hex()
            and segment.fingerprint == fingerprint
            and _is_readable(segment)
        ):
            found[position] = segment
    return found


def _is_readable(segment: Segment) -> bool:
    """Whether every piece is in a format that holds its rows, and on a layer there can be."""
    try:
        return all(
            rows.layer < _MOST_LAYERS and row_format(rows.store, rows.layout) is not None
            for _, _, rows in segment.pieces()
        )
    except ValueError:
        return False
