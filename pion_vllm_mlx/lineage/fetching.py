"""Restoring a match: rows of several segments into one array a piece, and the last one's state.

One pipelined round trip. Every block and every blob is checked against the manifest that was read
when the match was found, so a record that was written anew in between is a miss, not a mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import xxhash

from pion_patches.cache_rebuild import (
    CacheImage,
    Leaf,
    RebuildError,
    RowPiece,
    UnsupportedCache,
    cut,
)
from pion_patches.containers import unpack_arrays
from pion_vllm_mlx.fill import session_id
from pion_vllm_mlx.lineage.blocks import BLOCK, ceil_block
from pion_vllm_mlx.lineage.match import Link, Match
from pion_vllm_mlx.lineage.records import block_sums
from pion_vllm_mlx.manifest_fields import LeafEntry, Rows
from pion_vllm_mlx.pieces import Landing
from pion_vllm_mlx.restore import Miss
from pion_vllm_mlx.transport import Command, Lane, Patience, Reply, ServerError

PieceOf: TypeAlias = Callable[[str, int, Rows], RowPiece]


def fetch_match(lane: Lane, match: Match, patience: Patience) -> CacheImage:
    """The cache image of `match.tokens` tokens; raises Miss or TransportError."""
    rows, state = _Rows(match), State(match)
    receipt = receipt_of(match)
    reads = [*rows.commands, *state.commands()]
    replies = lane.exchange([*receipt, *reads], patience)[len(receipt) :]
    rows.take(replies[: len(rows.commands)])
    state.take(replies[len(rows.commands) :])
    return image_of(match, rows.tokens, rows.piece, state)


def image_of(match: Match, tokens: int, piece: PieceOf, state: State) -> CacheImage:
    """The image of a match of whose pieces `tokens` rows have come; raises Miss.

    `piece(side, leaf, rows)`: side "keys" or "values" of a leaf, whose entry is of `rows`.
    """
    try:
        leaves = []
        for at, leaf in enumerate(match.links[-1].segment.leaves):
            keys = None if leaf.keys is None else piece("keys", at, leaf.keys)
            values = None if leaf.values is None else piece("values", at, leaf.values)
            meta = dict(leaf.meta)
            if leaf.blob is None and not meta.get("unused"):
                meta |= {"offset": tokens, "rows": tokens}
            leaves.append(Leaf(leaf.path, leaf.kind, meta, keys, values, state.arrays(leaf)))
        return cut(CacheImage(tokens, tuple(leaves)), match.tokens)
    except (RebuildError, UnsupportedCache, ValueError) as error:
        raise Miss("rebuild", str(error)) from error


def receipt_of(match: Match) -> list[Command]:
    """One LOOKUP a restore, which credits the leaf with all tokens; a segment of ids has no rows
    to look up, and would count as a miss."""
    leaf = match.links[-1]
    if not any(leaf.segment.pieces()):
        return []
    saved = ("PREFILL_MS", match.prefill_ms) if match.prefill_ms else ()
    return [Command.of("KV.PREFIX.LOOKUP", leaf.name, "TOKENS", match.tokens, *saved)]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where the rows of one link's piece land: a part of the piece's array."""

    landing: Landing
    start: int
    nbytes: int

    @property
    def view(self) -> memoryview:
        if self.landing.view is None:
            raise Miss("rows", "missing or of another size")
        return self.landing.view[self.start : self.start + self.nbytes]


