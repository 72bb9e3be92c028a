"""/v1/chat/completions and /v1/completions, asked by the openai package."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.pion_vllm_mlx.serve.endpoint import Endpoint
from tests.pion_vllm_mlx.serve.parrot import TOOL_CALL

pytestmark = pytest.mark.model
LOOK_UP: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"zebra": {}, "apple": {}}},
    },
}


@pytest.fixture
def client(parrot: Endpoint) -> Any:
    return openai.OpenAI(base_url=f"{parrot.url}/v1", api_key="none", max_retries=0)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_a_question_is_answered_under_the_name_the_client_used(
    parrot: Endpoint, client: Any
) -> None:
    parrot.say("Hello there.")
    answer = client.chat.completions.create(model="gpt-whatever", messages=[user("Hi")])
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "gpt-whatever"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_counts_cached_tokens_as_a_whole_answer_does(
    parrot: Endpoint, client: Any
) -> None:
    """A01, M05: the third time as the second."""
    parrot.say("One two three.")
    ask: Any = {"model": "m", "messages": [user("Count, please, to three and no further.")]}
    first = client.chat.completions.create(**ask)
    again = client.chat.completions.create(**ask)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options=options))
    usages = [answer.usage for answer in (first, again)] + [chunks[-1].usage]
    cached = [u.prompt_tokens_details.cached_tokens for u in usages]
    prompt = usages[0].prompt_tokens
    assert cached == [cached[0], prompt - 1, prompt - 1]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == first.choices[0].message.content == again.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    without = list(client.chat.completions.create(**ask, stream=True))
    assert [chunk.usage for chunk in without] == [None] * len(without)


@pytest.mark.parametrize("stream", [False, True])
def test_characters_of_several_tokens_arrive_whole(
    parrot: Endpoint, client: Any, stream: bool
) -> None:
    """M01: a hieroglyph and a family, whose parts are no text by themselves."""
    text = "a 𓀀 and 👨‍👩‍👧‍👦."
    parrot.say(text)
    ask: Any = {"model": "m", "messages": [user("Draw.")], "stream": stream}
    answer: Any = client.chat.completions.create(**ask)
    pieces = (
        [c.choices[0].delta.content or "" for c in answer]
        if stream
        else [answer.choices[0].message.content]
    )
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_across_tokens_ends_the_answer(
    parrot: Endpoint, client: Any, stream: bool
) -> None:
    """M01."""
    parrot.say("before STOPPING HERE after")
    ask: Any = {"model": "m", "messages": [user("Go.")], "stream": stream, "stop": ["PING HE"]}
    answer: Any = client.chat.completions.create(**ask)
    pieces = (
        [c.choices[0].delta.content or "" for c in answer]
        if stream
        else [answer.choices[0].message.content]
    )
    assert "".join(pieces) == "before STOP"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_keeps_the_order_of_its_arguments(
    parrot: Endpoint, client: Any, stream: bool
) -> None:
    """L07: out to the client, and back into the prompt."""
    parrot.say(f"Let me see. {TOOL_CALL}")
    ask: Any = {"model": "m", "messages": [user("Look.")], "tools": [LOOK_UP], "stream": stream}
    answer: Any = client.chat.completions.create(**ask)
    if stream:
        chunks = list(answer)
        (call,) = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
        finish = chunks[-1].choices[0].finish_reason
    else:
        (call,) = answer.choices[0].message.tool_calls
        finish = answer.choices[0].finish_reason
    assert finish == "tool_calls"
    assert call.function.arguments == '{"zebra": 1, "apple": "b"}'
    parrot.say("Found.")
    said: Any = {"role": "assistant", "content": "Let me see. ", "tool_calls": [call.model_dump()]}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "nothing"}
    before = parrot.cached()
    ask["messages"] = [user("Look."), said, result]
    ask["stream"] = False
    next_turn = client.chat.completions.create(**ask)
    assert next_turn.choices[0].message.content == "Found."
    encode = parrot.provider.tokenizer.encode
    # All that was generated is found again, up to the call's end.
    assert parrot.cached() - before >= len(encode(TOOL_CALL)) - 3


def test_a_text_prompt_and_its_token_ids_are_the_same(parrot: Endpoint, client: Any) -> None:
    """L10: a rendered conversation gets no second first token."""
    parrot.say("Yes.")
    rendered = "<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n"
    ids = parrot.provider.tokenizer.encode(rendered, add_special_tokens=False)
    chat = client.chat.completions.create(model="m", messages=[user("Is it?")])
    text = client.completions.create(model="m", prompt=rendered)
    same = client.completions.create(model="m", prompt=ids)
    assert [text.choices[0].text, same.choices[0].text] == ["Yes.", "Yes."]
    for answer in (chat, text, same):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids)
    assert text.usage is not None
    assert text.usage.prompt_tokens_details is not None
    assert text.usage.prompt_tokens_details.cached_tokens == len(ids) - 1


def test_null_is_what_a_client_leaves_to_the_server(parrot: Endpoint) -> None:
    parrot.say("Fine.")
    body = {"messages": [user("?")], "max_tokens": None, "temperature": None, "stop": None}
    status, _, answer = parrot.ask("/v1/chat/completions", body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Fine.")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "messages"),
        ({"messages": [user("x")], "temperature": "hot"}, "temperature"),
        ({"messages": [user("x")], "adapters": "/etc"}, "adapters"),
        ({"messages": [{"role": "assistant", "content": [{"type": "audio"}]}]}, "text only"),
    ],
)
def test_a_request_that_means_nothing_is_told_so(
    parrot: Endpoint, body: dict[str, Any], reason: str
) -> None:
    status, _, answer = parrot.ask("/v1/chat/completions", body)
    assert status == 400
    assert reason in answer["error"]["message"]


def test_a_picture_is_refused_and_no_address_is_asked_for_it(
    parrot: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K01: the same text with another picture is never answered from the text alone."""
    monkeypatch.setattr("mlx_lm.server.urlopen", lambda *_, **__: pytest.fail("fetched"))
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}
    body = {"messages": [user("x") | {"content": [{"type": "text", "text": "What?"}, part]}]}
    assert parrot.ask("/v1/chat/completions", body)[0] == 400


