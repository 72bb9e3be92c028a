"""What is taken out of a conversation, and the warning about what is not."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pion_vllm_mlx.serve.head_watch import HeadWatch
from pion_vllm_mlx.serve.normalise import drop_billing_header, normalise_messages

LINE = "x-anthropic-billing-header: cc_version=2.1; cch=abc;"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{LINE}\nYou are helpful.", "You are helpful."),
        (LINE, ""),
        (f"{LINE}\n{LINE}\nYou.", "You."),
        (f"X-Anthropic-Billing-Header: x\r\n{LINE}\nYou.", "You."),
        (f"You quote:\n{LINE}\n", f"You quote:\n{LINE}\n"),
        ("x-anthropic-billing is a word", "x-anthropic-billing is a word"),
        ("", ""),
    ],
)
def test_accounting_is_dropped_at_the_very_beginning_only(text: str, left: str) -> None:
    """L08."""
    assert drop_billing_header(text) == left


def test_only_system_messages_lose_it() -> None:
    """L08: user text that quotes the header stays."""
    messages = [{"role": role, "content": f"{LINE}\nx"} for role in ("system", "user", "developer")]
    found = [message["content"] for message in normalise_messages(messages)]
    assert found == ["x", f"{LINE}\nx", "x"]
    kept = normalise_messages(messages, billing=False)
    assert [message["content"] for message in kept] == [f"{LINE}\nx"] * 3
    assert messages[0]["content"] == f"{LINE}\nx"


def test_other_names_for_the_same_things_are_understood() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": ""}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call]},
        "no message",
    ]
    developer, assistant, other = normalise_messages(messages)
    assert developer == {"role": "system", "content": "d"}
    assert assistant["reasoning_content"] == "r"
    assert assistant["tool_calls"][0]["function"]["arguments"] == "{}"
    assert other == "no message"
    for odd in (None, "text", 5):
        assert normalise_messages(odd) == odd


def test_system_messages_at_the_beginning_are_one() -> None:
    system, developer = {"role": "system", "content": "s"}, {"role": "developer", "content": "d"}
    question = {"role": "user", "content": "?"}
    assert normalise_messages([system, developer, question, developer]) == [
        {"role": "system", "content": "s\n\nd"},
        question,
        {"role": "system", "content": "d"},
    ]
    assert normalise_messages([system, question]) == [system, question]


def _prompts(nonces: list[int], length: int = 400) -> list[list[int]]:
    return [[*range(40), nonce, nonce + 1, *range(100, 100 + length)] for nonce in nonces]


def _note(prompts: list[list[int]], caplog: pytest.LogCaptureFixture) -> list[Any]:
    caplog.clear()
    watch = HeadWatch()
    with caplog.at_level(logging.WARNING, "pion_vllm_mlx"):
        for prompt in prompts:
            watch.note(prompt, lambda ids: f"<{ids[0]}>")
    return [record.getMessage() for record in caplog.records]


def test_a_head_that_changes_every_time_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    (told,) = _note(_prompts([1000, 2000, 3000, 4000, 5000, 6000]), caplog)
    assert "first 40 tokens" in told
    assert "'<4000>' here, '<3000>' before" in told


@pytest.mark.parametrize(
    "prompts",
    [
        _prompts([1000] * 8),
        _prompts([1000, 1000, 2000, 2000, 1000, 1000]),
        _prompts([1000, 2000, 3000, 4000], length=40),
        [[*range(40), *range(1000 * turn, 1000 * turn + 400)] for turn in range(8)],
        [[*range(50 * turn)] for turn in range(3, 11)],
    ],
    ids=["the same", "now and then", "short", "other conversations", "growing"],
)
def test_other_conversations_are_not_taken_for_it(
    prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    assert _note(prompts, caplog) == []
