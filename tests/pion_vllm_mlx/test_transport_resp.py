"""The RESP connection: exact bytes, deadlines, and never a reply for another command."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from pion_vllm_mlx.transport import (
    Command,
    Patience,
    ProtocolError,
    Refused,
    ServerError,
    Status,
    Unavailable,
)
from pion_vllm_mlx.transport.resp import RespConnection
from tests.pion_vllm_mlx.fake_peer import Answer, FakePeer, Words, array, bulk, seconds_of

QUICK = Patience(first_byte=0.2, stall=0.3, total=5)
SLOW = Patience(first_byte=10, stall=10, total=60)


@contextmanager
def connected(answer: Callable[[Words], Answer]) -> Iterator[tuple[RespConnection, FakePeer]]:
    with FakePeer(answer) as peer:
        connection = RespConnection("127.0.0.1", peer.port, deadline=time.monotonic() + 10)
        try:
            yield connection, peer
        finally:
            connection.close()


def always(answer: Answer) -> Callable[[Words], Answer]:
    return lambda words: answer


def one(connection: RespConnection, patience: Patience = SLOW) -> object:
    (reply,) = connection.exchange([Command.of("GO")], patience)
    return reply


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"+OK\r\n", Status("OK")),
        (b":-12\r\n", -12),
        (b"$-1\r\n", None),
        (b"$0\r\n\r\n", b""),
        (b"*-1\r\n", None),
        (b"*0\r\n", []),
        (b"*3\r\n:1\r\n$-1\r\n*1\r\n$4\r\n\r\n$-\r\n", [1, None, [b"\r\n$-"]]),
    ],
)
def test_every_reply_type_arrives_as_it_was_sent(sent: bytes, expected: object) -> None:
    """H14: an empty bulk is b"", null is None."""
    with connected(always(sent)) as (connection, _):
        reply = one(connection)
        assert reply == expected
        assert type(reply) is (bytearray if isinstance(expected, bytes) else type(expected))


def test_an_error_reply_is_a_value_in_its_place() -> None:
    """H09: an error in the middle shifts nobody's answer."""
    answers = {b"A": b"+a\r\n", b"B": b"-OOM no room\r\n", b"C": bulk(b"c")}
    with connected(lambda words: answers[words[0]]) as (connection, _):
        first, second, third = connection.exchange([Command.of(w) for w in "ABC"], SLOW)
    assert first == "a"
    assert isinstance(second, ServerError)
    assert second.code == "OOM"
    assert third == b"c"


@pytest.mark.parametrize("size", [0, 1, 16383, 16384, 16385, 65534, 65536, 3_000_000])
def test_large_words_and_bulks_pass_unchanged(size: int) -> None:
    """H10: binary bulks of every size around the buffers, both ways."""
    blob = np.random.default_rng(size).bytes(size)
    with connected(lambda words: array(bulk(words[1]), bulk(words[2]))) as (connection, peer):
        (reply,) = connection.exchange([Command.of("ECHO", memoryview(blob), 17)], SLOW)
        assert reply == [blob, b"17"]
        assert peer.requests == [[b"ECHO", blob, b"17"]]


def test_typed_views_are_sent_as_their_bytes() -> None:
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    with connected(lambda words: bulk(words[1])) as (connection, _):
        (reply,) = connection.exchange([Command.of("ECHO", memoryview(numbers.data))], SLOW)
    assert reply == numbers.tobytes()


def test_replies_split_at_every_byte_are_the_same_replies() -> None:
    """H05: no header or body may depend on how the bytes are cut."""
    whole = array(bulk(b"ab\r\ncd"), b":7\r\n", bulk(None), b"+fine\r\n", bulk(b""))
    for at in range(1, len(whole)):
        with connected(always([whole[:at], 0.001, whole[at:]])) as (connection, _):
            assert one(connection) == [b"ab\r\ncd", 7, None, "fine", b""]


