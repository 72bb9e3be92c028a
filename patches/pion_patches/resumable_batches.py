"""The batch generator of vllm-mlx's scheduler: stops prefills where they can be resumed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, Final

from mlx_lm.generate import GenerationBatch

from .checkpoints import cut_segments
from .engine_cache import TieredPrefixCache, cache_of
from .even_batches import EvenBatchGenerator

#: Prompt tokens computed in a step below which its time says little about the model's speed.
_MEASURED: Final = 64

log = logging.getLogger("pion_patches")


class ResumableBatchGenerator(EvenBatchGenerator):
    """Tells the prefix cache of its model about every state a prompt can be resumed from.

    The scheduler itself stores a model with recurrent or windowed layers once, right behind its
    first prompt. Here its prefills stop at multiples of a block as well, and an answer's end is
    kept. Of other models only the tokens of a resumed prompt are added, which processors of
    logits look at: a repeated token is penalised whether it was computed or restored.

    An empty prompt is answered with an error by the next call of `next`, and disturbs no other.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        initialise: Any = super().__init__
        initialise(*arguments, **options)
        #: Ids of empty prompts that are not answered yet.
        self._refused: list[int] = []
        self._cache: TieredPrefixCache | None = cache_of(self.model)
        if self._cache is not None:
            self._serving = self._cache
            if self.max_kv_size:
                self._cache.leave_tier("--max-kv-size makes other layers than the model's own")

    def insert(
        self,
        prompts: Sequence[list[int]],
        max_tokens: list[int] | None = None,
        caches: Sequence[Any] | None = None,
        all_tokens: list[list[int]] | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Ids of the sequences. A cache in `caches` that knows its tokens needs no `all_tokens`."""
        given = list(caches) if caches is not None else [None] * len(prompts)
        known = [list(getattr(cache, "tokens", ())) for cache in given]
        if not self.max_kv_size and any(
            cache is not None and not held for cache, held in zip(given, known, strict=True)
        ):
            # Whatever follows on such a cache has tokens before it that nobody here knows.
            self._cache = self._serving = None
            log.warning("states are not kept any more: a cache came from somewhere else")
        # mlx-lm either does not take an empty prompt or raises when its turn has come, and
        # vllm-mlx ends everybody's request then. A token stands in for it, and is never computed.
        segments = [
            self._cut(held, list(prompt) or [0])
            for prompt, held in zip(prompts, known, strict=True)
        ]
        stock: Any = self.insert_segments
        uids = stock(segments, max_tokens, given, all_tokens or known, *arguments, **options)
        refused = [uid for uid, prompt in zip(uids, prompts, strict=True) if not len(prompt)]
        if refused:
            log.warning("an empty prompt is refused")
            remove: Any = self.remove
            remove(refused)
            self._refused += refused
        return uids

    def _cut(self, held: list[int], prompt: list[int]) -> list[list[int]]:
        """The parts of a prompt that is behind the tokens `held` in its cache."""
        if self._cache is None:
            return [prompt]
        try:
            stops = self._cache.stops_of(held + prompt)
            ahead = {place - len(held): kind for place, kind in stops.items()}
            return cut_segments([prompt], ["user"], {n: k for n, k in ahead.items() if n > 0})[0]
        except Exception as error:
            log.warning("a prompt is not cut: %r", error)
            return [prompt]

    def _next(self) -> Any:
        before = self._computed()
        prompts, answers = super()._next()
        cache = self._cache
        if cache is not None:
            try:
                tokens, seconds = self._computed()
                if tokens - before[0] >= _MEASURED:
                    cache.note_prefill(tokens - before[0], seconds - before[1])
                if cache.is_stateful(self.model):
                    self._keep(cache, prompts, answers)
            except Exception as error:
                log.warning("what was computed is not kept: %r", error)
        refused, self._refused = self._refused, []
        return prompts, [*map(_refusal, refused), *answers]

    def _computed(self) -> tuple[int, float]:
        """Tokens of prompts computed so far, and the seconds that took."""
        here: Any = self
        if not hasattr(here, "_counters"):  # before mlx-lm 0.32
            return here._prompt_tokens_counter, here._prompt_time_counter
        return here._counters.prompt_tokens, here._counters.prompt_time

    def _keep(self, cache: TieredPrefixCache, prompts: list[Any], answers: list[Any]) -> None:
        ended = [part.uid for part in prompts if part.end_of_segment and not part.end_of_prompt]
        extract: Any = self.extract_cache
        for rows, tokens in extract(ended).values():
            cache.stop(list(tokens), list(rows))
        for answer in answers:
            if answer.finish_reason is not None and answer.prompt_cache:
                cache.store(list(answer.all_tokens), list(answer.prompt_cache))


def _refusal(uid: int) -> Any:
    """The whole answer to a prompt that cannot be answered. Its token means nothing."""
    answer: Any = GenerationBatch.Response
    empty = dict.fromkeys((field.name for field in dataclasses.fields(answer)), None)
    return answer(**empty | {"uid": uid, "token": 0, "finish_reason": "error", "all_tokens": []})
