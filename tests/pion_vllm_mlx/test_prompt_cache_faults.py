"""Whatever a server does or fails to do: the cold answer, in bounded time, and no exception."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pion_patches.cache_rebuild import rebuild
from pion_vllm_mlx.prompt_cache import PionPromptCache
from tests.pion_vllm_mlx.fake_peer import Answer, FakePeer, Words, array, bulk, seconds_of
from tests.pion_vllm_mlx.mini_server import MiniServer, dying
from tests.pion_vllm_mlx.tiny import PREFIX, cold_answer, continue_greedily, tiny_llama

MODEL = tiny_llama()
COLD = cold_answer(MODEL, PREFIX)
#: Generous: on a busy machine the fake peer's threads may take long to be scheduled.
PATIENT = 20.0


pytestmark = pytest.mark.usefixtures("no_lane_in_process")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [r.message for r in caplog.records if r.levelno >= logging.WARNING]


def client(port: int, timeout: float = PATIENT, **settings: Any) -> PionPromptCache:
    return PionPromptCache(MODEL, port=port, timeout=timeout, **({"store": "sync"} | settings))


def answer_of(prompt_cache: PionPromptCache, namespace: str = "ns") -> tuple[list[int], bytes]:
    return continue_greedily(MODEL, prompt_cache.get_or_prefill(PREFIX, namespace))


def miss_reasons(prompt_cache: PionPromptCache) -> dict[str, int]:
    reasons: dict[str, int] = prompt_cache.stats()["miss_reasons"]
    return reasons


@pytest.fixture
def filled() -> Iterator[MiniServer]:
    """A server that holds the prefix under "ns"."""
    with MiniServer() as server:
        with client(server.port) as pc:
            assert answer_of(pc) == COLD
            assert pc.stats()["stores"] == 1
        server.requests.clear()
        yield server


def test_a_filled_server_is_hit(filled: MiniServer) -> None:
    """The control: without interference every test here would be a hit."""
    with client(filled.port) as pc:
        assert answer_of(pc) == COLD
        assert pc.stats()["hits"] == 1
        assert pc.stats()["misses"] == 0
    assert not filled.commands("V.STOREBATCH")


COLD_COMMANDS = 12  # GET, LOOKUP, GET, GET, BEGIN, REGISTER, 4 STOREBATCH, SET; one to spare
WARM_COMMANDS = 5  # META GET, LOOKUP, 2 FETCH, META GET


@pytest.mark.parametrize("survived", range(COLD_COMMANDS))
@pytest.mark.parametrize("answered", [False, True])
def test_server_killed_between_any_two_commands_of_a_cold_call(
    survived: int, answered: bool
) -> None:
    """WIRE 15.11: killed before or after acknowledging its n-th command, then restarted."""
    with MiniServer(dying(survived, answered)) as server, client(server.port) as pc:
        assert answer_of(pc) == COLD
        with server.restart() as again:
            with client(again.port) as later:
                assert answer_of(later) == COLD
                assert later.stats()["hits"] + later.stats()["stores"] == 1
            with client(again.port) as third:
                assert answer_of(third) == COLD
                assert third.stats()["hits"] == 1


@pytest.mark.parametrize("survived", range(WARM_COMMANDS))
def test_server_killed_between_any_two_commands_of_a_hit(filled: MiniServer, survived: int) -> None:
    with filled.restart(dying(survived, answered=False)) as server, client(server.port) as pc:
        assert answer_of(pc) == COLD
        assert miss_reasons(pc) == {"unavailable": 1}


def half(answer: Answer) -> Answer:
    assert isinstance(answer, bytes)
    return [answer[: len(answer) // 2], None]


def interfere(name: bytes, change: Callable[[Answer], Answer]) -> Callable[[Words, Answer], Answer]:
    return lambda words, answer: change(answer) if words[0] == name else answer


WRONG_ANSWERS: dict[str, Callable[[Answer], Answer]] = {
    "half a reply": half,
    "an error": lambda answer: b"-ERR internal\r\n",
    "null": lambda answer: b"$-1\r\n",
    "an integer": lambda answer: b":7\r\n",
    "a status": lambda answer: b"+HELLO\r\n",
    "an empty array": lambda answer: b"*0\r\n",
    "nulls": lambda answer: array(bulk(None), bulk(None)),
    "short bulks": lambda answer: array(bulk(b"abc"), bulk(b"abc")),
    "nested arrays": lambda answer: array(array(bulk(b"abc")), b":1\r\n"),
    "nonsense": lambda answer: b"HTTP/1.1 200 OK\r\n\r\n",
    "out of memory": lambda answer: b"-OOM command not allowed\r\n",
    "misconfigured": lambda answer: b"-MISCONF disk full\r\n",
}


@pytest.mark.parametrize("command", ["KV.PREFIX.META", "V.FETCH"])
@pytest.mark.parametrize("wrong", WRONG_ANSWERS)
def test_a_wrong_answer_to_a_read_is_a_miss(filled: MiniServer, command: str, wrong: str) -> None:
    """WIRE 15.12, E02, G08: wrong length, wrong type, partial; then everything works again."""
    filled.meddle = interfere(command.encode(), WRONG_ANSWERS[wrong])
    with client(filled.port) as pc:
        assert answer_of(pc) == COLD
        assert pc.stats()["hits"] == 0
        assert pc.stats()["misses"] == 1
    filled.meddle = None
    with client(filled.port) as later:
        assert answer_of(later) == COLD
        assert answer_of(later) == COLD
        assert later.stats()["hits"] >= 1


@pytest.mark.parametrize("command", ["KV.PREFIX.REGISTER", "V.STOREBATCH", "KV.PREFIX.META"])
@pytest.mark.parametrize("wrong", ["half a reply", "an error", "null", "a status", "nonsense"])
def test_a_refused_store_is_a_cold_answer_and_leaves_nothing_visible(
    command: str, wrong: str
) -> None:
    """E01: a payload write that fails never leaves a prefix that can be looked up."""
    with MiniServer(interfere(command.encode(), WRONG_ANSWERS[wrong])) as server:
        with client(server.port) as pc:
            assert answer_of(pc) == COLD
        if command != "KV.PREFIX.META":
            assert server.manifests == {}
        server.meddle = None
        with client(server.port) as later:
            assert answer_of(later) == COLD
            assert answer_of(later) == COLD
            assert later.stats()["hits"] >= 1


@pytest.mark.parametrize("code", ["OOM no room", "MISCONF disk full", "ERR odd"])
def test_a_server_that_refuses_stores_is_told_once(
    code: str, warnings: Callable[[], list[str]]
) -> None:
    refuse = interfere(b"V.STOREBATCH", lambda answer: f"-{code}\r\n".encode())
    with MiniServer(refuse) as server, client(server.port) as pc:
        for turn in range(3):
            assert answer_of(pc, f"ns{turn}") == COLD
        assert len(warnings()) == 1
        assert code.partition(" ")[0] in warnings()[0]
        assert pc.stats()["stores_failed"] == 3
        server.meddle = None
        assert answer_of(pc, "ns3") == COLD
        assert pc.stats()["stores"] == 1


def test_a_fill_that_became_stale_is_no_trouble(warnings: Callable[[], list[str]]) -> None:
    stale = interfere(b"V.STOREBATCH", lambda answer: b"-STALE fill\r\n")
    with MiniServer(stale) as server, client(server.port) as pc:
        assert answer_of(pc) == COLD
        assert pc.stats()["stores_skipped"] == 1
        assert warnings() == []


def test_no_server_at_all(warnings: Callable[[], list[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with client(port) as pc:
        for _ in range(3):
            assert answer_of(pc) == COLD
        assert miss_reasons(pc) == {"unavailable": 3}
        assert len(warnings()) == 1


def test_a_silent_server_costs_one_deadline_and_then_nothing_for_five_seconds() -> None:
    with FakePeer(lambda words: [60.0]) as peer, client(peer.port, timeout=0.25) as pc:
        base = min(seconds_of(lambda: cold_answer(MODEL, PREFIX)) for _ in range(3))
        first = seconds_of(lambda: answer_of(pc))
        assert 0.25 <= first < base + 2
        asked = len(peer.requests)
        assert asked == 1
        started = time.monotonic()
        while time.monotonic() - started < 0.5:
            assert answer_of(pc) == COLD
        assert len(peer.requests) == asked
        assert peer.connections == 1


def test_a_server_of_one_kilobyte_a_second_does_not_hold_a_call(filled: MiniServer) -> None:
    def trickle(answer: Answer) -> Answer:
        assert isinstance(answer, bytes)
        parts: list[bytes | float | None] = []
        for start in range(0, len(answer), 100):
            parts += [answer[start : start + 100], 0.1]
        return parts

    filled.meddle = interfere(b"V.FETCH", trickle)
    with client(filled.port) as pc:
        elapsed = seconds_of(lambda: answer_of(pc))
        assert miss_reasons(pc) == {"unavailable": 1}
        assert elapsed < 10


def test_an_exception_while_rebuilding_is_one_cold_call(
    filled: MiniServer, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """G08: one failure does not stick."""
    failures = [RuntimeError("injected")]

    def fail_once(template: Any, image: Any) -> Any:
        if failures:
            raise failures.pop()
        return rebuild(template, image)

    monkeypatch.setattr("pion_vllm_mlx.named_prefixes.rebuild", fail_once)
    with client(filled.port) as pc:
        assert answer_of(pc) == COLD
        assert miss_reasons(pc) == {"error": 1}
        assert answer_of(pc) == COLD
        assert pc.stats()["hits"] == 1
        assert len(warnings()) == 1


def test_an_exception_while_storing_is_one_cold_call(
    monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("injected")

    with MiniServer() as server, client(server.port) as pc:
        with monkeypatch.context() as patch:
            patch.setattr("pion_vllm_mlx.storing.pack_prefix", fail)
            assert answer_of(pc) == COLD
        assert server.manifests == {}
        assert pc.stats()["stores_failed"] == 1
        assert len(warnings()) == 1
        assert answer_of(pc) == COLD
        assert pc.stats()["stores"] == 1


def test_a_prefix_stored_anew_while_it_is_read_is_a_miss(filled: MiniServer) -> None:
    """Rows of two fills are never mixed: the generation is read before and after them."""

    def swap(words: Words, answer: Answer) -> Answer:
        if words[0] == b"V.FETCH":
            gen, blob = filled.manifests[b"ns"]
            filled.manifests[b"ns"] = (gen + 1, blob)
        return answer

    filled.meddle = swap
    with client(filled.port) as pc:
        assert answer_of(pc) == COLD
        assert miss_reasons(pc) == {"changed": 1}


def test_rows_that_changed_in_storage_are_a_miss_that_heals(filled: MiniServer) -> None:
    """E02: one flipped bit in one row of the last layer."""
    filled.rows[b"ns_pv", b"1"][1234] ^= 4
    with client(filled.port) as pc:
        assert answer_of(pc) == COLD
        assert miss_reasons(pc) == {"checksum": 1}
        assert answer_of(pc) == COLD
        assert pc.stats()["hits"] == 1


def test_swapped_layers_are_a_miss(filled: MiniServer) -> None:
    """H09: each payload is checked against its own place, not against any."""
    rows = filled.rows
    rows[b"ns_pk", b"0"], rows[b"ns_pk", b"1"] = rows[b"ns_pk", b"1"], rows[b"ns_pk", b"0"]
    with client(filled.port) as pc:
        assert answer_of(pc) == COLD
        assert miss_reasons(pc) == {"checksum": 1}


def test_a_missing_layer_is_a_miss(filled: MiniServer) -> None:
    """C15, H09: one layer gone makes the whole prefix a miss."""
    del filled.rows[b"ns_pk", b"1"]
    with client(filled.port) as pc:
        assert answer_of(pc) == COLD
        assert miss_reasons(pc) == {"rows": 1}


def test_another_prefix_under_the_asked_name_is_a_miss(filled: MiniServer) -> None:
    """H01: the ids are in the payload, so a reply to another question is seen to be one."""
    other = [*PREFIX[:-1], (PREFIX[-1] + 1) % 61]
    with client(filled.port) as pc:
        pc.get_or_prefill(other, "other")
        filled.manifests[b"ns"] = (99, filled.manifests[b"other"][1])
        assert answer_of(pc) == COLD
        assert pc.stats()["miss_reasons"]["ids"] == 1


def test_threads_that_share_a_client_get_the_cold_answer(filled: MiniServer) -> None:
    with client(filled.port) as pc:
        images: list[bytes] = []

        def fetch() -> None:
            for _ in range(5):
                caches = pc.get_or_prefill(PREFIX, "ns")
                images.append(b"".join(bytes(memoryview(c.keys)) for c in caches))

        threads = [threading.Thread(target=fetch) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(images) == 15
        assert len(set(images)) == 1
        assert pc.stats()["hits"] == 15


def test_closing_during_a_call_ends_it_with_a_cold_answer() -> None:
    with FakePeer(lambda words: [60.0]) as peer, client(peer.port) as pc:
        timer = threading.Timer(0.3, pc.close)
        timer.start()
        assert answer_of(pc) == COLD
        timer.join()


def test_an_interrupted_call_leaves_no_reply_behind(filled: MiniServer) -> None:
    """H01: after a cancelled restore the next call gets its own prefix."""

    class Cancelled(BaseException):
        pass

    def cancel(words: Words, answer: Answer) -> Answer:
        filled.meddle = None
        return [0.15, answer] if isinstance(answer, bytes) else answer

    other = list(reversed(PREFIX))
    with client(filled.port) as pc:
        pc.get_or_prefill(other, "other")

        def alarm(signum: int, frame: object) -> None:
            raise Cancelled

        previous = signal.signal(signal.SIGALRM, alarm)
        try:
            filled.meddle = cancel
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Cancelled):
                pc.get_or_prefill(other, "other")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        time.sleep(0.3)
        assert answer_of(pc) == COLD
        assert pc.stats()["miss_reasons"].get("ids", 0) == 0
