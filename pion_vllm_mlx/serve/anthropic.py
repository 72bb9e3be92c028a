"""Anthropic's Messages API: its requests as chat requests, and chat answers as its messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

from pion_vllm_mlx.serve.errors import BadRequest
from pion_vllm_mlx.serve.manners import join_users
from pion_vllm_mlx.serve.tool_choice import choose

#: Fields with the same name and meaning in both.
_SAME: Final = ("max_tokens", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs")
_STOP_REASON: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def to_chat(body: dict[str, Any]) -> dict[str, Any]:
    """A /v1/messages body as a /v1/chat/completions body, `tool_choice` included: BadRequest."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: a list with one message at least")
    chat = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat["messages"] = [*_system(body.get("system")), *join_users(_messages(messages))]
    if stops := body.get("stop_sequences"):
        chat["stop"] = list(stops)
    thinking = body.get("thinking")
    if isinstance(thinking, dict):
        on = thinking.get("type") != "disabled"
        kwargs = {"enable_thinking": on} | chat.get("chat_template_kwargs", {})
        chat["chat_template_kwargs"] = kwargs
    chosen = choose(_tools(body.get("tools") or []), body.get("tool_choice"))
    return chat | chosen.fields()


def to_message(answer: dict[str, Any], name: str, usage: dict[str, int]) -> dict[str, Any]:
    """A chat answer as a Message of the model called `name`."""
    choice = answer["choices"][0]
    said = choice["message"]
    content: list[dict[str, Any]] = []
    if said.get("reasoning"):
        content.append({"type": "thinking", "thinking": said["reasoning"], "signature": ""})
    if said.get("content"):
        content.append({"type": "text", "text": said["content"]})
    calls = said.get("tool_calls") or []
    content += [tool_use(call) | {"input": _arguments(call)} for call in calls]
    return envelope(name, usage) | {
        "content": content,
        "stop_reason": stop_reason(choice["finish_reason"]),
    }


def envelope(name: str, usage: dict[str, int]) -> dict[str, Any]:
    """A Message without content, not stopped yet."""
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def usage_of(prompt: int, cached: int, generated: int) -> dict[str, int]:
    """Anthropic counts the tokens read from the cache apart from the input."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


def stop_reason(finish: str | None) -> str:
    """Its word for a finish reason."""
    return _STOP_REASON.get(finish or "stop", "end_turn")


def tool_use(call: dict[str, Any]) -> dict[str, Any]:
    """A tool_use block without its input."""
    function = call["function"]
    identity = f"toolu_{str(call['id']).replace('-', '')}"
    return {"type": "tool_use", "id": identity, "name": function["name"], "input": {}}


def error_of(status: int, message: str) -> dict[str, Any]:
    """The body of an error answer."""
    kind = {400: "invalid_request_error", 403: "permission_error", 404: "not_found_error"}
    kind |= {413: "request_too_large", 503: "overloaded_error"}
    detail = {"type": kind.get(status, "api_error"), "message": message}
    return {"type": "error", "error": detail}


def _system(system: Any) -> Iterator[dict[str, Any]]:
    if isinstance(system, list):
        # Blocks are texts of their own: an agent's first may be accounting, see `normalise`.
        texts = [str(block.get("text", "")) for block in system if isinstance(block, dict)]
        system = "\n".join(text for text in texts if text)
    if system:
        yield {"role": "system", "content": str(system)}


def _messages(messages: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Chat messages. A system message amid the others, as agents send for what has changed, is
    the user's: templates know one at the beginning only, and some raise for any other."""
    heads = True
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in (
            "user",
            "assistant",
            "system",
        ):
            raise BadRequest(f"messages.{number}: a role of user or assistant")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(b, dict) for b in blocks):
            raise BadRequest(f"messages.{number}.content: a text or a list of blocks")
        if message["role"] == "assistant":
            yield _assistant(blocks)
        else:
            yield from _user(blocks, message["role"] if heads else "user")
        heads = heads and message["role"] == "system"


def _assistant(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
    thoughts = [str(b.get("thinking", "")) for b in blocks if b.get("type") == "thinking"]
    if any(thoughts):
        said["reasoning_content"] = "".join(thoughts)
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            # The client's own order of keys: the prompt of the last turn had it.
            "function": {
                "name": block.get("name"),
                "arguments": json.dumps(block.get("input", {})),
            },
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    if calls:
        said["tool_calls"] = calls
    return said


def _user(blocks: Sequence[dict[str, Any]], role: str) -> Iterator[dict[str, Any]]:
    """Tool results are messages of their own; they come first, as in the conversation."""
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    for block in blocks:
        if block.get("type") == "tool_result":
            content = block.get("content") or ""
            text = content if isinstance(content, str) else _text(content)
            if block.get("is_error"):
                text = f"Error: {text}"
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    if any(block.get("type") == "image" for block in rest):
        yield {"role": role, "content": [_part(block) for block in rest]}
    elif rest:
        yield {"role": role, "content": _text(rest)}


def _text(blocks: Sequence[dict[str, Any]]) -> str:
    return "".join(str(block.get("text", "")) for block in blocks if block.get("type") == "text")


def _part(block: dict[str, Any]) -> dict[str, Any]:
    if block.get("type") != "image":
        return {"type": "text", "text": str(block.get("text", ""))}
    source = block.get("source") or {}
    url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools with a schema; those the service itself would run have none and are left out."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool["input_schema"],
            },
        }
        for tool in tools
        if isinstance(tool, dict) and "input_schema" in tool and "name" in tool
    ]


def _arguments(call: dict[str, Any]) -> Any:
    """A tool call's arguments as an object."""
    try:
        return json.loads(call["function"]["arguments"] or "{}")
    except ValueError:
        return {}
