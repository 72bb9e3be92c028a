"""Fetching a prefix: the manifest decides, every piece is checked, then a cache image is made.

Two round trips. The first reads the manifest; the second reads every piece and the manifest's
generation again, so that rows of two different fills can never be mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import xxhash

from pion_patches.cache_rebuild import CacheImage, Leaf, RebuildError, RowPiece
from pion_patches.containers import unpack_arrays
from pion_patches.pieces import HeadPiece
from pion_vllm_mlx.fill import session_id
from pion_vllm_mlx.lent import Layout, heads_of
from pion_vllm_mlx.manifest import (
    Blob,
    LeafEntry,
    Manifest,
    ManifestError,
    Rows,
    mismatch,
    read_manifest,
)
from pion_vllm_mlx.pieces import Landing, places_of
from pion_vllm_mlx.rates import Rates
from pion_vllm_mlx.tally import Tally
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import Buffer, Command, Lane, Patience, Reply, ServerError
from pion_vllm_mlx.transport.local import LocalLane, NotLent

#: Bytes a second below which a transfer is given up, however long the prefill took.
_SLOWEST: Final = 1 << 20


class Miss(Exception):
    """The server has no usable prefix; `reason` is one word for the statistics."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Found:
    """A stored prefix that is the one asked for, before any of its rows was read."""

    gen: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Restored:
    """A cache image whose every piece was checked, and its bytes as they came."""

    image: CacheImage
    nbytes: int


def find_prefix(
    lane: Lane,
    namespace: bytes,
    ids: Sequence[int] | int,
    fingerprint: str,
    tier: Tier,
    patience: Patience,
) -> Found:
    """Read and verify the manifest of `namespace` against the ids, or their number.

    Raises Miss or TransportError.
    """
    try:
        found = find_any_prefix(lane, namespace, patience)
    except Miss as miss:
        if miss.reason == "absent":
            # A miss to the server too; one without a manifest must credit no saved time.
            lane.exchange([_lookup(namespace, 0, 0)], patience)
        raise
    check_wanted(found.manifest, ids, fingerprint, tier)
    return found


def find_any_prefix(lane: Lane, namespace: bytes, patience: Patience) -> Found:
    """Read the manifest of `namespace`, whatever it is of; raises Miss or TransportError."""
    return _found(lane.exchange([_get(namespace)], patience)[0])


def _found(reply: Reply) -> Found:
    gen, blob = _meta(reply)
    if blob is None:
        raise Miss("absent")
    try:
        return Found(gen, read_manifest(blob))
    except ManifestError as error:
        raise Miss("manifest", str(error)) from error


def check_wanted(
    manifest: Manifest, ids: Sequence[int] | int, fingerprint: str, tier: Tier
) -> None:
    """Raise Miss unless the manifest is about `ids` (or so many) in formats `tier` takes."""
    reason = mismatch(manifest, ids, fingerprint)
    if reason is not None:
        raise Miss(reason)
    refused = tier.refused(manifest)
    if refused is not None:
        raise Miss("format", f"stored as {refused.store}")


def has_manifest(lane: Lane, namespace: bytes, patience: Patience) -> bool:
    """Whether a whole prefix, whoever's, is stored; raises Miss or TransportError if unknown."""
    return _meta(lane.exchange([_get(namespace)], patience)[0])[1] is not None


def find_generation(lane: Lane, namespace: bytes, patience: Patience) -> int:
    """Which fill of `namespace` is stored, 0 for none; raises Miss or TransportError."""
    return _meta(lane.exchange([_get(namespace)], patience)[0])[0]


def fetch_prefix(
    lane: Lane,
    namespace: bytes,
    found: Found,
    first_byte: float,
    *,
    credited: bool = True,
    rates: Rates | None = None,
) -> Restored:
    """Read every piece, check all of them, then make the image; raises Miss or TransportError.

    `first_byte`: seconds the server has to begin its answer. `credited`: a prefill is saved by
    this, and the server counts it. `rates`: do it only if, and as long as, it is sooner than that
    prefill; else Miss or GivenUp.
    """
    manifest = found.manifest
    try:
        reads = _plan(namespace, manifest)
    except ValueError as error:
        raise Miss("manifest", str(error)) from error
    nbytes = sum(read.nbytes for read in reads)
    credit = [_lookup(namespace, len(manifest.ids), manifest.prefill_ms)] if credited else []
    commands = [*credit, *(read.command for read in reads), _get(namespace)]
    tokens, told = len(manifest.ids), manifest.prefill_ms / 1000 or None
    if rates is not None and not rates.pays(tokens, nbytes, told):
        raise Miss("slower")
    replies = lane.exchange(commands, patience_for(nbytes, tokens, first_byte, told, rates))
    if _meta(replies[-1])[0] != found.gen:
        raise Miss("changed", "stored anew or dropped while it was read")
    arrived = _Arrived()
    for read, reply in zip(reads, replies[len(credit) : -1], strict=True):
        arrived.take(read, reply)
    return Restored(arrived.image(manifest), nbytes)


