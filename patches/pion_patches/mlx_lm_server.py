"""mlx_lm.server with another prompt cache: `PromptMemory` in the place of `LRUPromptCache`.

    install_mlx_lm_server_patch()
    mlx_lm.server.main()

Four names of `mlx_lm.server` are bound to ours, each a subclass or a stand-in of what was there; no
code of the server is changed. Beside the prompt cache these are the generator of responses, which
stops prefills where recurrent and windowed layers can be resumed (`checkpoints`) and refuses an
empty prompt, the batch generator, which never pads a prompt on the right, and the generation of one
answer at a time, which stops as the batches do (`sequential`).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final

import mlx_lm
from mlx_lm import server
from mlx_lm.generate import BatchGenerator, stream_generate
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import ResponseGenerator

from ._patch import Patch, PatchConflict, require_signature, require_version
from .checkpoints import Places, choose_stops, cut_segments, find_wishes, places_of
from .even_batches import EvenBatchGenerator
from .prompt_memory import BLOCK, PromptMemory
from .sequential import Single, chunk_ends, stream_with_pauses

log = logging.getLogger("pion_patches")

_THREAD = threading.local()

MLX_LM_LOW, MLX_LM_BELOW = "0.32.2", "0.33"


class ServedBatchGenerator(EvenBatchGenerator):
    """Computes for the generator of responses of its thread."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        initialise: Any = super().__init__
        initialise(*arguments, **options)
        self._serving = getattr(_THREAD, "serving", None)


def stream_one(**options: Any) -> Iterator[Any]:
    """In the place of `stream_generate` in mlx_lm.server, which passes everything by name."""
    serving = getattr(_THREAD, "serving", None)
    single = serving.single if isinstance(serving, StoppingResponseGenerator) else None
    # With images the prompt's tokens are not all there is to it.
    has_images = options.get("input_embeddings") is not None
    if single is None or has_images or not single.ends_with(options["prompt"]):
        yield from stream_generate(**options)
    else:
        yield from stream_with_pauses(single, **options)


class StoppingResponseGenerator(ResponseGenerator):
    """Cuts the prompts of models that need it, and tells the prompt cache about the model."""

    #: The request that is served alone.
    single: Single | None = None
    _known: tuple[Any, Places] = (None, Places(False))

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
            stops = choose_stops(len(prompt), wishes, stride=self._known[1].stride)
            segments, kinds = cut_segments(segments, kinds, stops)
        self.single = self._alone(prompt, segments, kinds) if vision is None else None
        return prompt, segments, kinds, state, vision

    def _serve_single(self, request: Any, stream: Any) -> None:
        self.single = None
        stock: Any = super()._serve_single
        stock(request, stream)

    def _alone(
        self, prompt: list[int], segments: list[list[int]], kinds: list[str]
    ) -> Single | None:
        """How a request is served if that is done alone."""
        memory, provider = self.prompt_cache, self.model_provider
        if not isinstance(memory, PromptMemory):
            return None
        flags, stateful = provider.cli_args, self.is_stateful(provider.model)
        ends = itertools.accumulate(len(segment) for segment in segments)
        # The last token is computed by itself in any case: before it ends what can be resumed.
        stops = {len(prompt) - 1: BLOCK, **dict(zip(ends, kinds, strict=True))} if stateful else {}
        if flags.kv_bits is not None:
            start, step = flags.quantized_kv_start, flags.prefill_step_size
            stops = chunk_ends(len(prompt), start, step, stateful=stateful)

        def keep(tokens: list[int], cache: list[Any], kind: str) -> None:
            memory.insert_cache(provider.model_key, tokens, cache, cache_type=kind)

        return Single(prompt, stops, keep, self.pass_state, stateful)

    def is_stateful(self, model: Any) -> bool:
        """Whether any of a model's caches cannot be cut at every token."""
        known, places = self._known
        if known is not model:
            places = places_of(model)
            self._known = (model, places)
        return places.stateful

    def _wishes(self, tokenizer: Any, request: Any, args: Any, prompt: list[int]) -> dict[int, str]:
        if request.request_type != "chat" or not tokenizer.has_chat_template:
            return {}
        options = {**self.cli_args.chat_template_args, **(args.chat_template_kwargs or {})}
        return find_wishes(tokenizer, request.messages, prompt, tools=request.tools, **options)


#: Names in mlx_lm.server: what must be there, and what goes there.
_BOUND: Final[dict[str, tuple[Any, Any]]] = {
    "LRUPromptCache": (LRUPromptCache, PromptMemory),
    "ResponseGenerator": (ResponseGenerator, StoppingResponseGenerator),
    "BatchGenerator": (BatchGenerator, ServedBatchGenerator),
    "stream_generate": (stream_generate, stream_one),
}


class MlxLmServerPatch(Patch):
    """The four names of mlx_lm.server, bound to ours."""

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
            (ResponseGenerator._serve_single, StoppingResponseGenerator._serve_single),
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
