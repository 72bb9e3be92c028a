"""/v1/responses, asked by the openai package."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from pion_vllm_mlx.serve.responses import to_messages
from tests.pion_vllm_mlx.serve.endpoint import Endpoint
from tests.pion_vllm_mlx.serve.parrot import TOOL_CALL

LOOK_UP: Any = {
    "type": "function",
    "name": "look_up",
    "description": "Looks something up.",
    "parameters": {"type": "object", "properties": {"zebra": {}, "apple": {}}},
    "strict": False,
}


@pytest.fixture
def client(parrot: Endpoint) -> Any:
    return openai.OpenAI(base_url=f"{parrot.url}/v1", api_key="none", max_retries=0)


@pytest.mark.model
def test_a_response_goes_on_from_an_earlier_one(parrot: Endpoint, client: Any) -> None:
    parrot.say("First answer.")
    first = client.responses.create(model="m", input="A first question, to be gone on from.")
    assert (first.status, first.output_text) == ("completed", "First answer.")
    assert first.usage is not None
    parrot.say("Second answer.")
    second = client.responses.create(
        model="m", input="And a second one.", previous_response_id=first.id
    )
    assert second.output_text == "Second answer."
    assert second.usage is not None
    # The whole first turn, its answer included.
    turn = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= turn - 1
    with pytest.raises(openai.NotFoundError, match="resp_absent") as refused:
        client.responses.create(model="m", input="?", previous_response_id="resp_absent")
    assert refused.value.code == "previous_response_not_found"
    assert refused.value.param == "previous_response_id"


@pytest.mark.model
def test_a_stream_builds_the_response_that_is_given_whole(parrot: Endpoint, client: Any) -> None:
    parrot.say("In pieces, a 𓀀.")
    with client.responses.stream(model="m", input="Go.") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.done") == 1
    whole = client.responses.create(model="m", input="Go.")
    assert final.output_text == whole.output_text == "In pieces, a 𓀀."
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called_and_its_output_read(
    parrot: Endpoint, client: Any, stream: bool
) -> None:
    """L07."""
    parrot.say(f"Looking. {TOOL_CALL}")
    ask: Any = {"model": "m", "input": "Look.", "tools": [LOOK_UP], "instructions": "Be quick."}
    if stream:
        with client.responses.stream(**ask) as events:
            said: Any = events.get_final_response()
    else:
        said = client.responses.create(**ask)
    message, call = said.output
    assert (message.type, call.type) == ("message", "function_call")
    assert call.arguments == '{"zebra": 1, "apple": "b"}'
    parrot.say("It is there.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    before = parrot.cached()
    answer = client.responses.create(**ask | {"input": [output], "previous_response_id": said.id})
    assert answer.output_text == "It is there."
    # The same conversation sent as items costs nothing: its prompt is the very same.
    items = [{"role": "user", "content": "Look."}, message.model_dump(), call.model_dump(), output]
    again = client.responses.create(**ask | {"input": items})
    assert again.usage.input_tokens == answer.usage.input_tokens
    cached = again.usage.input_tokens_details.cached_tokens
    assert cached == answer.usage.input_tokens - 1
    assert parrot.cached() > before


def test_a_conversation_begun_elsewhere_goes_on_with_the_calls_in_it() -> None:
    """Codex has tools that are no functions, and sends its whole conversation every time."""
    items = [
        {"role": "user", "content": "Mend it."},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
        {"type": "local_shell_call", "call_id": "2", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "2", "output": "a.py"},
    ]
    _, patch, done, shell, listed = to_messages(items)
    assert patch["tool_calls"][0]["function"] == {
        "name": "apply_patch",
        "arguments": '{"input": "*** Begin"}',
    }
    assert done == {"role": "tool", "tool_call_id": "1", "content": "done"}
    assert shell["tool_calls"][0]["function"]["arguments"] == '{"command": ["ls"]}'
    assert listed == {"role": "tool", "tool_call_id": "2", "content": "a.py"}


@pytest.mark.model
def test_a_response_that_runs_out_of_tokens_is_incomplete(parrot: Endpoint, client: Any) -> None:
    parrot.say("one two three four five six")
    said = client.responses.create(model="m", input="Count.", max_output_tokens=2)
    assert said.status == "incomplete"
    assert said.incomplete_details is not None
    assert said.incomplete_details.reason == "max_output_tokens"


@pytest.mark.model
@pytest.mark.parametrize("body", [{}, {"input": []}, {"input": [{"type": "computer_call"}]}])
def test_a_request_that_means_nothing_is_told_so(parrot: Endpoint, body: dict[str, Any]) -> None:
    status, _, answer = parrot.ask("/v1/responses", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
