"""Anthropic's side of an answer: a Message, or the events of one."""

from __future__ import annotations

from typing import Any

from pion_vllm_mlx.serve import anthropic
from pion_vllm_mlx.serve.exchange import Exchange
from pion_vllm_mlx.serve.reply import Reply


class AnthropicSink:
    """Writes an exchange's answer to `reply`; a stream's blocks follow each other."""

    def __init__(self, reply: Reply, exchange: Exchange, body: dict[str, Any]) -> None:
        self._reply = reply
        self._exchange = exchange
        self._name = str(body.get("model") or "default_model")
        self._index = -1
        self._open: str | None = None
        self._finish: str | None = None

    def result(self, answer: dict[str, Any]) -> None:
        message = anthropic.to_message(answer, self._name, self._usage())
        self._reply.json(200, message | self._ending(message["stop_reason"]))

    def begin(self) -> None:
        self._reply.begin_stream()
        message = anthropic.envelope(self._name, self._usage())
        self._event("message_start", message=message)

    def progress(self, done: int, total: int) -> None:
        self._event("ping")

    def chunk(self, chunk: dict[str, Any]) -> None:
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning"):
                self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                self._delta({"type": "thinking_delta", "thinking": thought})
            if text := delta.get("content"):
                self._enter("text", {"type": "text", "text": ""})
                self._delta({"type": "text_delta", "text": text})
            for call in delta.get("tool_calls") or []:
                self._leave()
                self._enter("tool", anthropic.tool_use(call))
                arguments = call["function"]["arguments"]
                self._delta({"type": "input_json_delta", "partial_json": arguments})
                self._leave()
            self._finish = choice.get("finish_reason") or self._finish

    def end(self) -> None:
        self._leave()
        delta = self._ending(anthropic.stop_reason(self._finish))
        self._event("message_delta", delta=delta, usage=self._usage())
        self._event("message_stop")
        self._reply.end_stream()

    def fail(self, status: int, message: str) -> None:
        error = anthropic.error_of(status, message)
        if self._reply.streaming:
            self._reply.event(error, "error")
            self._reply.end_stream()
        else:
            self._reply.json(status, error)

    def _ending(self, reason: str) -> dict[str, Any]:
        stop = self._exchange.stopped_by if reason == "end_turn" else None
        return {"stop_reason": reason if stop is None else "stop_sequence", "stop_sequence": stop}

    def _usage(self) -> dict[str, int]:
        exchange = self._exchange
        return anthropic.usage_of(
            exchange.prompt_tokens, exchange.cached_tokens, len(exchange.tokens)
        )

    def _enter(self, kind: str, block: dict[str, Any]) -> None:
        if self._open == kind:
            return
        self._leave()
        self._open = kind
        self._index += 1
        self._event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> None:
        self._event("content_block_delta", index=self._index, delta=delta)

    def _leave(self) -> None:
        if self._open is not None:
            self._open = None
            self._event("content_block_stop", index=self._index)

    def _event(self, kind: str, **fields: Any) -> None:
        self._reply.event({"type": kind, **fields}, kind)
