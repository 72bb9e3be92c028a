"""Restore or recompute: decided by measured rates, with clocks that the tests own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pion_vllm_mlx.prompt_cache import PionPromptCache
from pion_vllm_mlx.rates import SWITCH, WINDOW, Rates, Watch
from pion_vllm_mlx.transport import Command, GivenUp, Patience
from pion_vllm_mlx.transport.endpoint import Endpoint
from tests.pion_vllm_mlx.fake_peer import FakePeer, bulk
from tests.pion_vllm_mlx.mini_server import MiniServer
from tests.pion_vllm_mlx.tiny import PREFIX, cold_answer, continue_greedily, tiny_llama

MODEL = tiny_llama()
COLD = cold_answer(MODEL, PREFIX)
PATIENT = 20.0
MB = 1 << 20


@pytest.fixture(autouse=True)
def racing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other tests turn off."""
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")


def measured(prefill: float, restore: float) -> Rates:
    """1,000 tokens took `prefill` seconds, 10 MB `restore`."""
    rates = Rates()
    rates.add_prefill(1000, prefill)
    rates.add_restore(10 * MB, restore)
    return rates


def test_what_was_never_measured_is_tried() -> None:
    rates = Rates()
    assert rates.pays(1000, 10 * MB)
    rates.add_prefill(1000, 0.001)
    assert rates.pays(1000, 10 * MB)
    rates = Rates()
    rates.add_restore(10 * MB, 100.0)
    assert rates.pays(1000, 10 * MB)


def test_the_sooner_one_is_chosen_by_size() -> None:
    rates = measured(prefill=10.0, restore=1.0)
    assert rates.pays(1000, 10 * MB)
    assert rates.pays(1000, 90 * MB)
    assert not rates.pays(1000, 110 * MB)
    assert not rates.pays(90, 10 * MB)


def test_a_prefill_somebody_else_timed_counts_until_one_was_timed_here() -> None:
    rates = Rates()
    rates.add_restore(10 * MB, 5.0)
    assert rates.pays(1000, 10 * MB)
    assert not rates.pays(1000, 10 * MB, otherwise=2.0)
    rates.add_prefill(1000, 50.0)
    assert rates.pays(1000, 10 * MB, otherwise=2.0)


def test_a_restore_that_takes_a_moment_is_not_skipped() -> None:
    assert measured(prefill=0.001, restore=0.9 * WINDOW).pays(1000, 10 * MB)
    assert not measured(prefill=0.001, restore=1.1 * WINDOW).pays(1000, 10 * MB)


def test_small_restores_tell_nothing_of_large_ones() -> None:
    rates = Rates()
    rates.add_prefill(1000, 1.0)
    for _ in range(5):
        rates.add_restore(1000, 0.5)  # all of it is waiting
    assert rates.restore_seconds(100 * MB) is None
    assert rates.restore_seconds(1000) == pytest.approx(0.5)
    assert rates.pays(1000, 100 * MB)
    assert not rates.pays(100, 1000)


def test_a_prefill_of_a_few_tokens_is_no_measure_of_longer_ones() -> None:
    rates = Rates()
    rates.add_prefill(4, 1.0)
    assert rates.prefill_seconds(1000) == pytest.approx(250.0)
    rates = measured(prefill=10.0, restore=1.0)
    for _ in range(20):
        rates.add_prefill(4, 1.0)
    assert rates.prefill_seconds(1000) == pytest.approx(10.0)


def test_newer_measurements_outweigh_older_ones() -> None:
    rates = measured(prefill=10.0, restore=1.0)
    for _ in range(10):
        rates.add_restore(10 * MB, 20.0)
    assert not rates.pays(1000, 10 * MB)
    assert rates.restore_seconds(10 * MB) == pytest.approx(20.0, rel=0.1)


def test_a_restore_that_was_skipped_often_is_tried_again() -> None:
    rates = measured(prefill=10.0, restore=15.0)
    answers = [rates.pays(1000, 10 * MB) for _ in range(6)]
    assert answers[0] is False
    assert answers[-1] is True


def test_always_restore_turns_all_of_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    rates = measured(prefill=1.0, restore=100.0)
    assert rates.pays(1000, 10 * MB)
    assert rates.watch(1000, 10 * MB) is None


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def transfer(nbytes: int, prefill: float, steps: Iterator[tuple[float, int]]) -> float | None:
    """Feed a watch (seconds, bytes) step by step: when it gave up, or None."""
    clock = Clock()
    watch = Watch(nbytes, prefill, clock)
    for seconds, received in steps:
        clock.now += seconds
        if not watch(received):
            return clock.now
    return None


def at_rate(nbytes: int, rate: float, step: float = 0.05) -> Iterator[tuple[float, int]]:
    """Bytes that come evenly."""
    left = nbytes
    while left > 0:
        received = min(left, max(1, round(rate * step)))
        left -= received
        yield step, received


def test_a_large_transfer_over_a_slow_network_that_still_wins_is_not_cut() -> None:
    """500 MB at 5 MB/s, 100 s, against a prefill of 110 s."""
    assert transfer(500 * MB, 110.0, at_rate(500 * MB, 5 * MB)) is None


