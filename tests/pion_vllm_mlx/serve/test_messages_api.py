"""/v1/messages, asked by the anthropic package."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from pion_vllm_mlx.serve.anthropic import to_chat
from tests.pion_vllm_mlx.serve.endpoint import Endpoint
from tests.pion_vllm_mlx.serve.parrot import TOOL_CALL

pytestmark = pytest.mark.model
LOOK_UP: Any = {
    "name": "look_up",
    "description": "Looks something up.",
    "input_schema": {"type": "object", "properties": {"zebra": {}, "apple": {}}},
}


@pytest.fixture
def client(parrot: Endpoint) -> Any:
    return anthropic.Anthropic(base_url=parrot.url, api_key="none", max_retries=0)


def question(text: str, **options: Any) -> Any:
    return {
        "model": "claude-whatever",
        "max_tokens": 60,
        "messages": [{"role": "user", "content": text}],
        **options,
    }


def test_what_was_cached_is_counted_apart_from_the_input(parrot: Endpoint, client: Any) -> None:
    """M06: OpenAI's count of the same prompt includes it."""
    parrot.say("Certainly.")
    ask = question("Is this counted as it should be?", system="You count.")
    first, second = client.messages.create(**ask), client.messages.create(**ask)
    assert second.content[0].type == "text"
    assert second.content[0].text == "Certainly."
    assert (second.model, second.stop_reason) == ("claude-whatever", "end_turn")
    prompt = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    assert second.usage.input_tokens == 1
    assert second.usage.cache_read_input_tokens == prompt - 1
    assert second.usage.cache_creation_input_tokens == 0
    counted = client.messages.count_tokens(
        model="m", messages=ask["messages"], system=ask["system"]
    )
    assert counted.input_tokens == prompt


def test_a_stream_is_the_message_in_pieces(parrot: Endpoint, client: Any) -> None:
    parrot.say("Piece by piece, a 𓀀.")
    ask = question("Slowly.")
    with client.messages.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    whole = client.messages.create(**ask)
    texts = [message.content[0] for message in (final, whole)]
    assert [block.type == "text" and block.text for block in texts] == ["Piece by piece, a 𓀀."] * 2
    assert final.stop_reason == whole.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == (
        whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_used_and_its_result_read(parrot: Endpoint, client: Any, stream: bool) -> None:
    """L07: the input comes and goes in the order the model gave it."""
    parrot.say(f"Looking. {TOOL_CALL}")
    ask = question("Look.", tools=[LOOK_UP])
    if stream:
        with client.messages.stream(**ask) as events:
            said = events.get_final_message()
    else:
        said = client.messages.create(**ask)
    text, use = said.content
    assert said.stop_reason == "tool_use"
    assert (text.type, use.type) == ("text", "tool_use")
    assert use.type == "tool_use"
    assert list(use.input.items()) == [("zebra", 1), ("apple", "b")]
    parrot.say("It is there.")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "found"}
    ask["messages"] += [
        {"role": "assistant", "content": [block.model_dump() for block in said.content]},
        {"role": "user", "content": [result]},
    ]
    before = parrot.cached()
    answer = client.messages.create(**ask)
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "It is there."
    assert parrot.cached() - before >= len(parrot.provider.tokenizer.encode(TOOL_CALL)) - 3


