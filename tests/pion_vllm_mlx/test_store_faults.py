"""Stores behind the caller against real servers that fail: cold answers, bounded waits, no rest."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pion_vllm_mlx.prompt_cache import PionPromptCache
from tests.pion_vllm_mlx.fake_peer import Answer, Words, seconds_of
from tests.pion_vllm_mlx.mini_server import MiniServer
from tests.pion_vllm_mlx.tiny import PREFIX, VOCAB, cold_answer, continue_greedily, tiny_llama

Server = Any
MODEL = tiny_llama()
COLD = cold_answer(MODEL, PREFIX)
#: Generous: the first answer of a server on a busy machine may take long.
PATIENT = 20.0


def client(port: int, **settings: Any) -> PionPromptCache:
    return PionPromptCache(MODEL, port=port, **({"timeout": PATIENT} | settings))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_server_killed_in_the_middle_of_stores_costs_no_call_anything(
    server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    running = server()
    prefixes = [[(token + turn) % VOCAB for token in PREFIX] * 8 for turn in range(12)]
    expected = [cold_answer(MODEL, prefix) for prefix in prefixes]
    with client(running.port) as pc:
        for turn, prefix in enumerate(prefixes):
            if turn == 6:
                threading.Timer(0.01, running.kill).start()
            assert (
                continue_greedily(MODEL, pc.get_or_prefill(prefix, f"ns{turn}")) == expected[turn]
            )
        pc.flush()
        stats = pc.stats()
    assert stats["stores"] + stats["stores_failed"] == len(prefixes)
    assert stats["stores_failed"] >= 1
    assert len(warnings(caplog)) == 1
    running.restart()
    with client(running.port, store="off") as pc:
        for turn, prefix in enumerate(prefixes):
            assert (
                continue_greedily(MODEL, pc.get_or_prefill(prefix, f"ns{turn}")) == expected[turn]
            )
        assert pc.stats()["hits"] >= stats["stores"]
        assert set(pc.stats()["miss_reasons"]) <= {"absent"}


def test_a_full_disk_fails_the_store_and_says_so_once(
    server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    running = server("--max-disk", "300kb")
    large = PREFIX * 20
    with client(running.port) as pc:
        for turn in range(3):
            cache = pc.get_or_prefill(large, f"ns{turn}")
            assert continue_greedily(MODEL, cache) == cold_answer(MODEL, large)
            assert not pc.flush()
        assert pc.stats()["stores_failed"] == 3
        assert len(warnings(caplog)) == 1
        assert "MISCONF" in warnings(caplog)[0]
        assert not any(pc.lookup(f"ns{turn}") for turn in range(3))
        pc.get_or_prefill(PREFIX, "small")
        assert pc.flush()
        assert pc.lookup("small")


def test_both_connections_use_the_password_and_without_it_nothing_is_stored(
    server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    running = server("--requirepass", "secret")
    with client(running.port) as pc:
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, "ns")) == COLD
        assert pc.flush() or pc.stats()["stores_failed"] == 1
        assert pc.stats()["stores"] == 0
        assert len(warnings(caplog)) == 1
    with client(running.port, password="secret") as pc:
        pc.get_or_prefill(PREFIX, "ns")
        assert pc.flush()
        assert pc.stats()["stores"] == 1
    with client(running.port, password="secret", store="off") as pc:
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, "ns")) == COLD
        assert pc.stats()["hits"] == 1


def test_a_store_under_way_delays_no_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes rows at a crawl answers reads on the other connection as ever."""
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    crawling = threading.Event()

    def crawl(words: Words, answer: Answer) -> Answer:
        if words[0] != b"V.STOREBATCH" or b"slow" not in words[1]:
            return answer
        crawling.set()
        return [60.0, answer] if isinstance(answer, bytes) else answer

    with MiniServer(crawl) as server:
        pc = client(server.port, store_wait=0.2)
        pc.get_or_prefill(PREFIX, "ns")
        assert pc.flush(PATIENT)
        pc.get_or_prefill(PREFIX[:30], "slow")
        assert crawling.wait(PATIENT)
        for _ in range(3):
            assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, "ns")) == COLD
        assert pc.stats()["hits"] == 3
        assert pc.lookup("ns")
        assert seconds_of(pc.close) < 5
        assert b"slow" not in server.manifests


def test_a_clock_set_back_and_forth_changes_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays, deadlines and pauses go by the monotonic clock; the wall clock may say anything."""
    jumps = itertools.cycle((-1e9, 1e9))
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    with MiniServer() as server, client(server.port) as pc:
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, "ns")) == COLD
        assert seconds_of(lambda: pc.flush(PATIENT)) < PATIENT / 2
        assert pc.stats()["stores"] == 1
        assert pc.stats()["store_ms_total"] < 1000 * PATIENT
