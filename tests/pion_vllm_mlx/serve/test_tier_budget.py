"""A conversation that grows to the budget of the store behind a server's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_patches.prompt_memory import PromptMemory
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.serve.tier import PionTier
from pion_vllm_mlx.transport import Command, Patience
from pion_vllm_mlx.transport.endpoint import Endpoint
from tests.pion_patches.serving import Questions, chat_model, serving
from tests.pion_vllm_mlx.model_folder import text_of

BLOCK = 64
TURNS = 60
WORDS = [int(token) for token in np.random.default_rng(3).integers(10, 190, 300)]
SYSTEM = {"role": "system", "content": text_of(WORDS[:200])}


def user(number: int) -> dict[str, Any]:
    return {"role": "user", "content": text_of([10 + number, *WORDS[number : number + 60]])}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "hybrid", "qwen3_5")


def bytes_held(store: LocalServer) -> int:
    """Rows and state, by the server's own account."""
    lane = Endpoint("127.0.0.1", store.port)
    commands = [Command(("KV.PREFIX.INFO",)), Command(("KV.PREFIX.LIST", "pl"))]
    info, listed = lane.exchange(commands, Patience(first_byte=5, stall=5, total=20))
    lane.close()
    rows = int(bytes(info).partition(b"vstore_bytes:")[2].split(b"\r\n")[0])  # type: ignore[arg-type]
    return rows + sum(int(row[2]) for row in listed)  # type: ignore[union-attr,index,arg-type,misc]


@contextmanager
def kept(
    folder: Path, store: LocalServer, budget: int, conversations: int = 10
) -> Iterator[Questions]:
    tier = PionTier(Endpoint("127.0.0.1", store.port), budget_bytes=budget)
    memory = PromptMemory(conversations, tier=tier)
    try:
        with serving(folder, memory=memory) as questions:
            yield questions
            assert tier.flush(30)
    finally:
        memory.close()


def ask(questions: Questions, messages: list[dict[str, Any]], count: int = 4) -> Any:
    return questions.chat([dict(message) for message in messages], count=count)


def test_sixty_turns_of_a_hybrid_fit_into_a_budget_of_a_few_states(
    hybrid: Path, tmp_path: Path
) -> None:
    """F04, C05: states within the conversation leave, its rows stay, and it resumes after a
    restart: the next turn, the last answer again, and another conversation with its system prompt.
    """
    with LocalServer(tmp_path / "data", tmp_path / "log", ["--no-attention"]) as store:
        rows, state = sizes(hybrid, store)
        # At the end: the rows of the whole conversation, and five states.
        tokens = 202 + TURNS * (63 + 6)
        budget = rows * tokens + 5 * state
        messages = [SYSTEM]
        with kept(hybrid, store, budget) as questions:
            tier = questions.memory.tier
            for number in range(TURNS):
                messages.append(user(number))
                answer = ask(questions, messages)
                assert tier.flush(30)
                assert tier.figures()["used_bytes"] == bytes_held(store) <= budget
                if number < TURNS - 1:
                    messages.append({"role": "assistant", "content": text_of(answer.tokens[:-1])})
            figures = tier.figures()
            assert figures["oversize"] == figures["stores_failed"] == 0
            assert figures["evictions"] >= TURNS / 2
            assert bytes_held(store) > rows * (tokens - 3 * BLOCK)
        prompt = length(messages)
        following = [*messages, {"role": "assistant", "content": text_of(answer.tokens[:-1])}]
        following.append(user(TURNS))
        other = [SYSTEM, {"role": "user", "content": text_of(WORDS[250:290])}]
        for conversation, least in (
            (messages, prompt - 2 * BLOCK),
            (following, prompt - BLOCK),
            (other, 202 - BLOCK),
            # An old question asked anew goes on from the last state before it that is still there.
            (messages[:TURNS], 202 - BLOCK),
        ):
            with serving(hybrid) as cold:
                expected = ask(cold, conversation)
            with kept(hybrid, store, budget) as questions:
                found = ask(questions, conversation)
                assert found.tokens == expected.tokens
                assert found.cached >= least
                assert questions.memory.counts["tier_hits"] == 1
            assert bytes_held(store) <= budget


def length(messages: list[dict[str, Any]]) -> int:
    """Tokens of a prompt: a message has a word before it and after, an answer two before it."""
    return sum(len(message["content"].split()) + 2 for message in messages) + 2


def sizes(folder: Path, store: LocalServer) -> tuple[int, int]:
    """Bytes of a row of all layers, and of a state. The store is empty again afterwards."""
    held = []
    for blocks in (1, 2):
        with kept(folder, store, 1 << 30) as questions:
            questions.ids([*WORDS[: blocks * BLOCK], 5], count=1)
            assert questions.memory.tier.flush(30)
            held.append(bytes_held(store))
            questions.memory.tier._parts[questions.generator.model_provider.model_key][
                0
            ].index.trim(0)
            assert bytes_held(store) == 0
    row = (held[1] - held[0]) // BLOCK
    return row, held[0] - row * BLOCK
