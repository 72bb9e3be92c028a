"""Stage 2 of `PionPromptCache`: attention over prefixes that stay in the server.

    pc = PionPromptCache(model, stage2=True)
    pc.get_or_prefill(prefix_ids, namespace)  # cold: stored, and made ready for queries
    cache = make_pion_prompt_cache(model, namespace, pc, len(prefix_ids))  # in any process

A process that does not hold the prefix asks the server for attention, layer by layer; one that
does, does not. Sessions are named `<namespace>_attn`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from pion_patches.blocks import Blocks
from pion_patches.cache_rebuild import CacheImage, Leaf, RebuildError, flatten, rebuild
from pion_patches.prefix_entry import CannotSplit, PrefixMismatch, model_name
from pion_patches.remote import RemoteEntry, RemoteRows, remote_slots
from pion_vllm_mlx.attend_slots import AttendSlots, is_exact, session_of
from pion_vllm_mlx.attend_wire import F32, AttendWire, as_f32, is_missing
from pion_vllm_mlx.process_lock import ProcessLock
from pion_vllm_mlx.restore import (
    Found,
    Miss,
    check_wanted,
    fetch_prefix,
    find_any_prefix,
)
from pion_vllm_mlx.tally import Tally
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import Lane, Patience, ServerError, TransportError
from pion_vllm_mlx.transport.binary import BinaryLane, ColdEntry
from pion_vllm_mlx.wire_prefix import NotOnTheWire, WireLayer, WirePrefix, wire_layers

T = TypeVar("T")

_ENTRIES_KEPT: Final = 64

_Trouble = (Miss, TransportError, ServerError, ColdEntry, RebuildError, CannotSplit, PrefixMismatch)


class Stage2:
    """The attention sessions of one model's prefixes on one server. Thread-safe as its lane is.

    `template(tokens)` makes the model's empty caches, `restore(ids, namespace)` full ones, whatever
    it takes; `quick` is the patience with small answers.
    """

    def __init__(
        self,
        model: Any,
        lane: Lane,
        binary: BinaryLane | None,
        tally: Tally,
        tier: Tier,
        quick: Patience,
        *,
        fingerprint: Callable[[], str],
        template: Callable[[int], list[Any]],
        restore: Callable[[tuple[int, ...], bytes], list[Any]],
    ) -> None:
        self.wire = AttendWire(lane, binary, tally)
        self._slots = AttendSlots(lane, self.wire, quick)
        self._model = model
        self._lane = lane
        self._tally = tally
        self._tier = tier
        self._quick = quick
        self._fingerprint = fingerprint
        self._template = template
        self._restore = restore
        self._entries: OrderedDict[tuple[bytes, Blocks | None], RemoteEntry] = OrderedDict()
        self._lock = ProcessLock()
        #: WARMs that queries caused.
        self.cold_rehydrates = 0

    # --- opening -----------------------------------------------------------------------------

    def open(
        self, name: bytes, tokens: int, settings: Mapping[str, Any] | None
    ) -> RemoteEntry | None:
        """The stored prefix of so many tokens as one attended to in the server; None if it is not.

        What stands in the way is told once. Raises ValueError for `settings` that mean nothing.
        """
        blocks = Blocks.of(settings) if settings else None
        try:
            found = find_any_prefix(self._lane, name, self._quick)
            check_wanted(found.manifest, tokens, self._fingerprint(), self._tier)
        except (Miss, TransportError):
            return None
        # One at a time, so that threads that come for one prefix share it.
        with self._lock:
            held = self._entries.get((name, blocks))
            if held is None or not self._is_current(held, found):
                held = self._make(name, found, blocks)
            if held is not None:
                self._tally.add("hits")
        return held

    def _make(self, name: bytes, found: Found, blocks: Blocks | None) -> RemoteEntry | None:
        try:
            entry = self._make_entry(name, found, blocks)
        except NotOnTheWire as reason:
            what = f"{model_name(self._model)} is not attended to in the server"
            self._tally.warn_once("not on the wire", "%s: %s", what, reason)
            return None
        except _Trouble as trouble:
            self._tell("attention in the server is not to be had", trouble)
            return None
        self._tally.add("wire_prefixes")
        self._entries[name, blocks] = entry
        while len(self._entries) > _ENTRIES_KEPT:
            self._entries.popitem(last=False)
        return entry

    def clear(self) -> None:
        """Let go of what was opened; caches in use go on."""
        with self._lock:
            self._entries.clear()
        if self.wire.binary is not None:
            self.wire.binary.close()

    def is_ready(self, name: bytes) -> bool:
        """Whether the prefix is stored and every layer of it can be queried at once."""
        try:
            found = find_any_prefix(self._lane, name, self._quick)
            layers = wire_layers(found.manifest)
            return self._slots.are_ready(name, layers)
        except NotOnTheWire:
            return True
        except (Miss, TransportError, ServerError):
            return False

    def _is_current(self, entry: RemoteEntry, found: Found) -> bool:
        remote = entry.remote
        assert isinstance(remote, WirePrefix)
        return remote.found.gen == found.gen and not remote.is_lost

    def _make_entry(self, name: bytes, found: Found, blocks: Blocks | None) -> RemoteEntry:
        layers = wire_layers(found.manifest)
        if not self._slots.are_ready(name, layers):
            self._slots.warm(name, found, layers)
        local = self._fetch_local(name, found, layers)

        def rehydrate() -> None:
            self.cold_rehydrates += 1
            self._slots.warm(name, found, layers)

        remote = WirePrefix(
            self.wire,
            session_of(name),
            found,
            layers,
            rehydrate=rehydrate,
            still_held=lambda: self._slots.holds(name, found),
            restore=lambda: self._restore(found.manifest.ids, name),
            tell=self._tell_lost,
            blocks=blocks,
        )
        rows = {one.path: RemoteRows(remote, one.layer, one.kv_heads, one.dim) for one in layers}
        tokens = len(found.manifest.ids)
        slots = remote_slots(self._template(tokens), rows, local, tokens)
        return RemoteEntry.of(self._model, tokens, slots, remote)

    def _fetch_local(
        self, name: bytes, found: Found, layers: tuple[WireLayer, ...]
    ) -> dict[tuple[int, ...], Any]:
        """The caches that are not attended to in the server, filled, by path.

        Also credits the server with the hit, and sees that what it warmed was this very fill.
        """
        manifest = found.manifest
        empty = dict(flatten(self._template(len(manifest.ids))))
        kinds = {path: type(cache).__name__ for path, cache in empty.items()}
        if kinds != {leaf.path: leaf.kind for leaf in manifest.leaves}:
            raise RebuildError("stored caches of another shape than the model's")
        there = {one.path for one in layers}
        here = tuple(leaf for leaf in manifest.leaves if leaf.path not in there)
        part = Found(found.gen, dataclasses.replace(manifest, leaves=here))
        restored = fetch_prefix(self._lane, name, part, self._quick.first_byte)
        self._tally.add("bytes_fetched", restored.nbytes)
        return {
            leaf.path: _rebuild_one(empty[leaf.path], leaf, restored.image.tokens)
            for leaf in restored.image.leaves
        }

    # --- filling -----------------------------------------------------------------------------

    def push(
        self, name: bytes, ids: tuple[int, ...], fingerprint: str, image: CacheImage
    ) -> Callable[[Lane], None]:
        """What makes this prefix ready for queries once it is stored; it tells, but never raises.

        Where the stored rows keep every bit the server reads those; else K and V travel, from
        copies made now, in the thread whose arrays they are.
        """
        sides = {} if self._tier.vquant == "auto" else _rows_of(image)

        def push(lane: Lane) -> None:
            slots = AttendSlots(lane, AttendWire(lane, None, self._tally), self._quick)
            try:
                found = find_any_prefix(lane, name, self._quick)
                check_wanted(found.manifest, ids, fingerprint, self._tier)
                layers = wire_layers(found.manifest)
                if is_exact(found.manifest, layers):
                    slots.warm(name, found, layers)
                else:
                    rows = {one.layer: _by_head(sides[one.path], one) for one in layers}
                    slots.store(name, found, rows)
            except NotOnTheWire:
                return
            except Exception as trouble:
                self._tell("a prefix was not made ready for attention in the server", trouble)

        return push

    # --- asking ------------------------------------------------------------------------------

    def ask(self, name: bytes, heads: int, dim: int, query: Callable[[bytes], T]) -> T:
        """`query(sid)`; slots that turned cold, or went with a restart, are made again, once.

        Raises ColdEntry or ServerError where that did not help, and TransportError.
        """
        sid = session_of(name)
        try:
            return query(sid)
        except ColdEntry:
            if not self._rehydrate(name, heads, dim):
                raise
        except ServerError as error:
            if not is_missing(error) or not self._rehydrate(name, heads, dim):
                raise
        return query(sid)

    def _rehydrate(self, name: bytes, heads: int, dim: int) -> bool:
        try:
            made = self.wire.warm(name, heads, dim, session_of(name), self.wire.patience)
        except ServerError:
            return False
        self.cold_rehydrates += made > 0
        return made > 0

    # --- telling -----------------------------------------------------------------------------

    def _tell_lost(self, error: Exception) -> None:
        self._tally.add("wire_losses")
        self._tell("attention in the server ended", error)

    def _tell(self, what: str, trouble: Exception) -> None:
        if not isinstance(trouble, TransportError):  # which the lane has told already
            self._tally.warn_once(what, "%s: %s. Going on in this process.", what, trouble)


def _rows_of(image: CacheImage) -> dict[tuple[int, ...], tuple[F32, F32]]:
    """K and V rows [N][H*D] of the caches that have both in one part, by path."""
    return {
        leaf.path: (as_f32(leaf.keys.parts[0]), as_f32(leaf.values.parts[0]))
        for leaf in image.leaves
        if leaf.keys is not None and leaf.values is not None and leaf.keys.fmt == "dense"
    }


def _by_head(sides: tuple[F32, F32], layer: WireLayer) -> tuple[F32, F32]:
    """Rows [N][H*D] as [H][N][D]."""
    keys, values = (
        as_f32(rows.reshape(-1, layer.kv_heads, layer.dim).swapaxes(0, 1)) for rows in sides
    )
    return keys, values


def _rebuild_one(empty: Any, leaf: Leaf, tokens: int) -> Any:
    (cache,) = rebuild([empty], CacheImage(tokens, (dataclasses.replace(leaf, path=(0,)),)))
    return cache