def borrow_prefix(
    lane: LocalLane,
    namespace: bytes,
    ids: Sequence[int] | int | None,
    fingerprint: str,
    tier: Tier,
    patience: Patience,
) -> tuple[Found, Restored | Command]:
    """As `find_prefix` and `fetch_prefix`, from a file that the server lends to this machine.

    One round trip. Where there is no such file yet, the second value is the command that has it
    made; making it and fetching the rows would slow each other down. `ids` None: of any tokens.
    Raises Miss for a prefix that is not there or not the one asked for, and NotLent where the lane
    cannot be used at all.
    """
    reply, loan = lane.borrow(namespace, patience)
    try:
        found = _found(reply)
        wanted = len(found.manifest.ids) if ids is None else ids
        check_wanted(found.manifest, wanted, fingerprint, tier)
        layout = Layout.of(found.manifest)
        if loan is None or loan.gen != found.gen or loan.digest != layout.digest:
            return found, Command.of("KV.PREFIX.LEND", namespace, found.gen, layout.text)
        image = layout.read(loan)
        lane.tell(_lookup(namespace, len(found.manifest.ids), found.manifest.prefill_ms))
    except Miss as miss:
        if miss.reason == "absent":
            # A miss to the server too; one without a manifest must credit no saved time.
            lane.tell(_lookup(namespace, 0, 0))
        raise
    finally:
        if loan is not None:
            loan.close()
    return found, Restored(image, loan.nbytes)


def try_to_borrow(
    lane: LocalLane,
    namespace: bytes,
    ids: Sequence[int] | int | None,
    fingerprint: str,
    tier: Tier,
    patience: Patience,
    tally: Tally,
) -> tuple[Found | None, Restored | Command | None]:
    """As `borrow_prefix`, but (None, None) where the lane cannot be used, and all of it counted."""
    try:
        found, outcome = borrow_prefix(lane, namespace, ids, fingerprint, tier, patience)
    except NotLent as reason:
        tally.add_not_lent(reason.reason)
        return None, None
    if isinstance(outcome, Restored):
        tally.add("hits_local")
    else:
        tally.add_not_lent("unmade")
    return found, outcome


@dataclass(frozen=True, slots=True)
class _Read:
    """One command of a restore and what its reply must fill: rows of a side, or one blob."""

    command: Command
    side: str = ""
    landings: tuple[Landing, ...] = ()
    batch: bool = False
    blob: Blob | None = None

    @property
    def nbytes(self) -> int:
        rows = sum(landing.nbytes for landing in self.landings)
        return rows + (self.blob.nbytes if self.blob is not None else 0)


def _plan(namespace: bytes, manifest: Manifest) -> list[_Read]:
    """One BATCH a side where all layers have the same rows, as usual; else layer by layer."""
    reads: list[_Read] = []
    for side in ("keys", "values"):
        sid = session_id(namespace, side)
        wanted = sorted((r for s, r in manifest.pieces() if s == side), key=_layer_of)
        landings = tuple(Landing(rows) for rows in wanted)
        counts = {rows.count for rows in wanted}
        if len(counts) == 1 and [rows.layer for rows in wanted] == list(range(len(wanted))):
            span = (0, wanted[0].count, len(wanted))
            command = Command.of(
                "V.FETCH", sid, "BATCH", *span, "FMT", "PACKED", place=places_of(landings)
            )
            reads.append(_Read(command, side, landings, batch=True))
            continue
        for landing in landings:
            one = (landing.rows.layer, "RANGE", 0, landing.rows.count)
            command = Command.of("V.FETCH", sid, *one, "FMT", "PACKED", place=places_of([landing]))
            reads.append(_Read(command, side, (landing,)))
    for leaf in manifest.leaves:
        if leaf.blob is not None:
            command = Command.of("SSM.PREFIX.FETCH", namespace, leaf.blob.layer)
            reads.append(_Read(command, blob=leaf.blob))
    return reads


