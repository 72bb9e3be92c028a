"""What a conversation is kept in: segments, each a record of its own with a manifest.

Of a model whose layers are all plain attention a segment holds rows of tokens `[start, end)`, and
any part of it can be restored. Of a model that has other state, too, it holds the rows since the
checkpoint it was computed from, and says what the state at its end is. That state is a record of
its own: where it is gone, what comes after still rests on the rows, and only there it cannot be
resumed. Beside them lies a trace, the token ids alone: it shows where a conversation leaves another
between two checkpoints.

A segment rests on exactly those rows its computation began with. Another run over the same tokens,
in other chunks, say, differs in a few last bits, so each segment names what it rests on by its
trail: a running checksum of everything the model had computed up to there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from pion_vllm_mlx.lineage.blocks import BLOCK
from pion_vllm_mlx.manifest_fields import (
    LAYOUT,
    MOST_LEAVES,
    MOST_TOKENS,
    LeafEntry,
    ManifestError,
    Rows,
    check_places,
    fields_of,
    hex_in,
    ids_in,
    ids_out,
    integer_in,
    leaf_in,
    leaf_out,
    list_in,
    seal,
    text_in,
    unseal,
)

_KIND: Final = "pion-segment"
_STATE_KIND: Final = "pion-state"
_VERSION: Final = 1
_DIGITS: Final = 16
#: Tokens of one segment at most, whose manifest then still fits.
LONGEST: Final = 4096 * BLOCK


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[start, start + len(ids))`; `start` is a multiple of 64.

    `digest`: what it is named by (hex); `parent`: that of the segment before it, or "".
    `base`: the trail it rests on, "" at the start of a prompt; `trail`: the trail at the end of
    each of its whole blocks. `sums`: for each block of 64 rows, the last one maybe shorter, the
    xxh3-64 of its PACKED bytes in all pieces, keys of layer 0, 1, … and then values. All of them
    16 hex digits each. `leaves`: every cache of the model, with rows or a blob; none in a trace.
    `prefill_ms`, `prefill_step`: how long these tokens took to compute, in chunks of how many.
    `gen`: the fill it was read from, which no manifest tells; 0 for one that was not read.
    """

    digest: str
    parent: str
    base: str
    start: int
    ids: tuple[int, ...]
    fingerprint: str
    leaves: tuple[LeafEntry, ...] = ()
    sums: tuple[str, ...] = ()
    trail: tuple[str, ...] = ()
    prefill_ms: int = 0
    prefill_step: int = 1
    gen: int = field(default=0, compare=False)

    @property
    def end(self) -> int:
        """The first token after it."""
        return self.start + len(self.ids)

    def trail_at(self, tokens: int) -> str | None:
        """The trail at a block end from `start` to its own; None elsewhere."""
        if tokens == self.start:
            return self.base
        block, rest = divmod(tokens - self.start, BLOCK)
        return self.trail[block - 1] if not rest and 0 < block <= len(self.trail) else None

    def pieces(self) -> Iterator[tuple[str, int, Rows]]:
        """Side, leaf index and rows of each piece, in the order of the checksums."""
        for side in ("keys", "values"):
            found = [(getattr(leaf, side), at) for at, leaf in enumerate(self.leaves)]
            held = [(rows, at) for rows, at in found if rows is not None]
            for rows, at in sorted(held, key=lambda pair: pair[0].layer):
                yield side, at, rows

    def shape(self) -> list[Any]:
        """What two segments must share to be one prefix: leaves, layers, layouts, formats."""
        leaves = [(leaf.path, leaf.kind) for leaf in self.leaves]
        return [leaves, [(s, at, r.layer, r.layout, r.store) for s, at, r in self.pieces()]]


@dataclass(frozen=True, slots=True)
class State:
    """Says that the state at the end of the segment `digest` is stored, whole.

    Its blobs are those which the segment's leaves describe. `anchor`: other conversations are
    expected to begin with these tokens, so it is worth more than those around it.
    """

    digest: str
    fingerprint: str
    anchor: bool = False


def write_state(state: State) -> bytes:
    """Encode; raises ManifestError."""
    fields = {"digest": state.digest, "model": state.fingerprint, "anchor": state.anchor}
    return seal(_STATE_KIND, _VERSION, fields)


def read_state(blob: bytes | bytearray | memoryview) -> State:
    """Decode and check; raises ManifestError."""
    return unseal(_STATE_KIND, _VERSION, blob, _state_in)


