"""Small differences between clients, taken out before mlx_lm.server sees a conversation."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any, Final

#: A coding agent's first system line, another one with every request.
_BILLING: Final = re.compile(r"\A(?:[ \t]*x-anthropic-billing-header:[^\n]*(?:\n|\Z))+", re.I)


def drop_billing_header(text: str) -> str:
    """A system prompt without the accounting lines at its very beginning."""
    return _BILLING.sub("", text)


def normalise_messages(messages: Any, *, billing: bool = True) -> Any:
    """The messages of a chat request; what is not a list of objects stays as it is.

    `developer` is `system`; a call without arguments has none instead of an empty text; reasoning
    that mlx_lm.server sent out as `reasoning` goes back in under the name templates know it by;
    several system messages at the beginning are one, as some templates know no more; with
    `billing` the accounting lines of system messages are dropped.
    """
    if not isinstance(messages, list):
        return messages
    found = [_normalise(m, billing) if isinstance(m, dict) else m for m in messages]
    head = list(itertools.takewhile(_is_system_text, found))
    if len(head) < 2:
        return found
    texts = [message["content"] for message in head if message["content"]]
    return [head[0] | {"content": "\n\n".join(texts)}, *found[len(head) :]]


def has_images(messages: Sequence[Any]) -> bool:
    """Whether any content part is not text."""
    contents = [m.get("content") for m in messages if isinstance(m, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts)


def _normalise(message: dict[str, Any], billing: bool) -> dict[str, Any]:
    message = dict(message)
    if message.get("role") == "developer":
        message["role"] = "system"
    if billing and message.get("role") == "system":
        message["content"] = _without_header(message.get("content"))
    if message.get("reasoning") and not message.get("reasoning_content"):
        message["reasoning_content"] = message["reasoning"]
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_with_arguments(call) for call in calls]
    return message


def _is_system_text(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") != "system":
        return False
    return isinstance(message.get("content"), str)


def _without_header(content: Any) -> Any:
    if isinstance(content, str):
        return drop_billing_header(content)
    if isinstance(content, list):
        return [
            part | {"text": drop_billing_header(part["text"])}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    return content


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and function.get("arguments") == "":
        return call | {"function": function | {"arguments": "{}"}}
    return call
