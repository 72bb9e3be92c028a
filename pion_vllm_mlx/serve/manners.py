"""What conversations a chat template takes, and others put so that it does.

Agents send what the APIs allow: a system message amid the others, two of the user's in a row. Many
templates raise for one or the other, a few for any system message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

Message = dict[str, Any]

_SYSTEM: Final[Message] = {"role": "system", "content": "a"}
_USER: Final[Message] = {"role": "user", "content": "b"}
_ANSWER: Final[Message] = {"role": "assistant", "content": "c"}


@dataclass(frozen=True, slots=True)
class Manners:
    """What a template renders without an error."""

    system: bool = True
    late_system: bool = True
    users_in_a_row: bool = True

    @classmethod
    def of(cls, tokenizer: Any) -> Manners:
        """Try a template; one that takes not even a question is left alone."""

        def takes(*messages: Message) -> bool:
            try:
                tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True
                )
            except Exception:
                return False
            return True

        if not tokenizer.has_chat_template or not takes(_USER):
            return cls()
        return cls(
            takes(_SYSTEM, _USER), takes(_USER, _ANSWER, _SYSTEM, _USER), takes(_USER, _USER)
        )

    def fit(self, messages: Sequence[Any]) -> list[Any]:
        """The same conversation with the user's words where the template takes no others."""
        fitted = list(messages)
        if not all(isinstance(message, dict) for message in fitted):
            return fitted  # what is no message is told by whoever renders it
        for place, message in enumerate(fitted):
            allowed = self.late_system if place else self.system
            if message.get("role") == "system" and not allowed:
                fitted[place] = message | {"role": "user"}
        changed = [message for message, old in zip(fitted, messages, strict=True) if message != old]
        return join_users(fitted) if changed or not self.users_in_a_row else fitted


def join_users(messages: Iterable[Message]) -> list[Message]:
    """User messages that follow each other as one, an empty line between their texts."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else {}
        if not last.get("role") == message.get("role") == "user":
            found.append(message)
            continue
        one, other = last.get("content"), message.get("content")
        if isinstance(one, str) and isinstance(other, str):
            content: Any = f"{one}\n\n{other}"
        else:
            content = [*_parts(one), *_parts(other)]
        found[-1] = {"role": "user", "content": content}
    return found


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": str(content or "")}]