class _Arrived:
    """Pieces and blobs that were checked, by where they belong."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], Landing] = {}
        self._blobs: dict[int, Buffer] = {}

    def take(self, read: _Read, reply: Reply) -> None:
        """Check one reply against the manifest; raises Miss."""
        if isinstance(reply, ServerError):
            raise Miss("rows", str(reply))
        if read.blob is not None:
            self._take_blob(read.blob, reply)
            return
        bulks = reply if read.batch else [reply]
        if not isinstance(bulks, list) or len(bulks) != len(read.landings):
            raise Miss("rows", "another number of layers")
        for landing, bulk in zip(read.landings, bulks, strict=True):
            # A bulk of another length, or none, was not placed into the landing.
            if bulk is None or bulk is not landing.view:
                raise Miss("rows", f"layer {landing.rows.layer} is missing or of another size")
            if not landing.is_intact():
                raise Miss("checksum", f"layer {landing.rows.layer}")
            self._rows[read.side, landing.rows.layer] = landing

    def _take_blob(self, blob: Blob, reply: Reply) -> None:
        if not isinstance(reply, bytes | bytearray | memoryview) or len(reply) != blob.nbytes:
            raise Miss("rows", f"state of layer {blob.layer} is missing or of another size")
        if xxhash.xxh3_64_hexdigest(reply) != blob.checksum:
            raise Miss("checksum", f"state of layer {blob.layer}")
        self._blobs[blob.layer] = reply

    def image(self, manifest: Manifest) -> CacheImage:
        """The cache image, once everything was taken."""
        tokens = len(manifest.ids)
        try:
            leaves = tuple(self._leaf(entry, tokens) for entry in manifest.leaves)
        except (RebuildError, ValueError) as error:
            raise Miss("rebuild", str(error)) from error
        image = CacheImage(tokens, leaves)
        mx.eval(image.arrays())
        return image

    def _leaf(self, entry: LeafEntry, tokens: int) -> Leaf:
        arrays: tuple[mx.array | None, ...] = ()
        if entry.blob is not None:
            arrays = unpack_arrays(entry.kind, self._blobs[entry.blob.layer], tokens)
        keys = self._piece("keys", entry, entry.keys)
        values = self._piece("values", entry, entry.values)
        return Leaf(entry.path, entry.kind, dict(entry.meta), keys, values, arrays)

    def _piece(self, side: str, entry: LeafEntry, rows: Rows | None) -> RowPiece | None:
        """The rows, seen head by head: the first append to the cache turns them, in its copy."""
        if rows is None:
            return None
        piece = self._rows[side, rows.layer].piece()
        heads = heads_of(entry, side, rows)
        return piece if heads is None else HeadPiece.of(piece, heads)


def _layer_of(rows: Rows) -> int:
    return rows.layer


def _get(namespace: bytes) -> Command:
    return Command.of("KV.PREFIX.META", namespace, "GET")


def _lookup(namespace: bytes, tokens: int, prefill_ms: int) -> Command:
    """A LOOKUP that credits what is restored with the prefill it saves."""
    options = ("TOKENS", tokens, "PREFILL_MS", prefill_ms)
    return Command.of("KV.PREFIX.LOOKUP", namespace, *options)


def _meta(reply: Reply) -> tuple[int, Buffer | None]:
    """Generation and manifest of a META GET; (0, None) without one."""
    match reply:
        case None:
            return 0, None
        case ServerError():
            raise Miss("refused", str(reply))
        case [int() as gen, bytes() | bytearray() | memoryview() as blob]:
            return gen, blob
        case _:
            raise Miss("manifest", "an unexpected reply to META GET")


def patience_for(
    nbytes: int, tokens: int, first_byte: float, told: float | None, rates: Rates | None = None
) -> Patience:
    """Wait for `nbytes` no longer than computing `tokens` takes here, but 2 s at least.

    `told`: seconds it took whoever stored them, for as long as this client has computed nothing
    itself. With `rates` the transfer is given up as soon as it cannot win any more.
    """
    own = None if rates is None else rates.prefill_seconds(tokens)
    longest = 2 + nbytes / _SLOWEST
    total = own if own is not None else min(longest, told or longest)
    watch = None if rates is None else rates.watch(tokens, nbytes, told)
    return Patience(first_byte=first_byte, stall=2.0, total=max(2.0, total), watch=watch)
