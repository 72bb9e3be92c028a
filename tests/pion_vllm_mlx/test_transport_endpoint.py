"""The endpoint: one reconnect, one warning, and then five seconds of peace."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading

import pytest

from pion_vllm_mlx.transport import Command, Patience, Refused, TimedOut, Unavailable
from pion_vllm_mlx.transport.endpoint import PAUSE, Endpoint
from tests.pion_vllm_mlx.fake_peer import Answer, FakePeer, Words, bulk, seconds_of

SLOW = Patience(first_byte=10, stall=10, total=60)
PING = [Command.of("PING")]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pong(words: Words) -> Answer:
    return b"+PONG\r\n"


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_one_connection_serves_many_exchanges() -> None:
    with FakePeer(pong) as peer:
        endpoint = Endpoint(port=peer.port, connect_timeout=10)
        for _ in range(3):
            assert endpoint.exchange(PING, SLOW) == ["PONG"]
        endpoint.close()
        assert peer.connections == 1


def test_dead_server_costs_one_attempt_then_none_for_five_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    endpoint = Endpoint(port=closed_port(), clock=clock)

    def fail() -> None:
        with pytest.raises(Unavailable):
            endpoint.exchange(PING, SLOW)

    assert seconds_of(fail) < 2
    assert endpoint.connects == 1
    clock.now += PAUSE - 0.1
    fail()
    assert endpoint.connects == 1
    clock.now += 0.2
    fail()
    assert endpoint.connects == 2
    assert len(warnings_of(caplog)) == 1


def test_a_server_that_accepts_and_says_nothing_costs_the_first_byte_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint(port=listener.getsockname()[1])

        def fail() -> None:
            with pytest.raises(Unavailable):
                endpoint.exchange(PING, Patience())

        assert 0.2 < seconds_of(fail) < 2
        assert seconds_of(fail) < 0.1
        assert endpoint.connects == 1


def test_each_outage_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    answers: list[Answer] = [None, None, b"+PONG\r\n", None, None]
    with FakePeer(lambda words: answers.pop(0)) as peer:
        endpoint = Endpoint(port=peer.port, clock=clock, connect_timeout=10)
        for outcome in (False, False, True, False):
            if outcome:
                endpoint.exchange(PING, SLOW)
            else:
                with pytest.raises(Unavailable):
                    endpoint.exchange(PING, SLOW)
            clock.now += PAUSE + 1
    assert answers == []  # the last failure used the kept connection, then one new one
    assert len(warnings_of(caplog)) == 2


def test_a_restarted_server_is_found_by_one_reconnect(caplog: pytest.LogCaptureFixture) -> None:
    with FakePeer(pong) as first:
        endpoint = Endpoint(port=first.port, connect_timeout=10)
        endpoint.exchange(PING, SLOW)
    with FakePeer(pong, port=first.port) as second:
        assert endpoint.exchange(PING, SLOW) == ["PONG"]
        assert second.connections == 1
    assert warnings_of(caplog) == []


def test_a_deadline_is_not_waited_for_twice() -> None:
    """A kept connection that hangs is no stale one: the call fails, it does not start over."""
    with FakePeer(lambda words: pong(words) if words[0] == b"PING" else [60.0]) as peer:
        endpoint = Endpoint(port=peer.port, connect_timeout=10)
        endpoint.exchange(PING, SLOW)
        with pytest.raises(TimedOut):
            endpoint.exchange([Command.of("HANG")], Patience(first_byte=0.1))
        assert peer.connections == 1


def test_commands_bound_to_their_connection_are_not_repeated_on_another() -> None:
    with FakePeer(pong) as first:
        endpoint = Endpoint(port=first.port, connect_timeout=10)
        endpoint.exchange(PING, SLOW)
    with FakePeer(pong, port=first.port) as second:
        with pytest.raises(Unavailable):
            endpoint.exchange(PING, SLOW, retry=False)
        assert second.connections == 0


def test_a_server_that_wants_a_password_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with FakePeer(lambda words: b"-NOAUTH Authentication required.\r\n") as peer:
        endpoint = Endpoint(port=peer.port, connect_timeout=10)
        with pytest.raises(Refused, match="NOAUTH"):
            endpoint.exchange(PING, SLOW)
        with pytest.raises(Unavailable):
            endpoint.exchange(PING, SLOW)
        assert len(peer.requests) == 1
    assert len(warnings_of(caplog)) == 1


def test_threads_share_an_endpoint_and_each_gets_its_own_answer() -> None:
    """H01: replies belong to the thread that asked."""
    with FakePeer(lambda words: bulk(words[1])) as peer:
        endpoint = Endpoint(port=peer.port, connect_timeout=10)
        wrong: list[object] = []

        def ask(name: str) -> None:
            for turn in range(50):
                word = f"{name}-{turn}".encode()
                (reply,) = endpoint.exchange([Command.of("ECHO", word)], SLOW)
                if reply != word:
                    wrong.append((word, reply))

        threads = [threading.Thread(target=ask, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(peer.requests) == 200


@pytest.mark.parametrize("kept", [False, True])
def test_closing_ends_an_exchange_in_another_thread(
    kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """And that is no outage: whoever asks next is answered, and nothing is told."""
    with FakePeer(lambda words: [10.0] if words == [b"HANG"] else b"+PONG\r\n") as peer:
        endpoint = Endpoint(port=peer.port, connect_timeout=10)
        ended = threading.Event()
        if kept:
            assert endpoint.exchange(PING, SLOW) == ["PONG"]

        def ask() -> None:
            with pytest.raises(Unavailable):
                endpoint.exchange([Command.of("HANG")], SLOW)
            ended.set()

        thread = threading.Thread(target=ask)
        thread.start()
        while not peer.commands("HANG"):
            thread.join(0.01)
        endpoint.close()
        thread.join(5)
        assert ended.is_set()
        assert endpoint.available
        assert endpoint.exchange(PING, SLOW) == ["PONG"]
        assert len(peer.commands("HANG")) == 1
        with pytest.raises(Unavailable):
            Endpoint(port=peer.port, connect_timeout=10).exchange(PING, SLOW, retry=False)
        endpoint.close()
        with pytest.raises(Unavailable):
            endpoint.exchange(PING, SLOW, retry=False)
        assert endpoint.available
        assert not caplog.records


def test_a_forked_child_opens_its_own_connection() -> None:
    script = """
import os
from pion_vllm_mlx.transport import Command, Patience
from pion_vllm_mlx.transport.endpoint import Endpoint
from tests.pion_vllm_mlx.fake_peer import FakePeer, bulk
slow = Patience(10, 10, 60)
with FakePeer(lambda words: bulk(words[1])) as peer:
    endpoint = Endpoint(port=peer.port, connect_timeout=10)
    endpoint.exchange([Command.of("ECHO", "before")], slow)
    child = os.fork()
    if child == 0:
        (reply,) = endpoint.exchange([Command.of("ECHO", "child")], slow)
        os._exit(0 if reply == b"child" and endpoint.connects == 2 else 1)
    _, status = os.waitpid(child, 0)
    (reply,) = endpoint.exchange([Command.of("ECHO", "parent")], slow)
    print(status, reply == b"parent", endpoint.connects, peer.connections)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    assert done.stdout.split() == ["0", "True", "1", "2"]
