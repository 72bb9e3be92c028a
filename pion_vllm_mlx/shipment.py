"""What is stored of a prefix: pieces, blobs, and the manifest that lists them.

    shipment = pack_prefix(image, ids, fingerprint, tier, …)   # in the thread that has the image
    store_prefix(lane, namespace, shipment)                    # in any thread

A shipment is bytes in MLX's own memory: making one costs no copy of rows, and encoding happens
piece by piece while it is sent, without MLX. The first pieces may be on their way before the last
ones are evaluated.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from pion_patches.cache_rebuild import CacheImage, RowPiece
from pion_patches.containers import pack_arrays
from pion_patches.hybrid import fit_to_store
from pion_patches.pieces import RowLayout
from pion_server.formats import Format
from pion_vllm_mlx.manifest import Blob, LeafEntry, Manifest, ManifestError, Rows, write_manifest
from pion_vllm_mlx.pieces import pack_rows, row_format
from pion_vllm_mlx.tier import Tier

_UNKNOWN: Final = "0" * 16


class Unstorable(Exception):
    """A prefix the server has no place for: too wide, too many layers, too large a manifest."""


class Arriving:
    """The bytes of one piece's parts, which another thread may wait for."""

    def __init__(self, rows: RowPiece) -> None:
        self._rows = rows
        self._views: tuple[memoryview, ...] = ()
        self._settled = threading.Event()

    def evaluate(self) -> None:
        """Have them computed, in the thread whose arrays they are."""
        if not self._settled.is_set():
            self._views = self._rows.views()
            self._settled.set()

    def give_up(self) -> None:
        """Whoever waits does so in vain, unless they are there."""
        self._settled.set()

    def await_bytes(self) -> tuple[memoryview, ...]:
        """The bytes, once they are there; raises ValueError if they never will be."""
        self._settled.wait()
        if not self._views:
            raise ValueError("its numbers could not be computed")
        return self._views


@dataclass(frozen=True, slots=True)
class Piece:
    """One side of a leaf: its rows as the model has them, and the format they are stored in."""

    side: str
    layer: int
    format: Format
    layout: RowLayout
    rows: int
    views: Arriving

    @property
    def place(self) -> tuple[str, int]:
        """Side and layer, of which there is one piece each."""
        return self.side, self.layer

    @property
    def nbytes(self) -> int:
        """Bytes of all rows on the wire."""
        return self.rows * self.format.packed_row_bytes

    def pack(self) -> memoryview:
        """All rows as PACKED bytes; raises Unstorable for numbers the format would change."""
        try:
            return pack_rows(self.views.await_bytes(), self.layout, self.rows, self.format)
        except ValueError as error:
            raise Unstorable(str(error)) from error


@dataclass(frozen=True, slots=True)
class Shipment:
    """A prefix as pieces, blobs (SSM layer, bytes) and a manifest that lacks the checksums."""

    draft: Manifest
    pieces: tuple[Piece, ...]
    blobs: tuple[tuple[int, bytes], ...]

    @property
    def nbytes(self) -> int:
        """Bytes that cross the wire as rows and blobs when everything is stored."""
        return sum(piece.nbytes for piece in self.pieces) + sum(len(blob) for _, blob in self.blobs)

    def evaluate(self) -> None:
        """Have all rows computed, in order, in the thread whose arrays they are."""
        try:
            for piece in self.pieces:
                piece.views.evaluate()
        finally:
            for piece in self.pieces:
                piece.views.give_up()

    @property
    def prefill_ms(self) -> int:
        """How long the cold prefill took; 0: unknown."""
        return self.draft.prefill_ms

    def manifest(self, checksums: Mapping[tuple[str, int], str]) -> bytes:
        """The manifest, given each piece's checksum by its place."""

        def checked(side: str, rows: Rows | None) -> Rows | None:
            if rows is None:
                return None
            return dataclasses.replace(rows, checksum=checksums[side, rows.layer])

        leaves = tuple(
            dataclasses.replace(
                leaf, keys=checked("keys", leaf.keys), values=checked("values", leaf.values)
            )
            for leaf in self.draft.leaves
        )
        return write_manifest(dataclasses.replace(self.draft, leaves=leaves))


def pack_prefix(
    image: CacheImage,
    ids: Sequence[int],
    fingerprint: str,
    tier: Tier,
    *,
    prefill_ms: int,
    prefill_step: int,
    wait: bool = True,
) -> Shipment:
    """Take a cache image apart for the server. Raises Unstorable where it has no place for it.

    Without `wait` the rows are still to be computed, by `Shipment.evaluate` in this very thread.
    """
    image = fit_to_store(image)
    layers = sum(1 for leaf in image.leaves if leaf.keys is not None or leaf.values is not None)
    pieces: list[Piece] = []
    blobs: list[tuple[int, bytes]] = []
    entries = []
    layer = 0
    for index, leaf in enumerate(image.leaves):
        sides: dict[str, Rows | None] = {}
        for side, rows in (("keys", leaf.keys), ("values", leaf.values)):
            sides[side] = None
            if rows is not None:
                piece, sides[side] = _piece(side, layer, layers, rows, tier)
                pieces.append(piece)
        layer += leaf.keys is not None or leaf.values is not None
        blob = None
        if leaf.arrays:
            data = pack_arrays(leaf.kind, leaf.arrays, image.tokens)
            blobs.append((index, data))
            blob = Blob(index, len(data), xxhash.xxh3_64_hexdigest(data))
        entries.append(LeafEntry(leaf.path, leaf.kind, leaf.meta, **sides, blob=blob))
    draft = Manifest(tuple(ids), fingerprint, tuple(entries), prefill_ms, prefill_step)
    try:
        write_manifest(draft)  # as long as the one with the checksums
    except (ManifestError, TypeError) as error:
        raise Unstorable(str(error)) from error
    shipment = Shipment(draft, tuple(pieces), tuple(blobs))
    if wait:
        shipment.evaluate()
    return shipment


def _piece(side: str, layer: int, layers: int, rows: RowPiece, tier: Tier) -> tuple[Piece, Rows]:
    layout = rows.layout
    store = tier.store_for(side, layer, layers, layout)
    try:
        fmt = row_format(store, layout)
    except ValueError as error:
        raise Unstorable(str(error)) from error
    entry = Rows(layer, rows.rows, layout, store, _UNKNOWN)
    return Piece(side, layer, fmt, layout, rows.rows, Arriving(rows)), entry
