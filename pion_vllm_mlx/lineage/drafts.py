"""Records ready to be stored: a capture as the segments it is kept in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import xxhash

from pion_server.formats import Format
from pion_vllm_mlx.lineage.blocks import BLOCK
from pion_vllm_mlx.lineage.capture import Capture, HeldRows
from pion_vllm_mlx.lineage.records import (
    Segment,
    State,
    block_sums,
    write_segment,
    write_state,
)
from pion_vllm_mlx.manifest_fields import Blob, LeafEntry, ManifestError, Rows
from pion_vllm_mlx.pieces import pack_rows, row_format
from pion_vllm_mlx.shipment import Unstorable
from pion_vllm_mlx.tier import Tier

#: Rows of one segment of a model of plain attention; what is longer becomes several.
ROWS_A_SEGMENT: Final = 256 * BLOCK


@dataclass(frozen=True, slots=True)
class Packed:
    """One side of a leaf as PACKED bytes of `format`, for V-store layer `layer`."""

    side: str
    layer: int
    format: Format
    data: memoryview


@dataclass(frozen=True, slots=True)
class Draft:
    """A record ready to be stored: its name, manifest, pieces of `rows` rows, and blobs.

    `blobs`: (SSM layer, bytes).
    """

    name: bytes
    manifest: bytes
    rows: int
    pieces: tuple[Packed, ...]
    blobs: tuple[tuple[int, bytes], ...]
    prefill_ms: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of rows and blobs on the wire."""
        return sum(len(p.data) for p in self.pieces) + sum(len(b) for _, b in self.blobs)

    @property
    def stored_bytes(self) -> int:
        """Bytes the server counts for it."""
        rows = sum(piece.format.row_bytes for piece in self.pieces) * self.rows
        return rows + sum(len(blob) for _, blob in self.blobs)


def draft_rows(
    capture: Capture, start: int, parent: str, tier: Tier, prefill_seconds: float
) -> Iterator[Draft]:
    """The segments that hold the rows from `start`, a block end, to the capture's end.

    None if not one whole block is new. `parent`: the digest of the segment before them.
    `prefill_seconds`: how long the tokens from the capture's start on took. Raises Unstorable.
    """
    tokens = capture.tokens
    while tokens - start >= BLOCK:
        end = min(tokens, start + ROWS_A_SEGMENT)
        if 0 < tokens - end < BLOCK:
            end -= BLOCK  # what is left over has a whole block to be named by, too
        digest = capture.asked.digest_after(start)
        share = (end - start) / max(1, tokens - capture.start)
        draft = _Draft(capture, start, end, tier)
        name, milliseconds = capture.asked.segment_at(start), round(1000 * prefill_seconds * share)
        yield draft.sealed(name, digest.hex(), parent, milliseconds)
        parent, start = digest.hex(), end


def draft_state(
    capture: Capture, parent: str, tier: Tier, prefill_seconds: float, *, traced: bool
) -> Iterator[Draft]:
    """The state of a capture, the one segment that holds its rows and, unless `traced`, its trace.

    In this order: a segment that is there had its state. Raises Unstorable.
    """
    asked, start, end = capture.asked, capture.start, capture.tokens
    digest = asked.digest_at(end).hex()
    draft = _Draft(capture, start, end, tier)
    yield draft_end(capture)
    yield draft.sealed(asked.checkpoint_at(end), digest, parent, round(1000 * prefill_seconds))
    if not traced:
        ids, first = tuple(asked.ids[start:end].tolist()), asked.digest_after(start).hex()
        trace = Segment(first, digest, "", start, ids, capture.fingerprint)
        yield Draft(asked.trace_at(start), _write(trace), len(ids), (), ())


def draft_end(capture: Capture) -> Draft:
    """The state at a capture's end alone. Raises Unstorable."""
    asked, end = capture.asked, capture.tokens
    state = State(asked.digest_at(end).hex(), capture.fingerprint, capture.anchor)
    leaves = enumerate(capture.leaves)
    blobs = tuple((at, leaf.blob) for at, leaf in leaves if leaf.blob is not None)
    return Draft(asked.state_at(end), _write(state), 0, (), blobs)


class _Draft:
    """A span of a capture's tokens, packed."""

    def __init__(self, capture: Capture, start: int, end: int, tier: Tier) -> None:
        self._capture, self._start, self._end = capture, start, end
        held = [rows for leaf in capture.leaves for rows in leaf.rows.values()]
        layers = 1 + max((rows.layer for rows in held), default=0)
        rows = slice(start - capture.start, end - capture.start)
        self._leaves: list[LeafEntry] = []
        self._pieces: list[Packed] = []
        self._lossless = True
        for index, leaf in enumerate(capture.leaves):
            sides: dict[str, Rows] = {}
            for side, each in leaf.rows.items():
                if rows.stop > rows.start:
                    piece, sides[side] = _pack(side, each, rows, layers, tier)
                    self._pieces.append(piece)
                    self._lossless &= piece.format.name == each.layout.store_format
            blob = None
            if leaf.blob is not None:
                blob = Blob(index, len(leaf.blob), xxhash.xxh3_64_hexdigest(leaf.blob))
            keys, values = sides.get("keys"), sides.get("values")
            self._leaves.append(LeafEntry(leaf.path, leaf.kind, leaf.meta, keys, values, blob))
        self._pieces.sort(key=lambda piece: (piece.side, piece.layer))

    def sealed(self, name: bytes, digest: str, parent: str, prefill_ms: int) -> Draft:
        """The record, with its manifest."""
        capture, start, end = self._capture, self._start, self._end
        first, last = ((at - capture.start) // BLOCK for at in (start, end))
        base = capture.trail_at(start)
        if base is None:
            raise ValueError(f"nothing is known of token {start}")
        segment = Segment(
            digest=digest,
            parent=parent,
            base=base,
            start=start,
            ids=tuple(capture.asked.ids[start:end].tolist()),
            fingerprint=capture.fingerprint,
            leaves=tuple(self._leaves),
            sums=self._sums(),
            trail=capture.trail[first:last],
            prefill_ms=prefill_ms,
            prefill_step=capture.prefill_step,
        )
        return Draft(name, _write(segment), end - start, tuple(self._pieces), (), prefill_ms)

    def _sums(self) -> tuple[str, ...]:
        if not self._pieces:
            return ()
        rows = self._end - self._start
        if self._lossless:  # stored as they are, they have the checksums they had
            first = (self._start - self._capture.start) // BLOCK
            return self._capture.sums[first : first + -(-rows // BLOCK)]
        return block_sums([piece.data for piece in self._pieces], rows)


def _pack(side: str, held: HeldRows, rows: slice, layers: int, tier: Tier) -> tuple[Packed, Rows]:
    layout, width = held.layout, held.layout.row_bytes
    store = tier.store_for(side, held.layer, layers, layout)
    data, count = held.data[rows.start * width : rows.stop * width], rows.stop - rows.start
    try:
        fmt = row_format(store, layout)
        if fmt.name != layout.store_format:
            data = pack_rows([data], layout, count, fmt)
    except ValueError as error:
        raise Unstorable(str(error)) from error
    return Packed(side, held.layer, fmt, data), Rows(held.layer, count, layout, store, "")


def _write(record: Segment | State) -> bytes:
    try:
        return write_segment(record) if isinstance(record, Segment) else write_state(record)
    except (ManifestError, TypeError) as error:
        raise Unstorable(str(error)) from error
