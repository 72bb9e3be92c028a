"""Pion behind the memory of a server: another process goes on where this one has stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
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
from pion_vllm_mlx.transport.local import LocalLane
from tests.pion_patches.serving import Questions, chat_model, serving
from tests.pion_vllm_mlx.model_folder import text_of

FAMILIES = ("llama", "qwen3_5", "gemma3_text", "gpt_oss")
WORDS = [int(token) for token in np.random.default_rng(1).integers(10, 190, 900)]
SYSTEM = {"role": "system", "content": text_of(WORDS[:200])}
BLOCK = 64


def user(start: int, end: int) -> dict[str, Any]:
    return {"role": "user", "content": text_of(WORDS[start:end])}


def said(tokens: list[int]) -> dict[str, Any]:
    return {"role": "assistant", "content": text_of(tokens[:-1])}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {family: chat_model(base / family, family) for family in FAMILIES}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalServer]:
    with LocalServer(tmp_path / "data", tmp_path / "log", ["--no-attention"]) as server:
        yield server


@contextmanager
def kept(folder: Path, store: LocalServer, *flags: str, **options: Any) -> Iterator[Questions]:
    """A server that knows nothing but what `store` holds; all is written at the end."""
    tier = PionTier(Endpoint("127.0.0.1", store.port), **options)
    memory = PromptMemory(tier=tier)
    try:
        with serving(folder, *flags, memory=memory) as questions:
            yield questions
            assert tier.flush(30)
    finally:
        memory.close()


def wait_until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_goes_on_after_a_restart(
    folders: dict[str, Path], store: LocalServer, family: str
) -> None:
    """C05, G09: a turn, a tool loop, a regenerated answer, a second session.

    Restored on one thread, computed with on another, stored from a third.
    """
    first = [SYSTEM, user(200, 330)]
    with serving(folders[family]) as cold:
        answer = cold.chat([dict(m) for m in first])
    turn = [*first, said(answer.tokens), user(330, 350)]
    loop = [*first, said(answer.tokens), {"role": "tool", "content": text_of(WORDS[350:380])}]
    other = [SYSTEM, user(400, 440)]
    with kept(folders[family], store) as before:
        assert before.chat([dict(m) for m in first]).tokens == answer.tokens
    prompt = 202 + 132
    for messages, least in (
        (turn, prompt - 2 * BLOCK),
        (loop, prompt - 2 * BLOCK),
        (first, prompt - BLOCK),
        (other, 202 - BLOCK),
    ):
        with serving(folders[family]) as cold:
            expected = cold.chat([dict(m) for m in messages])
        with kept(folders[family], store) as after:
            found = after.chat([dict(m) for m in messages])
            assert found.tokens == expected.tokens
            assert found.cached >= least
            assert after.memory.counts["tier_hits"] == 1
            again = after.chat([dict(m) for m in messages])
            assert again.tokens == expected.tokens
            assert again.cached >= found.cached


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_conversation_is_there_before_it_is_asked_for(
    folders: dict[str, Path], store: LocalServer, family: str
) -> None:
    """The one stored last of two, and its longest end; after a SIGKILL of the server, too."""
    turns = [[SYSTEM, user(200, 330)]]
    with kept(folders[family], store) as before:
        before.chat([SYSTEM, user(500, 600)])
        for start in (340, 420):
            answer = before.chat([dict(m) for m in turns[-1]])
            turns.append([*turns[-1], said(answer.tokens), user(start, start + 75)])
    with serving(folders[family]) as cold:
        expected = cold.chat([dict(m) for m in turns[-1]])
    store.kill()
    store.start()
    with kept(folders[family], store) as after:
        provider = after.generator.model_provider
        wait_until(lambda: provider.model is not None)
        after.memory.attach(provider.model_key, provider)
        after.memory.preload(provider.model_key)
        found = after.chat([dict(m) for m in turns[-1]])
        assert found.tokens == expected.tokens
        assert after.memory.counts["preloaded_tokens"] > 200 + 132 + 77 - BLOCK
        assert after.memory.counts["preloaded_tokens"] - found.cached < BLOCK
        assert after.memory.counts["tier_hits"] == 0
        # It is known for what it is: of what follows only the new rows are stored.
        assert after.memory.tier.flush(30)
        figures = after.memory.tier.figures()
        assert figures["stores"]
        assert figures["bytes_stored"] < figures["bytes_fetched"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_restore_after_a_restart_comes_from_files(
    folders: dict[str, Path], store: LocalServer, family: str
) -> None:
    """They are made while nobody asks yet: a pion-server that was started anew has none."""
    first = [SYSTEM, user(200, 330)]
    with kept(folders[family], store) as before:
        answer = before.chat([dict(m) for m in first])
    turn = [*first, said(answer.tokens), user(330, 350)]
    with serving(folders[family]) as cold:
        expected = cold.chat([dict(m) for m in turn])
    store.kill()
    store.start()
    with kept(folders[family], store) as after:
        after.ids(WORDS[:5])  # the model is there; serve itself attaches it before any request
        await_files(store)
        assert after.chat([dict(m) for m in turn]).tokens == expected.tokens
        assert after.memory.tier.figures()["hits_local"] == 1


def await_files(store: LocalServer) -> None:
    """Until the server has a file of every record with rows or state."""
    listed: Any = [store.command("KV.PREFIX.LIST", start) for start in ("pls1-", "plc1-")]
    names = [bytes(row[0]) for rows in listed for row in rows if row[1] + row[2]]
    assert names
    lane = LocalLane.beside(Endpoint("127.0.0.1", store.port), 5.0)
    ends = time.monotonic() + 20
    missing = True
    while missing and time.monotonic() < ends:
        loans = lane.borrow_each(names, Patience(first_byte=5))
        missing = None in loans
        for loan in loans:
            if loan is not None:
                loan.close()
        time.sleep(0.05)
    assert not missing
    lane.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_answer_is_not_computed_again_after_a_restart(
    folders: dict[str, Path], store: LocalServer, family: str
) -> None:
    """The state a hybrid had in the middle of its answer is kept, at the last multiple of 64."""
    with kept(folders[family], store) as before:
        # A random model may end at any token: the first answer that is long enough will do.
        answers = (
            (start, before.ids(WORDS[start : start + 150], count=200)) for start in range(20)
        )
        start, answer = next(a for a in answers if len(a[1].tokens) > 2 * BLOCK)
    held = 150 + len(answer.tokens)
    prompt = [*WORDS[start : start + 150], *answer.tokens, *WORDS[300:330]]
    with serving(folders[family]) as cold:
        expected = cold.ids(prompt).tokens
    with kept(folders[family], store) as after:
        found = after.ids(prompt)
    assert found.tokens == expected
    assert held - BLOCK <= found.cached <= held


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_budget_is_never_exceeded(
    folders: dict[str, Path], store: LocalServer, family: str
) -> None:
    """F04: one conversation that is larger costs no other its place."""
    budget = 400_000
    with kept(folders[family], store, budget_bytes=budget) as questions:
        tier = questions.memory.tier
        for number in range(12):
            questions.ids([number, *WORDS[number * 10 : number * 10 + 150]], count=2)
            assert tier.flush(30)
            assert tier.figures()["used_bytes"] <= budget
        figures = dict(tier.figures())
        assert figures["evictions"] > 0
        assert figures["used_bytes"] > budget / 2
        questions.ids([77, *WORDS, *WORDS], count=2)
        assert tier.flush(30)
        assert 0 < tier.figures()["used_bytes"] <= budget
    last = [11, *WORDS[110:260]]
    with kept(folders[family], store, budget_bytes=budget) as questions:
        assert questions.ids(last, count=2).cached >= 2 * BLOCK


def test_a_server_that_is_gone_costs_the_reuse_and_nothing_else(
    folders: dict[str, Path], store: LocalServer
) -> None:
    with serving(folders["llama"]) as cold:
        expected = [cold.ids(WORDS[start : start + 200]).tokens for start in range(0, 500, 100)]
    store.kill()
    with kept(folders["llama"], store) as questions:
        found = [questions.ids(WORDS[start : start + 200]).tokens for start in range(0, 500, 100)]
        assert found == expected
        assert questions.generator.is_healthy


def test_a_server_that_hangs_holds_no_stream_longer_than_its_deadline(
    folders: dict[str, Path], store: LocalServer
) -> None:
    with serving(folders["llama"]) as cold:
        expected = cold.ids(WORDS[:300]).tokens
    with kept(folders["llama"], store) as questions:
        questions.ids(WORDS[300:500])
        assert questions.memory.tier.flush(30)
        os.kill(store.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            assert questions.ids(WORDS[:300]).tokens == expected
            # The deadline is half a second; this only tells a wait with an end from one without.
            assert time.monotonic() - started < 20
            assert questions.memory.counts["tier_hits"] == 0
        finally:
            os.kill(store.pid, signal.SIGCONT)


def test_what_was_written_before_the_server_died_is_found_when_it_is_back(
    folders: dict[str, Path], store: LocalServer
) -> None:
    """SIGKILL of pion-server in between: an acknowledged prefix is there."""
    with kept(folders["qwen3_5"], store) as questions:
        expected = questions.ids(WORDS[:300])
    store.kill()
    store.start()
    with kept(folders["qwen3_5"], store) as questions:
        found = questions.ids(WORDS[:300])
    assert found.tokens == expected.tokens
    assert found.cached == 256


def test_tenants_find_their_own_only(folders: dict[str, Path], tmp_path: Path) -> None:
    """I01: the same prompt under two names, after a restart of both server and serve."""
    tenants = ("--requirepass", "admin", "--tenant", "one=p1", "--tenant", "two=p2")
    store = LocalServer(tmp_path / "data", tmp_path / "log", ["--no-attention", *tenants])

    def cached(name: str, password: str) -> int:
        endpoint = Endpoint("127.0.0.1", store.port, username=name, password=password)
        memory = PromptMemory(tier=PionTier(endpoint))
        try:
            with serving(folders["llama"], memory=memory) as questions:
                found = questions.ids(WORDS[:300])
                assert memory.tier is not None
                assert memory.tier.flush(30)  # type: ignore[attr-defined]
                return found.cached
        finally:
            memory.close()

    with store:
        assert cached("one", "p1") == 0
        assert cached("two", "p2") == 0
        assert cached("one", "p1") >= 256
        store.kill()
        store.start()
        assert cached("two", "p2") >= 256
        assert cached("one", "p1") >= 256


def test_other_weights_find_nothing(
    folders: dict[str, Path], store: LocalServer, tmp_path: Path
) -> None:
    """E13: the same path, other weights."""
    with kept(folders["llama"], store) as questions:
        questions.ids(WORDS[:300])
    other = chat_model(tmp_path / "llama", "llama", seed=9)
    with kept(other, store) as questions:
        assert questions.ids(WORDS[:300]).cached == 0
    with kept(folders["llama"], store) as questions:
        assert questions.ids(WORDS[:300]).cached >= 256


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_seeded_requests_go_on_after_a_restart(
    folders: dict[str, Path], store: LocalServer, family: str
) -> None:
    """C05 where requests are served one at a time: the same question, and another after the same
    system prompt."""
    first, other = [SYSTEM, user(200, 330)], [SYSTEM, user(400, 440)]
    sampled: dict[str, Any] = {"seed": 3, "temperature": 1.0}
    with kept(folders[family], store) as before:
        expected = before.chat([dict(m) for m in first], **sampled)
        assert expected.cached == 0
    with kept(folders[family], store) as after:
        found = after.chat([dict(m) for m in first], **sampled)
        assert found.tokens == expected.tokens
        assert found.cached >= 202 + 132 - BLOCK
    with kept(folders[family], store) as after, serving(folders[family]) as cold:
        found = after.chat([dict(m) for m in other], **sampled)
        assert found.tokens == cold.chat([dict(m) for m in other], **sampled).tokens
        assert found.cached >= 202 - BLOCK


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_quantised_caches_go_on_after_a_restart_with_the_same_flags_only(
    tmp_path: Path, store: LocalServer, family: str
) -> None:
    """D03: bits, groups and chunks are part of what a prefix is; a start of its own is not kept."""
    folder = chat_model(
        tmp_path / "model", family, **({"head_dim": 32} if family == "llama" else {})
    )
    prompt = [*WORDS[:300], 3]

    def flags(bits: int = 4, group: int = 32, start: int = 0, step: int = 64) -> tuple[str, ...]:
        named = {"kv-bits": bits, "kv-group-size": group, "quantized-kv-start": start}
        named["prefill-step-size"] = step
        return tuple(word for name, value in named.items() for word in (f"--{name}", str(value)))

    with serving(folder, *flags()) as cold:
        expected = cold.ids(prompt).tokens
    with kept(folder, store, *flags()) as before:
        assert before.ids(WORDS[:300]).cached == 0
    with kept(folder, store, *flags()) as after:
        found = after.ids(prompt)
        assert (found.tokens, found.cached) == (expected, 256)
    for other in (flags(bits=8), flags(step=128), flags(start=150), ()):
        with kept(folder, store, *other) as after, serving(folder, *other) as cold:
            found = after.ids(prompt)
            assert (found.tokens, found.cached) == (cold.ids(prompt).tokens, 0)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_conversation_of_more_segments_than_a_server_has_slots_is_reused_in_part(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """A foreign server with few session slots, two a segment: the beginning stays, nothing fails,
    and the server evicts nothing by itself, which is what would take the root first."""
    flags = ["--no-attention", "--vstore-sessions", "40"]
    with LocalServer(tmp_path / "data", tmp_path / "log", flags) as store:
        prompt: list[int] = []
        with kept(folders[family], store) as questions:
            for turn in range(24):
                prompt += [turn + 10, *WORDS[turn : turn + 70]]
                questions.ids(prompt, count=1)
                assert questions.memory.tier.flush(30)
            figures = questions.memory.tier.figures()
            # Told once, for what one request had given it by then.
            assert 1 <= figures["oversize"] <= 2
            assert figures["stores_failed"] == figures["stores_dropped"] == 0
            other = [5, *WORDS[300:400]]
            questions.ids(other, count=1)
        lane = Endpoint("127.0.0.1", store.port)
        (info,) = lane.exchange([Command(("KV.PREFIX.INFO",))], Patience(5, 5, 20))
        lane.close()
        assert b"vstore_evictions:0\r\n" in bytes(info)  # type: ignore[arg-type]
        with kept(folders[family], store) as after, serving(folders[family]) as cold:
            assert after.ids([*other, 3]).cached >= BLOCK
            found = after.ids([*prompt, 3, 4])
            assert found.tokens == cold.ids([*prompt, 3, 4]).tokens
            # Twelve segments have slots, less the one that made room for another conversation.
            assert 10 * BLOCK <= found.cached < len(prompt) - 8 * BLOCK


def test_a_draft_models_cache_goes_on_after_a_restart_with_the_models(
    folders: dict[str, Path], store: LocalServer, tmp_path: Path
) -> None:
    """What only one of the two has is not enough; both are restored to the same token."""
    draft = chat_model(tmp_path / "draft", "llama", seed=4)
    flags = ("--draft-model", str(draft))
    prompt = [*WORDS[:200], 3]
    with serving(folders["llama"], *flags) as cold:
        expected = cold.ids(prompt, count=16).tokens
    with kept(folders["llama"], store) as alone:
        assert alone.ids(WORDS[:200]).cached == 0
    with kept(folders["llama"], store, *flags) as before:
        found = before.ids(WORDS[:200], count=16)
        assert found.cached == 0
    with kept(folders["llama"], store, *flags) as after:
        answer = after.ids(prompt, count=16)
        assert answer.tokens == expected
        assert 192 <= answer.cached <= 200
        assert after.memory.counts["tier_hits"] == 1