def test_a_bulk_lands_in_the_memory_it_was_given() -> None:
    target = bytearray(100_000)
    sizes: list[tuple[int, int]] = []

    def place(index: int, nbytes: int) -> memoryview | None:
        sizes.append((index, nbytes))
        return memoryview(target) if nbytes == len(target) else None

    body = bytes(range(250)) * 400
    answer = array(bulk(b"small"), bulk(None), bulk(body))
    with connected(always(answer)) as (connection, _):
        (reply,) = connection.exchange([Command(("GO",), place)], SLOW)
    assert sizes == [(0, 5), (2, 100_000)]
    assert target == body
    assert isinstance(reply, list)
    assert isinstance(reply[2], memoryview)
    assert reply[:2] == [b"small", None]


def test_more_requests_than_the_kernel_buffers_do_not_deadlock() -> None:
    """Replies are taken in while the request is still being written."""
    with connected(lambda words: b"+" + b"x" * 300 + b"\r\n") as (connection, _):
        commands = [Command.of("PUT", bytes(100_000)) for _ in range(200)]
        assert len(connection.exchange(commands, SLOW)) == 200


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$-2\r\n",
        b"$+5\r\nhello\r\n",
        b"$05\r\nhello\r\n",
        b"$ 5\r\nhello\r\n",
        b"$5\r\nhello!!\r\n",
        b"$999999999999\r\n",
        b"*4294967295\r\n",
        b":12a\r\n",
        b":\r\n",
        b"*1\r\n" * 10_000,
        b"+" + b"a" * 100_000,
        b"+OK\r\n+OK\r\n",
    ],
)
def test_nonsense_is_a_protocol_error_and_closes(nonsense: bytes) -> None:
    """H07, H08: only canonical lengths within bounds; nothing is allocated for a mere header."""
    with connected(always([nonsense, 0.05])) as (connection, _):
        with pytest.raises(ProtocolError):
            one(connection)
        assert not connection.usable


def test_a_late_second_answer_is_never_taken_for_the_next_command() -> None:
    """H01: what lies in the socket before a request is written cannot be its answer."""
    with connected(lambda words: [bulk(words[1]), 0.05, bulk(b"extra")]) as (connection, _):
        assert connection.exchange([Command.of("GET", "foo")], SLOW) == [b"foo"]
        time.sleep(0.5)
        with pytest.raises(Unavailable, match="out of step"):
            connection.exchange([Command.of("GET", "bar")], SLOW)
        assert not connection.usable


def test_a_huge_header_costs_no_memory_before_its_bytes_arrive() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not os.path.exists("/proc/self/statm"):
        pytest.skip("reads resident memory from /proc")
    with connected(always([b"$500000000\r\n", b"x" * 1000, 0.5, None])) as (connection, _):
        before = resident()
        with pytest.raises(Unavailable):
            one(connection)
        assert resident() - before < 64 << 20


def test_silence_is_unavailable_after_the_first_byte_deadline() -> None:
    with connected(always([5.0])) as (connection, _):

        def wait() -> None:
            with pytest.raises(Unavailable, match="no answer"):
                one(connection, QUICK)

        assert 0.15 < seconds_of(wait) < 2
        assert not connection.usable


def test_a_transfer_that_stalls_is_unavailable() -> None:
    with (
        connected(always([b"$1000\r\n", b"x" * 400, 5.0])) as (connection, _),
        pytest.raises(Unavailable, match="stalled"),
    ):
        one(connection, QUICK)


def test_a_transfer_that_trickles_ends_at_the_total_deadline() -> None:
    """A peer of 1 KB/s keeps every pause short, yet cannot hold a call for ever."""
    drops: list[bytes | float] = [b"x" * 50, 0.05]
    trickle: Answer = [b"$1000000\r\n", *(drops * 200)]
    with connected(always(trickle)) as (connection, _):

        def wait() -> None:
            with pytest.raises(Unavailable):
                one(connection, Patience(first_byte=0.5, stall=0.5, total=0.6))

        assert seconds_of(wait) < 3


def test_half_a_reply_then_a_closed_connection_is_unavailable() -> None:
    with (
        connected(always([b"$10\r\nhalf", None])) as (connection, _),
        pytest.raises(Unavailable, match="closed"),
    ):
        one(connection)


def test_a_peer_that_never_reads_ends_the_request() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        connection = RespConnection(
            "127.0.0.1", listener.getsockname()[1], deadline=time.monotonic() + 10
        )
        with pytest.raises(Unavailable, match="stalled"):
            connection.exchange([Command.of("PUT", bytes(64 << 20))], QUICK)
        assert not connection.usable


