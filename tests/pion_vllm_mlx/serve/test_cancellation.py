"""M02: whoever closes the connection has the computing stopped, at once and for good."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.pion_vllm_mlx.serve.endpoint import Endpoint, endpoint

pytestmark = pytest.mark.model


class Held:
    """Lets a model compute so many steps, then holds it in the next one until `release`."""

    def __init__(self) -> None:
        self.begun = 0
        self._most: int | None = None
        self._open = threading.Event()
        self._open.set()

    def hold_after(self, steps: int) -> None:
        before, self._open = self._open, threading.Event()
        self._most = self.begun + steps
        before.set()

    def release(self) -> None:
        self._most = None
        self._open.set()

    def step(self) -> None:
        self.begun += 1
        if self._most is not None and self.begun > self._most:
            assert self._open.wait(60)

    @property
    def is_holding(self) -> bool:
        return self._most is not None and self.begun > self._most


@pytest.fixture(scope="module")
def held() -> Held:
    return Held()


@pytest.fixture(scope="module")
def slow(held: Held) -> Iterator[Endpoint]:
    """A parrot that can be held, eight tokens of a prompt at a step."""
    with endpoint() as served:
        served.provider.cli_args.prefill_step_size = 8
        parrot = served.parrot
        compute = type(parrot).__call__

        def step(model: Any, inputs: Any, cache: Any = None) -> Any:
            held.step()
            return compute(model, inputs, cache)

        served.provider.parrot.__class__ = type("Held", (type(parrot),), {"__call__": step})
        yield served


def wait_until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def hang_up_after(
    slow: Endpoint, held: Held, steps: int, stream: bool, prompt: str, **more: Any
) -> int:
    """Ask, close the connection in the middle of a step; how many steps begin after that."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 400, "stream": stream}
    raw = json.dumps(body | more).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}"
    cancelled = slow.service.figures._requests.labels("chat", "cancelled")._value
    before = cancelled.get()
    held.hold_after(steps)
    with socket.create_connection(("127.0.0.1", slow.door.port), 30) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + raw)
        wait_until(lambda: held.is_holding)
    wait_until(lambda: cancelled.get() == before + 1)
    at = held.begun
    held.release()
    # Hundreds of steps of this model fit in here, were it not stopped.
    time.sleep(0.5)
    return held.begun - at


def answer(slow: Endpoint) -> str:
    slow.say("Ready.")
    body = {"messages": [{"role": "user", "content": "Again."}]}
    found: str = slow.ask("/v1/chat/completions", body)[2]["choices"][0]["message"]["content"]
    return found


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_nobody_waits_for_is_not_computed(
    slow: Endpoint, held: Held, stream: bool, seed: int | None
) -> None:
    slow.parrot.say(*[500] * 300)
    more = {} if seed is None else {"seed": seed}
    assert hang_up_after(slow, held, 20, stream, f"Tell me, {stream} {seed}.", **more) <= 2
    assert answer(slow) == "Ready."


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_nobody_waits_for_is_not_computed(
    slow: Endpoint, held: Held, stream: bool, seed: int | None
) -> None:
    prompt = f"{stream} {seed} " + "and so on " * 200
    more = {} if seed is None else {"seed": seed}
    assert hang_up_after(slow, held, 3, stream, prompt, **more) <= 2
    assert answer(slow) == "Ready."


def _chat(url: str) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    said: Any = [{"role": "user", "content": "Tell me, chat."}]
    return client.chat.completions.create(model="m", messages=said, max_tokens=400, stream=True)


def _responses(url: str) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return client.responses.create(
        model="m", input="Tell me, responses.", max_output_tokens=400, stream=True
    )


def _messages(url: str) -> Any:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    said: Any = [{"role": "user", "content": "Tell me, messages."}]
    return client.messages.create(model="m", messages=said, max_tokens=400, stream=True)


@pytest.mark.parametrize("begin", [_chat, _responses, _messages])
def test_a_stream_that_its_client_closes_is_not_computed(
    slow: Endpoint, held: Held, begin: Callable[[str], Any]
) -> None:
    """As the `openai` and `anthropic` packages close one."""
    slow.parrot.say(*[500] * 300)
    api = begin.__name__[1:]
    cancelled = slow.service.figures._requests.labels(api, "cancelled")._value
    before = cancelled.get()
    held.hold_after(25)
    stream = begin(slow.url)
    assert next(iter(stream))
    wait_until(lambda: held.is_holding)
    stream.close()
    wait_until(lambda: cancelled.get() == before + 1)
    at = held.begun
    held.release()
    time.sleep(0.5)
    assert held.begun - at <= 2
    assert answer(slow) == "Ready."


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_ends_its_requests_and_not_the_server(
    slow: Endpoint, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G08: mlx_lm.server serves nothing more after that."""
    slow.parrot.say(*[500] * 50)
    compute = type(slow.parrot).__call__
    steps = [0]

    def fail(model: Any, inputs: Any, cache: Any = None) -> Any:
        steps[0] += 1
        if steps[0] == 12:
            raise RuntimeError("a fault that was put there")
        return compute(model, inputs, cache)

    body = {"messages": [{"role": "user", "content": f"Fail, {stream}."}], "stream": stream}
    with monkeypatch.context() as failing:
        failing.setattr(type(slow.parrot), "__call__", fail)
        status, _, found = slow.ask("/v1/chat/completions", body)
    if stream:
        assert status == 200
        assert "a fault that was put there" in found.splitlines()[-2]
    else:
        assert status == 500
        assert "a fault that was put there" in found["error"]["message"]
    assert answer(slow) == "Ready."
    assert slow.service.generator.is_healthy


def test_one_who_hangs_up_does_not_disturb_the_others(slow: Endpoint, held: Held) -> None:
    slow.parrot.say(*[500] * 60)
    found: list[Any] = []
    body = {"messages": [{"role": "user", "content": "I stay."}], "max_tokens": 60}
    staying = threading.Thread(
        target=lambda: found.append(slow.ask("/v1/chat/completions", body)[2])
    )
    held.hold_after(8)
    staying.start()
    wait_until(lambda: held.is_holding)
    hang_up_after(slow, held, 12, False, "I go.")
    staying.join(60)
    assert found[0]["usage"]["completion_tokens"] == 60
    assert slow.service.generator.is_healthy
