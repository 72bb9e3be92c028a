"""A batch generator whose prompts are never padded, and that notes the states answers pass."""

from __future__ import annotations

import itertools
import logging
from typing import Any, Protocol

from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import BatchRotatingKVCache

from .live_caches import leaves_of
from .prompt_memory import GRAIN

log = logging.getLogger("pion_patches")


class Serving(Protocol):
    """Whom a batch generator computes for."""

    def is_stateful(self, model: Any) -> bool:
        """Whether any of a model's caches cannot be cut at every token."""

    def pass_state(self, tokens: list[int], cache: list[Any]) -> None:
        """An answer under way has come to a multiple of the grain."""


class EvenBatchGenerator(BatchGenerator):
    """Processes as many tokens of every prompt in the batch at a time, so that none is padded.

    Some recurrent layers take padding on the right for tokens, which would spoil an answer and,
    worse, the state that is kept of it.

    So steps are of any length, and one of a single token, which is written into a window in place,
    may be followed by a longer one. BatchRotatingKVCache makes the mask of that one for the window
    as the single token left it and puts it in order only afterwards: what is to hide the padding
    of a row shorter than the window hides a token of it, too. Here it is put in order before.
    """

    _serving: Serving | None = None

    def _next(self) -> Any:
        waiting = itertools.islice(self._unprocessed_sequences, self.prefill_batch_size)
        running = [entry[0] for entry in self._currently_processing]
        prompts = [*running, *(sequence[1] for sequence in waiting)]
        # A single token left is the one whose logits start the answer: no prompt any more.
        lengths = [len(parts[0]) for parts in prompts if len(parts) > 1 or len(parts[0]) > 1]
        step = self.prefill_step_size
        for leaf in leaves_of(self._prompt_batch.prompt_cache):
            if isinstance(leaf, BatchRotatingKVCache):
                put_in_order: Any = leaf._temporal_order
                put_in_order()
        stock: Any = super()._next
        self.prefill_step_size = min([step, *lengths])
        try:
            found = stock()
        finally:
            self.prefill_step_size = step
        if self._serving is not None:
            try:
                self._pass_states(self._serving)
            except Exception as error:
                log.warning("states of answers are not kept: %r", error)
                self._serving = None
        return found

    def _pass_states(self, serving: Serving) -> None:
        """Note the state of each answer that is at a multiple of the grain."""
        batch = self._generation_batch
        places = [i for i, tokens in enumerate(batch.tokens) if len(tokens) % GRAIN == 0]
        if places and serving.is_stateful(self.model):
            for place in places:
                cache = batch.extract_cache(place)
                serving.pass_state(batch.tokens[place], cache)
