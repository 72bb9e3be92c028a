"""Responses that later ones go on from: within bounds, and after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pion_patches.prompt_memory import PromptMemory
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.serve.remembered import Remembered, Shelf, Unknown
from pion_vllm_mlx.serve.tier import PionTier
from pion_vllm_mlx.transport.endpoint import Endpoint
from tests.pion_vllm_mlx.serve.endpoint import endpoint


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalServer]:
    with LocalServer(tmp_path / "data", tmp_path / "log", ["--no-attention"]) as server:
        yield server


def shelf(store: LocalServer, **who: Any) -> Shelf:
    return Shelf(Endpoint("127.0.0.1", store.port, **who))


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def texts(remembered: Remembered, response: str) -> list[str]:
    return [message["content"] for message in remembered.recall(response)]


def talk(remembered: Remembered, name: str, turns: int) -> None:
    """A conversation of responses `<name>0`, `<name>1`, …, of 1,000 characters each."""
    for turn in range(turns):
        before = f"{name}{turn - 1}" if turn else ""
        remembered.keep(f"{name}{turn}", said(f"{name}{turn}".ljust(1000, ".")), before)


def test_a_conversation_is_put_together_from_its_turns() -> None:
    remembered = Remembered()
    talk(remembered, "r", 3)
    assert [text.rstrip(".") for text in texts(remembered, "r2")] == ["r0", "r1", "r2"]
    assert [text.rstrip(".") for text in texts(remembered, "r0")] == ["r0"]
    remembered.keep("fork", said("fork"), "r0")
    assert [text.rstrip(".") for text in texts(remembered, "fork")] == ["r0", "fork"]
    with pytest.raises(Unknown, match="absent"):
        remembered.recall("absent")


def test_the_longest_unused_are_forgotten_first_and_ends_before_beginnings() -> None:
    remembered = Remembered(most_bytes=6 * 1100)
    talk(remembered, "a", 3)
    talk(remembered, "b", 3)
    remembered.recall("a2")
    talk(remembered, "c", 2)
    assert len(texts(remembered, "a2")) == 3
    assert len(texts(remembered, "c1")) == 2
    with pytest.raises(Unknown, match="b2"):
        remembered.recall("b2")
    # Of what was used as a whole the last turn leaves first: the ones before go on without it.
    remembered = Remembered(most_bytes=3 * 1100)
    talk(remembered, "a", 3)
    remembered.recall("a2")
    remembered.keep("other", said("x" * 1000))
    with pytest.raises(Unknown, match="a2"):
        remembered.recall("a2")
    assert len(texts(remembered, "a1")) == 2
    remembered.keep("large", said("x" * 5000))
    assert len(texts(remembered, "a1")) == 2
    with pytest.raises(Unknown, match="large"):
        remembered.recall("large")


def test_another_process_finds_them_and_keeps_to_the_bound(store: LocalServer) -> None:
    """SIGKILL of pion-server in between; what came before counts."""
    talk(Remembered(6 * 1100, shelf(store)), "a", 3)
    store.kill()
    store.start()
    after = Remembered(6 * 1100, shelf(store))
    assert [text.rstrip(".") for text in texts(after, "a2")] == ["a0", "a1", "a2"]
    talk(after, "b", 6)
    last = Remembered(6 * 1100, shelf(store))
    assert len(texts(last, "b5")) == 6
    for gone in ("a0", "a1", "a2"):
        with pytest.raises(Unknown, match=gone):
            last.recall(gone)
    held = list(shelf(store).sizes())
    assert sorted(name for name, _ in held) == [f"b{turn}" for turn in range(6)]
    assert sum(size for _, size in held) <= 6 * 1100


def test_a_tenant_finds_its_own_only(tmp_path: Path) -> None:
    """I01: by a name it was told, before and after a restart."""
    tenants = ("--requirepass", "admin", "--tenant", "one=p1", "--tenant", "two=p2")
    with LocalServer(tmp_path / "data", tmp_path / "log", ["--no-attention", *tenants]) as store:
        one: Callable[[], Shelf] = lambda: shelf(store, username="one", password="p1")  # noqa: E731
        other: Callable[[], Shelf] = lambda: shelf(store, username="two", password="p2")  # noqa: E731
        talk(Remembered(shelf=one()), "a", 2)
        for _ in range(2):
            with pytest.raises(Unknown, match="a1"):
                Remembered(shelf=other()).recall("a1")
            assert list(other().sizes()) == []
            assert len(texts(Remembered(shelf=one()), "a1")) == 2
            store.kill()
            store.start()


def test_what_is_there_but_no_turn_is_unknown(store: LocalServer) -> None:
    Shelf(Endpoint("127.0.0.1", store.port)).put("odd", b"[1, 2")
    with pytest.raises(Unknown, match="odd"):
        Remembered(shelf=shelf(store)).recall("odd")
    Shelf(Endpoint("127.0.0.1", store.port)).put("loop", b'{"previous": "loop", "messages": []}')
    with pytest.raises(Unknown, match="loop"):
        Remembered(shelf=shelf(store)).recall("loop")


def test_without_its_server_the_memory_of_this_process_is_left(store: LocalServer) -> None:
    remembered = Remembered(shelf=shelf(store))
    talk(remembered, "a", 2)
    store.kill()
    talk(remembered, "b", 2)
    assert len(texts(remembered, "a1")) == len(texts(remembered, "b1")) == 2
    with pytest.raises(Unknown, match="absent"):
        remembered.recall("absent")


@pytest.mark.model
def test_a_response_is_gone_on_from_after_serve_has_restarted(store: LocalServer) -> None:
    """Through the endpoint; one that was not to be stored is unknown before and after."""

    def ask(**body: Any) -> tuple[int, Any]:
        tier = PionTier(Endpoint("127.0.0.1", store.port))
        with endpoint(memory=PromptMemory(tier=tier), tier=tier) as served:
            served.say("An answer.")
            status, _, answer = served.ask("/v1/responses", {"model": "m", **body})
            return status, answer

    _, first = ask(input="Remember me.")
    _, second = ask(input="And me.", previous_response_id=first["id"])
    status, third = ask(input="Go on.", previous_response_id=second["id"])
    assert status == 200
    # The whole conversation is in the prompt.
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    _, unstored = ask(input="Forget me.", store=False)
    for absent in (unstored["id"], "resp_absent"):
        status, answer = ask(input="?", previous_response_id=absent)
        assert (status, answer["error"]["code"]) == (404, "previous_response_not_found")
