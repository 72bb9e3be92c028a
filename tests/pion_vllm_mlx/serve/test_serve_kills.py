"""``serve`` and its pion-server, killed between requests and in the middle of one."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.pion_patches.serving import chat_model
from tests.pion_vllm_mlx.serve.test_serve_command import Process, ask, started

WORDS = [int(token) for token in np.random.default_rng(2).integers(10, 190, 600)]
FAMILIES = ("llama", "gpt_oss")


def complete(serve: Process, prompt: list[int], count: int = 8) -> tuple[str, int]:
    """The text of an answer, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": count}
    status, answer = ask(serve.port, "/v1/completions", body)
    assert status == 200, answer
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], cached


def pion_server(serve: Process) -> psutil.Process:
    (child,) = psutil.Process(serve.process.pid).children()
    return child


def stats(serve: Process) -> Any:
    return ask(serve.port, "/v1/pion/stats")[1]


def wait_until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_until_written(serve: Process) -> None:
    """An answer ends before its conversation is given to the store: wait for both."""

    def is_written() -> bool:
        found = stats(serve)
        return bool(found["tier"]["stores"]) and not found["gauges"]["tier_bytes_waiting"]

    wait_until(is_written)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_is_a_cold_servers(tmp_path: Path, family: str) -> None:
    folder = chat_model(tmp_path / "model", family)
    data = tmp_path / "data"
    prompts = [WORDS[:300], WORDS[:340], [*WORDS[:280], *WORDS[400:440]], WORDS[100:400]]
    with started(folder, "--no-pion") as cold:
        expected = [complete(cold, prompt)[0] for prompt in prompts]
    with started(folder, "--pion-dir", str(data)) as serve:
        assert complete(serve, prompts[0])[0] == expected[0]
        wait_until_written(serve)
        # In the middle of a request.
        with socket.create_connection(("127.0.0.1", serve.port)) as connection:
            body = json.dumps({"prompt": WORDS, "max_tokens": 500, "stream": True}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            connection.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
            assert connection.recv(100)
            serve.process.kill()
            serve.process.wait()
    with started(folder, "--pion-dir", str(data)) as serve:
        found = complete(serve, prompts[1])
        assert found[0] == expected[1]
        assert found[1] >= 256
        wait_until_written(serve)
        # The pion-server, between two requests; it is started again, and knows what it knew.
        former = pion_server(serve)
        former.kill()
        assert complete(serve, prompts[2])[0] == expected[2]
        wait_until(lambda: "was started again" in serve.said)
        assert complete(serve, prompts[3])[0] == expected[3]
        assert ask(serve.port, "/health")[0] == 200
        assert pion_server(serve).pid != former.pid


def test_no_server_is_left_behind_and_two_serves_share_one(tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "model", "llama")
    data = tmp_path / "data"
    with started(folder, "--pion-dir", str(data)) as first:
        child = pion_server(first)
        text, _ = complete(first, WORDS[:300])
        wait_until_written(first)
        with started(folder, "--pion-dir", str(data)) as second:
            assert psutil.Process(second.process.pid).children() == []
            found = complete(second, WORDS[:300])
            assert found[0] == text
            assert found[1] >= 256
        noted = data / "server.json"
        assert noted.stat().st_mode & 0o077 == 0
        assert data.stat().st_mode & 0o077 == 0
        password = json.loads(noted.read_text())["password"]
        assert password not in " ".join(child.cmdline())
    child.wait(30)
