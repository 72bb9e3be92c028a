"""One request through mlx_lm.server's own handler, without a socket: a body in, events out.

Parsing, sampling arguments, templates, tools and reasoning stay mlx_lm.server's. What its handler
writes is read back here, one JSON object a write, and given to a `Sink` in the dialect of choice.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from mlx_lm.server import APIHandler

from pion_vllm_mlx.serve.channel import ClientGone
from pion_vllm_mlx.serve.generator import Generator, Interrupted, Unavailable, demand_call
from pion_vllm_mlx.serve.stops import StopWatch

log = logging.getLogger("pion_vllm_mlx")


class Sink(Protocol):
    """Where an answer goes. `result` is called once, or `begin`, `chunk`s and `end`, or `fail`."""

    def result(self, answer: dict[str, Any]) -> None:
        """The whole answer, as /v1/chat/completions or /v1/completions has it."""

    def begin(self) -> None:
        """A stream begins; `Exchange.prompt_tokens` and `cached_tokens` are known."""

    def chunk(self, chunk: dict[str, Any]) -> None:
        """A piece of a stream."""

    def progress(self, done: int, total: int) -> None:
        """So many of the prompt's tokens are computed; nothing else has come for a while."""

    def end(self) -> None:
        """The stream is complete."""

    def fail(self, status: int, message: str) -> None:
        """No answer, or none to the end."""


class Exchange:
    """A request on its way. Its figures are known once the answer has begun."""

    def __init__(self, generator: Generator, fingerprint: str, is_gone: Callable[[], bool]) -> None:
        self.generator = generator
        self.fingerprint = fingerprint
        self.is_gone = is_gone
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.failure: Exception | None = None
        #: Whether the answer has to be a call of a tool.
        self.required = False
        self._stops = StopWatch([])
        self.started = time.monotonic()
        #: Seconds until the first token.
        self.first: float | None = None

    def run(self, path: str, body: dict[str, Any], sink: Sink) -> None:
        """Put `body` to mlx_lm.server's handler for `path`; ClientGone if nobody waits any more."""
        handler = _Handler(self, path, body, sink)
        try:
            post: Any = handler.do_POST
            post()
            handler.finish_answer()
        except (ClientGone, BrokenPipeError, ConnectionError, TimeoutError) as error:
            raise ClientGone from error
        except Exception as error:
            log.warning("an answer ended early: %r", error)
            sink.fail(*self._status(error))

    # What the handler asks of a generator of responses.

    @property
    def cli_args(self) -> Any:
        """mlx_lm.server's flags."""
        return self.generator.cli_args

    def generate(
        self, request: Any, args: Any, progress_callback: Callable[[int, int], None] | None = None
    ) -> tuple[Any, Iterator[Any]]:
        """As mlx_lm.server's; notes the figures."""
        if self.required:
            demand_call(request)
        try:
            context, responses = self.generator.answer(
                request, args, self.is_gone, progress_callback
            )
        except Exception as error:
            self.failure = error
            raise
        self.prompt_tokens = len(context.prompt)
        self.cached_tokens = max(0, context.prompt_cache_count)
        self._stops = StopWatch(args.stop_words)
        return context, self._noted(responses)

    @property
    def stopped_by(self) -> str | None:
        """The stop text that ended the answer, or None."""
        if self.finish != "stop":
            return None
        return self._stops.matched(self.tokens, self.generator.model_provider.tokenizer)

    @property
    def usage(self) -> dict[str, Any]:
        """As OpenAI counts: the prompt includes what was read from the cache."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.tokens),
            "total_tokens": self.prompt_tokens + len(self.tokens),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _noted(self, responses: Iterator[Any]) -> Iterator[Any]:
        for response in responses:
            if self.first is None:
                self.first = time.monotonic() - self.started
            self.tokens.append(response.token)
            end = None
            if response.finish_reason != "stop":
                end = self._stops.add(response.text)
            if end is None:
                self.finish = response.finish_reason or self.finish
                yield response
                continue
            # mlx_lm.server looks for stops token by token, and misses one whose text begins or
            # ends within a token; from the text it takes each out, wherever it lies.
            self.finish = "stop"
            yield dataclasses.replace(response, text=end, finish_reason=None)
            yield dataclasses.replace(response, text="", finish_reason="stop")
            return

    def _status(self, error: Exception) -> tuple[int, str]:
        status = 400
        if isinstance(error, Unavailable | Interrupted):
            status = 503 if isinstance(error, Unavailable) else 500
        return status, str(error) or type(error).__name__


class _Handler(APIHandler):
    """mlx_lm.server's handler with a body for its socket and a sink for its answers."""

    def __init__(self, exchange: Exchange, path: str, body: dict[str, Any], sink: Sink) -> None:
        # Not the base class's: it would serve a connection.
        mine: Any = self
        raw = json.dumps(body).encode()
        self.created = int(time.time())
        mine.response_generator = exchange
        self.system_fingerprint = exchange.fingerprint
        self.path = path
        mine.headers = {"Content-Length": str(len(raw))}
        self.rfile = io.BytesIO(raw)
        mine.wfile = self
        self._exchange = exchange
        self._sink = sink
        self._status = 200
        self._streams = False
        self._ended = False

    def _set_completion_headers(self, status_code: int = 200) -> None:
        self._status = status_code

    def _set_stream_headers(self, status_code: int = 200) -> None:
        self._streams = True
        self._sink.begin()

    def send_header(self, *_: Any) -> None:
        """The sink's side has headers of its own."""

    def end_headers(self) -> None:
        """As above."""

    def flush(self) -> None:
        """Every write is handed on at once."""

    def write(self, data: bytes) -> None:
        """One event of a stream, or a whole answer."""
        if not self._streams:
            self._whole(self._counted(json.loads(data)))
        elif data.startswith(b": keepalive "):
            done, total = data.split()[2].split(b"/")
            self._sink.progress(int(done), int(total))
        elif data.startswith(b"data: [DONE]"):
            self._ended = True
        else:
            self._sink.chunk(self._counted(json.loads(data.removeprefix(b"data: "))))

    def finish_answer(self) -> None:
        """End a stream; called when the handler has returned."""
        if self._ended:
            self._sink.end()

    def _counted(self, answer: dict[str, Any]) -> dict[str, Any]:
        return answer | {"usage": self._exchange.usage} if "usage" in answer else answer

    def _whole(self, answer: dict[str, Any]) -> None:
        failure = self._exchange.failure
        if isinstance(failure, ClientGone):
            raise failure
        if failure is not None:
            # The handler says 404 to whatever has gone wrong.
            self._sink.fail(*self._exchange._status(failure))
        elif self._status == 200:
            self._sink.result(answer)
        else:
            self._sink.fail(self._status, str(answer.get("error", "")))
