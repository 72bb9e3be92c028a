"""``serve`` and its pion-server, killed between requests and in the middle of one."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def both(families: tuple[str, ...], streams: int) -> list[Any]:
    return [pytest.param(family, streams, marks=pytest.mark.nightly) for family in families]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "streams"),
    [("qwen3_5", 4), *both(("llama", "qwen3_5", "gemma3_text", "gpt_oss"), 16)],
)
def test_streams_at_once_outlive_both_servers(tmp_path: Path, family: str, streams: int) -> None:
    """SIGKILL of the pion-server while they run, then of both: every answer is a cold server's."""
    folder = chat_model(tmp_path / "model", family)
    kept = ("--pion-dir", str(tmp_path / "data"), "--prompt-cache-size", "4")
    # Beginnings that are shared and some that are not, of other lengths.
    firsts = [[*WORDS[: 150 + 9 * n], 10 + n, *WORDS[n : n + 40]] for n in range(streams)]
    firsts[1::4] = [prompt[::-1] for prompt in firsts[1::4]]
    nexts = [[*prompt, *WORDS[300:330]] for prompt in firsts]
    with started(folder, "--no-pion", "--prompt-cache-size", "0") as cold:
        expected = [complete(cold, prompt, 24)[0] for prompt in (*firsts, *nexts)]
    with ThreadPoolExecutor(streams) as pool:
        with started(folder, *kept) as serve:

            def put(prompt: list[int]) -> str:
                return complete(serve, prompt, 24)[0]

            before = [pool.submit(put, prompt) for prompt in firsts]
            wait_until(lambda: stats(serve)["requests"]["requests"] >= streams // 2)
            pion_server(serve).kill()
            assert [answer.result(300) for answer in before] == expected[:streams]
            wait_until(lambda: "was started again" in serve.said)
            # In the middle of the next ones, and of what is written of the first.
            cut = [pool.submit(put, prompt) for prompt in nexts]
            wait_until(lambda: stats(serve)["requests"]["requests"] > streams)
            pion_server(serve).kill()
            serve.process.kill()
            for answer, whole in zip(cut, expected[streams:], strict=True):
                lost = answer.exception(300)
                assert isinstance(lost, OSError | http.client.HTTPException) or lost is None
                assert lost is not None or answer.result() == whole
        with started(folder, *kept) as serve:
            after = [pool.submit(put, prompt) for prompt in (*firsts, *nexts)]
            assert [answer.result(300) for answer in after] == expected
            assert ask(serve.port, "/health")[0] == 200


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
