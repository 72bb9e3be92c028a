"""What others' servers got wrong, asked over HTTP: tiny models, Pion behind their memory.

Each answer is compared with that of the same server without any memory, and the tokens that were
not computed are counted, so that a server that never reuses anything does not pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mlx_lm import tokenizer_utils
from transformers import PreTrainedTokenizerFast

from pion_patches.prompt_memory import PromptMemory
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.serve.provider import Provider
from pion_vllm_mlx.serve.tier import PionTier
from pion_vllm_mlx.transport.endpoint import Endpoint as Address
from tests.pion_patches.serving import chat_model
from tests.pion_vllm_mlx.model_folder import text_of
from tests.pion_vllm_mlx.serve.endpoint import Endpoint, endpoint

WORDS = [int(token) for token in np.random.default_rng(11).integers(10, 190, 800)]


class Forgetful(PromptMemory):
    """Keeps nothing."""

    def insert_cache(self, *arguments: Any, **options: Any) -> None:
        """Keep nothing."""


class Asking:
    """Completions of token ids: the text, and the prompt tokens that were not computed."""

    def __init__(self, served: Endpoint) -> None:
        self.served = served

    def __call__(self, prompt: list[int], count: int = 8, **options: Any) -> tuple[str, int]:
        body = {"prompt": prompt, "max_tokens": count, **options}
        status, _, answer = self.served.ask("/v1/completions", body)
        assert status == 200, answer
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        return answer["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]

    def flush(self) -> None:
        tier: Any = self.served.service.tier
        assert tier.flush(30)


Start = Callable[..., Asking]


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / family, family)


@contextmanager
def asking(folder: Path, memory: PromptMemory, tier: PionTier | None = None) -> Iterator[Asking]:
    plain = mock.patch.object(tokenizer_utils, "AutoTokenizer", PreTrainedTokenizerFast)
    with plain, endpoint(Provider, "--model", str(folder), memory=memory, tier=tier) as served:
        yield Asking(served)


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[Asking]:
    with asking(folder, Forgetful()) as ask:
        yield ask


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a serve that knows nothing but what the one pion-server of the test holds."""
    with (
        LocalServer(tmp_path / "data", tmp_path / "log", ["--no-attention"]) as store,
        ExitStack() as ends,
    ):

        def begin(conversations: int = 10, **options: Any) -> Asking:
            tier = PionTier(Address("127.0.0.1", store.port), **options)
            memory = PromptMemory(conversations, tier=tier)
            return ends.enter_context(asking(folder, memory, tier))

        yield begin


def test_beginnings_of_any_length_are_reused_to_the_token(
    start: Start, cold: Asking, family: str
) -> None:
    """A07, A13: at the steps of a buffer as elsewhere; the count is what was not computed."""
    warm = start()
    warm(WORDS[:650])
    for length in (255, 256, 257, 600):
        prompt = [*WORDS[:length], 3, 5, 7]
        text, cached = warm(prompt)
        assert text == cold(prompt)[0]
        # A hybrid has kept its state at the system's stops and at the last multiple of 64.
        assert cached == length if family == "llama" else cached <= length
    text, cached = warm([5, *WORDS[:40]])
    assert (text, cached) == (cold([5, *WORDS[:40]])[0], 0)


def test_a_short_conversation_comes_back_from_the_disk_as_it_was(
    start: Start, cold: Asking, family: str
) -> None:
    """A10: of a buffer of 256 rows those that are there, and no others."""
    before = start()
    before(WORDS[:70], count=1)
    before.flush()
    _, cached = after = start()([*WORDS[:70], 9])
    assert after[0] == cold([*WORDS[:70], 9])[0]
    assert cached in ((69, 70) if family == "llama" else (64,))


