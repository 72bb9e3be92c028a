"""Stores that run behind the caller: what is stored, what is waited for, and for how long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from pion_vllm_mlx.prompt_cache import PionPromptCache
from tests.pion_patches.shipping import continuation, token_ids
from tests.pion_patches.zoo import build
from tests.pion_vllm_mlx.fake_peer import Answer, Words, seconds_of
from tests.pion_vllm_mlx.mini_server import MiniServer
from tests.pion_vllm_mlx.tiny import PREFIX, cold_answer, continue_greedily, tiny_llama

MODEL = tiny_llama()
COLD = cold_answer(MODEL, PREFIX)
#: Generous: on a busy machine the fake peer's threads may take long to be scheduled.
PATIENT = 20.0


class Gate:
    """Holds one command back until it is opened."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, words: Words, answer: Answer) -> Answer:
        if words[0] == self.name or words[-1] == self.name:
            self.reached.set()
            self.opened.wait(PATIENT)
        return answer


@pytest.fixture
def at_begin() -> Iterator[Gate]:
    """Stops a store before it has packed or sent anything."""
    gate = Gate(b"BEGIN")
    yield gate
    gate.opened.set()


def client(server: MiniServer, model: Any = MODEL, **settings: Any) -> PionPromptCache:
    return PionPromptCache(model, port=server.port, timeout=PATIENT, **settings)


def restored(server: MiniServer, model: Any = MODEL, name: str = "ns", **settings: Any) -> Any:
    """The cache another client gets; it has to be a hit."""
    with client(server, model, store="off", **settings) as other:
        cache = other.get_or_prefill(PREFIX, name)
        assert other.stats()["hits"] == 1
    return cache


def until(holds: Callable[[], bool]) -> None:
    """Wait for it; an assertion error if it never comes true."""
    deadline = time.monotonic() + PATIENT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_after_a_flush_everything_is_stored() -> None:
    with MiniServer() as server, client(server) as pc:
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, "ns")) == COLD
        assert pc.flush()
        assert pc.stats()["stores"] == 1
        assert continue_greedily(MODEL, restored(server)) == COLD


def test_closing_and_leaving_wait_for_the_stores() -> None:
    with MiniServer() as server:
        with client(server) as pc:
            pc.get_or_prefill(PREFIX, "ns")
        assert b"ns" in server.manifests
        pc.get_or_prefill(PREFIX, "other")
        pc.close()
        assert b"other" in server.manifests


def test_a_call_returns_before_its_store_and_the_next_hits_in_process(at_begin: Gate) -> None:
    with MiniServer(at_begin) as server, client(server) as pc:
        pc.get_or_prefill(PREFIX, "ns")
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, "ns")) == COLD
        assert pc.stats()["hits_in_process"] == 1
        assert not pc.flush(0.05)
        assert server.manifests == {}
        at_begin.opened.set()
        assert pc.flush()
        assert b"ns" in server.manifests


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"vquant": "int8"}),
        ("llama", {"kv_bits": 4, "kv_group_size": 32}),
        ("gemma3_text", {}),
        ("qwen3_5", {}),
        ("mamba2", {}),
    ],
)
def test_generating_while_the_store_waits_changes_nothing_of_what_is_stored(
    at_begin: Gate, family: str, settings: dict[str, Any]
) -> None:
    """The caller appends to its cache in place, and even spoils it, before a byte was packed."""
    wide: dict[str, Any] = {"head_dim": 32} if family == "llama" else {}
    model = build(family, seed=1, **wide)
    prefix, calls = token_ids(0, len(PREFIX)), (4, 1, 1)
    with MiniServer() as server, client(server, model, store="sync", **settings) as pc:
        pc.get_or_prefill(prefix, "ns")
        expected = server.rows, server.blobs
    with MiniServer(at_begin) as server, client(server, model, **settings) as pc:
        cache = pc.get_or_prefill(prefix, "ns")
        assert at_begin.reached.wait(PATIENT)
        continuation(family, model, cache, len(prefix), calls)
        for leaf in cache:
            for name, value in vars(leaf).items():
                if isinstance(value, mx.array) and value.size:
                    value[...] = 1
                    mx.eval(value)
                    setattr(leaf, name, value)
        at_begin.opened.set()
        assert pc.flush()
        assert (server.rows, server.blobs) == expected
        assert server.rows or server.blobs


