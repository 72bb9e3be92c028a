"""A signal in the middle of starting a child is acted on when the child has a name."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from pion_vllm_mlx.late_signals import signals_later


class Told(Exception):
    pass


def tell(number: int, frame: FrameType | None) -> None:
    raise Told(number)


@pytest.fixture
def telling() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, tell)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("telling")
def test_a_signal_within_the_block_comes_at_its_end() -> None:
    named: list[str] = []

    def start() -> None:
        with signals_later():
            signal.raise_signal(signal.SIGTERM)
            named.append("child")

    with pytest.raises(Told):
        start()
    assert named == ["child"]
    assert signal.getsignal(signal.SIGTERM) is tell


@pytest.mark.usefixtures("telling")
def test_without_a_signal_nothing_has_changed_after_it() -> None:
    with signals_later():
        assert signal.getsignal(signal.SIGTERM) is not tell
    assert signal.getsignal(signal.SIGTERM) is tell


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with signals_later():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("telling")
def test_in_another_thread_there_is_nothing_to_put_off() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_start_there).result()
    assert signal.getsignal(signal.SIGTERM) is tell


def _start_there() -> None:
    with signals_later():
        assert signal.getsignal(signal.SIGTERM) is tell
