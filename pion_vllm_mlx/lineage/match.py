"""How much of a token list is stored, given the records found under its names. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.lineage.blocks import (
    BLOCK,
    as_ids,
    ceil_block,
    chain,
    checkpoint_name,
    common,
    segment_name,
    state_name,
    trace_name,
)
from pion_vllm_mlx.lineage.records import Segment
from pion_vllm_mlx.pieces import row_format


@dataclass(frozen=True)
class Asked:
    """A token list, the digest at the end of each whole block, and so all names it may have."""

    ids: NDArray[np.uint32]
    digests: tuple[bytes, ...]
    name_start: bytes = b""

    @classmethod
    def of(cls, root: bytes, ids: Iterable[int], name_start: bytes = b"") -> Asked:
        """Compute the digests of `ids` in the scope of `root`; ValueError for what is no id."""
        array = as_ids(list(ids))
        return cls(array, tuple(chain(root, array)), name_start)

    def digest_at(self, tokens: int) -> bytes:
        """The digest at a block end, 64 or later."""
        return self.digests[tokens // BLOCK - 1]

    def digest_after(self, start: int) -> bytes:
        """The digest at the end of the block that begins at `start`, a multiple of 64."""
        return self.digests[start // BLOCK]

    def segment_at(self, start: int) -> bytes:
        """The name of the segment that begins at `start`, a multiple of 64."""
        return segment_name(self.name_start, self.digest_after(start))

    def checkpoint_at(self, tokens: int) -> bytes:
        """The name of the segment that ends at a block end where state was kept."""
        return checkpoint_name(self.name_start, self.digest_at(tokens))

    def state_at(self, tokens: int) -> bytes:
        """The name of the state at a block end."""
        return state_name(self.name_start, self.digest_at(tokens))

    def trace_at(self, start: int) -> bytes:
        """The name of the trace that begins at `start`, a multiple of 64."""
        return trace_name(self.name_start, self.digest_after(start))


class Mark(NamedTuple):
    """What tells one computation of a prefix from another at a block end.

    `trail`: see `Segment`. `sum`: checksum of the last block's rows as the model has them, or ""
    where they are not stored as they were.
    """

    trail: str
    sum: str


@dataclass(frozen=True, slots=True)
class Link:
    """A stored segment and how many of its tokens a match uses, from its first on."""

    name: bytes
    segment: Segment
    used: int

    @property
    def end(self) -> int:
        """The first token after what is used."""
        return self.segment.start + self.used

    @property
    def read(self) -> int:
        """Rows to read: whole blocks, since each block has one checksum."""
        return min(ceil_block(self.used), len(self.segment.ids))

    def ends(self) -> Iterator[tuple[int, Mark]]:
        """The block ends a computation may go on from, each with its mark."""
        segment = self.segment
        kept = all(rows.store == rows.layout.store_format for _, _, rows in segment.pieces())
        sums = segment.sums if kept and segment.sums else ("",) * len(segment.trail)
        whole = self.used // BLOCK
        has_state = any(leaf.blob for leaf in segment.leaves)
        for block in range(whole - 1 if has_state else 0, whole):
            end = segment.start + (block + 1) * BLOCK
            yield end, Mark(segment.trail[block], sums[block])


@dataclass(frozen=True)
class Match:
    """The longest stored prefix of a token list that can be restored: `tokens` leading ids.

    `seen`: how many leading ids are stored in some form. Beyond `tokens` that is of no use but to
    tell where others would find a checkpoint useful. A match of 0 tokens is a miss, and `reason`
    says why in a word. `state_gen`: the fill that brought the state at its end; 0 without any.
    """

    asked: Asked
    tokens: int = 0
    seen: int = 0
    links: tuple[Link, ...] = ()
    unavailable: bool = False
    state_gen: int = 0

    @property
    def reason(self) -> str:
        """Why there is nothing to restore: one word for the statistics."""
        if self.unavailable:
            return "unavailable"
        if not self.asked.digests:
            return "short"
        return "checkpoint" if self.seen else "absent"

    @cached_property
    def nbytes(self) -> int:
        """Bytes a restore moves: rows as stored, and state."""
        total = 0
        for link in self.links:
            for _, _, rows in link.segment.pieces():
                total += row_format(rows.store, rows.layout).packed_row_bytes * link.read
        leaves = self.links[-1].segment.leaves if self.links else ()
        return total + sum(leaf.blob.nbytes for leaf in leaves if leaf.blob is not None)

    @property
    def prefill_ms(self) -> int:
        """What computing these tokens took whoever stored them; 0: unknown."""
        parts = [link.segment.prefill_ms * link.used / len(link.segment.ids) for link in self.links]
        return round(sum(parts)) if all(parts) else 0

    def trail_at(self, tokens: int) -> str | None:
        """The trail of the stored prefix at a block end; None where there is none."""
        if tokens == 0:
            return ""
        marks = (pair for link in self.links for pair in link.ends())
        return next((mark.trail for end, mark in marks if end == tokens), None)


def match_rows(asked: Asked, segments: Mapping[int, Segment]) -> Match:
    """For plain attention: put the segments found together, by their first token.

    The ids of each are compared, to the token. A segment counts if it rests on the very rows
    before it; the first gap ends the chain.
    """
    links: list[Link] = []
    tokens = 0
    for start in sorted(segments):
        segment = segments[start]
        if start > tokens:
            break
        shared = common(as_ids(segment.ids), asked.ids[start:])
        before = _until(links, start)
        if shared < BLOCK or start + shared <= tokens or not _rests_on(segment, before):
            continue
        links = [*before, Link(asked.segment_at(start), segment, shared)]
        tokens = start + shared
    return Match(asked, tokens, tokens, tuple(links))


@dataclass(frozen=True)
class Stored:
    """What is there of a token list for a model with state; the ids of each are compared.

    `segments` by their ends, `traces` by their first tokens; `states`: the ends whose state is
    there, each with the fill that brought it.
    """

    asked: Asked
    segments: Mapping[int, Segment]
    traces: Mapping[int, Segment]
    states: Mapping[int, int]

    def match(self) -> Match:
        """The last checkpoint whose state and all of whose segments are there."""
        asked, match = self.asked, Match(self.asked)
        for end in sorted(self.segments.keys() & self.states.keys(), reverse=True):
            links = self.links_to(end)
            if links is not None:
                match = Match(asked, end, end, links, state_gen=self.states[end])
                break
        seen = match.tokens
        for start in sorted(self.traces):
            if start <= seen:
                shared = common(as_ids(self.traces[start].ids), asked.ids[start:])
                seen = max(seen, start + shared)
        return replace(match, seen=seen)

    def links_to(self, end: int) -> tuple[Link, ...] | None:
        """The segments from the first token to `end`, each of which rests on the one before it.

        None where one is missing, whether any state is there or not.
        """
        return _links_to(self.asked, self.segments, end)


def _links_to(asked: Asked, segments: Mapping[int, Segment], end: int) -> tuple[Link, ...] | None:
    links: list[Link] = []
    while end:
        segment = segments.get(end)
        if segment is None or segment.end != end:
            return None
        if common(as_ids(segment.ids), asked.ids[segment.start :]) != len(segment.ids):
            return None
        links.insert(0, Link(asked.checkpoint_at(end), segment, len(segment.ids)))
        end = segment.start
    rests = all(_rests_on(link.segment, links[:at]) for at, link in enumerate(links))
    return tuple(links) if rests else None


def _rests_on(segment: Segment, links: list[Link]) -> bool:
    """Whether it was computed on top of exactly these, and is stored in the same shape.

    Its parent need not be the last: another that holds the last block once more may have come in
    between.
    """
    if not links:
        return segment.start == 0
    before = links[-1].segment
    return (
        segment.start == links[-1].end
        and segment.parent in [link.segment.digest for link in links]
        and segment.base == before.trail_at(segment.start)
        and segment.shape() == links[0].segment.shape()
    )


def _until(links: Iterable[Link], end: int) -> list[Link]:
    """The same tokens up to `end`, a block end."""
    kept = (link for link in links if link.segment.start < end)
    return [
        Link(link.name, link.segment, min(link.used, end - link.segment.start)) for link in kept
    ]