def test_generating_while_rows_are_sent_changes_nothing_of_what_is_stored() -> None:
    """Stores one after another, while the caller goes on with the cache it got of each."""
    model = build("llama", seed=1)
    prefixes = [token_ids(seed, 300) for seed in range(6)]
    with MiniServer() as server:
        with client(server, model) as pc:
            for number, prefix in enumerate(prefixes):
                cache = pc.get_or_prefill(prefix, f"ns{number}")
                for _ in range(10):
                    model(mx.array([[7]]), cache=cache)
                    mx.eval([leaf.state for leaf in cache])
        for number, prefix in enumerate(prefixes):
            cold = model.make_cache() if hasattr(model, "make_cache") else None
            with client(server, model, store="off") as other:
                hit = other.get_or_prefill(prefix, f"ns{number}")
                assert other.stats()["hits"] == 1
            with client(server, model, store="off") as other:
                cold = other.get_or_prefill(prefix, "no such name")
            answers = [continuation("llama", model, c, 300, (4, 1)).tobytes() for c in (hit, cold)]
            assert answers[0] == answers[1]


def test_off_stores_nothing_and_sync_is_done_when_the_call_returns() -> None:
    with MiniServer() as server:
        with client(server, store="off") as pc:
            assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, "ns")) == COLD
            assert pc.flush()
            assert server.manifests == {}
            assert pc.stats()["stores"] == pc.stats()["stores_failed"] == 0
        with client(server, store="sync") as pc:
            pc.get_or_prefill(PREFIX, "ns")
            assert b"ns" in server.manifests


@pytest.mark.parametrize("settings", [{"store": "later"}, {"store_wait": -1}])
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="store"):
        PionPromptCache(MODEL, **settings)


def test_a_failed_store_is_counted_told_once_and_seen_by_the_flush(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(words: Words, answer: Answer) -> Answer:
        return b"-MISCONF disk full\r\n" if words[0] == b"V.STOREBATCH" else answer

    with MiniServer(refuse) as server, client(server) as pc:
        for turn in range(3):
            assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, f"ns{turn}")) == COLD
            assert not pc.flush()
        assert pc.stats()["stores_failed"] == 3
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
        server.meddle = None
        pc.get_or_prefill(PREFIX, "ns3")
        assert pc.flush()
        assert pc.stats()["stores"] == 1


def test_closing_gives_up_after_its_wait(at_begin: Gate) -> None:
    with MiniServer(at_begin) as server:
        pc = client(server, store_wait=0.3)
        pc.get_or_prefill(PREFIX, "ns")
        pc.get_or_prefill(PREFIX[:-1], "ns2")
        assert at_begin.reached.wait(PATIENT)
        assert 0.3 <= seconds_of(pc.close) < 5
        until(lambda: pc.stats()["stores_failed"] == 2)
        at_begin.opened.set()


def test_a_newer_prefix_takes_the_place_of_one_that_waits(at_begin: Gate) -> None:
    with MiniServer(at_begin) as server, client(server) as pc:
        pc.get_or_prefill(PREFIX, "first")
        assert at_begin.reached.wait(PATIENT)
        for tokens in (10, 20, 30):
            pc.get_or_prefill(PREFIX[:tokens], "growing")
        at_begin.opened.set()
        assert pc.flush()
        assert pc.stats()["stores"] == 2
        assert pc.stats()["stores_skipped"] == 2
        with client(server, store="off") as other:
            assert other.restore("growing", 30) is not None


