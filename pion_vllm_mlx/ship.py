"""Storing a prefix: what goes where, then a fill that readers see whole or not at all.

    META BEGIN → REGISTER → rows and blobs, each with the fill's generation → META SET

The manifest is written last and only after every piece was acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from pion_patches.cache_rebuild import CacheImage, RowPiece
from pion_patches.containers import pack_arrays
from pion_patches.hybrid import fit_to_store
from pion_server.formats import Format
from pion_vllm_mlx.manifest import Blob, LeafEntry, Manifest, ManifestError, Rows, write_manifest
from pion_vllm_mlx.pieces import pack_piece, row_format
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import Command, Lane, Patience, ProtocolError, ServerError

ROWS_A_COMMAND: Final = 4096
#: A fill opens with one small record in the log, behind the writes of others at most.
_SHORT: Final = Patience(first_byte=2, stall=2, total=5)
#: Bytes a second that a server, its disk and the way there manage even on a bad day.
_SLOWEST: Final = 4 << 20


class Unstorable(Exception):
    """A prefix the server has no place for: too wide, too many layers, too large a manifest."""


class StoreFailed(Exception):
    """The server took the connection but not the prefix; `code` is its error's first word."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Piece:
    """One side of a leaf, ready to be stored."""

    side: str
    layer: int
    format: Format
    rows: int
    data: memoryview

    @property
    def spec(self) -> str:
        """The layer's specification in a schema."""
        return f"fmt={self.format.name},dim={self.format.dim}"


@dataclass(frozen=True, slots=True)
class Shipment:
    """A prefix as pieces, blobs and the manifest that lists them."""

    manifest: bytes
    pieces: tuple[Piece, ...]
    blobs: tuple[tuple[int, bytes], ...]
    prefill_ms: int

    @property
    def nbytes(self) -> int:
        """Bytes that cross the wire as rows and blobs."""
        return sum(len(piece.data) for piece in self.pieces) + sum(
            len(blob) for _, blob in self.blobs
        )


def pack_prefix(
    image: CacheImage,
    ids: Sequence[int],
    fingerprint: str,
    tier: Tier,
    *,
    prefill_ms: int,
    prefill_step: int,
) -> Shipment:
    """Encode a cache image for the server. Raises Unstorable where it has no place for it."""
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
                piece, sides[side] = _pack_rows(side, layer, layers, rows, tier)
                pieces.append(piece)
        layer += leaf.keys is not None or leaf.values is not None
        blob = None
        if leaf.arrays:
            data = pack_arrays(leaf.kind, leaf.arrays, image.tokens)
            blobs.append((index, data))
            blob = Blob(index, len(data), xxhash.xxh3_64_hexdigest(data))
        entries.append(LeafEntry(leaf.path, leaf.kind, leaf.meta, **sides, blob=blob))
    manifest = Manifest(tuple(ids), fingerprint, tuple(entries), prefill_ms, prefill_step)
    try:
        return Shipment(write_manifest(manifest), tuple(pieces), tuple(blobs), prefill_ms)
    except (ManifestError, TypeError) as error:
        raise Unstorable(str(error)) from error


def _pack_rows(
    side: str, layer: int, layers: int, rows: RowPiece, tier: Tier
) -> tuple[Piece, Rows]:
    layout = rows.layout
    store = tier.store_for(side, layer, layers, layout)
    try:
        fmt = row_format(store, layout)
    except ValueError as error:
        raise Unstorable(str(error)) from error
    data = pack_piece(rows, fmt)
    entry = Rows(layer, rows.rows, layout, store, xxhash.xxh3_64_hexdigest(data))
    return Piece(side, layer, fmt, rows.rows, data), entry


def store_prefix(lane: Lane, namespace: bytes, shipment: Shipment) -> bool:
    """Store a whole prefix; False if another client is filling this namespace right now.

    Raises StoreFailed when the server refuses a piece, TransportError when it is gone. Either way
    the manifest is not there, so nobody takes the half for the whole.
    """
    patience = _patience_for(shipment.nbytes)
    (gen,) = lane.exchange([Command.of("KV.PREFIX.META", namespace, "BEGIN")], _SHORT)
    if gen == 0:
        return False
    if isinstance(gen, ServerError):
        raise StoreFailed(gen.code, str(gen))
    if not isinstance(gen, int) or gen < 0:
        raise ProtocolError("META BEGIN answers an integer")
    try:
        if shipment.pieces:
            _expect_ok(lane, [_register(namespace, shipment)], patience)
        writes = (*_rows(namespace, gen, shipment), *_blobs(namespace, gen, shipment))
        _expect_ok(lane, writes, patience)
        manifest = Command.of("KV.PREFIX.META", namespace, "SET", gen, shipment.manifest)
        _expect_ok(lane, [manifest], patience)
    except StoreFailed:
        abort = Command.of("KV.PREFIX.META", namespace, "ABORT", gen)
        lane.exchange([abort], _SHORT, retry=False)
        raise
    return True


def _register(namespace: bytes, shipment: Shipment) -> Command:
    """REGISTER where all pieces are of one width and format, else REGISTER.SCHEMA."""
    measured = ("PREFILL_MS", shipment.prefill_ms) if shipment.prefill_ms > 0 else ()
    first = shipment.pieces[0]
    layers = 1 + max(piece.layer for piece in shipment.pieces)
    if len({piece.spec for piece in shipment.pieces}) == 1 and len(shipment.pieces) == 2 * layers:
        uniform = ("KV.PREFIX.REGISTER", namespace, first.format.dim, first.format.name)
        return Command.of(*uniform, *measured)
    sides = {}
    for side in ("keys", "values"):
        # A leaf may have one side only; its layer is declared on the other and stays empty.
        sides[side] = ["fmt=raw,dim=1"] * layers
    for piece in shipment.pieces:
        sides[piece.side][piece.layer] = piece.spec
    specs = (*sides["keys"], *sides["values"])
    return Command.of("KV.PREFIX.REGISTER.SCHEMA", namespace, layers, *specs, *measured)


def _rows(namespace: bytes, gen: int, shipment: Shipment) -> Iterator[Command]:
    for piece in shipment.pieces:
        sid = session_id(namespace, piece.side)
        width = piece.format.packed_row_bytes
        for start in range(0, piece.rows, ROWS_A_COMMAND):
            count = min(ROWS_A_COMMAND, piece.rows - start)
            blob = piece.data[start * width : (start + count) * width]
            yield Command.of(
                "V.STOREBATCH", sid, piece.layer, start, count, blob, "FMT", "PACKED", "GEN", gen
            )


def _blobs(namespace: bytes, gen: int, shipment: Shipment) -> Iterator[Command]:
    for index, blob in shipment.blobs:
        yield Command.of("SSM.PREFIX.STORE", namespace, index, blob, "GEN", gen)


def session_id(namespace: bytes, side: str) -> bytes:
    """The V-store session of a namespace's side."""
    return namespace + (b"_pk" if side == "keys" else b"_pv")


def _expect_ok(lane: Lane, commands: Sequence[Command], patience: Patience) -> None:
    for reply in lane.exchange(commands, patience, retry=False):
        if isinstance(reply, ServerError):
            raise StoreFailed(reply.code, str(reply))
        if reply != "OK":
            raise ProtocolError("a store is answered by OK")


def _patience_for(nbytes: int) -> Patience:
    """Writes wait for a disk: seconds, and more for more bytes."""
    scaled = nbytes / _SLOWEST
    return Patience(first_byte=10 + scaled, stall=10, total=30 + 2 * scaled)