def test_an_empty_prompt_is_an_error_and_the_next_one_is_answered(
    parrot: Endpoint, client: Any
) -> None:
    """A16."""
    parrot.say("Still here.")
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.completions.create(model="m", prompt="")
    answer = client.chat.completions.create(model="m", messages=[user("There?")])
    assert answer.choices[0].message.content == "Still here."


def test_an_accounting_line_does_not_reach_the_prompt(parrot: Endpoint) -> None:
    """L08: dropped at the beginning of a system prompt, kept where a user quotes it."""
    parrot.say("Ok.")

    def ask(nonce: str) -> Any:
        line = f"x-anthropic-billing-header: cc_version=2; cch={nonce};"
        system = {"role": "system", "content": f"{line}\nYou are careful. " * 1 + "Very. " * 30}
        body = {"messages": [system, user(f"Quote: {line}")]}
        return parrot.ask("/v1/chat/completions", body)[2]["usage"]

    first, second = ask("aaaa"), ask("bbbb")
    system_tokens = len(parrot.provider.tokenizer.encode("You are careful. " + "Very. " * 30))
    assert second["prompt_tokens_details"]["cached_tokens"] > system_tokens
    line = "x-anthropic-billing-header: cc_version=2; cch=aaaa;"
    assert first["prompt_tokens"] > system_tokens + len(parrot.provider.tokenizer.encode(line))


def test_json_of_the_wire_is_what_curl_shows(parrot: Endpoint) -> None:
    import subprocess

    parrot.say("Curled.")
    body = json.dumps({"messages": [user("Hi")], "stream": True})
    found = subprocess.run(
        ["curl", "-sN", f"{parrot.url}/v1/chat/completions", "-d", body],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    events = [line.removeprefix("data: ") for line in found.stdout.splitlines() if "data: " in line]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(pieces) == "Curled."
