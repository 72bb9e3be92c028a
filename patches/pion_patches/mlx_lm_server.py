"""mlx_lm.server with another prompt cache: `PromptMemory` in the place of `LRUPromptCache`.

    install_mlx_lm_server_patch()
    mlx_lm.server.main()

Three names of `mlx_lm.server` are bound to classes of ours, each a subclass or a stand-in of what
was there; no code of the server is changed. Beside the prompt cache these are the generator of
responses, which stops prefills where recurrent and windowed layers can be resumed (`checkpoints`)
and refuses an empty prompt, and the batch generator, which never pads a prompt on the right.
"""

from __future__ import annotations

import itertools
import logging
import threading
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final

import mlx_lm
from mlx_lm import server
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.server import ResponseGenerator

from ._patch import Patch, PatchConflict, require_signature, require_version
from .checkpoints import (
    ROWLESS_STRIDE,
    STRIDE,
    choose_stops,
    cut_segments,
    find_wishes,
    stride_of,
)
from .live_caches import has_rows, leaves_of
from .prompt_memory import GRAIN, PromptMemory

log = logging.getLogger("pion_patches")

_THREAD = threading.local()

MLX_LM_LOW, MLX_LM_BELOW = "0.32.2", "0.33"


class EvenBatchGenerator(BatchGenerator):
    """Processes as many tokens of every prompt in the batch at a time, so that none is padded.

    Some recurrent layers take padding on the right for tokens, which would spoil an answer and,
    worse, the state that is kept of it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        initialise: Any = super().__init__
        initialise(*arguments, **options)
        self._serving: StoppingResponseGenerator | None = getattr(_THREAD, "serving", None)

    def _next(self) -> Any:
        waiting = itertools.islice(self._unprocessed_sequences, self.prefill_batch_size)
        running = [entry[0] for entry in self._currently_processing]
        prompts = [*running, *(sequence[1] for sequence in waiting)]
        # A single token left is the one whose logits start the answer: no prompt any more.
        lengths = [len(parts[0]) for parts in prompts if len(parts) > 1 or len(parts[0]) > 1]
        step = self.prefill_step_size
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

    def _pass_states(self, serving: StoppingResponseGenerator) -> None:
        """Note the state of each answer that is at a multiple of the grain."""
        batch = self._generation_batch
        places = [i for i, tokens in enumerate(batch.tokens) if len(tokens) % GRAIN == 0]
        if places and serving.is_stateful(self.model):
            for place in places:
                cache = batch.extract_cache(place)
                serving.pass_state(batch.tokens[place], cache)


class StoppingResponseGenerator(ResponseGenerator):
    """Cuts the prompts of models that need it, and tells the prompt cache about the model."""

    _stateful_model: tuple[Any, bool] = (None, False)
    _stride = STRIDE

    def _generate(self) -> None:
        # The batch generator is made in there, by a call that cannot be given anything more.
        _THREAD.serving = self
        stock: Any = super()._generate
        stock()

    def pass_state(self, tokens: list[int], cache: list[Any]) -> None:
        """An answer under way has come to a multiple of the grain."""
        if isinstance(self.prompt_cache, PromptMemory):
            self.prompt_cache.pass_state(self.model_provider.model_key, tokens, cache)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        stock: Any = super()._tokenize
        prompt, segments, kinds, state, vision = stock(tokenizer, request, args)
        if not prompt:
            # The batch generator raises for it later, on the thread that serves everybody.
            raise ValueError("the prompt is empty")
        provider = self.model_provider
        if isinstance(self.prompt_cache, PromptMemory):
            self.prompt_cache.attach(provider.model_key, provider)
        if vision is None and self.is_stateful(provider.model):
            wishes: dict[int, str] = {}
            try:
                wishes = self._wishes(tokenizer, request, args, prompt)
            except Exception as error:
                log.debug("the ends of messages are not known: %r", error)
            stops = choose_stops(len(prompt), wishes, stride=self._stride)
            segments, kinds = cut_segments(segments, kinds, stops)
        return prompt, segments, kinds, state, vision

    def is_stateful(self, model: Any) -> bool:
        """Whether any of a model's caches cannot be cut at every token."""
        known, stateful = self._stateful_model
        if known is not model:
            leaves = leaves_of(make_prompt_cache(model))
            stateful = not all(has_rows(leaf) for leaf in leaves)
            if stateful:
                try:
                    self._stride = stride_of(model)
                except Exception as error:
                    self._stride = ROWLESS_STRIDE
                    log.debug("the size of a state is not known: %r", error)
            self._stateful_model = (model, stateful)
        return stateful

    def _wishes(self, tokenizer: Any, request: Any, args: Any, prompt: list[int]) -> dict[int, str]:
        if request.request_type != "chat" or not tokenizer.has_chat_template:
            return {}
        options = {**self.cli_args.chat_template_args, **(args.chat_template_kwargs or {})}
        return find_wishes(tokenizer, request.messages, prompt, tools=request.tools, **options)


#: Names in mlx_lm.server: what must be there, and what goes there.
_BOUND: Final[dict[str, tuple[type, type]]] = {
    "LRUPromptCache": (LRUPromptCache, PromptMemory),
    "ResponseGenerator": (ResponseGenerator, StoppingResponseGenerator),
    "BatchGenerator": (BatchGenerator, EvenBatchGenerator),
}


class MlxLmServerPatch(Patch):
    """The three names of mlx_lm.server, bound to our classes."""

    name: ClassVar[str] = "mlx_lm.server"

    def check(self) -> None:
        require_version("mlx-lm", mlx_lm.__version__, MLX_LM_LOW, MLX_LM_BELOW)
        for name, (stock, _) in _BOUND.items():
            if getattr(server, name) is not stock:
                raise PatchConflict(f"mlx_lm.server.{name} is not mlx-lm's own any more")
        for found, template in (
            (LRUPromptCache.fetch_nearest_cache, PromptMemory.fetch_nearest_cache),
            (LRUPromptCache.insert_cache, PromptMemory.insert_cache),
            (LRUPromptCache.stats_by_type, PromptMemory.stats_by_type),
            (ResponseGenerator._tokenize, StoppingResponseGenerator._tokenize),
            (BatchGenerator._next, EvenBatchGenerator._next),
        ):
            require_signature(found, template)

    def is_installed(self) -> bool:
        return any(getattr(server, name) is ours for name, (_, ours) in _BOUND.items())

    def apply(self) -> None:
        for name, (_, ours) in _BOUND.items():
            setattr(server, name, ours)

    def revert(self) -> None:
        for name, (_, ours) in _BOUND.items():
            if getattr(server, name) is not ours:
                raise PatchConflict(f"somebody else has replaced mlx_lm.server.{name} since")
        for name, (stock, _) in _BOUND.items():
            setattr(server, name, stock)


PATCH = MlxLmServerPatch()


def install_mlx_lm_server_patch() -> None:
    """Give servers that mlx_lm.server makes from now on a `PromptMemory`; again is a no-op.

    Raises `UnsupportedVersion` (found, required) for an mlx-lm outside the tested range or with
    another signature, `PatchConflict` where somebody else has replaced one of the names.
    """
    PATCH.install()


def uninstall_mlx_lm_server_patch() -> None:
    """Bind the names to mlx-lm's own classes again; servers that run keep theirs."""
    PATCH.uninstall()


def is_installed() -> bool:
    """Say whether the patch is in force in this process."""
    return PATCH.is_installed()


def mlx_lm_server_patch() -> AbstractContextManager[None]:
    """Install for a ``with`` block; what was installed before it stays installed after."""
    return PATCH.installed()
