"""OpenAI's side of an answer: mlx_lm.server's own objects, handed on."""

from __future__ import annotations

from typing import Any, Final

from pion_vllm_mlx.serve.reply import Reply

_KINDS: Final = {403: "permission_error", 404: "not_found_error", 503: "server_error"}


def error_of(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error answer; `param`, `code`: the field that is wrong, and OpenAI's word."""
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ChatSink:
    """Writes an exchange's answer to `reply`, under the model's name the client used."""

    def __init__(self, reply: Reply, name: str) -> None:
        self._reply = reply
        self._name = name

    def result(self, answer: dict[str, Any]) -> None:
        self._reply.json(200, answer | {"model": self._name})

    def begin(self) -> None:
        self._reply.begin_stream()

    def chunk(self, chunk: dict[str, Any]) -> None:
        if chunk["object"] == "chat.completion":
            # The one with the usage, which is a chunk like the others.
            chunk["object"] = "chat.completion.chunk"
        self._reply.event(chunk | {"model": self._name})

    def progress(self, done: int, total: int) -> None:
        self._reply.comment(f"keepalive {done}/{total}")

    def end(self) -> None:
        self._reply.raw(b"data: [DONE]\n\n")
        self._reply.end_stream()

    def fail(self, status: int, message: str) -> None:
        if self._reply.streaming:
            self._reply.event(error_of(status, message))
            self._reply.end_stream()
        else:
            self._reply.json(status, error_of(status, message))
