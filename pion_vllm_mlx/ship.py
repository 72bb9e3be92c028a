"""Storing a prefix: one fill, of no more than the server lacks.

What it has already is not sent again: nothing of a prefix that another client stored meanwhile, and
of one that extends the prefix stored under its name only the new rows, where the old ones are the
same bits.
"""

from __future__ import annotations

import contextlib
import enum
import time
from dataclasses import dataclass
from typing import Final

import xxhash

from pion_patches.pieces import RowLayout
from pion_vllm_mlx.fill import SHORT, Fill, StoreFailed, begin
from pion_vllm_mlx.manifest import Manifest, ManifestError, Rows, mismatch, read_manifest
from pion_vllm_mlx.shipment import Piece, Shipment
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import Command, Lane, Reply

#: Bytes in one pipeline: after so many the replies are looked at, or a refusal comes too late.
_BATCH: Final = 128 << 20
#: Seconds of encoding after which what is ready is sent: a fill is a lease that writes renew.
_LONGEST_SILENCE: Final = 5.0


class Outcome(enum.Enum):
    """How a store ended that did not fail."""

    STORED = "stored"
    PRESENT = "present"
    """The very prefix is there, in formats the tier takes."""
    BUSY = "busy"
    """Another client is filling this namespace right now."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """How a store ended, and the bytes of rows and blobs it sent."""

    outcome: Outcome
    nbytes: int = 0


def store_prefix(
    lane: Lane, namespace: bytes, shipment: Shipment, *, tier: Tier | None = None, damaged: int = 0
) -> Receipt:
    """Store a prefix, or as much of it as the server lacks.

    `tier`: whose formats count as the same prefix; None stores even what is there. `damaged`: the
    generation of a manifest whose rows proved to be others; nothing of it is relied on.

    Raises StoreFailed when the server refuses a piece, Unstorable for numbers a format cannot hold,
    TransportError when the server is gone. In each case the manifest is not there, so nobody takes
    the half for the whole.
    """
    if tier is not None:
        stored = _read(lane.exchange([_get(namespace)], SHORT)[0], damaged)
        if _is_present(stored, shipment, tier):
            return Receipt(Outcome.PRESENT)
    try:
        return _store(lane, namespace, shipment, damaged)
    except _BaseGone:
        return _store(lane, namespace, shipment, damaged)  # whole: BEGIN took the base's manifest


class _BaseGone(StoreFailed):
    """The stored prefix that was being extended was dropped or evicted meanwhile."""


def _store(lane: Lane, namespace: bytes, shipment: Shipment, damaged: int) -> Receipt:
    # Read again right before BEGIN removes it: another client may have stored this meanwhile, and
    # then no row has to be sent.
    found, begun = lane.exchange([_get(namespace), begin(namespace)], SHORT)
    with Fill(lane, namespace, begun, shipment.nbytes) as fill:
        if not fill.is_mine:
            return Receipt(Outcome.BUSY)
        stored = _read(found, damaged)
        base = stored if _extends(stored, shipment) else None
        try:
            return Receipt(Outcome.STORED, _write(fill, shipment, base))
        except StoreFailed as failure:
            if base is not None and failure.code == "STALE":
                raise _BaseGone(failure.code, str(failure)) from failure
            raise


def _read(reply: Reply, damaged: int) -> Manifest | None:
    """The manifest META GET answered; what is none, or is known to lie, counts as none."""
    match reply:
        case [int() as gen, bytes() | bytearray() | memoryview() as blob] if gen != damaged:
            with contextlib.suppress(ManifestError):
                return read_manifest(blob)
    return None


def _is_present(manifest: Manifest | None, shipment: Shipment, tier: Tier) -> bool:
    draft = shipment.draft
    return (
        manifest is not None
        and mismatch(manifest, draft.ids, draft.fingerprint) is None
        and tier.refused(manifest) is None
    )


def _extends(manifest: Manifest | None, shipment: Shipment) -> bool:
    """Whether the stored prefix is a beginning of this one, in the very same places and formats."""
    draft = shipment.draft
    if manifest is None or manifest.fingerprint != draft.fingerprint:
        return False
    if manifest.ids != draft.ids[: len(manifest.ids)]:
        return False
    return _places(manifest) == _places(draft)


def _places(manifest: Manifest) -> dict[tuple[str, int], tuple[str, RowLayout]]:
    return {(side, rows.layer): (rows.store, rows.layout) for side, rows in manifest.pieces()}


def _write(fill: Fill, shipment: Shipment, base: Manifest | None) -> int:
    """Write what is new, then the manifest; the bytes of rows and blobs sent."""
    kept = {} if base is None else {(side, rows.layer): rows for side, rows in base.pieces()}
    if shipment.pieces and base is None:
        # Not for an extension: of a session evicted meanwhile it must not make an empty one.
        fill.write([fill.register(shipment.pieces, shipment.prefill_ms)])
    sent, waiting, checksums = 0, 0, {}
    commands: list[Command] = []
    wrote_at = time.monotonic()
    for piece in shipment.pieces:
        if piece.place in kept or not piece.rows:
            data = piece.pack()
            start, checksums[piece.place] = _compare(data, piece, kept.get(piece.place))
            commands += fill.rows(piece, data, start)
        else:
            # Packed while the pieces before it are on their way.
            start = 0
            commands += fill.rows_later(piece, piece.rows, _Packing(piece, checksums).take)
        waiting += (piece.rows - start) * piece.format.packed_row_bytes
        if waiting >= _BATCH or time.monotonic() - wrote_at > _LONGEST_SILENCE:
            fill.write(commands)
            sent, waiting, commands = sent + waiting, 0, []
            wrote_at = time.monotonic()
    fill.write([*commands, *fill.blobs(shipment.blobs)])
    fill.seal(shipment.manifest(checksums))
    return sent + waiting + sum(len(blob) for _, blob in shipment.blobs)


class _Packing:
    """The rows of one piece, packed when the first of them are sent and let go with the last."""

    def __init__(self, piece: Piece, checksums: dict[tuple[str, int], str]) -> None:
        """`checksums`: gets the piece's once that is known."""
        self._piece = piece
        self._checksums = checksums
        self._data = memoryview(b"")

    def take(self, start: int, end: int) -> memoryview:
        """Rows `[start, end)`; raises Unstorable."""
        piece = self._piece
        if start == 0:
            self._data = piece.pack()
            self._checksums[piece.place] = _compare(self._data, piece, None)[1]
        width = piece.format.packed_row_bytes
        taken = self._data[start * width : end * width]
        if end == piece.rows:
            self._data = memoryview(b"")
        return taken


def _compare(data: memoryview, piece: Piece, kept: Rows | None) -> tuple[int, str]:
    """The first row that has to be sent, and the checksum of all; both in one pass."""
    hasher = xxhash.xxh3_64()
    start = 0
    if kept is not None and kept.count <= piece.rows:
        split = kept.count * piece.format.packed_row_bytes
        hasher.update(data[:split])
        # The same bits, or the new prefix was computed in other chunks, say, and differs a little.
        start = kept.count if hasher.hexdigest() == kept.checksum else 0
        data = data[split:]
    hasher.update(data)
    return start, hasher.hexdigest()


def _get(namespace: bytes) -> Command:
    return Command.of("KV.PREFIX.META", namespace, "GET")