def test_a_transfer_that_cannot_win_is_given_up_after_a_quarter_second() -> None:
    gave_up = transfer(500 * MB, 50.0, at_rate(500 * MB, 5 * MB))
    assert gave_up is not None
    assert WINDOW <= gave_up <= 2 * WINDOW


def test_what_is_left_counts_not_what_was_lost() -> None:
    """A transfer that is nearly done is finished, however long it took so far."""

    def slows_down() -> Iterator[tuple[float, int]]:
        yield from at_rate(95 * MB, 100 * MB)
        yield from at_rate(5 * MB, MB)  # 5 s more, a prefill takes 6

    assert transfer(100 * MB, 6.0, slows_down()) is None
    assert transfer(100 * MB, 4.0, slows_down()) is not None


def test_a_transfer_that_stops_for_a_moment_is_not_given_up_by_its_first_bytes() -> None:
    """A burst of small first bytes is no measure of the speed."""

    def hesitates() -> Iterator[tuple[float, int]]:
        yield 0.0, 10
        yield 0.2, 10
        yield from at_rate(10 * MB - 20, 100 * MB)

    assert transfer(10 * MB, 1.0, hesitates()) is None


class Paced(Rates):
    """Rates whose clock is the bytes received: they come at `rate` bytes a second."""

    def __init__(self, rate: float) -> None:
        self._time = Clock()
        super().__init__(self._time)
        self._rate = rate

    def watch(self, tokens: int, nbytes: int, otherwise: float | None = None) -> Any:
        inner = super().watch(tokens, nbytes, otherwise)

        def paced(received: int) -> bool:
            self._time.now += received / self._rate
            return inner is None or inner(received)

        return paced


@pytest.fixture
def filled() -> Iterator[MiniServer]:
    with MiniServer() as server:
        with client(server.port) as pc:
            pc.get_or_prefill(PREFIX, "ns")
            assert pc.flush(60)
            assert pc.stats()["stores"] == 1
        server.requests.clear()
        yield server


def client(port: int, rates: Rates | None = None) -> PionPromptCache:
    pc = PionPromptCache(MODEL, port=port, timeout=PATIENT)
    pc._named.rates = rates or pc._named.rates
    return pc


def bytes_of(server: MiniServer) -> int:
    return sum(len(rows) for rows in server.rows.values())


def test_a_restore_that_becomes_slower_than_a_prefill_ends_in_one(filled: MiniServer) -> None:
    """The server stays in use: it is well, only slow."""
    rates = Paced(bytes_of(filled) / 100)  # 100 s
    rates.add_prefill(len(PREFIX), 1.0)
    slowly(filled)
    with client(filled.port, rates) as pc:
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, "ns")) == COLD
        assert pc.stats()["miss_reasons"] == {"slower": 1}
        assert pc.stats()["given_up"] == 1
        filled.meddle = None
        pc._named.rates = Rates()
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, "ns")) == COLD
        assert pc.stats()["hits"] == 1


def test_a_slow_restore_that_wins_is_a_hit(filled: MiniServer) -> None:
    rates = Paced(bytes_of(filled) / 100)  # 100 s
    rates.add_prefill(len(PREFIX), 200.0)
    slowly(filled)
    with client(filled.port, rates) as pc:
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, "ns")) == COLD
        assert pc.stats()["hits"] == 1


def slowly(server: MiniServer) -> None:
    """Rows come in many small parts, so that a client receives them in several."""

    def cut(words: list[bytes], answer: Any) -> Any:
        if words[0] != b"V.FETCH":
            return answer
        parts: list[Any] = []
        for start in range(0, len(answer), 1000):
            parts += [answer[start : start + 1000], 0.005]
        return parts

    server.meddle = cut


def test_a_restore_that_is_known_to_lose_is_not_begun(filled: MiniServer) -> None:
    rates = Rates()
    rates.add_prefill(len(PREFIX), 0.5)
    for _ in range(3):
        rates.add_restore(1000, 60.0)
    with client(filled.port, rates) as pc:
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, "ns")) == COLD
        assert pc.stats()["miss_reasons"] == {"slower": 1}
        assert not filled.commands("V.FETCH")
        assert pc.flush(60)
        assert not filled.commands("V.STOREBATCH")  # it is there, and sound
        assert pc.restore("ns", len(PREFIX)) is not None  # asked for, not weighed


def test_an_exchange_that_is_given_up_leaves_no_reply_behind() -> None:
    """H01: the rest of it answers nobody."""

    def answer(words: list[bytes]) -> Any:
        return [bulk(words[1])[:4], 0.05, bulk(words[1])[4:]]

    def refuse(received: int) -> bool:
        return False

    with FakePeer(answer) as peer:
        lane = Endpoint("127.0.0.1", peer.port, connect_timeout=PATIENT)
        patience = Patience(first_byte=PATIENT, watch=refuse)
        with pytest.raises(GivenUp):
            lane.exchange([Command.of("GET", b"one" * 1000)], patience)
        assert lane.available
        (reply,) = lane.exchange([Command.of("GET", b"two")], Patience(first_byte=PATIENT))
        assert reply == b"two"
        lane.close()