class _Rows:
    """The rows of a match: one landing a piece, as long as the whole match."""

    def __init__(self, match: Match) -> None:
        self._links = match.links
        self.tokens = sum(link.read for link in match.links)
        pieces = list(match.links[0].segment.pieces())
        whole = [Rows(r.layer, self.tokens, r.layout, r.store, "") for _, _, r in pieces]
        self._landings = [Landing(rows) for rows in whole]
        self._sides = [side for side, _, _ in pieces]
        self._leaf = {(side, at): n for n, (side, at, _) in enumerate(pieces)}
        self.commands: list[Command] = []
        #: For each command, the link it reads and the pieces its bulks are.
        self._reads: list[tuple[int, list[int]]] = []
        #: What was received, by link and piece.
        self._slots: dict[tuple[int, int], _Slot] = {}
        before = 0
        for index, link in enumerate(match.links):
            for piece, landing in enumerate(self._landings):
                width = landing.format.packed_row_bytes
                self._slots[index, piece] = _Slot(landing, before * width, link.read * width)
            for side in ("keys", "values"):
                self._plan(index, link, side)
            before += link.read

    def _plan(self, index: int, link: Link, side: str) -> None:
        """One BATCH a side where its layers are 0, 1, …, as usual; else layer by layer."""
        wanted = [n for n, of in enumerate(self._sides) if of == side]
        sid = session_id(link.name, side)
        layers = [self._landings[piece].rows.layer for piece in wanted]
        if layers == list(range(len(layers))) and layers:
            span = ("BATCH", 0, link.read, len(layers))
            self._add(index, wanted, sid, *span)
            return
        for piece, layer in zip(wanted, layers, strict=True):
            self._add(index, [piece], sid, layer, "RANGE", 0, link.read)

    def _add(self, index: int, pieces: list[int], sid: bytes, *span: str | int) -> None:
        def place(element: int, nbytes: int) -> memoryview | None:
            if element >= len(pieces) or self._slots[index, pieces[element]].nbytes != nbytes:
                return None
            if self._landings[0].view is None:
                Landing.open(self._landings)
            return self._slots[index, pieces[element]].view

        self.commands.append(Command.of("V.FETCH", sid, *span, "FMT", "PACKED", place=place))
        self._reads.append((index, pieces))

    def take(self, replies: Sequence[Reply]) -> None:
        """Check that every bulk landed, then every block; raises Miss."""
        for (_, pieces), command, reply in zip(self._reads, self.commands, replies, strict=True):
            if isinstance(reply, ServerError):
                raise Miss("rows", str(reply))
            bulks = reply if "BATCH" in command.words else [reply]
            if not isinstance(bulks, list) or len(bulks) != len(pieces):
                raise Miss("rows", "another number of layers")
            # A bulk of another length, or none, has not landed.
            if not all(isinstance(bulk, memoryview) for bulk in bulks):
                raise Miss("rows", "missing or of another size")
        for index, link in enumerate(self._links):
            views = [self._slots[index, piece].view for piece in range(len(self._landings))]
            expected = link.segment.sums[: ceil_block(link.read) // BLOCK]
            if views and block_sums(views, link.read) != expected:
                raise Miss("checksum", link.name.decode("ascii", "replace"))

    def piece(self, side: str, at: int, rows: Rows) -> RowPiece:
        """Keys or values of a leaf, with the rows of all links."""
        return self._landings[self._leaf[side, at]].piece()


class State:
    """The state at a match's end, if its model has any."""

    def __init__(self, match: Match) -> None:
        last = match.links[-1]
        self._tokens = match.tokens
        self._name = match.asked.state_at(match.tokens)
        self.blobs = [leaf.blob for leaf in last.segment.leaves if leaf.blob is not None]
        self._arrived: dict[int, bytes | bytearray | memoryview] = {}

    def commands(self) -> list[Command]:
        return [Command.of("SSM.PREFIX.FETCH", self._name, blob.layer) for blob in self.blobs]

    def take(self, replies: Sequence[Reply]) -> None:
        """Check every blob; raises Miss."""
        for blob, reply in zip(self.blobs, replies, strict=True):
            if not isinstance(reply, bytes | bytearray | memoryview) or len(reply) != blob.nbytes:
                raise Miss("rows", f"state of leaf {blob.layer} is missing or of another size")
            if xxhash.xxh3_64_hexdigest(reply) != blob.checksum:
                raise Miss("checksum", f"state of leaf {blob.layer}")
            self._arrived[blob.layer] = reply

    def arrays(self, leaf: LeafEntry) -> tuple[mx.array | None, ...]:
        """The arrays of a leaf; raises RebuildError."""
        if leaf.blob is None:
            return ()
        return unpack_arrays(leaf.kind, self._arrived[leaf.blob.layer], self._tokens)
