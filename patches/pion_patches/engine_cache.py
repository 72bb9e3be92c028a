"""vllm-mlx's prefix cache on top of a `PromptMemory`, and so of a second tier.

`TieredPrefixCache` comes before vllm-mlx's own class in the bases of the one that takes its place
(`vllm_mlx`); this module needs mlx-lm only. What differs from vllm-mlx's own:

* Every match is a prefix with a token left to compute. Its scheduler throws an exact match away,
  as it cannot know whether the last token is in the cache already.
* The longest common beginning is found token by token over all entries, and is cut to its length
  in every layer: rows behind it are not reachable.
* Nothing is quantised: a hit gives the answer of a cold run.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .checkpoints import Places, Wishes, choose_stops, places_of
from .live_caches import arrays_of, leaves_of
from .prompt_memory import BLOCK, GRAIN, PromptMemory
from .second_tier import SecondTier

log = logging.getLogger("pion_patches")

_MB: Final = 1 << 20
#: Prompts between their fetch and their prefill.
_MOST_WAITING: Final = 256
_NUMBERS = itertools.count(1)
#: The cache of each model that lives, by the model's id.
_CACHES: weakref.WeakValueDictionary[int, TieredPrefixCache] = weakref.WeakValueDictionary()


class Resumed(list[Any]):
    """A prompt cache that knows which tokens it holds."""

    tokens: Sequence[int] = ()


def cache_of(model: Any) -> TieredPrefixCache | None:
    """The prefix cache that was made for a model, as long as somebody uses it."""
    found = _CACHES.get(id(model))
    return found if found is not None and found.model is model else None


class TieredPrefixCache:
    """Answers what vllm-mlx's scheduler and multimodal generator ask of a prefix cache.

    Nothing raises, nothing waits longer than the fence of the memory lets it. As the class it
    stands for it belongs to one thread at a time.
    """

    #: Set by who makes the class: the tier, and the folder the model's weights come from.
    tier: ClassVar[SecondTier | None] = None
    source: ClassVar[str | None] = None

    # Attributes of vllm-mlx's class.
    _config: Any
    _entries: Any
    _stats: Any
    _max_memory: int
    _current_memory: int
    _last_match_type: str | None
    _last_matched_key: tuple[int, ...] | None

    def __init__(self, model: Any, config: Any = None) -> None:
        initialise: Any = super().__init__
        initialise(model, config)
        number = next(_NUMBERS)
        self.key = (self.source or f"<model {number}>", number)
        self.memory = PromptMemory(self._config.max_entries, self._max_memory, tier=self.tier)
        self._model = weakref.ref(model)
        self._places: Places | None = None
        #: Where prompts that were asked for leave what is known, until they are computed.
        self._partings: OrderedDict[tuple[int, ...], int] = OrderedDict()
        flags = {"kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 0}
        provider = SimpleNamespace(
            model=model,
            draft_model=None,
            cli_args=SimpleNamespace(prefill_step_size=2048, **flags),
        )
        self.memory.attach(self.key, provider)
        _CACHES[id(model)] = self
        weakref.finalize(self, _let_go, self.memory, self.key)
        if self._config.kv_quantize:
            log.warning("the prefix cache is not quantised: what is kept is what was computed")

    @property
    def model(self) -> Any:
        """The model, or None when it is gone."""
        return self._model()

    # --- what the scheduler asks -------------------------------------------------------------

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """The caller's own cache of the longest beginning known, and the tokens after it."""
        if self._entries:
            # Put there by the multimodal generator: whole prompts with their logits, and layers of
            # mlx-vlm's.
            stock: Any = super().fetch  # type: ignore[misc]
            cache, rest = stock(tokens)
            if cache is not None:
                return cache, rest
            self._stats.misses -= 1
        self._last_match_type, self._last_matched_key = "miss", None
        cache, rest = self._resume(tokens)
        self._note_parting(tokens, len(tokens) - len(rest))
        if cache is None:
            self._stats.misses += 1
            return None, tokens
        held = tokens[: len(tokens) - len(rest)]
        self._stats.hits += 1
        self._stats.tokens_saved += len(held)
        self._last_match_type, self._last_matched_key = "prefix", tuple(held)
        found = Resumed(cache)
        found.tokens = held
        return found, rest

    def _resume(self, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        least = self._config.min_prefix_tokens
        if len(tokens) < max(2, least):
            return None, tokens
        cache, rest = self.memory.fetch_nearest_cache(self.key, tokens)
        if cache is None or len(tokens) - len(rest) < least:
            return None, tokens
        try:
            # A slice belongs to the thread it was taken in until it is evaluated.
            mx.eval(list(arrays_of(cache)))
        except Exception as error:
            log.warning("a prefix could not be resumed, going on without: %r", error)
            return None, tokens
        return cache, rest

    def _note_parting(self, tokens: list[int], held: int) -> None:
        """The next prompt that begins as this one and another can be resumed where they part."""
        try:
            if not tokens or not self.places.stateful:
                return
            place = self.memory.shared(self.key, tokens[:-1])
            if place - held >= GRAIN:
                self._partings[tuple(tokens)] = place
                while len(self._partings) > _MOST_WAITING:
                    self._partings.popitem(last=False)
        except Exception as error:
            log.warning("where prompts part is not noted: %r", error)

    def stops_of(self, tokens: Sequence[int]) -> Wishes:
        """Where the prefill of a prompt stops, each with its kind; nowhere if it need not."""
        place = self._partings.pop(tuple(tokens), 0)
        if not self.places.stateful:
            return {}
        wishes: Wishes = {place: BLOCK} if place else {}
        return choose_stops(len(tokens), wishes, stride=self.places.stride)

    def store(self, tokens: list[int], cache: list[Any], evict_prefixes: bool = True) -> bool:
        """Keep what `cache` holds of `tokens`; whether that was done.

        Layers that are not mlx-lm's (mlx-vlm has classes of its own) are kept as vllm-mlx does it.
        """
        if not tokens or not cache or len(tokens) < self._config.min_prefix_tokens:
            return False
        if any(type(leaf).__module__ != KVCache.__module__ for leaf in leaves_of(cache)):
            stock: Any = super().store  # type: ignore[misc]
            return bool(stock(tokens, cache, evict_prefixes))
        counts = self.memory.counts
        before = counts["inserted"] - counts["rejected"]
        self.memory.insert_cache(self.key, tokens, list(cache))
        stored = counts["inserted"] - counts["rejected"] > before
        self._stats.store_rejections += not stored
        return stored

    def remove(self, tokens: list[int], *, include_ssd: bool = False) -> bool:
        """Let go of what begins with `tokens`, in memory; whether there was any."""
        stock: Any = super().remove  # type: ignore[misc]
        found = stock(tokens, include_ssd=include_ssd)
        return bool(self.memory.forget(self.key, tokens)) or bool(found)

    def clear(self) -> None:
        """Let go of everything in memory; what the tier holds stays."""
        stock: Any = super().clear  # type: ignore[misc]
        stock()
        self.memory.trim_to(n_sequences=0, n_bytes=0)

    # --- figures -----------------------------------------------------------------------------

    def get_stats(self) -> dict[str, Any]:
        """As vllm-mlx's, and `tier_hits`, `tier_tokens`: restores, and the tokens they spared."""
        counts = self.memory.counts
        self._stats.current_memory_bytes = self._current_memory + self.memory.nbytes
        self._stats.entry_count = len(self)
        self._stats.evictions = counts["evicted"]
        stock: Any = super().get_stats  # type: ignore[misc]
        return dict(stock()) | {name: counts[name] for name in ("tier_hits", "tier_tokens")}

    @property
    def memory_usage_mb(self) -> float:
        """MB in use."""
        return (self._current_memory + self.memory.nbytes) / _MB

    def __len__(self) -> int:
        return len(self._entries) + len(self.memory)

    def __contains__(self, tokens: list[int]) -> bool:
        known = self.memory.match(self.key, [*tokens, 0])
        return tuple(tokens) in self._entries or known == len(tokens)

    # --- what the tier stands for ------------------------------------------------------------

    def set_ssd_tier(self, ssd_tier: Any) -> None:
        """Nothing is spilled: what leaves memory is in the second tier already."""
        if ssd_tier is not None:
            log.warning("the SSD cache stays empty: conversations are kept in Pion")

    def check_ssd(self, tokens: list[int]) -> None:
        """Nothing is there."""

    def save_to_disk(self, cache_dir: str) -> bool:
        """Write no file; whether the tier was given everything when it was computed."""
        return self.memory.tier is not None and len(self.memory) > 0

    def load_from_disk(self, cache_dir: str) -> int:
        """Load nothing: the tier is asked for each prompt."""
        return 0

    # --- what the batch generator says -------------------------------------------------------

    def is_stateful(self, model: Any) -> bool:
        """Whether the model can be resumed only where its prefill stopped."""
        return self.places.stateful

    @property
    def places(self) -> Places:
        """Where the model can be resumed."""
        if self._places is None:
            self._places = places_of(self.model)
        return self._places

    def pass_state(self, tokens: list[int], cache: list[Any]) -> None:
        """An answer under way has come to a multiple of the grain."""
        self.memory.pass_state(self.key, tokens, cache)

    def stop(self, tokens: list[int], cache: list[Any]) -> None:
        """A prefill has stopped where it can be resumed."""
        self.memory.insert_cache(self.key, tokens, cache, cache_type=BLOCK)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """So many tokens were computed in so many seconds."""
        if self.memory.tier is not None:
            self.memory.tier.note_prefill(tokens, seconds)

    def leave_tier(self, reason: str) -> None:
        """From now on in memory only."""
        if self.memory.tier is not None:
            log.warning("conversations are kept in memory only: %s", reason)
            self.memory.tier = None


def _let_go(memory: PromptMemory, key: Any) -> None:
    """The tier is shared: only what it holds of this model goes."""
    memory.fence.close()
    if memory.tier is not None:
        memory.tier.detach(key)
