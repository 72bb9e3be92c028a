"""Requests that begin alike and come at once compute the beginning once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_patches.prompt_memory import PromptMemory
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.serve.admission import Admission
from pion_vllm_mlx.serve.channel import Channel
from pion_vllm_mlx.serve.provider import Provider
from pion_vllm_mlx.serve.tier import PionTier
from pion_vllm_mlx.transport.endpoint import Endpoint as Lane
from tests.pion_patches.serving import chat_model
from tests.pion_vllm_mlx.model_folder import text_of
from tests.pion_vllm_mlx.serve.endpoint import Endpoint, endpoint

WORDS = [int(token) for token in np.random.default_rng(6).integers(10, 190, 900)]
SYSTEM = {"role": "system", "content": text_of(WORDS[:400])}
QUESTIONS = [[*WORDS[500 + 30 * n : 540 + 40 * n]] for n in range(4)]


def request(tokens: list[int]) -> tuple[Any, list[int]]:
    return (Channel(), None, None), tokens


def test_one_goes_on_and_the_others_wait_until_its_beginning_is_known() -> None:
    known = 0
    admission = Admission(lambda tokens: known)
    first, beginning = request([*range(300), 1])
    second, alike = request([*range(300), 2])
    third, other = request([*range(1000, 1300)])
    assert admission.offer(first, beginning)
    assert not admission.offer(second, alike)
    assert admission.offer(third, other)
    assert admission.waiting
    assert admission.take() is None
    known = 290
    assert admission.take() is second
    assert not admission.waiting


@pytest.mark.parametrize("end", [RuntimeError("no"), None, "token", "cancel"])
def test_nobody_waits_for_one_that_has_ended(end: Any) -> None:
    admission = Admission(lambda tokens: 0)
    first, beginning = request([*range(300), 1])
    second, alike = request([*range(300), 2])
    assert admission.offer(first, beginning)
    assert not admission.offer(second, alike)
    first[0].put((10, 300))
    assert admission.take() is None
    if end == "cancel":
        first[0].cancel()
    else:
        first[0].put(end)
    assert admission.take() is second


def test_one_nobody_waits_for_is_dropped() -> None:
    admission = Admission(lambda tokens: 0)
    first, beginning = request([*range(300), 1])
    second, alike = request([*range(300), 2])
    assert admission.offer(first, beginning)
    assert not admission.offer(second, alike)
    second[0].cancel()
    first[0].put("token")
    assert admission.take() is None
    assert not admission.waiting


def test_a_short_beginning_keeps_nobody_back() -> None:
    admission = Admission(lambda tokens: 0)
    assert admission.offer(*request([*range(100), 1]))
    assert admission.offer(*request([*range(100), 2]))


def ask(served: Endpoint, question: list[int], *more: Any) -> tuple[str, int, int]:
    """The answer, the prompt's tokens, and those that were cached."""
    messages = [SYSTEM, {"role": "user", "content": text_of(question)}, *more]
    body = {"messages": messages, "max_tokens": 6}
    status, _, answer = served.ask("/v1/chat/completions", body)
    assert status == 200, answer
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"] or "", usage["prompt_tokens"], cached


def flags(folder: Path) -> tuple[str, ...]:
    # Small steps, so that the first is still computing when the others come.
    return ("--model", str(folder), "--prefill-step-size", "16")


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_four_sessions_at_once_compute_their_system_prompt_once(
    tmp_path: Path, family: str
) -> None:
    folder = chat_model(tmp_path / "model", family)
    with endpoint(Provider, *flags(folder), memory=PromptMemory(0)) as cold:
        expected = [ask(cold, question)[0] for question in QUESTIONS]
    with LocalServer(tmp_path / "data", tmp_path / "log", ["--no-attention"]) as store:
        tier = PionTier(Lane("127.0.0.1", store.port))
        memory = PromptMemory(tier=tier)
        with endpoint(Provider, *flags(folder), memory=memory) as served:
            with ThreadPoolExecutor(4) as pool:
                running = [pool.submit(ask, served, QUESTIONS[0])]
                while not served.service.generator.steps:
                    time.sleep(0.001)
                running += [pool.submit(ask, served, question) for question in QUESTIONS[1:]]
                found = [each.result() for each in running]
            assert [answer for answer, _, _ in found] == expected
            assert [cached >= 400 for _, _, cached in found] == [False, True, True, True]
            assert tier.flush(30)
        # Every one of them was stored: all go on after a restart.
        memory = PromptMemory(tier=PionTier(Lane("127.0.0.1", store.port)))
        with endpoint(Provider, *flags(folder), memory=memory) as served:
            for question, (_, prompt, _) in zip(QUESTIONS, found, strict=True):
                assert ask(served, question)[2] >= prompt - 64 - 2