def test_an_interrupted_call_cannot_leave_its_reply_to_the_next() -> None:
    """H01: cancelled between request and reply, the connection is closed."""

    class Cancelled(BaseException):
        pass

    def cancel(signum: int, frame: object) -> None:
        raise Cancelled

    previous = signal.signal(signal.SIGALRM, cancel)
    try:
        with connected(lambda words: [0.15, bulk(words[1])]) as (connection, _):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Cancelled):
                connection.exchange([Command.of("GET", "foo")], SLOW)
            assert not connection.usable
            with pytest.raises(Unavailable, match="closed"):
                connection.exchange([Command.of("GET", "bar")], SLOW)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_an_exception_while_placing_a_bulk_closes_the_connection() -> None:
    def place(index: int, nbytes: int) -> memoryview | None:
        raise MemoryError

    with connected(always(bulk(b"data"))) as (connection, _):
        with pytest.raises(MemoryError):
            connection.exchange([Command(("GO",), place)], SLOW)
        assert not connection.usable


def test_room_of_another_size_than_announced_is_refused() -> None:
    with (
        connected(always(bulk(b"12345"))) as (connection, _),
        pytest.raises(ProtocolError, match="room for 4 bytes, 5"),
    ):
        connection.exchange([Command(("GO",), lambda i, n: memoryview(bytearray(4)))], SLOW)


def test_abort_from_another_thread_ends_an_exchange() -> None:
    with connected(always([10.0])) as (connection, _):
        timer = threading.Timer(0.1, connection.abort)
        timer.start()

        def wait() -> None:
            with pytest.raises(Unavailable):
                one(connection)

        assert seconds_of(wait) < 5
        timer.join()


def test_password_is_sent_first_and_a_wrong_one_is_refused() -> None:
    def answer(words: Words) -> Answer:
        return b"+OK\r\n" if words[-1] == b"right" else b"-WRONGPASS invalid\r\n"

    with FakePeer(answer) as peer:
        soon = time.monotonic() + 10
        RespConnection("127.0.0.1", peer.port, deadline=soon, password="right").close()
        RespConnection(
            "127.0.0.1", peer.port, deadline=soon, username="bob", password="right"
        ).close()
        with pytest.raises(Refused, match="WRONGPASS"):
            RespConnection("127.0.0.1", peer.port, deadline=soon, password="wrong")
        assert peer.requests[:2] == [[b"AUTH", b"right"], [b"AUTH", b"bob", b"right"]]


@pytest.mark.parametrize("host", ["no such host \x00", "name.invalid", "a" * 300])
def test_a_host_that_does_not_resolve_is_unavailable_in_time(host: str) -> None:
    def connect() -> None:
        with pytest.raises(Unavailable):
            RespConnection(host, 1974, deadline=time.monotonic() + 0.25)

    assert seconds_of(connect) < 3


def test_an_argument_is_made_when_its_turn_comes() -> None:
    """At most a few megabytes ahead of what the server has taken."""
    size, taken, ahead = 1 << 20, [0], []

    def answer(words: Words) -> Answer:
        taken[0] += 1
        return b"+OK\r\n"

    def make(number: int) -> bytes:
        ahead.append(number - taken[0])
        return bytes([number]) * size

    with connected(answer) as (connection, _):
        commands = [Command.of("PUT", n, partial(make, n)) for n in range(64)]
        assert connection.exchange(commands, SLOW) == ["OK"] * 64
    assert len(ahead) == 64
    # What the kernel and the peer hold comes on top.
    assert max(ahead) < 48


def test_an_argument_that_cannot_be_made_ends_the_connection() -> None:
    """Half a request is out: nothing that follows may be taken for the rest of it."""

    def fail() -> bytes:
        raise ArithmeticError("no")

    with connected(always(b"+OK\r\n")) as (connection, _):
        with pytest.raises(ArithmeticError):
            connection.exchange([Command.of("PUT", bytes(1 << 20)), Command.of("PUT", fail)], SLOW)
        assert not connection.usable
