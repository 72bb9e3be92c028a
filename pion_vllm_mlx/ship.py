"""Storing a prefix: a fill that readers see whole or not at all.

    META GET → META BEGIN → REGISTER → rows and blobs, each with the fill's generation → META SET

The manifest is written last and only after every piece was acknowledged. What the server has
already is not sent again: nothing of a prefix that another client stored meanwhile, and of one that
extends the prefix stored under its name only the new rows, where the old ones are the same bits.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from pion_patches.pieces import RowLayout
from pion_vllm_mlx.manifest import Manifest, ManifestError, Rows, mismatch, read_manifest
from pion_vllm_mlx.shipment import Piece, Shipment
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import (
    Command,
    Lane,
    Patience,
    ProtocolError,
    Reply,
    ServerError,
    TransportError,
)

ROWS_A_COMMAND: Final = 4096
#: Packed bytes held at once: the replies to so many are awaited before more are encoded.
_BATCH: Final = 32 << 20
#: A fill opens with one small record in the log, behind the writes of others at most.
_SHORT: Final = Patience(first_byte=2, stall=2, total=5)
#: Bytes a second that a server, its disk and the way there manage even on a bad day.
_SLOWEST: Final = 4 << 20


class StoreFailed(Exception):
    """The server took the connection but not the prefix; `code` is its error's first word."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


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
        stored = _read(lane.exchange([_get(namespace)], _SHORT)[0], damaged)
        if _is_present(stored, shipment, tier):
            return Receipt(Outcome.PRESENT)
    # Read again right before BEGIN removes it: another client may have stored this meanwhile, and
    # then no row has to be sent.
    found, gen = lane.exchange([_get(namespace), _begin(namespace)], _SHORT)
    if gen == 0:
        return Receipt(Outcome.BUSY)
    if isinstance(gen, ServerError):
        raise StoreFailed(gen.code, str(gen))
    if not isinstance(gen, int) or gen < 0:
        raise ProtocolError("META BEGIN answers an integer")
    stored = _read(found, damaged)
    base = stored if _extends(stored, shipment) else None
    try:
        return Receipt(Outcome.STORED, _fill(lane, namespace, gen, shipment, base))
    except TransportError:
        raise  # the fill ends with the connection
    except Exception:
        abort = Command.of("KV.PREFIX.META", namespace, "ABORT", gen)
        with contextlib.suppress(TransportError):
            lane.exchange([abort], _SHORT, retry=False)
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


def _fill(lane: Lane, namespace: bytes, gen: int, shipment: Shipment, base: Manifest | None) -> int:
    """Write what is new, then the manifest; the bytes of rows and blobs sent."""
    patience = _patience_for(shipment.nbytes)
    kept = {} if base is None else {(side, r.layer): r for side, r in base.pieces()}
    if shipment.pieces and base is None:
        # Not for an extension: of a session evicted meanwhile it must not make an empty one.
        _expect_ok(lane, [_register(namespace, shipment)], patience)
    sent, checksums = 0, {}
    commands: list[Command] = []
    waiting = 0
    for piece in shipment.pieces:
        data = piece.pack()
        start, checksums[piece.place] = _compare(data, piece, kept.get(piece.place))
        commands += _rows(namespace, gen, piece, data, start)
        waiting += len(data) - start * piece.format.packed_row_bytes
        if waiting >= _BATCH:
            _expect_ok(lane, commands, patience)
            sent, waiting, commands = sent + waiting, 0, []
    commands += _blobs(namespace, gen, shipment)
    waiting += sum(len(blob) for _, blob in shipment.blobs)
    if commands:
        _expect_ok(lane, commands, patience)
    manifest = shipment.manifest(checksums)
    _expect_ok(lane, [Command.of("KV.PREFIX.META", namespace, "SET", gen, manifest)], patience)
    return sent + waiting


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


def _begin(namespace: bytes) -> Command:
    return Command.of("KV.PREFIX.META", namespace, "BEGIN")


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


def _rows(
    namespace: bytes, gen: int, piece: Piece, data: memoryview, first: int
) -> Iterator[Command]:
    sid = session_id(namespace, piece.side)
    width = piece.format.packed_row_bytes
    for start in range(first, piece.rows, ROWS_A_COMMAND):
        count = min(ROWS_A_COMMAND, piece.rows - start)
        blob = data[start * width : (start + count) * width]
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