def _state_in(loaded: Any) -> State:
    digest, model, anchor = fields_of(loaded, ("digest", "model", "anchor"))
    if not isinstance(anchor, bool):
        raise ManifestError("an anchor is true or false")
    return State(hex_in(digest, 64), hex_in(model, 64), anchor)


def block_sums(pieces: Sequence[memoryview], rows: int) -> tuple[str, ...]:
    """The checksum of each block of 64 rows over all pieces, each `[rows][row bytes]`."""
    widths = [len(piece) // rows for piece in pieces] if rows else []
    sums = []
    for start in range(0, rows, BLOCK):
        hasher = xxhash.xxh3_64()
        for piece, width in zip(pieces, widths, strict=True):
            hasher.update(piece[start * width : (start + BLOCK) * width])
        sums.append(hasher.hexdigest())
    return tuple(sums)


def next_trail(base: str, *sums: str) -> str:
    """The trail after what these checksums are of."""
    return xxhash.xxh3_64_hexdigest(" ".join((base, *sums)).encode())


def write_segment(segment: Segment) -> bytes:
    """Encode; raises ManifestError."""
    return seal(
        _KIND,
        _VERSION,
        {
            "layout": LAYOUT,
            "digest": segment.digest,
            "parent": segment.parent,
            "base": segment.base,
            "start": segment.start,
            "tokens": len(segment.ids),
            "ids": ids_out(segment.ids),
            "model": segment.fingerprint,
            "leaves": [leaf_out(leaf) for leaf in segment.leaves],
            "sums": "".join(segment.sums),
            "trail": "".join(segment.trail),
            "prefill_ms": segment.prefill_ms,
            "prefill_step": segment.prefill_step,
        },
    )


def read_segment(blob: bytes | bytearray | memoryview) -> Segment:
    """Decode and check what can be checked without the rows; raises ManifestError."""
    return unseal(_KIND, _VERSION, blob, _segment_in)


def _segment_in(loaded: Any) -> Segment:
    names = ("layout", "digest", "parent", "base", "start", "tokens", "ids", "model")
    layout, digest, parent, base, start, tokens, ids, model, *rest = fields_of(
        loaded,
        (*names, "leaves", "sums", "trail", "prefill_ms", "prefill_step"),
    )
    leaves, sums, trail, prefill_ms, prefill_step = rest
    if layout != LAYOUT:
        raise ManifestError("another layout")
    segment = Segment(
        digest=hex_in(digest, 64),
        parent="" if parent == "" else hex_in(parent, 64),
        base="" if base == "" else hex_in(base, _DIGITS),
        start=integer_in(start, 0, MOST_TOKENS),
        ids=ids_in(ids, integer_in(tokens, 1, LONGEST)),
        fingerprint=hex_in(model, 64),
        leaves=tuple(leaf_in(leaf, summed=False) for leaf in list_in(leaves, MOST_LEAVES)),
        sums=_sums_in(sums),
        trail=_sums_in(trail),
        prefill_ms=integer_in(prefill_ms, 0, 86_400_000),
        prefill_step=integer_in(prefill_step, 1, MOST_TOKENS),
    )
    _check(segment)
    return segment


def _check(segment: Segment) -> None:
    check_places(segment.leaves)
    tokens = len(segment.ids)
    if segment.start % BLOCK or tokens < BLOCK:
        raise ManifestError("a segment begins with a whole block")
    if bool(segment.start) != bool(segment.base) and segment.leaves:
        raise ManifestError("only the first segment rests on nothing")
    if any(rows.count != tokens for _, _, rows in segment.pieces()):
        raise ManifestError("rows of another number of tokens")
    blocks = -(-tokens // BLOCK) if any(segment.pieces()) else 0
    if len(segment.sums) != blocks:
        raise ManifestError(f"{len(segment.sums)} checksums of {blocks} blocks")
    if len(segment.trail) != (tokens // BLOCK if segment.leaves else 0):
        raise ManifestError("another number of trails than of whole blocks")


def _sums_in(value: Any) -> tuple[str, ...]:
    if value == "":
        return ()
    text = text_in(value, _DIGITS * (LONGEST // BLOCK))
    if len(text) % _DIGITS or any(digit not in "0123456789abcdef" for digit in text):
        raise ManifestError(f"checksums are {_DIGITS} hex digits each")
    return tuple(text[at : at + _DIGITS] for at in range(0, len(text), _DIGITS))
