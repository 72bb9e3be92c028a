"""M02: whoever closes the connection has the computing stopped, at once and for good."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.pion_vllm_mlx.serve.endpoint import Endpoint, endpoint

pytestmark = pytest.mark.model
#: Seconds a step of the slowed model takes; nothing is judged by it, it only gives time to hang up.
STEP = 0.05


@pytest.fixture(scope="module")
def slow() -> Iterator[Endpoint]:
    """A parrot that takes its time, eight tokens of a prompt at a step."""
    with endpoint() as served:
        served.provider.cli_args.prefill_step_size = 8
        parrot = served.parrot
        compute = type(parrot).__call__

        def slowly(model: Any, inputs: Any, cache: Any = None) -> Any:
            time.sleep(STEP)
            return compute(model, inputs, cache)

        served.provider.parrot.__class__ = type("Slow", (type(parrot),), {"__call__": slowly})
        yield served


def wait_until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def hang_up_when(
    slow: Endpoint, enough: Callable[[], bool], stream: bool, prompt: str = "Tell me.", **more: Any
) -> int:
    """Ask, close the connection when `enough`; the steps computed from then on."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 400, "stream": stream}
    raw = json.dumps(body | more).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}"
    cancelled = slow.service.figures._requests.labels("chat", "cancelled")._value
    before = cancelled.get()
    with socket.create_connection(("127.0.0.1", slow.door.port), 30) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + raw)
        if stream:
            assert connection.recv(1 << 16)
        wait_until(enough)
        at = len(slow.parrot.forwarded)
    wait_until(lambda: cancelled.get() == before + 1)
    time.sleep(6 * STEP)
    return len(slow.parrot.forwarded) - at


def answer(slow: Endpoint) -> str:
    slow.say("Ready.")
    body = {"messages": [{"role": "user", "content": "Again."}]}
    found: str = slow.ask("/v1/chat/completions", body)[2]["choices"][0]["message"]["content"]
    return found


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_nobody_waits_for_is_not_computed(
    slow: Endpoint, stream: bool, seed: int | None
) -> None:
    slow.parrot.say(*[500] * 300)
    begun = len(slow.parrot.forwarded)
    prompt = f"Tell me, {stream} {seed}."
    more = {} if seed is None else {"seed": seed}
    steps = hang_up_when(
        slow, lambda: len(slow.parrot.forwarded) > begun + 8, stream, prompt, **more
    )
    # The step that was under way, one that had begun to be computed ahead, one that noticed.
    assert steps <= 3
    assert answer(slow) == "Ready."


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_nobody_waits_for_is_not_computed(
    slow: Endpoint, stream: bool, seed: int | None
) -> None:
    begun = len(slow.parrot.forwarded)
    prompt = f"{stream} {seed} " + "and so on " * 200
    more = {} if seed is None else {"seed": seed}
    steps = hang_up_when(
        slow, lambda: len(slow.parrot.forwarded) > begun + 2, stream, prompt, **more
    )
    assert steps <= 3
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


def test_one_who_hangs_up_does_not_disturb_the_others(slow: Endpoint) -> None:
    import threading

    slow.parrot.say(*[500] * 60)
    found: list[Any] = []
    body = {"messages": [{"role": "user", "content": "I stay."}], "max_tokens": 60}
    staying = threading.Thread(
        target=lambda: found.append(slow.ask("/v1/chat/completions", body)[2])
    )
    begun = len(slow.parrot.forwarded)
    staying.start()
    wait_until(lambda: len(slow.parrot.forwarded) > begun + 5)
    at = len(slow.parrot.forwarded)
    hang_up_when(slow, lambda: len(slow.parrot.forwarded) > at + 8, False, "I go.")
    staying.join(60)
    assert found[0]["usage"]["completion_tokens"] == 60
    assert slow.service.generator.is_healthy
