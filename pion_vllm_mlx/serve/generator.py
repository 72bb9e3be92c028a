"""mlx_lm.server's generator of responses, with a pulse, and an end for those nobody waits for."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty
from types import SimpleNamespace
from typing import Any, Final

from pion_patches.mlx_lm_server import StoppingResponseGenerator
from pion_patches.prompt_memory import PromptMemory
from pion_vllm_mlx.serve.admission import Admission
from pion_vllm_mlx.serve.channel import Channel, ClientGone
from pion_vllm_mlx.serve.head_watch import HeadWatch
from pion_vllm_mlx.serve.pace import Pace
from pion_vllm_mlx.serve.provider import Provider
from pion_vllm_mlx.serve.tool_choice import lead_in

log = logging.getLogger("pion_vllm_mlx")

#: Failures within so many seconds after which it is no use to go on.
_MOST_FAILURES, _FAILING = 3, 60.0
#: Where a request keeps its tokens.
_TOKENIZED: Final = "pion_tokenized"
#: Where it says that its answer has to be a call of a tool.
_DEMANDED: Final = "pion_demanded"
#: Seconds between two looks at a client while nothing comes.
_LOOK: Final = 0.02

Progress = Callable[[int, int], None]


class Unavailable(RuntimeError):
    """Nothing can be generated: the model is not loaded, or the generation thread has ended."""


class Interrupted(RuntimeError):
    """Computing has failed, for this request and all that ran with it; later ones are served."""


class Generator(StoppingResponseGenerator):
    """`answer` in the place of mlx_lm.server's `generate`, for threads that watch a socket."""

    model_provider: Provider

    def __init__(self, provider: Provider, memory: PromptMemory, patience: float = 300.0) -> None:
        """`patience`: seconds without a sign of life after which it counts as hung."""
        self._pace = Pace()
        self._heads = HeadWatch()
        self._live: set[Channel] = set()
        self._admission = Admission(
            lambda tokens: memory.match(provider.model_key, tokens),
        )
        self.patience = patience
        initialise: Any = super().__init__
        initialise(provider, memory)
        self._time_budget = self._pace

    @property
    def is_healthy(self) -> bool:
        """Whether the generation thread lives and has shown it lately."""
        return self._is_available() and self.pulse < self.patience

    @property
    def pulse(self) -> float:
        """Seconds since the generation thread last looked for work or began a step."""
        return time.monotonic() - self._pace.beat

    @property
    def steps(self) -> int:
        """Steps of batches so far, prompts and tokens alike."""
        return self._pace.steps

    def stop(self) -> None:
        """Have the generation thread end after its step."""
        self._stop = True
        self._pace.hurry()

    def wait_for_end(self, seconds: float) -> bool:
        """Whether the generation thread has ended within so many seconds."""
        self._generation_thread.join(seconds)
        return not self._generation_thread.is_alive()

    def answer(
        self, request: Any, args: Any, is_gone: Callable[[], bool], progress: Progress | None
    ) -> tuple[Any, Iterator[Any]]:
        """mlx_lm.server's context and responses for a request.

        `is_gone` is asked at every item and while there is none; once it says so, computing stops
        and ClientGone is raised. Raises Unavailable, and whatever the request itself raised.
        """
        self._check_available()
        channel = Channel()
        self._live.add(channel)
        self.requests.put((channel, request, args))
        try:
            context = self._take(channel, is_gone)
            waiting: list[Any] = []
            # On the sequential path the count of cached tokens comes with the first progress.
            while context.prompt_cache_count < 0 and not waiting:
                waiting.append(self._take(channel, is_gone))
        except BaseException:
            self._give_up(channel)
            raise
        return context, self._responses(channel, waiting, is_gone, progress)

    def _responses(
        self,
        channel: Channel,
        waiting: list[Any],
        is_gone: Callable[[], bool],
        progress: Progress | None,
    ) -> Iterator[Any]:
        try:
            while (item := waiting.pop() if waiting else self._take(channel, is_gone)) is not None:
                if not isinstance(item, tuple):
                    yield item
                elif progress is not None:
                    progress(*item)
        except BaseException:
            self._give_up(channel)
            raise
        self._live.discard(channel)

    def _take(self, channel: Channel, is_gone: Callable[[], bool]) -> Any:
        """The next item; an exception among them is raised."""
        while True:
            if is_gone():
                raise ClientGone
            try:
                item = channel.get(timeout=_LOOK)
            except Empty:
                self._check_available()
                continue
            if isinstance(item, Exception):
                raise item
            return item

    def _give_up(self, channel: Channel) -> None:
        self._live.discard(channel)
        channel.cancel()
        self._pace.hurry()

    def _check_available(self) -> None:
        if not self._is_available():
            raise Unavailable("the generation thread has ended; restart the server")

    def _is_available(self) -> bool:
        available: Any = self.generation_available
        return bool(available())

    def _run_generate(self) -> None:
        failures: deque[float] = deque(maxlen=_MOST_FAILURES)
        generate: Any = self._generate
        while True:
            try:
                generate()
                return
            except Exception as error:
                if self.model_provider.failure is not None:
                    break  # the model could not be loaded, which its provider tells
                log.error("computing has failed: %r", error, exc_info=True)
                self._interrupt(error)
                failures.append(time.monotonic())
                if len(failures) == _MOST_FAILURES and failures[-1] - failures[0] < _FAILING:
                    log.critical("computing fails again and again: nothing more is served")
                    break
        self._generation_failed = True

    def _interrupt(self, error: Exception) -> None:
        """Tell everybody who waits. mlx_lm.server's loop, and the batch in it, starts anew."""
        for channel in list(self._live):
            # Not begun yet, some of them: those are not to be begun for nobody.
            channel.cancel()
            channel.put(Interrupted(f"computing has failed: {error!r}"))

    def _next_request(self, timeout: float | None = None) -> Any:
        self._pace.beat = time.monotonic()
        request = self._admission.take()
        if request is None:
            take: Any = super()._next_request
            request = take(timeout)
            # Nobody waits for it any more: not one step is spent on it.
            if request is not None and (request[0].cancelled or not self._may_go_on(request)):
                request = None
        self._pace.attentive = self._admission.waiting
        return request

    def _may_go_on(self, request: Any) -> bool:
        _, asked, args = request
        batchable: Any = self._is_batchable
        if not batchable(args):
            return True  # served alone
        try:
            prompt = self._tokenize(self.model_provider.tokenizer, asked, args)[0]
        except Exception:
            return True  # told to whoever asked, by mlx_lm.server, where it happens again
        return self._admission.offer(request, prompt)

    def _lead(
        self,
        tokenizer: Any,
        prompt: list[int],
        segments: list[list[int]],
        kinds: list[str],
        state: str,
        vision: Any,
    ) -> tuple[list[int], list[list[int]], list[str], str, Any]:
        """A tokenised prompt with the beginning of a call, where its template has such a thing."""
        lead = lead_in(tokenizer, state)
        if not lead or vision is not None:
            return prompt, segments, kinds, state, vision
        longer = [*prompt, *lead]
        if self.single is not None:
            self.single = dataclasses.replace(self.single, prompt=longer)
        return longer, [*segments[:-1], [*segments[-1], *lead]], kinds, "tool", vision

    def _serve_single(self, request: Any, stream: Any) -> None:
        request[0].sequential = True
        serve: Any = super()._serve_single
        serve(request, stream)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        # Once a request: the answer is kept with it between admission and computing.
        if (known := vars(request).pop(_TOKENIZED, None)) is not None:
            return known
        encoder = tokenizer
        if request.request_type == "text":
            encoder = _encoder_of(tokenizer, request.prompt)
        found = super()._tokenize(encoder, request, args)
        if vars(request).get(_DEMANDED):
            found = self._lead(tokenizer, *found)
        self._heads.note(found[0], tokenizer.decode)
        vars(request)[_TOKENIZED] = found
        return found


def demand_call(request: Any) -> None:
    """Have the answer to a request of mlx_lm.server's begin with the call of a tool."""
    vars(request)[_DEMANDED] = True


def _encoder_of(tokenizer: Any, prompt: Any) -> Any:
    """The tokenizer for a text; one that answers with the ids themselves for a list of ids."""
    if isinstance(prompt, list):
        return SimpleNamespace(encode=lambda ids: list(ids))
    bos, text = getattr(tokenizer, "bos_token", None), str(prompt)
    ids = tokenizer.encode(text)
    # A rendered conversation brings its own first token: it must not get a second one.
    if bos and text.startswith(bos) and ids[:2] == [tokenizer.bos_token_id] * 2:
        ids = ids[1:]
    return SimpleNamespace(encode=lambda _: ids)
