"""What each endpoint does, given a request's body and somewhere to write the answer."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from mlx_lm.server import CompletionRequest, ResponseGenerator, get_system_fingerprint

from pion_patches.prompt_memory import PromptMemory
from pion_vllm_mlx.serve import anthropic, chat_sink, responses
from pion_vllm_mlx.serve.anthropic_sink import AnthropicSink
from pion_vllm_mlx.serve.channel import ClientGone
from pion_vllm_mlx.serve.chat_sink import ChatSink
from pion_vllm_mlx.serve.errors import BadRequest
from pion_vllm_mlx.serve.exchange import Exchange, Sink
from pion_vllm_mlx.serve.figures import Figures
from pion_vllm_mlx.serve.generator import Generator
from pion_vllm_mlx.serve.manners import Manners
from pion_vllm_mlx.serve.normalise import has_images, normalise_messages
from pion_vllm_mlx.serve.remembered import Remembered, Shelf, Unknown
from pion_vllm_mlx.serve.reply import Reply
from pion_vllm_mlx.serve.responses_sink import ResponsesSink
from pion_vllm_mlx.serve.tier import PionTier
from pion_vllm_mlx.serve.tool_choice import Demanding, choose, lead_in

log = logging.getLogger("pion_vllm_mlx")

_CHAT: Final = "/v1/chat/completions"
_TEXT: Final = "/v1/completions"
#: Prompt tokens computed in a request below which its time says little about the model's speed.
_MEASURED: Final = 64
#: Fields that would have mlx_lm.server load something else from this machine's disk.
_OTHER_MODELS: Final = ("adapters", "draft_model")

Body = dict[str, Any]


@dataclass
class Service:
    """One model, its prompt memory, its figures. `name`: what /v1/models calls the model."""

    generator: Generator
    memory: PromptMemory
    name: str
    normalise: bool = True
    tier: PionTier | None = None
    remembered: Remembered = field(default_factory=Remembered)

    def __post_init__(self) -> None:
        if self.tier is not None:
            self.remembered = Remembered(shelf=Shelf(self.tier.lane()))
        self.figures = Figures(self._reading)
        fingerprint: Any = get_system_fingerprint
        self._fingerprint = str(fingerprint())
        self._created = int(time.time())
        self._manners: tuple[Any, Manners] | None = None

    def chat(self, reply: Reply, body: Body) -> None:
        """POST /v1/chat/completions"""
        self._openai(reply, body, _CHAT, "chat")

    def completions(self, reply: Reply, body: Body) -> None:
        """POST /v1/completions; the prompt is a text, or token ids."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if not isinstance(prompt, str) and not self._are_ids(prompt):
            raise BadRequest("prompt: a text or a list of token ids")
        self._openai(reply, body | {"prompt": prompt}, _TEXT, "completions")

    def messages(self, reply: Reply, body: Body) -> None:
        """POST /v1/messages"""
        chat = self._checked(anthropic.to_chat(body))
        exchange = self._exchange(reply)
        self._run("messages", exchange, _CHAT, chat, reply, AnthropicSink(reply, exchange, body))

    def count_tokens(self, reply: Reply, body: Body) -> None:
        """POST /v1/messages/count_tokens"""
        chat = self._checked(anthropic.to_chat(body))
        request = CompletionRequest("chat", "", chat["messages"], chat.get("tools"), None)
        args = SimpleNamespace(chat_template_kwargs=chat.get("chat_template_kwargs"))
        render: Any = ResponseGenerator._tokenize
        tokenizer = self.generator.model_provider.tokenizer
        prompt, _, _, state, _ = render(self.generator, tokenizer, request, args)
        lead = lead_in(tokenizer, state) if _is_required(chat) else ()
        reply.json(200, {"input_tokens": len(prompt) + len(lead)})

    def responses(self, reply: Reply, body: Body) -> None:
        """POST /v1/responses"""
        earlier: list[dict[str, Any]] = []
        if previous := body.get("previous_response_id"):
            try:
                earlier = self.remembered.recall(str(previous))
            except Unknown as error:
                where = "previous_response_id", "previous_response_not_found"
                reply.json(404, chat_sink.error_of(404, str(error), *where))
                return
        added = responses.to_messages(body.get("input") or [])
        chat = self._checked(responses.to_chat(body, earlier))
        exchange = self._exchange(reply)
        sink = ResponsesSink(reply, exchange, body, added, self.remembered)
        self._run("responses", exchange, _CHAT, chat, reply, sink)

    def root(self, reply: Reply) -> None:
        """GET /: who is there."""
        reply.json(200, {"server": "pion-vllm-mlx serve", "model": self.name})

    def models(self, reply: Reply) -> None:
        """GET /v1/models"""
        reply.json(200, {"object": "list", "data": [self._model()]})

    def model(self, reply: Reply) -> None:
        """GET /v1/models/…: any name is answered for, as any name is served."""
        reply.json(200, self._model())

    def health(self, reply: Reply) -> None:
        """GET /health: 200 while the generation thread shows signs of life."""
        provider, generator = self.generator.model_provider, self.generator
        state = "ok" if generator.is_healthy else "unavailable"
        if not provider.ready.is_set():
            state = "loading"
        body = {"status": state, "seconds_since_heartbeat": round(generator.pulse, 3)}
        reply.json(200 if state == "ok" else 503, body)

    def stats(self, reply: Reply) -> None:
        """GET /v1/pion/stats"""
        reply.json(200, {"model": self.name, **self.figures.snapshot()})

    def metrics(self, reply: Reply) -> None:
        """GET /metrics"""
        reply.send(200, self.figures.exposition(), "text/plain; version=0.0.4; charset=utf-8")

    def _openai(self, reply: Reply, body: Body, path: str, api: str) -> None:
        options = body.get("stream_options")
        asked = bool(isinstance(options, dict) and options.get("include_usage"))
        chat = self._checked(body) | {"stream_options": {"include_usage": asked}}
        if path == _CHAT:
            chosen = choose(_functions(chat.pop("tools", ())), chat.pop("tool_choice", None))
            chat |= chosen.fields()
        sink = ChatSink(reply, str(body.get("model") or self.name))
        self._run(api, self._exchange(reply), path, chat, reply, sink)

    def _checked(self, body: Body) -> Body:
        """The body mlx_lm.server gets. Raises BadRequest."""
        for name in _OTHER_MODELS:
            if body.get(name) is not None:
                raise BadRequest(f"{name}: this server serves {self.name} as it is")
        # Clients send null for what they leave to the server.
        checked = {key: value for key, value in body.items() if value is not None}
        if "messages" in checked:
            messages = normalise_messages(checked["messages"], billing=self.normalise)
            # mlx_lm.server fetches an image's address before it knows whether it can use one.
            if self.generator.model_provider.processor is None and has_images(messages):
                raise BadRequest("messages: this model reads text only")
            checked["messages"] = self._fitted(messages)
        return checked | {"model": "default_model"}

    def _fitted(self, messages: Any) -> Any:
        """Messages the model's chat template takes, if it takes any such conversation."""
        tokenizer = self.generator.model_provider.tokenizer
        if self._manners is None or self._manners[0] is not tokenizer:
            self._manners = tokenizer, Manners.of(tokenizer)
        return self._manners[1].fit(messages) if isinstance(messages, list) else messages

    def _exchange(self, reply: Reply) -> Exchange:
        return Exchange(self.generator, self._fingerprint, reply.is_gone)

    def _run(
        self, api: str, exchange: Exchange, path: str, body: Body, reply: Reply, sink: Sink
    ) -> None:
        outcome = "failed"
        if _is_required(body):
            exchange.required = True
            sink = Demanding(sink, frozenset(tool["function"]["name"] for tool in body["tools"]))
        self.figures.begin()
        try:
            exchange.run(path, body, sink)
            outcome = "ok" if reply.status == 200 else "refused"
        except ClientGone:
            outcome = "cancelled"
            raise
        finally:
            figures = {
                "prompt": exchange.prompt_tokens,
                "cached": exchange.cached_tokens,
                "generated": len(exchange.tokens),
            }
            self.figures.end(api, outcome, first=exchange.first, **figures)
            computed = exchange.prompt_tokens - exchange.cached_tokens
            if self.tier is not None and exchange.first and computed >= _MEASURED:
                self.tier.note_prefill(computed, exchange.first)
            seconds = time.monotonic() - exchange.started
            log.info(
                "%s %s: %d prompt tokens, %d of them cached, %d generated, %.2f s to the first"
                " token, %.2f s in all",
                *(api, outcome, *figures.values(), exchange.first or 0.0, seconds),
            )

    def _are_ids(self, prompt: Any) -> bool:
        from pion_vllm_mlx.arguments import vocab_size_of

        size = vocab_size_of(self.generator.model_provider.model) or 1 << 31
        return isinstance(prompt, list) and all(type(t) is int and 0 <= t < size for t in prompt)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "local",
            # Anthropic's clients read these two.
            "type": "model",
            "display_name": self.name,
        }

    def _reading(self) -> dict[str, dict[str, float]]:
        memory, generator = self.memory, self.generator
        tier = dict(self.tier.figures()) if self.tier is not None else {}
        events = dict(memory.counts)
        events |= {"tier_late": memory.fence.late, "tier_failed": memory.fence.failed}
        gauges = {
            "memory_bytes": memory.nbytes,
            "memory_conversations": len(memory),
            "tier_bytes": tier.get("used_bytes", 0),
            "tier_bytes_waiting": tier.get("bytes_waiting", 0),
            "heartbeat_age_seconds": generator.pulse,
            "healthy": int(generator.is_healthy),
        }
        return {"memory": events, "tier": tier, "gauges": gauges}


def _is_required(chat: Body) -> bool:
    return chat.get("tool_choice") == "required"


def _functions(tools: Any) -> list[dict[str, Any]]:
    """The tools of a chat request. Raises BadRequest for what has no name."""
    for number, tool in enumerate(tools if isinstance(tools, list | tuple) else [None]):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools.{number}: a function with a name")
    return list(tools)


def error_body(path: str, status: int, message: str) -> dict[str, Any]:
    """An error in the dialect of the API that was asked."""
    if path.startswith("/v1/messages"):
        return anthropic.error_of(status, message)
    return chat_sink.error_of(status, message)
