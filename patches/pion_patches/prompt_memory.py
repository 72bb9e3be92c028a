"""The prompt cache of a server: what was computed in this process, then what a second tier holds.

It takes the place of mlx-lm's `LRUPromptCache` and answers the same calls, all of which come from
the one thread that serves every stream. So nothing here raises, nothing waits without a bound, and
a fetch never answers that nothing is left to compute: mlx-lm's server dies of that.

    cache, rest = memory.fetch_nearest_cache(key, tokens)      # rest has one token at least

The longest match wins, token by token. A model all of whose caches keep a row a token is resumed
at any token; one with recurrent or windowed layers where their state was kept, which is where its
prefill stopped (see `checkpoints`).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from .live_caches import arrays_of
from .memory_entry import Entry, Incoherent, States
from .preload import Preload
from .second_tier import FIND, Fence, SecondTier, restore_seconds
from .token_ids import as_ids, common_length

log = logging.getLogger("pion_patches")

#: The kind of an insertion that brings a state only: a stop inside a prefill. At an anchor other
#: conversations are expected to begin.
BLOCK: Final = "block"
ANCHOR: Final = "anchor"
#: Stored checkpoints lie at multiples of this many tokens.
GRAIN: Final = 64
KINDS: Final = ("system", "user", "assistant", BLOCK, ANCHOR)
#: States of prefills that have not ended yet, of all requests together.
_MOST_PENDING: Final = 512
_MOST_INEXACT: Final = 16
_NO_LIMIT: Final = 1 << 63


class PromptMemory:
    """`max_size` conversations of `max_bytes` in all, least recently used first to go.

    One that is larger than `max_bytes` by itself is not kept, and costs no other its place.
    Thread-safe. `counts`: hits, misses, tokens_reused, tier_hits, tier_tokens, preloaded_tokens,
    inserted, rejected, incoherent, evicted, errors, and inexact: prompts that were resumed earlier
    than they match, or not at all, because with `--kv-bits` the answer had been another one than
    without any reuse.
    """

    def __init__(
        self,
        max_size: int = 10,
        max_bytes: int = _NO_LIMIT,
        *,
        tier: SecondTier | None = None,
    ) -> None:
        self.max_size = max_size
        self.max_bytes = max_bytes
        self.tier = tier
        self.counts: Counter[str] = Counter()
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._pending: OrderedDict[bytes, tuple[int, States]] = OrderedDict()
        #: Those among them that were taken while an answer was generated.
        self._passing: set[bytes] = set()
        self._models: dict[Any, weakref.ref[Any]] = {}
        self._lock = threading.RLock()
        self.fence = Fence()
        self._preload: Preload | None = None
        self._number = 0
        #: With `--kv-bits`: the tokens before which nothing is quantised, and those of a chunk.
        self._quantised: tuple[int, int] | None = None
        #: What the last answers ended with, of which nothing could be kept then.
        self._inexact: deque[tuple[Any, np.ndarray]] = deque(maxlen=_MOST_INEXACT)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and states; what two conversations share counts once."""
        with self._lock:
            rows = sum(entry.row_bytes for entry in self._entries.values())
            states = {id(s): s.nbytes for e in self._entries.values() for s in e.states.values()}
            return rows + sum(states.values()) + sum(s.nbytes for _, s in self._pending.values())

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Conversations and bytes by what their last insertion was, as mlx-lm's log prints them."""
        found = {kind: {"n_sequences": 0, "n_bytes": 0} for kind in KINDS}
        with self._lock:
            for entry in self._entries.values():
                figures = found[entry.kind]
                figures["n_sequences"] += 1
                figures["n_bytes"] += entry.nbytes
        return found

    def attach(self, model_key: Any, provider: Any) -> None:
        """Note the model `model_key` stands for now; what another of that name left is forgotten.

        `provider`: mlx_lm.server's, whose flags say how much may be kept.
        """
        known = self._models.get(model_key)
        if known is not None and known() is provider.model:
            return
        flags = provider.cli_args
        limit = getattr(flags, "prompt_cache_bytes", None)
        with self._lock:
            self._quantised = None
            if getattr(flags, "kv_bits", None) is not None:
                self._quantised = flags.quantized_kv_start, flags.prefill_step_size
            self.max_bytes = self.max_bytes if limit is None else limit
            self._models[model_key] = weakref.ref(provider.model)
            self._entries = OrderedDict(
                (number, e) for number, e in self._entries.items() if e.key != model_key
            )
            self._pending.clear()
            self._passing.clear()
        if self.tier is not None:
            try:
                self.tier.attach(model_key, provider)
            except Exception as error:
                self._wonder("a model could not be attached to the second tier", error)

    def preload(self, model_key: Any) -> Preload | None:
        """Have the conversation restored that the second tier was given last, in the background.

        A request that goes on with it finds it here, and waits for it if it is not here yet. One
        that would take half of `max_bytes` is left alone. None without a second tier.
        """
        if self.tier is None:
            return None

        def keep(ids: np.ndarray, cache: list[Any]) -> None:
            self._keep(Entry.of(model_key, ids, cache, "user"))
            self.counts["preloaded_tokens"] += len(ids)

        self._preload = Preload(self.tier, model_key, keep, self.max_bytes // 2)
        return self._preload

    def fetch_nearest_cache(
        self, model: Any, tokens: Sequence[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """The caller's own cache of the longest prefix known, and the tokens after it.

        The last token is never in the cache: its logits are what the caller wants.
        """
        try:
            asked = as_ids(tokens)[:-1]
            cache, count, source = self._fetch(model, asked)
        except Exception as error:
            self._wonder("a prompt could not be looked up", error)
            return None, list(tokens)
        with self._lock:
            self.counts["hits" if count else "misses"] += 1
            self.counts[f"{source}_tokens"] += count
        return (cache, list(tokens[count:])) if count else (None, list(tokens))

    def match(self, model: Any, tokens: Sequence[int]) -> int:
        """How many leading tokens could be resumed after, without the second tier."""
        try:
            with self._lock:
                return self._best(model, as_ids(tokens)[:-1])[1]
        except Exception as error:
            self._wonder("a prompt could not be looked up", error)
            return 0

    def insert_cache(
        self,
        model: Any,
        tokens: Sequence[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Take over a cache that holds `tokens`; the list itself is emptied.

        The caller may keep the list in a variable for as long as it computes, and one more
        reference to an array is what makes MLX copy it instead of writing in place.
        """
        try:
            self._insert(model, as_ids(tokens), list(prompt_cache), cache_type)
        except Incoherent as reason:
            self.counts["incoherent"] += 1
            log.debug("a prompt cache is not kept: %s", reason)
        except Exception as error:
            self._wonder("a prompt cache could not be kept", error)
        finally:
            prompt_cache.clear()

    def pass_state(self, model: Any, tokens: Sequence[int], cache: Sequence[Any]) -> None:
        """Note the state of an answer under way, at a multiple of the grain.

        It takes the place of the one before. Where an answer ends is known only when it has, and
        a tier keeps states at such multiples only: the last one passed is the one it gets.
        """
        try:
            ids = as_ids(tokens)
            state = States.of(cache)
            mx.eval(list(arrays_of(state.leaves)))
            name, before = _name(model, ids), _name(model, ids[:-GRAIN])
            with self._lock:
                if before in self._passing:
                    self._passing.discard(before)
                    self._pending.pop(before, None)
                self._passing.add(name)
                self._hold(name, len(ids), state)
        except Exception as error:
            self._wonder("a state could not be noted", error)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Let go of the least recently used until no more than that is left."""
        with self._lock:
            self._shrink(
                self.max_size if n_sequences is None else max(0, n_sequences),
                _NO_LIMIT if n_bytes is None else max(0, n_bytes),
            )

    def shared(self, model: Any, tokens: Sequence[int]) -> int:
        """How many leading `tokens` some conversation begins with, resumable there or not."""
        ids = as_ids(tokens)
        with self._lock:
            entries = [entry for entry in self._entries.values() if entry.key == model]
        return max((entry.common(ids) for entry in entries), default=0)

    def forget(self, model: Any, tokens: Sequence[int]) -> int:
        """Let go of every conversation that begins with `tokens`; how many there were."""
        ids = as_ids(tokens)
        with self._lock:
            found = [
                number
                for number, entry in self._entries.items()
                if entry.key == model and entry.common(ids) == len(ids)
            ]
            for number in found:
                del self._entries[number]
        return len(found)

    def close(self) -> None:
        """Let go of everything, the second tier last."""
        with self._lock:
            self._entries.clear()
            self._pending.clear()
        self.fence.close()
        if self.tier is not None:
            self.tier.close()

    def _fetch(self, key: Any, asked: np.ndarray) -> tuple[list[Any] | None, int, str]:
        with self._lock:
            number, count = self._best(key, asked)
        if self._preload is not None and self._preload.wait(asked, count):
            with self._lock:
                number, count = self._best(key, asked)
        with self._lock:
            entry = self._entries.get(number)
            if self._quantised is not None and count < self._shared(key, asked):
                self.counts["inexact"] += 1
        if (found := self._from_tier(key, asked, count)) is not None:
            return found
        cache = entry.resume(count) if entry is not None else None
        if cache is None:
            return None, 0, "memory"
        with self._lock:
            if number in self._entries:
                self._entries.move_to_end(number)
        return cache, count, "memory"

    def _best(self, key: Any, asked: np.ndarray) -> tuple[int, int]:
        """The entry that can be resumed after most of `asked`, and after how many."""
        best, most = -1, 0
        common = {n: e.common(asked) for n, e in self._entries.items() if e.key == key}
        # Comparing tokens costs little, cutting a cache costs a slice a layer.
        for number in sorted(common, key=lambda number: -common[number]):
            if common[number] <= most:
                break
            if (count := self._longest(self._entries[number], common[number])) > most:
                best, most = number, count
        return best, most

    def _shared(self, key: Any, asked: np.ndarray) -> int:
        """How many leading tokens of `asked` were computed before, kept or not."""
        known = [(entry.key, entry.tokens) for entry in self._entries.values()]
        seen = (common_length(ids, asked) for of, ids in (*known, *self._inexact) if of == key)
        return max(seen, default=0)

    def _longest(self, entry: Entry, matched: int) -> int:
        """After how many of `matched` equal leading tokens an entry can be resumed, exactly.

        With `--kv-bits` that is at the end of a chunk, as a cold run has it there: quantised from
        the first token on, or not at all.
        """
        if self._quantised is None:
            return entry.longest(matched)
        start, step = self._quantised
        floored, kinds = matched - matched % step, entry.row_kinds
        if KVCache in kinds:
            floored = max(0, min(floored, (start - 1) // step * step))
        count = entry.longest(floored)
        return 0 if count % step or (QuantizedKVCache in kinds and count < start) else count

    def _from_tier(
        self, key: Any, asked: np.ndarray, count: int
    ) -> tuple[list[Any], int, str] | None:
        tier = self.tier
        # A negative id stands for an image's content, which no tokenizer's ids can name.
        if tier is None or len(asked) - count < max(1, tier.min_gain) or asked.min() < 0:
            return None
        ids = asked.tolist()
        offer = self.fence.ask(tier.find, key, ids, seconds=FIND)
        if offer is None or offer.tokens - count < max(1, tier.min_gain):
            return None
        seconds = restore_seconds(offer.tokens - count)
        cache = self.fence.ask(tier.restore, offer, seconds=seconds)
        if cache is None:
            return None
        entry = Entry.of(key, asked[: offer.tokens], cache, "user")
        count = self._longest(entry, len(entry.tokens))
        own = entry.resume(count) if count else None
        if own is None:
            return None
        self.counts["tier_hits"] += 1
        # Kept, so that a second stream with the same beginning need not fetch it again.
        self._keep(entry)
        return own, count, "tier"

    def _insert(self, key: Any, tokens: np.ndarray, cache: list[Any], kind: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
        if self._quantised is not None and kind == "assistant":
            # Computed token by token at its end: another prompt has these tokens in chunks.
            self._inexact.append((key, tokens))
            return
        entry = Entry.of(key, tokens, cache, kind)
        stops = kind in (BLOCK, ANCHOR)
        if stops:
            # The rows are still growing in the caller's batch, and copying them at each of many
            # stops is quadratic work: only the state is taken, until the rows come.
            mx.eval(list(arrays_of([states.leaves for states in entry.states.values()])))
        else:
            mx.eval(list(arrays_of(entry.cache)))
        if stops:
            with self._lock:
                for count, states in entry.states.items():
                    self._hold(_name(key, entry.tokens[:count]), count, states)
            self._store(key, entry.tokens, entry.cache, anchor=kind == ANCHOR)
            return
        with self._lock:
            passed = self._adopt(entry)
        for count in passed:
            self._store(key, entry.tokens[:count], entry.resume(count))
        self._store(key, entry.tokens, entry.cache, anchor=kind == "system")
        self.counts["inserted"] += 1
        self._keep(entry)

    def _store(
        self, key: Any, tokens: np.ndarray, cache: list[Any] | None, *, anchor: bool = False
    ) -> None:
        if self.tier is None or cache is None or tokens.min() < 0:
            return
        try:
            self.tier.store(key, tokens.tolist(), cache, anchor=anchor)
        except Exception as error:
            self._wonder("a prefix could not be given to the second tier", error)

    def _hold(self, name: bytes, count: int, states: States) -> None:
        self._pending[name] = count, states
        while len(self._pending) > _MOST_PENDING:
            self._passing.discard(self._pending.popitem(last=False)[0])

    def _keep(self, entry: Entry) -> None:
        """Put an entry in, take out those it contains, and keep the limits."""
        with self._lock:
            for number, other in list(self._entries.items()):
                if other.key != entry.key:
                    continue
                common = other.common(entry.tokens)
                # States at shared places are the same for both, whoever is evicted first.
                for tokens, states in other.states.items():
                    if tokens <= common:
                        entry.states.setdefault(tokens, states)
                if common == len(other.tokens) and self._longest(entry, common) == common:
                    del self._entries[number]
            while entry.nbytes > self.max_bytes:
                if not entry.thin():
                    self.counts["rejected"] += 1
                    return
            self._number += 1
            self._entries[self._number] = entry
            self._shrink(self.max_size, self.max_bytes)

    def _adopt(self, entry: Entry) -> list[int]:
        """Give an entry the states of its own prefill and answer; where the answer's are."""
        passed = []
        for name, (count, states) in list(self._pending.items()):
            if count <= len(entry.tokens) and name == _name(entry.key, entry.tokens[:count]):
                entry.states.setdefault(count, states)
                del self._pending[name]
                if name in self._passing:
                    self._passing.discard(name)
                    passed.append(count)
        return passed

    def _shrink(self, entries: int, nbytes: int) -> None:
        while len(self._entries) > entries:
            self._entries.popitem(last=False)
            self.counts["evicted"] += 1
        while self._entries and self.nbytes > nbytes:
            oldest = next(iter(self._entries.values()))
            if not oldest.thin():
                self._entries.popitem(last=False)
                self.counts["evicted"] += 1
        if self.nbytes > nbytes:
            self._pending.clear()
            self._passing.clear()

    def _wonder(self, what: str, error: Exception) -> None:
        """Tell once about an error nothing above foresees; the request goes on without a cache."""
        self.counts["errors"] += 1
        if self.counts["errors"] == 1:
            log.warning("%s, going on without: %r", what, error)


def _name(key: Any, tokens: np.ndarray) -> bytes:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16)
    digest.update(tokens.tobytes())
    return digest.digest()
