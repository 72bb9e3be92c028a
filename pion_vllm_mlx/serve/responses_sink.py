"""The Responses API's side of an answer: a Response, or the events that build one."""

from __future__ import annotations

from typing import Any

from pion_vllm_mlx.serve import chat_sink, responses
from pion_vllm_mlx.serve.exchange import Exchange
from pion_vllm_mlx.serve.remembered import Remembered
from pion_vllm_mlx.serve.reply import Reply


class ResponsesSink:
    """Writes an exchange's answer to `reply`, and has the conversation remembered."""

    def __init__(
        self,
        reply: Reply,
        exchange: Exchange,
        body: dict[str, Any],
        added: list[dict[str, Any]],
        remembered: Remembered,
    ) -> None:
        """`added`: the chat messages of this request, without instructions."""
        self._reply = reply
        self._exchange = exchange
        self._added = added
        self._previous = str(body.get("previous_response_id") or "")
        self._remembered = remembered
        self._stored = body.get("store", True) is not False
        self._response = responses.envelope(body, responses.new_identity())
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""
        self._finish: str | None = None
        self._number = -1

    def result(self, answer: dict[str, Any]) -> None:
        choice = answer["choices"][0]
        self._output = responses.output_of(choice["message"])
        self._reply.json(200, self._finished(choice["finish_reason"]))

    def begin(self) -> None:
        self._reply.begin_stream()
        self._event("response.created", response=self._response)
        self._event("response.in_progress", response=self._response)

    def progress(self, done: int, total: int) -> None:
        self._reply.comment(f"keepalive {done}/{total}")

    def chunk(self, chunk: dict[str, Any]) -> None:
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning"):
                self._write("reasoning", thought)
            if text := delta.get("content"):
                self._write("message", text)
            for call in delta.get("tool_calls") or []:
                self._call(call)
            self._finish = choice.get("finish_reason") or self._finish

    def end(self) -> None:
        self._close()
        response = self._finished(self._finish)
        self._event(f"response.{response['status']}", response=response)
        self._reply.end_stream()

    def fail(self, status: int, message: str) -> None:
        if not self._reply.streaming:
            self._reply.json(status, chat_sink.error_of(status, message))
            return
        error = {"code": "server_error", "message": message}
        failed = self._response | {"status": "failed", "error": error}
        self._event("response.failed", response=failed)
        self._reply.end_stream()

    def _finished(self, finish: str | None) -> dict[str, Any]:
        exchange = self._exchange
        usage = responses.usage_of(
            exchange.prompt_tokens, exchange.cached_tokens, len(exchange.tokens)
        )
        if self._stored:
            said = responses.to_messages(self._output)
            self._remembered.keep(self._response["id"], [*self._added, *said], self._previous)
        return responses.finished(self._response, self._output, finish, usage)

    def _write(self, kind: str, text: str) -> None:
        """A piece of a message or of reasoning, in the item that is open or a new one."""
        if self._open is None or self._open["type"] != kind:
            self._close()
            make = responses.message_item if kind == "message" else responses.reasoning_item
            self._start(make("", "in_progress"))
            if kind == "message":
                part = responses.text_part("")
                self._event("response.content_part.added", **self._place(), part=part)
        self._text += text
        name = "output_text" if kind == "message" else "reasoning_text"
        self._event(f"response.{name}.delta", **self._place(), delta=text)

    def _call(self, call: dict[str, Any]) -> None:
        self._close()
        self._start(responses.call_item(call, "in_progress"))
        assert self._open is not None
        arguments = call["function"]["arguments"]
        place = {"item_id": self._open["id"], "output_index": len(self._output)}
        self._event("response.function_call_arguments.delta", **place, delta=arguments)
        self._event(
            "response.function_call_arguments.done",
            **place,
            arguments=arguments,
            name=call["function"]["name"],
        )
        self._done({"arguments": arguments})

    def _start(self, item: dict[str, Any]) -> None:
        self._open, self._text = item, ""
        index = len(self._output)
        self._event("response.output_item.added", output_index=index, item=item)

    def _close(self) -> None:
        """End the text item that is open."""
        if self._open is None:
            return
        if self._open["type"] == "message":
            part = responses.text_part(self._text)
            self._event("response.output_text.done", **self._place(), text=self._text)
            self._event("response.content_part.done", **self._place(), part=part)
            self._done({"content": [part]})
        else:
            self._event("response.reasoning_text.done", **self._place(), text=self._text)
            self._done({"content": [{"type": "reasoning_text", "text": self._text}]})

    def _done(self, fields: dict[str, Any]) -> None:
        assert self._open is not None
        item = self._open | fields | {"status": "completed"}
        self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._output)}
        return place | {"content_index": 0, "logprobs": []}

    def _event(self, kind: str, **fields: Any) -> None:
        self._number += 1
        self._reply.event({"type": kind, "sequence_number": self._number, **fields}, kind)
