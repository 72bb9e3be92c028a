"""Lineage: the one index of stored prefixes, for the prompt cache and for serve."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten

from pion_patches.cache_rebuild import (
    CacheImage,
    RebuildError,
    UnsupportedCache,
    known_caches,
    rebuild,
)
from pion_patches.hybrid import classify
from pion_patches.pieces import dtype_name
from pion_vllm_mlx.fill import StoreFailed
from pion_vllm_mlx.kv_bits import KvBits
from pion_vllm_mlx.lineage.blocks import BLOCK, CHECKPOINT, SEGMENT, Scope, floor_block
from pion_vllm_mlx.lineage.borrowing import Unmade, try_to_borrow
from pion_vllm_mlx.lineage.capture import Capture, Foreign, capture_cache
from pion_vllm_mlx.lineage.eviction import Keeper, Oversize
from pion_vllm_mlx.lineage.fetching import fetch_match
from pion_vllm_mlx.lineage.filling import write_draft
from pion_vllm_mlx.lineage.known import UNKNOWN, Known
from pion_vllm_mlx.lineage.latest import latest_ids
from pion_vllm_mlx.lineage.match import Asked, Match
from pion_vllm_mlx.lineage.planning import OUTCOMES, plan_rows, plan_state
from pion_vllm_mlx.lineage.preparing import order_files, worth_files
from pion_vllm_mlx.lineage.search import search
from pion_vllm_mlx.lineage.tails import before_tail
from pion_vllm_mlx.namespace import model_fingerprint
from pion_vllm_mlx.process_lock import ProcessLock
from pion_vllm_mlx.rates import Rates
from pion_vllm_mlx.restore import Miss, patience_for
from pion_vllm_mlx.shipment import Unstorable
from pion_vllm_mlx.tally import Tally
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import Command, GivenUp, Lane, Patience, TransportError
from pion_vllm_mlx.transport.local import LocalLane

PREFILL_STEP: Final = 512
#: Tokens between two checkpoints of a long prefill of a stateful model.
CHECKPOINT_STEP: Final = 1024


class Lineage:
    """All prefixes of one model that a server keeps, found by their tokens.

    No method raises for what a server does or a stored record holds: that is a miss, counted by
    reason. Thread-safe but for `capture`, which belongs into the thread that runs the model.
    """

    def __init__(
        self,
        model: Any,
        lane: Lane,
        store_lane: Lane | None = None,
        *,
        local: LocalLane | None = None,
        tier: Tier | None = None,
        kv_bits: KvBits | None = None,
        adapter: str = "",
        tenant: str = "",
        ns_prefix: bytes = b"",
        timeout: float = 0.25,
        budget_bytes: int | None = None,
        min_gain: int = 16,
        model_path: str | Path | None = None,
        prefill_step: int = PREFILL_STEP,
        rates: Rates | None = None,
        tally: Tally | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            model: an mlx-lm model; `UnsupportedCache` if its caches cannot be stored exactly.
            lane, store_lane: ways to the server; a store holds its lane for as long as it takes.
            local: the way for a server on this machine, where it can be gone.
            tier, kv_bits: how rows are stored and quantised; bits only from the first token on.
            adapter, tenant: prefixes under another value are other prefixes.
            ns_prefix: what every name begins with, for a server with `--ns-prefix`.
            timeout: seconds to wait for the first byte of an answer.
            budget_bytes: what all prefixes of this index may take on the server together.
            min_gain: tokens that are not worth a restore.
            prefill_step: tokens a chunk of the caller's prefills; kept for the record.
            rates, tally: estimates and figures to share with others.
        """
        self._model = model
        self._model_path = model_path
        self._lane, self._store_lane = lane, store_lane or lane.twin()
        self._local = local
        self._tier, self._kv_bits = tier or Tier(), kv_bits or KvBits()
        if self._kv_bits.bits is not None and self._kv_bits.start:
            raise UnsupportedCache("kv_bits that begin in mid-prefix", known_caches())
        self._adapter, self._tenant, self._ns_prefix = adapter, tenant, ns_prefix
        self._timeout, self._min_gain = timeout, min_gain
        self._prefill_step = prefill_step
        self._storing = ProcessLock()
        self._known = Known()
        self._tally = tally or Tally()
        self._keeper = Keeper(self._store_lane, ns_prefix, budget_bytes, self._tally)
        self._root: tuple[str, bytes] | None = None
        self.rates = rates or Rates()
        slots = classify(self._kv_bits.template(model, 1))
        #: Whether the model has state that exists only where it was captured.
        self.stateful = any(slot.route != "kv" for slot in slots)

    # --- finding and restoring ---------------------------------------------------------------

    def find(self, ids: Iterable[int]) -> Match:
        """How much of `ids` is stored; 0 tokens where nothing is, or the server cannot be asked.

        Raises ValueError for what is no token id.
        """
        asked, fingerprint = self._asked(ids)
        try:
            return search(self._lane, asked, fingerprint, self._quick(), stateful=self.stateful)
        except TransportError:
            return Match(asked, unavailable=True)
        except Exception as error:
            self._tally.wonder("what is stored of a prompt could not be found", error)
            return Match(asked, unavailable=True)

    def pays(self, match: Match) -> bool:
        """Whether restoring is worth it: enough tokens, and sooner than computing them."""
        enough = match.tokens >= max(1, self._min_gain)
        return enough and self.rates.pays(match.tokens, match.nbytes, _seconds(match))

    def restore(self, match: Match) -> list[Any] | None:
        """Caches that hold exactly `match.tokens` tokens, the caller's own, or None.

        This is what counts as a hit or a miss, on the server too.
        """
        if not match.tokens:
            self._tally.add_miss(match.reason)
            if match.reason == "absent":
                with contextlib.suppress(TransportError):
                    first = Command.of("KV.PREFIX.LOOKUP", match.asked.segment_at(0))
                    self._lane.exchange([first], self._quick())
            return None
        if not self.pays(match):
            self._tally.add_miss("gain" if match.tokens < self._min_gain else "slower")
            return None
        started = time.perf_counter()
        try:
            sizes = (match.nbytes, match.tokens)
            lent = try_to_borrow(self._local, match, self._quick(), self._tally)
            image = lent if isinstance(lent, CacheImage) else None
            if image is None:
                patience = patience_for(*sizes, self._timeout, _seconds(match), self.rates)
                image = fetch_match(self._lane, match, patience)
            cache = rebuild(self._kv_bits.template(self._model, match.tokens), image)
        except Miss as miss:
            self._tally.add_miss(miss.reason)
            self._known.forget()
            return None
        except GivenUp:
            self._tally.add_miss("slower")
            self._tally.add("given_up")
            return None
        except TransportError:
            self._tally.add_miss("unavailable")
            return None
        except RebuildError:
            self._tally.add_miss("rebuild")
            return None
        except Exception as error:
            self._tally.add_miss("error")
            self._tally.wonder("a stored prefix could not be rebuilt", error)
            return None
        self._known.add(match.asked, (pair for link in match.links for pair in link.ends()))
        if image is lent:
            self._tally.add("hits_local")
        else:
            self.rates.add_restore(match.nbytes, time.perf_counter() - started)
        if isinstance(lent, Unmade):
            lent.order()
        self._tally.add_seconds("fetch_ms_total", time.perf_counter() - started)
        self._tally.add("hits")
        self._tally.add("tokens_restored", match.tokens)
        self._tally.add("bytes_fetched", match.nbytes)
        return cache

    def fetch(self, ids: Iterable[int]) -> tuple[list[Any] | None, int]:
        """`find` and `restore`: the caches and how many tokens they hold, or (None, 0)."""
        match = self.find(ids)
        cache = self.restore(match)
        return (None, 0) if cache is None else (cache, match.tokens)

    def latest(self, lane: Lane) -> tuple[Lineage, Match]:
        """What is stored of the conversation stored last, and this index on a lane of its own.

        Both so that restoring it, whenever that is, holds up nobody who asks this one.
        """
        beside = copy.copy(self)
        beside._lane = lane
        try:
            _, fingerprint = self._asked(())
            start = self._ns_prefix + (CHECKPOINT if self.stateful else SEGMENT)
            ids = latest_ids(lane, start, fingerprint, self._quick())
        except TransportError:
            ids = ()
        except Exception as error:
            self._tally.wonder("the conversation stored last could not be found", error)
            ids = ()
        return beside, beside.find(ids)

    # --- capturing and storing ---------------------------------------------------------------

    def checkpoints(self, start: int, end: int, at: Iterable[int] = ()) -> tuple[int, ...]:
        """Where a prefill of tokens `start` to `end` should pause for a `capture`; ascending.

        Block ends: those before the positions `at`, every 1,024 tokens, and the last one. None for
        a model without state, for which one capture at the end will do.
        """
        if not self.stateful:
            return ()
        wished = {floor_block(position) for position in (*at, end)}
        first = start - start % CHECKPOINT_STEP + CHECKPOINT_STEP
        wished.update(range(first, end, CHECKPOINT_STEP))
        return tuple(sorted(position for position in wished if start < position <= end))

    def capture(
        self,
        ids: Iterable[int],
        cache: Sequence[Any],
        start: int | None = None,
        *,
        anchor: bool = False,
    ) -> Capture | None:
        """What of `cache`, which holds exactly `ids`, is worth storing, or None.

        Rows that this process has restored or captured before are left out; with `start` only
        those before it. A stateful model is captured at block ends only. `anchor`: others are
        expected to begin with these ids, so their state is among the last to be evicted.
        """
        try:
            asked, fingerprint = self._asked(ids)
            tokens = len(asked.ids)
            if self._known.is_refused(asked):
                return None
            begun = self._known.last(asked, tokens if start is None else min(start, tokens))
            if tokens - begun[0] < BLOCK and not self.stateful and tokens % BLOCK:
                begun = before_tail(self._known, asked)
            if tokens - begun[0] < BLOCK or (self.stateful and tokens % BLOCK):
                return None
            try:
                capture = capture_cache(cache, asked, fingerprint, begun, self._prefill_step)
            except Foreign:
                capture = capture_cache(cache, asked, fingerprint, UNKNOWN, self._prefill_step)
            capture = dataclasses.replace(capture, anchor=anchor)
        except (UnsupportedCache, Unstorable) as refusal:
            self._tally.add("stores_failed")
            self._tally.warn_once("unsupported", "a prefix cannot be stored: %s", refusal)
            return None
        except Exception as error:
            self._tally.add("stores_failed")
            self._tally.wonder("a prefix could not be captured", error)
            return None
        self._known.add(asked, capture.ends())
        return capture

    def store(self, capture: Capture, prefill_seconds: float = 0.0) -> str:
        """Store what of a capture the server lacks: see `OUTCOMES`.

        `prefill_seconds`: how long the captured tokens took, which a later hit is credited with.
        """
        with self._storing:
            try:
                outcome = self._store(capture, prefill_seconds)
            except TransportError:
                outcome = "failed"
            except StoreFailed as failure:
                # A stale fill only means that somebody else stored or dropped it meanwhile.
                outcome = "busy" if failure.code == "STALE" else "failed"
                if failure.code != "STALE":
                    self._tally.warn_once("store", "the server did not store: %s", failure)
            except Oversize as reason:
                outcome = "oversize"
                self._known.refuse(capture.asked)
                self._tally.warn_once("oversize", "a conversation is not stored: %s", reason)
            except Unstorable as reason:
                outcome = "failed"
                self._tally.warn_once("unstorable", "a prefix cannot be stored: %s", reason)
            except Exception as error:
                outcome = "failed"
                self._tally.wonder("a prefix could not be stored", error)
        if outcome not in ("stored", "known"):
            self._known.forget()
        self._tally.add(OUTCOMES[outcome])
        return outcome

    def _store(self, capture: Capture, prefill_seconds: float) -> str:
        if not self._store_lane.available:
            return "failed"  # nothing is worth encoding for a server that was gone a moment ago
        plan = plan_state if self.stateful else plan_rows
        planned = plan(self._store_lane, capture, self._tier, prefill_seconds)
        if isinstance(planned, str):
            return planned
        drafts, links = planned
        self._keeper.make_room(drafts, [link.name for link in links])
        for draft in drafts:
            if not write_draft(self._store_lane, draft):
                return "busy"
            self._tally.add("bytes_stored", draft.nbytes)
        return "stored" if drafts else "known"

    # --- keeping -----------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Rows and state the server holds under this index's names; 0 if it cannot be asked."""
        try:
            return self._keeper.used_bytes()
        except (TransportError, StoreFailed):
            return 0

    def trim(self, nbytes: int) -> None:
        """Evict, least recently used leaves first, down to `nbytes`."""
        with self._storing, contextlib.suppress(TransportError, StoreFailed):
            self._keeper.trim(nbytes)
        self._known.forget()

    def reconcile(self) -> None:
        """Drop what crashed fills left behind, and segments whose parent is gone."""
        with self._storing, contextlib.suppress(TransportError, StoreFailed):
            self._keeper.reconcile()

    def prepare(self, nbytes: int) -> None:
        """Have files made of what was used last, up to `nbytes`, for a server on this machine.

        A server that was started anew has none; the first restore of each conversation finds them.
        """
        if self._local is None or not self._local.is_possible:
            return
        with self._storing, contextlib.suppress(TransportError, StoreFailed):
            order_files(self._store_lane, worth_files(self._keeper.used_last(), nbytes))

    def stats(self) -> dict[str, Any]:
        """Figures since this object was made, by the names `PionPromptCache.stats` explains."""
        return self._tally.snapshot()

    def close(self) -> None:
        """Let go of the connections. The object stays usable."""
        self._lane.close()
        self._store_lane.close()
        if self._local is not None:
            self._local.close()

    def asked(self, ids: Iterable[int]) -> Asked:
        """The names `ids` may be stored under, for the model as it is now; ValueError as `find`."""
        return self._asked(ids)[0]

    # --- within ------------------------------------------------------------------------------

    def _asked(self, ids: Iterable[int]) -> tuple[Asked, str]:
        fingerprint = model_fingerprint(self._model, self._model_path)
        if self._root is None or self._root[0] != fingerprint:
            self._root = (fingerprint, self._scope(fingerprint).root())
        return Asked.of(self._root[1], ids, self._ns_prefix), fingerprint

    def _scope(self, fingerprint: str) -> Scope:
        tier, bits = self._tier, self._kv_bits
        stored = f"{tier.vquant},{tier.boundary_protect},{tier.protect_dtype}"
        quantised = "" if bits.bits is None else f",kv{bits.bits}g{bits.group_size}"
        return Scope(
            model=fingerprint,
            adapter=self._adapter,
            dtype=_dtype_of(self._model),
            format=stored + quantised,
            tenant=self._tenant,
        )

    def _quick(self) -> Patience:
        return Patience(first_byte=self._timeout, stall=2.0, total=10.0)


def _seconds(match: Match) -> float | None:
    """How long the tokens took whoever stored them; None where that is not known."""
    return match.prefill_ms / 1000 or None


def _dtype_of(model: Any) -> str:
    """The dtype of the first parameter of numbers, which activations have, too."""
    parameters: Any = tree_flatten(model.parameters())
    for _, array in parameters:
        if mx.issubdtype(array.dtype, mx.floating):
            return dtype_name(array)
    return ""
