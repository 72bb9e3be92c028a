"""Conversations as agents send them, for templates that take less."""

from __future__ import annotations

from typing import Any

import pytest

from pion_vllm_mlx.serve.manners import Manners, join_users
from tests.pion_vllm_mlx.serve.endpoint import Endpoint

SYSTEM = {"role": "system", "content": "Be good."}
HELLO = {"role": "user", "content": "Hello."}
GO_ON = {"role": "user", "content": "Go on."}
HI = {"role": "assistant", "content": "Hi."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
FOUND = {"role": "tool", "tool_call_id": "1", "content": "found"}

ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
)


def fit(manners: Manners, *messages: Any) -> list[Any]:
    return manners.fit(list(messages))


def test_a_template_that_takes_everything_gets_everything_as_it_is() -> None:
    conversation = [SYSTEM, HELLO, GO_ON, HI, SYSTEM, CALL, FOUND]
    assert Manners().fit(conversation) == conversation
    assert Manners().fit(["no message"]) == ["no message"]


def test_what_a_template_does_not_take_is_the_users() -> None:
    late = Manners(late_system=False)
    joined = {"role": "user", "content": "Be good.\n\nGo on."}
    assert fit(late, SYSTEM, HELLO, HI, SYSTEM, GO_ON) == [SYSTEM, HELLO, HI, joined]
    assert fit(late, SYSTEM, HELLO, GO_ON) == [SYSTEM, HELLO, GO_ON]
    none = Manners(system=False, late_system=False, users_in_a_row=False)
    first = {"role": "user", "content": "Be good.\n\nHello."}
    assert fit(none, SYSTEM, HELLO, HI, GO_ON) == [first, HI, GO_ON]
    # Whatever the turn, the beginning of a conversation stays the same.
    assert fit(none, SYSTEM, HELLO, CALL, FOUND, GO_ON)[:2] == [first, CALL]


def test_texts_and_pictures_are_joined_as_parts() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    (one,) = join_users([HELLO, {"role": "user", "content": [picture]}])
    assert one["content"] == [{"type": "text", "text": "Hello."}, picture]


@pytest.mark.model
@pytest.mark.parametrize(
    ("template", "manners"),
    [
        (ALTERNATE, Manners(system=False, late_system=False, users_in_a_row=False)),
        (SYSTEM_FIRST, Manners(late_system=False)),
    ],
)
def test_an_agents_conversation_is_answered_whatever_the_template(
    parrot: Endpoint, template: str, manners: Manners
) -> None:
    """Templates as Gemma's and Qwen3.5's; as Codex sends it, over each API."""
    tokenizer = parrot.provider.tokenizer
    before = tokenizer._tokenizer.chat_template
    service = parrot.service
    tokenizer._tokenizer.chat_template, service._manners = template, None
    try:
        assert Manners.of(tokenizer) == manners
        messages = [SYSTEM, HELLO, GO_ON, HI, SYSTEM, GO_ON]
        chat = {"messages": messages, "max_tokens": 2}
        assert parrot.ask("/v1/chat/completions", chat)[0] == 200
        items = {"input": messages, "max_output_tokens": 2}
        assert parrot.ask("/v1/responses", items)[0] == 200
        assert parrot.ask("/v1/messages", chat)[0] == 200
    finally:
        tokenizer._tokenizer.chat_template, service._manners = before, None
