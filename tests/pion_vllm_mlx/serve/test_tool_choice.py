"""`tool_choice` in all three APIs: an answer keeps to it, or says that it does not."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest

from pion_vllm_mlx.serve.errors import BadRequest
from pion_vllm_mlx.serve.tool_choice import Choice, choose, lead_in
from tests.pion_vllm_mlx.serve.endpoint import Endpoint

SCHEMA: Any = {"type": "object", "properties": {"zebra": {}, "apple": {}}}
CALL = '{"name": "look_up", "arguments": {"zebra": 1}}'


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


ONE, OTHER = tool("look_up"), tool("other")
ONLY_ONE = {"name": "look_up", "input_schema": SCHEMA}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, Choice([ONE, OTHER])),
        ("auto", Choice([ONE, OTHER])),
        ({"type": "auto"}, Choice([ONE, OTHER])),
        ("none", Choice([])),
        ({"type": "none"}, Choice([])),
        ("required", Choice([ONE, OTHER], required=True)),
        ({"type": "any"}, Choice([ONE, OTHER], required=True)),
        ({"type": "tool", "name": "other"}, Choice([OTHER], required=True)),
        ({"type": "function", "name": "other"}, Choice([OTHER], required=True)),
        ({"type": "function", "function": {"name": "other"}}, Choice([OTHER], required=True)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "look_up"}]},
            Choice([ONE]),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [OTHER]}},
            Choice([OTHER], required=True),
        ),
    ],
)
def test_every_form_of_it_is_understood(asked: Any, expected: Choice) -> None:
    assert choose([ONE, OTHER], asked) == expected


@pytest.mark.parametrize(
    "asked",
    ["sometimes", {"type": "file_search"}, {"type": "tool", "name": "absent"}, {"type": "tool"}, 7],
)
def test_what_is_not_understood_is_refused(asked: Any) -> None:
    with pytest.raises(BadRequest, match="tool_choice"):
        choose([ONE, OTHER], asked)
    with pytest.raises(BadRequest, match="none is offered"):
        choose([], "required")


def test_an_answer_begins_with_a_call_where_the_template_has_such_a_thing() -> None:
    known = SimpleNamespace(
        has_tool_calling=True,
        tool_call_start_tokens=(7, 8),
        think_end_tokens=(5,),
        response_transitions={},
    )
    assert lead_in(known, "normal") == [7, 8]
    assert lead_in(known, "reasoning") == [5, 7, 8]
    assert lead_in(SimpleNamespace(**vars(known) | {"has_tool_calling": False}), "normal") == []
    assert lead_in(SimpleNamespace(**vars(known) | {"tool_call_start_tokens": ()}), "normal") == []
    harmony = {"response_transitions": {"start": [("to=functions", "tool")]}}
    assert lead_in(SimpleNamespace(**vars(known) | harmony), "normal") == []


# --- through the endpoint --------------------------------------------------------------------


def say(parrot: Endpoint, *parts: str) -> None:
    """An answer of texts, each cut into tokens by itself."""
    encode = parrot.provider.tokenizer.encode
    parrot.parrot.say(*(t for part in parts for t in encode(part, add_special_tokens=False)))


def unwilling(parrot: Endpoint) -> None:
    """As many words as a call begins with, then the rest of a call: only one that is made to begin
    with a call makes it."""
    start = parrot.provider.tokenizer.tool_call_start_tokens
    say(parrot, *["x"] * len(start), CALL, "</tool_call>")


def ask_openai(parrot: Endpoint, stream: bool, **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{parrot.url}/v1", api_key="none", max_retries=0)
    create: Any = client.chat.completions.create
    messages = [{"role": "user", "content": "Look."}]
    ask = {"model": "m", "messages": messages, "tools": [ONE, OTHER], **options}
    if not stream:
        return create(**ask).choices[0]
    message, finish = SimpleNamespace(content="", tool_calls=[]), None
    for chunk in create(**ask, stream=True):
        for choice in chunk.choices:
            message.content += choice.delta.content or ""
            message.tool_calls += choice.delta.tool_calls or []
            finish = choice.finish_reason or finish
    return SimpleNamespace(message=message, finish_reason=finish)


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_made_where_the_model_alone_makes_none(
    parrot: Endpoint, stream: bool
) -> None:
    unwilling(parrot)
    free = ask_openai(parrot, stream)
    assert (free.finish_reason, not free.message.tool_calls) == ("stop", True)
    named = {"type": "function", "function": {"name": "look_up"}}
    for required in ("required", named):
        made = ask_openai(parrot, stream, tool_choice=required)
        assert made.finish_reason == "tool_calls"
        (call,) = made.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "look_up",
            {"zebra": 1},
        )
    again = ask_openai(parrot, stream, tool_choice="none")
    assert again.message.content.startswith("xx")


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "said"), [("required", "Just a text."), ("other", CALL)])
def test_a_required_call_that_is_not_made_is_an_error(
    parrot: Endpoint, stream: bool, choice: str, said: str
) -> None:
    """Never a text, nor the call of another tool, in its place."""
    start = parrot.provider.tokenizer.tool_call_start_tokens
    say(parrot, *["x"] * len(start), said, "</tool_call>")
    asked: Any = choice
    if choice == "other":
        asked = {"type": "function", "function": {"name": "other"}}
    error = openai.APIError if stream else openai.UnprocessableEntityError
    with pytest.raises(error, match="was required"):
        ask_openai(parrot, stream, tool_choice=asked)
    # One that ran out of tokens says that instead.
    assert ask_openai(parrot, stream, tool_choice=asked, max_tokens=1).finish_reason == "length"


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_any_and_tool_are_kept_to(parrot: Endpoint, stream: bool) -> None:
    client = anthropic.Anthropic(base_url=parrot.url, api_key="none", max_retries=0)

    def ask(**options: Any) -> Any:
        messages: Any = [{"role": "user", "content": "Look."}]
        asked: Any = {"model": "m", "max_tokens": 60, "messages": messages, "tools": [ONLY_ONE]}
        if not stream:
            return client.messages.create(**asked, **options)
        with client.messages.stream(**asked, **options) as events:
            return events.get_final_message()

    unwilling(parrot)
    assert ask(tool_choice={"type": "auto"}).stop_reason == "end_turn"
    for kind in ({"type": "any"}, {"type": "tool", "name": "look_up"}):
        made = ask(tool_choice=kind)
        assert made.stop_reason == "tool_use"
        (block,) = made.content
        assert (block.name, block.input) == ("look_up", {"zebra": 1})
    say(parrot, "Just a text, and a long one.")
    with pytest.raises(anthropic.APIStatusError, match="was required"):
        ask(tool_choice={"type": "any"})


@pytest.mark.model
def test_a_prompt_is_counted_with_the_beginning_of_the_call(parrot: Endpoint) -> None:
    unwilling(parrot)
    body: Any = {"messages": [{"role": "user", "content": "Look."}], "tools": [ONLY_ONE]}
    body |= {"tool_choice": {"type": "any"}, "model": "m", "max_tokens": 60}
    _, _, counted = parrot.ask("/v1/messages/count_tokens", body)
    _, _, answer = parrot.ask("/v1/messages", body)
    usage = answer["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    # The next turn begins with all of it.
    said = {"role": "assistant", "content": answer["content"]}
    result = {"type": "tool_result", "tool_use_id": answer["content"][0]["id"], "content": "found"}
    body["messages"] += [said, {"role": "user", "content": [result]}]
    body["tool_choice"] = {"type": "auto"}
    _, _, following = parrot.ask("/v1/messages", body)
    assert following["usage"]["cache_read_input_tokens"] >= counted["input_tokens"]


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_function_of_a_response_is_called(parrot: Endpoint, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{parrot.url}/v1", api_key="none", max_retries=0)
    function = {"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": False}
    ask: Any = {"model": "m", "input": "Look.", "tools": [function]}

    def respond(**options: Any) -> Any:
        if not stream:
            return client.responses.create(**ask, **options)
        with client.responses.stream(**ask, **options) as events:
            return events.get_final_response()

    unwilling(parrot)
    assert [item.type for item in respond().output] == ["message"]
    for choice in ("required", {"type": "function", "name": "look_up"}):
        (call,) = respond(tool_choice=choice).output
        assert (call.type, json.loads(call.arguments)) == ("function_call", {"zebra": 1})
    status, _, answer = parrot.ask("/v1/responses", ask | {"tool_choice": {"type": "file_search"}})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.model
def test_a_required_call_with_a_seed_is_made_too(parrot: Endpoint) -> None:
    """Served one at a time, on another path."""
    unwilling(parrot)
    for _ in range(2):
        made = ask_openai(parrot, False, tool_choice="required", seed=3)
        assert made.finish_reason == "tool_calls"