def test_prefixes_that_wait_hold_bounded_memory(
    at_begin: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pion_vllm_mlx.storing.WAITING_BYTES", 2 * 40 * 2 * 2 * 32 * 4)
    with MiniServer(at_begin) as server, client(server) as pc:
        for number in range(5):
            assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, f"ns{number}")) == COLD
        at_begin.opened.set()
        assert pc.flush()
        assert pc.stats()["stores"] == 2
        assert pc.stats()["stores_skipped"] == 3
        pc.get_or_prefill(PREFIX * 6, "larger than all")
        assert pc.flush()
        assert pc.stats()["stores"] == 3


def stored_by(*clients: PionPromptCache) -> list[tuple[int, int]]:
    """Stores and skipped stores of each, in no order."""
    figures = [pc.stats() for pc in clients]
    return sorted((stats["stores"], stats["stores_skipped"]) for stats in figures)


def test_of_two_clients_that_miss_at_once_one_fills_and_the_other_leaves_it_to_it(
    at_begin: Gate,
) -> None:
    with MiniServer(at_begin) as server, client(server) as one, client(server) as two:
        one.get_or_prefill(PREFIX, "ns")
        two.get_or_prefill(PREFIX, "ns")
        until(lambda: sum(words[-1] == b"BEGIN" for words in server.requests) == 2)
        at_begin.opened.set()
        assert one.flush()
        assert two.flush()
        assert stored_by(one, two) == [(0, 1), (1, 0)]
        assert len(server.commands("V.STOREBATCH")) == 4


def test_a_client_that_comes_a_moment_later_finds_the_prefix_stored() -> None:
    lookups = Gate(b"KV.PREFIX.LOOKUP")
    with MiniServer(lookups) as server, client(server) as one, client(server) as two:
        late = threading.Thread(target=lambda: two.get_or_prefill(PREFIX, "ns"))
        late.start()
        assert lookups.reached.wait(PATIENT)
        server.meddle = None
        one.get_or_prefill(PREFIX, "ns")
        assert one.flush()
        lookups.opened.set()
        late.join(PATIENT)
        assert two.flush()
        assert stored_by(one, two) == [(0, 1), (1, 0)]
        assert two.stats()["miss_reasons"] == {"absent": 1}
        assert sum(words[-1] == b"BEGIN" for words in server.requests) == 1


def test_a_client_overtaken_just_before_it_begins_sends_no_row() -> None:
    """The other one's fill ends between this one's look and its BEGIN."""
    gate = Gate(b"GET")
    with MiniServer() as server, client(server) as one, client(server) as two:
        server.meddle = lambda words, answer: gate(words, answer) if first_store() else answer

        def first_store() -> bool:
            """Of `two`: the look before the store, behind that of the call."""
            return len(server.commands("KV.PREFIX.META")) == 2

        two.get_or_prefill(PREFIX, "ns")
        assert gate.reached.wait(PATIENT)
        server.meddle = None
        one.get_or_prefill(PREFIX, "ns")
        assert one.flush()
        gate.opened.set()
        assert two.flush()
        assert len(server.commands("V.STOREBATCH")) == 4
        assert two.stats()["bytes_stored"] == 0
        assert continue_greedily(MODEL, restored(server)) == COLD


def test_the_thread_ends_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pion_vllm_mlx.background._IDLE", 0.05)
    others = set(threading.enumerate())

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread not in others]

    with MiniServer() as server, client(server) as pc:
        for turn in range(2):
            pc.get_or_prefill(PREFIX, f"ns{turn}")
            assert pc.flush()
            until(lambda: "pion-store" not in threads())
        assert pc.stats()["stores"] == 2


def test_where_no_thread_can_be_started_the_prefix_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "pion-store":
            raise RuntimeError("can't start new thread")
        start(thread)

    with MiniServer() as server, client(server) as pc:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, "ns")) == COLD
        assert pc.stats()["stores_failed"] == 1
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
        pc.get_or_prefill(PREFIX, "other")
        assert pc.flush()
        assert pc.stats()["stores"] == 1
