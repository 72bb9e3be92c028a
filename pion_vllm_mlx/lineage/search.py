"""Finding what is stored of a token list: one pipelined round trip over all its names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, TypeVar

from pion_vllm_mlx.lineage.blocks import BLOCK
from pion_vllm_mlx.lineage.match import Asked, Match, Stored, match_rows
from pion_vllm_mlx.lineage.records import Segment, State, read_segment, read_state
from pion_vllm_mlx.manifest_fields import ManifestError
from pion_vllm_mlx.pieces import row_format
from pion_vllm_mlx.transport import Command, Lane, Patience, Reply

_MOST_LAYERS: Final = 256
Buffer = bytes | bytearray | memoryview
Read = TypeVar("Read")


def search(
    lane: Lane, asked: Asked, fingerprint: str, patience: Patience, *, stateful: bool
) -> Match:
    """The longest stored prefix of `asked` that can be restored; raises TransportError.

    Whatever is absent, damaged, of another model or about other tokens ends the match before it.
    """
    if stateful:
        return search_state(lane, asked, fingerprint, patience).match()
    starts = range(0, len(asked.digests) * BLOCK, BLOCK)
    names = [asked.segment_at(start) for start in starts]
    replies = lane.exchange([get_manifest(name) for name in names], patience) if names else ()
    found = _segments(zip(starts, replies, strict=True), asked.digest_after, fingerprint)
    return match_rows(asked, {s: each for s, each in found.items() if each.start == s})


def search_state(lane: Lane, asked: Asked, fingerprint: str, patience: Patience) -> Stored:
    """Every record of a model with state that `asked` may rest on; raises TransportError."""
    starts = range(0, len(asked.digests) * BLOCK, BLOCK)
    ends = [start + BLOCK for start in starts]
    if not ends:
        return Stored(asked, {}, {}, {})
    names = [asked.checkpoint_at(end) for end in ends]
    names += [asked.trace_at(start) for start in starts]
    names += [asked.state_at(end) for end in ends]
    replies = lane.exchange([get_manifest(name) for name in names], patience)
    segments, traces, states = (
        replies[at : at + len(ends)] for at in range(0, len(names), len(ends))
    )
    return Stored(
        asked,
        _segments(zip(ends, segments, strict=True), asked.digest_at, fingerprint),
        _segments(zip(starts, traces, strict=True), asked.digest_after, fingerprint),
        _states(zip(ends, states, strict=True), asked, fingerprint),
    )


def get_manifest(name: bytes) -> Command:
    """The command that reads a record's manifest."""
    return Command.of("KV.PREFIX.META", name, "GET")


def segment_in(reply: Reply) -> Segment | None:
    """The segment of a META GET's reply; None for anything else."""
    found = _manifest_in(reply, read_segment)
    return None if found is None else replace(found[1], gen=found[0])


def state_in(reply: Reply) -> tuple[int, State] | None:
    """The same for what says that a state is there, with the fill that brought it."""
    return _manifest_in(reply, read_state)


def _manifest_in(reply: Reply, read: Callable[[Buffer], Read]) -> tuple[int, Read] | None:
    match reply:
        case [int() as gen, bytes() | bytearray() | memoryview() as blob]:
            try:
                return gen, read(blob)
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


def _states(replies: Iterable[tuple[int, Reply]], asked: Asked, fingerprint: str) -> dict[int, int]:
    """The ends whose state is there, each with the fill that brought it."""
    states = {}
    for end, reply in replies:
        gen, state = state_in(reply) or (0, None)
        mark = asked.digest_at(end).hex(), fingerprint
        if state is not None and (state.digest, state.fingerprint) == mark:
            states[end] = gen
    return states


def _is_readable(segment: Segment) -> bool:
    """Whether every piece is in a format that holds its rows, and on a layer there can be."""
    try:
        return all(
            rows.layer < _MOST_LAYERS and row_format(rows.store, rows.layout) is not None
            for _, _, rows in segment.pieces()
        )
    except ValueError:
        return False
