"""What of a live prompt cache is worth storing, as bytes any thread may send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from pion_patches.cache_class import class_named
from pion_patches.cache_rebuild import Leaf, dismantle
from pion_patches.containers import pack_arrays
from pion_patches.folding import fold_rows
from pion_patches.hybrid import MOST_LAYERS, WIDEST_ROW
from pion_patches.pieces import RowLayout
from pion_vllm_mlx.lineage.blocks import BLOCK
from pion_vllm_mlx.lineage.match import Asked, Mark
from pion_vllm_mlx.lineage.records import block_sums, next_trail
from pion_vllm_mlx.shipment import Unstorable


class Foreign(Exception):
    """The cache was not computed from the rows that were seen before: it is of another run."""


@dataclass(frozen=True, slots=True)
class HeldRows:
    """One side of an attention leaf: `count` rows of `layout` in V-store layer `layer`."""

    layer: int
    layout: RowLayout
    data: memoryview
    count: int

    def without(self, rows: int) -> HeldRows | None:
        """The same but for the first `rows`; None if that is all."""
        data = self.data[rows * self.layout.row_bytes :]
        return HeldRows(self.layer, self.layout, data, self.count - rows) if data else None


@dataclass(frozen=True, slots=True)
class HeldLeaf:
    """One cache: rows by side ("keys", "values"), or state as a blob."""

    path: tuple[int, ...]
    kind: str
    meta: dict[str, Any]
    rows: dict[str, HeldRows]
    blob: bytes | None = None

    def without(self, rows: int) -> HeldLeaf:
        """The same leaf but for its first rows."""
        left = {side: held.without(rows) for side, held in self.rows.items()}
        kept = {side: held for side, held in left.items() if held is not None}
        return HeldLeaf(self.path, self.kind, self.meta, kept, self.blob)


@dataclass(frozen=True)
class Capture:
    """A prefix of `len(asked.ids)` tokens: rows from token `start` on, and state at its end.

    `base`, `trail`: see `Segment`. `sums`: checksums of the blocks of all rows, as the model has
    them. `stateful`: it has state, so it is one segment, restored as a whole.
    """

    asked: Asked
    fingerprint: str
    start: int
    base: str
    leaves: tuple[HeldLeaf, ...]
    sums: tuple[str, ...]
    trail: tuple[str, ...]
    stateful: bool
    prefill_step: int
    #: Other conversations are expected to begin with these tokens.
    anchor: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the whole prefix."""
        return len(self.asked.ids)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        rows = sum(len(r.data) for leaf in self.leaves for r in leaf.rows.values())
        return rows + sum(len(leaf.blob) for leaf in self.leaves if leaf.blob is not None)

    def trail_at(self, tokens: int) -> str | None:
        """The trail at a block end of what was captured; None elsewhere."""
        if tokens == self.start:
            return self.base
        block = (tokens - self.start) // BLOCK
        return self.trail[block - 1] if 0 < block <= len(self.trail) else None

    def ends(self) -> Iterator[tuple[int, Mark]]:
        """The block ends a computation may go on from, each with its mark."""
        sums = self.sums or ("",) * len(self.trail)
        whole = len(self.trail)
        for block in range(whole - 1 if self.stateful else 0, whole):
            yield self.start + (block + 1) * BLOCK, Mark(self.trail[block], sums[block])


def capture_cache(
    cache: Sequence[Any],
    asked: Asked,
    fingerprint: str,
    begun: tuple[int, Mark],
    prefill_step: int,
) -> Capture:
    """Copy rows and all other state, in the thread that runs the model.

    `begun`: from which token on, a block end, and the mark there. Raises Foreign if the cache is
    not of that computation, UnsupportedCache, or Unstorable for rows the V-store has no place for.
    """
    start, mark = begun
    # One block more is read where it can be compared with the one that was seen before.
    overlap = BLOCK if start and mark.sum else 0
    image = dismantle(cache, len(asked.ids), start - overlap)
    leaves: list[HeldLeaf] = []
    layers, stateful = 0, False
    for index, leaf in enumerate(image.leaves):
        if class_named(leaf.kind, leaf.path).route != "kv":
            leaves.append(_state(leaf, image.tokens))
            stateful = True
            continue
        rows = {
            side: HeldRows(layers, piece.layout, piece.to_bytes(), piece.rows)
            for side, piece in (("keys", leaf.keys), ("values", leaf.values))
            if piece is not None
        }
        layers += not leaf.meta.get("unused")
        _check(index, rows, layers)
        leaves.append(HeldLeaf(leaf.path, leaf.kind, leaf.meta, rows))
    held = [(side, rows) for leaf in leaves for side, rows in leaf.rows.items()]
    held.sort(key=lambda pair: (pair[0], pair[1].layer))
    tokens = len(asked.ids)
    sums = block_sums([r.data for _, r in held], tokens - start + overlap) if held else ()
    if overlap and sums and sums[0] != mark.sum:
        raise Foreign(f"other rows before token {start}")
    kept = tuple(leaf.without(overlap) for leaf in leaves)
    sums = sums[overlap // BLOCK :]
    trail = _trail(kept, sums, tokens - start, mark.trail)
    return Capture(asked, fingerprint, start, mark.trail, kept, sums, trail, stateful, prefill_step)


def _trail(
    leaves: Sequence[HeldLeaf], sums: Sequence[str], rows: int, base: str
) -> tuple[str, ...]:
    """The trail at the end of each whole block."""
    trail = []
    for block in range(rows // BLOCK):
        base = next_trail(base, *sums[block : block + 1])
        trail.append(base)
    blobs = [xxhash.xxh3_64_hexdigest(leaf.blob) for leaf in leaves if leaf.blob is not None]
    if blobs and trail:
        trail[-1] = next_trail(trail[-1], *blobs)
    return tuple(trail)


def _state(leaf: Leaf, tokens: int) -> HeldLeaf:
    """Recurrent arrays, and the rows of a window or a chunk, which exist at this token only."""
    if leaf.keys is not None or leaf.values is not None:
        leaf = fold_rows(leaf)
    blob = pack_arrays(leaf.kind, leaf.arrays, tokens) if leaf.arrays else None
    return HeldLeaf(leaf.path, leaf.kind, leaf.meta, {}, blob)


def _check(index: int, rows: dict[str, HeldRows], layers: int) -> None:
    widths = [held.layout.store_dim for held in rows.values()]
    if layers > MOST_LAYERS or any(width > WIDEST_ROW for width in widths):
        raise Unstorable(f"leaf {index}: {layers} layers, rows of {widths}")
