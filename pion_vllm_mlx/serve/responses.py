"""OpenAI's Responses API: its requests as chat requests, and chat answers as its output items."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from pion_vllm_mlx.serve.errors import BadRequest
from pion_vllm_mlx.serve.tool_choice import choose

_SAME: Final = ("temperature", "top_p", "top_k", "seed", "stream", "chat_template_kwargs")
_KEPT: Final = ("instructions", "metadata", "parallel_tool_calls", "temperature", "top_p")
_TEXTS: Final = ("input_text", "output_text", "text")
#: Items that call a tool of the client's, to their arguments as JSON. Only functions are offered
#: to a model; the others come with conversations that were begun elsewhere.
_CALLS: Final[dict[str, Callable[[dict[str, Any]], str]]] = {
    "function_call": lambda item: item.get("arguments") or "{}",
    "custom_tool_call": lambda item: json.dumps({"input": item.get("input") or ""}),
    "local_shell_call": lambda item: json.dumps(item.get("action") or {}),
}


def to_chat(body: dict[str, Any], earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A /v1/responses body as a /v1/chat/completions body. Raises BadRequest.

    `earlier`: the conversation before, without instructions.
    """
    chat = {name: body[name] for name in _SAME if body.get(name) is not None}
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    effort = (body.get("reasoning") or {}).get("effort")
    if effort in ("none", "minimal"):
        chat["chat_template_kwargs"] = {"enable_thinking": False}
    head = (
        [{"role": "system", "content": str(body["instructions"])}]
        if body.get("instructions")
        else []
    )
    chat["messages"] = [*head, *earlier, *to_messages(body.get("input"))]
    if not chat["messages"]:
        raise BadRequest("input: a text or a list of items")
    chosen = choose(_tools(body.get("tools") or []), body.get("tool_choice"))
    return chat | chosen.fields()


def to_messages(items: Any) -> list[dict[str, Any]]:
    """Input items as chat messages. Calls that follow each other are one message's."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise BadRequest("input: a text or a list of items")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise BadRequest(f"input.{number}: an object")
        for message in _message(item, number):
            last = messages[-1] if messages else {}
            if last.get("role") == message["role"] == "assistant":
                _join(last, message)
            else:
                messages.append(message)
    return messages


def output_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat answer's message as output items."""
    items: list[dict[str, Any]] = []
    if message.get("reasoning"):
        items.append(reasoning_item(message["reasoning"]))
    if message.get("content"):
        items.append(message_item(message["content"]))
    items += [call_item(call) for call in message.get("tool_calls") or []]
    return items


def message_item(text: str, status: str = "completed") -> dict[str, Any]:
    """A message of the assistant."""
    content = [text_part(text)] if status == "completed" else []
    return _item("message", "msg", role="assistant", content=content, status=status)


def text_part(text: str) -> dict[str, Any]:
    """A part of a message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_item(text: str, status: str = "completed") -> dict[str, Any]:
    """What the model thought before it answered."""
    content = [{"type": "reasoning_text", "text": text}] if status == "completed" else []
    return _item("reasoning", "rs", summary=[], content=content, status=status)


def call_item(call: dict[str, Any], status: str = "completed") -> dict[str, Any]:
    """A function call; its `call_id` is what the output is sent back under."""
    function = call["function"]
    arguments = function["arguments"] if status == "completed" else ""
    names = {"name": function["name"], "call_id": call["id"]}
    return _item("function_call", "fc", arguments=arguments, status=status, **names)


def envelope(body: dict[str, Any], identity: str) -> dict[str, Any]:
    """A Response that has just begun."""
    return {
        "id": identity,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": body.get("model") or "default_model",
        "output": [],
        "previous_response_id": body.get("previous_response_id"),
        "store": body.get("store", True),
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "usage": None,
        **{name: body.get(name) for name in _KEPT},
    }


def finished(
    response: dict[str, Any],
    output: list[dict[str, Any]],
    finish: str | None,
    usage: dict[str, Any],
) -> dict[str, Any]:
    """The Response with its output; incomplete where the tokens have run out."""
    cut = finish == "length"
    return response | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": usage,
    }


def usage_of(prompt: int, cached: int, generated: int) -> dict[str, Any]:
    """Input includes what was read from the cache."""
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }


def new_identity(prefix: str = "resp") -> str:
    """An identity nothing else has."""
    return f"{prefix}_{uuid.uuid4().hex}"


def _item(kind: str, prefix: str, **fields: Any) -> dict[str, Any]:
    return {"id": new_identity(prefix), "type": kind, **fields}


def _message(item: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    kind = str(item.get("type", "message"))
    if kind == "message":
        yield {"role": item.get("role", "user"), "content": _content(item.get("content"))}
    elif kind in _CALLS:
        function = {"name": item.get("name") or kind, "arguments": _CALLS[kind](item)}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
    elif kind.endswith("_output") and kind.removesuffix("_output") in _CALLS:
        output = item.get("output")
        text = output if isinstance(output, str) else _content(output)
        yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
    elif kind == "reasoning":
        thoughts = "".join(str(part.get("text", "")) for part in item.get("content") or [])
        if thoughts:
            yield {"role": "assistant", "content": "", "reasoning_content": thoughts}
    else:
        raise BadRequest(f"input.{number}: items of type {kind!r} are not known")


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content or ""
    parts = [part for part in content if isinstance(part, dict)]
    if all(part.get("type") in _TEXTS for part in parts):
        return "".join(str(part.get("text", "")) for part in parts)
    return [
        {"type": "text", "text": part.get("text", "")} if part.get("type") in _TEXTS else part
        for part in parts
    ]


def _join(last: dict[str, Any], message: dict[str, Any]) -> None:
    if message.get("content"):
        last["content"] = (last.get("content") or "") + message["content"]
    if message.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]
    if message.get("reasoning_content"):
        last["reasoning_content"] = message["reasoning_content"]


def _tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Functions; tools the service itself would run are left out."""
    names = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {n: tool[n] for n in names if tool.get(n) is not None}}
        for tool in tools
        if isinstance(tool, dict) and tool.get("type") == "function" and tool.get("name")
    ]