def test_the_choice_of_tools_is_kept_to(parrot: Endpoint, client: Any) -> None:
    parrot.say("No tool.")
    other = LOOK_UP | {"name": "other"}
    offered = [LOOK_UP, other]
    messages: Any = [{"role": "user", "content": "?"}]

    def count(**options: Any) -> Any:
        asked: Any = {"model": "m", "messages": messages, **options}
        return client.messages.count_tokens(**asked).input_tokens

    none = count()
    assert count(tools=offered, tool_choice={"type": "none"}) == none
    one = count(tools=[LOOK_UP])
    call = len(parrot.provider.tokenizer.tool_call_start_tokens)
    assert count(tools=offered, tool_choice={"type": "tool", "name": "look_up"}) == one + call
    assert count(tools=offered, tool_choice={"type": "auto"}) > one > none
    with pytest.raises(anthropic.BadRequestError, match="there is no tool"):
        count(tools=offered, tool_choice={"type": "tool", "name": "absent"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [" five", "FOUR fi"])
def test_the_stop_sequence_that_ended_an_answer_is_named(
    parrot: Endpoint, client: Any, stream: bool, stop: str
) -> None:
    """M01: one that is tokens of its own, and one that ends within a token."""
    parrot.say("three FOUR five six")
    ask = question("Count.", stop_sequences=["never", stop])
    if stream:
        with client.messages.stream(**ask) as events:
            said = events.get_final_message()
    else:
        said = client.messages.create(**ask)
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", stop)
    assert said.content[0].type == "text"
    assert said.content[0].text == "three FOUR five".removesuffix(stop).removesuffix("FOUR five")


def test_an_answer_that_runs_out_of_tokens_says_so(parrot: Endpoint, client: Any) -> None:
    parrot.say("one two three four five six seven")
    said = client.messages.create(**question("Count.") | {"max_tokens": 3})
    assert (said.stop_reason, said.usage.output_tokens) == ("max_tokens", 3)


def test_accounting_in_the_first_system_block_is_dropped(parrot: Endpoint, client: Any) -> None:
    """L08."""
    parrot.say("Ok.")

    def ask(nonce: str) -> Any:
        line = f"x-anthropic-billing-header: cc_version=2; cch={nonce};"
        system: Any = [{"type": "text", "text": line}, {"type": "text", "text": "Be good. " * 20}]
        return client.messages.create(**question("Hello.", system=system)).usage

    first, second = ask("1a2b"), ask("3c4d")
    assert second.input_tokens == 1
    assert second.cache_read_input_tokens == first.input_tokens + first.cache_read_input_tokens - 1


def test_thoughts_come_back_into_the_prompt(parrot: Endpoint) -> None:
    """L05: within a tool loop a template keeps them, and the prompt was computed with them."""
    said = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]}
    messages = [{"role": "user", "content": "?"}, said, {"role": "user", "content": "!"}]
    counts = []
    for thought in ("Hm.", "Hm, hm, hm."):
        said["content"][0]["thinking"] = thought  # type: ignore[index]
        counts.append(parrot.ask("/v1/messages/count_tokens", {"messages": messages})[2])
    assert counts[1]["input_tokens"] > counts[0]["input_tokens"]


def test_a_system_message_amid_the_others_is_the_users(parrot: Endpoint) -> None:
    """Claude Code 2 sends them, and templates such as Qwen3.5's raise for them."""
    body = {
        "system": [{"type": "text", "text": "Be good."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
            {"role": "system", "content": "There are no agents."},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "Go on."},
        ],
    }
    joined = {"role": "user", "content": "Hello.\n\nThere are no agents."}
    assert to_chat(body)["messages"] == [
        {"role": "system", "content": "Be good."},
        joined,
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Go on."},
    ]
    assert parrot.ask("/v1/messages/count_tokens", body)[0] == 200
    # At the beginning it is what it is, and a picture stays a part of its own.
    picture = {"type": "image", "source": {"url": "http://nowhere/"}}
    body = {
        "messages": [
            {"role": "system", "content": "Be good."},
            {"role": "user", "content": [picture]},
            {"role": "user", "content": "What is it?"},
        ]
    }
    system, user = to_chat(body)["messages"]
    assert system == {"role": "system", "content": "Be good."}
    assert [part["type"] for part in user["content"]] == ["image_url", "text"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}, "max_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "text only",
        ),
    ],
)
def test_a_request_that_means_nothing_is_told_so(
    parrot: Endpoint, body: dict[str, Any], reason: str
) -> None:
    """K01 for the picture."""
    status, _, answer = parrot.ask("/v1/messages", body)
    assert (status, answer["type"], answer["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert reason in answer["error"]["message"]