def test_many_streams_with_a_short_beginning_in_common_stay_apart(
    start: Start, cold: Asking
) -> None:
    """A06, G01: seventeen tokens in common, then a topic of its own; twice, sixteen at once."""
    warm = start(32)
    topics = [WORDS[30 * number : 30 * number + 80] for number in range(16)]
    prompts = [[*WORDS[:17], 20 + number, *topic] for number, topic in enumerate(topics)]
    expected = [cold(prompt)[0] for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        for _ in range(2):
            answers = list(pool.map(warm, prompts))
            assert [text for text, _ in answers] == expected
    assert all(cached == len(p) - 1 for (_, cached), p in zip(answers, prompts, strict=True))


def test_no_conversation_shows_in_another_while_many_are_evicted(
    start: Start, cold: Asking
) -> None:
    """G01: twenty conversations with a marker each, room for five, two fresh prompts at a time."""
    prompts = [[10 + number, *WORDS[:70], 100 + number] for number in range(20)]
    warm = start(5, budget_bytes=600_000)
    for prompt in prompts:
        warm(prompt, count=2)
    fresh = [[*WORDS[200 + turn : 290 + turn], 10 + turn] for turn in range(12)]
    expected = [cold(prompt, count=4)[0] for prompt in fresh]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda prompt: warm(prompt, count=4), fresh))
    assert [text for text, _ in answers] == expected
    assert max(cached for _, cached in answers) <= 3
    # What is left of them all is still theirs.
    some = [*fresh[:-6:-1], *prompts[::4]]
    found = [(warm([*p, 7], count=4), cold([*p, 7], count=4)) for p in some]
    assert [text for (text, _), _ in found] == [text for _, (text, _) in found]
    assert any(cached >= 64 for (_, cached), _ in found)


def test_threads_that_ask_for_the_same_few_prompts_get_the_same_answers(
    start: Start, cold: Asking
) -> None:
    """G03: eight threads over five keys, in a memory that holds two."""
    prompts = [[30 + number, *WORDS[:20]] for number in range(5)]
    expected = [cold(prompt, count=3)[0] for prompt in prompts]
    warm = start(2)

    def ask(seed: int) -> list[tuple[int, str]]:
        order = random.Random(seed).choices(range(5), k=6)
        return [(number, warm(prompts[number], count=3)[0]) for number in order]

    with ThreadPoolExecutor(8) as pool:
        answers = [answer for each in pool.map(ask, range(8)) for answer in each]
    assert all(text == expected[number] for number, text in answers)
    assert len(warm.served.service.memory) <= 2
    assert warm.served.service.memory.counts["errors"] == 0


def test_text_that_comes_back_as_other_tokens_is_reused_up_to_there(
    start: Start, cold: Asking
) -> None:
    """L01: stored as 13, 71, sent as 82; from memory, and after a restart."""
    head, tail = WORDS[:195], WORDS[400:420]
    warm = start()
    warm([*head, 13, 71, *tail], count=1)
    warm.flush()
    for server, after in ((warm, tail), (start(), WORDS[430:450])):
        text, cached = server([*head, 82, *after])
        assert text == cold([*head, 82, *after])[0]
        assert 192 <= cached <= 196


def test_reasoning_that_the_template_drops_costs_only_what_follows(
    start: Start, cold: Asking
) -> None:
    """L04: the client sends an earlier answer without its thoughts."""

    def chat(ask: Asking, messages: list[dict[str, str]]) -> tuple[str, int]:
        _, _, answer = ask.served.ask(
            "/v1/chat/completions", {"messages": messages, "max_tokens": 6}
        )
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"].get("content", ""), cached

    system = {"role": "system", "content": text_of(WORDS[:146])}
    messages = [system, {"role": "user", "content": text_of(WORDS[300:340])}]
    warm = start()
    assert chat(warm, messages)[0] == chat(cold, messages)[0]
    warm.flush()
    # Not what it said: as if the first half of it had been its thoughts.
    messages += [{"role": "assistant", "content": "w30"}, {"role": "user", "content": "w31 w32"}]
    expected = chat(cold, messages)[0]
    prompt = 148 + 42
    for server, least in ((warm, prompt), (start(), prompt - 64)):
        text, cached = chat(server, messages)
        assert text == expected
        assert cached >= least
