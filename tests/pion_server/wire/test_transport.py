"""A real server process over a real socket: order, limits, slow and rude clients, shutdown."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pion_server.wire.server import is_local

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

EXTRA = Path(__file__).with_name("extra_commands.py")
MB = 1 << 20
Start = Callable[..., "ServerProcess"]


@pytest.fixture(scope="module")
def running(module_server: Start) -> ServerProcess:
    """One for all tests that leave no trace in it."""
    return module_server(extra=EXTRA)


@pytest.fixture
def alone(server: Start) -> ServerProcess:
    return server(extra=EXTRA)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_pipeline_written_whole_before_reading(running: ServerProcess) -> None:
    client = running.client()
    client.send(b"".join(client.pack("ECHO", i) for i in range(10_000)))
    assert [client.read() for _ in range(10_000)] == [b"%d" % i for i in range(10_000)]


def test_a_pipeline_whose_replies_exceed_every_socket_buffer(running: ServerProcess) -> None:
    """H10: requests are read on while replies queue, or both sides would wait for ever."""
    client = running.client()
    word = b"w" * 20_000
    client.send(client.pack("ECHO", word) * 2000)
    assert all(client.read() == word for _ in range(2000))


def test_replies_keep_their_order_whatever_makes_them(alone: ServerProcess) -> None:
    client = alone.client()
    sent: list[tuple[Any, ...]] = []
    expected: list[Any] = []
    for i in range(20):
        sent += [
            ("T.WORK", 3, i),
            ("PING",),
            ("T.LAZY", 70_000),
            ("T.WAIT", 2, i),
            ("T.FILE", 2, i),
        ]
        file = (b"0123456789abcdef" * 4)[3 : 3 + i]
        lazy = (b"0123456789abcdef" * 4375)[:70_000]
        expected += [b"%d" % i, "PONG", lazy, b"%d" % i, [file, file]]
        sent += [("T.EAGER", 30_000), ("T.WRITE", "thread", i)]
        expected += [b"e" * 30_000, i + 1]
    client.send(b"".join(client.pack(*words) for words in sent))
    assert [client.read() for _ in sent] == expected


def test_an_error_in_a_pipeline_takes_no_other_reply(running: ServerProcess) -> None:
    """H13, H09: one wrong arity, then 100 good commands."""
    client = running.client()
    client.send(client.pack("ECHO") + b"".join(client.pack("ECHO", i) for i in range(100)))
    replies = [client.read() for _ in range(101)]
    assert str(replies[0]) == "ERR wrong number of arguments for 'echo' command"
    assert replies[1:] == [b"%d" % i for i in range(100)]


@pytest.mark.parametrize("size", [0, 1, 16_383, 16_384, 16_385, 65_536, 65_537, 64 * MB])
def test_blobs_of_every_size_arrive_exactly(running: ServerProcess, size: int) -> None:
    """H10: binary, with CRLF CRLF and `$-1` inside."""
    pattern = b"\r\n\r\n$-1\r\n\0\xff" + bytes(range(256)) * 3
    blob = (pattern * (size // len(pattern) + 1))[:size]
    client = running.client()
    assert client.call("T.CRC", blob, b"after") == [size, zlib.crc32(blob), 5, zlib.crc32(b"after")]
    assert client.call("PING") == "PONG"


def test_a_blob_at_the_limit_arrives_and_one_byte_more_is_refused_once(
    running: ServerProcess,
) -> None:
    """H10: 512 MB, limit + 1."""
    client = running.client(120)
    piece, pieces = b"z" * MB, 512
    client.send(b"*2\r\n$5\r\nT.CRC\r\n$%d\r\n" % (pieces * MB))
    crc = 0
    for _ in range(pieces):
        client.send(piece)
        crc = zlib.crc32(piece, crc)
    client.send(b"\r\n")
    assert client.read() == [pieces * MB, crc]
    client.send(b"*2\r\n$5\r\nT.CRC\r\n$%d\r\n" % (pieces * MB + 1))
    assert str(client.read()) == "ERR Protocol error: invalid bulk length"
    assert client.at_end()


def test_the_request_limit_closes_only_this_connection(server: Start) -> None:
    running = server("--max-request", "2mb", extra=EXTRA)
    other = running.client()
    client = running.client()
    blob = b"b" * MB
    assert len(client.call("T.CRC", blob)) == 2
    client.send(b"*4\r\n$5\r\nT.CRC\r\n" + (b"$%d\r\n%b\r\n" % (MB, blob)) + b"$%d\r\n" % MB)
    assert str(client.read()) == f"ERR Protocol error: request exceeds {2 * MB} bytes"
    assert client.at_end()
    assert other.call("PING") == "PONG"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"*4294967295\r\n", "invalid multibulk length"),
        (b"*1048577\r\n", "invalid multibulk length"),
        (b"*1\r\n$9223372036854775807\r\n", "invalid bulk length"),
        (b"*1\r\n$629145600\r\n", "invalid bulk length"),
        (b"*1\r\n" * 10_000, "expected '$', got '*'"),
        (b"*1\r\n%4294967295\r\n", "expected '$', got '%'"),
        (b"*2\r\n$4\r\nECHO\r\n$4\r\n\xc3\xa9\xc3\xa9\xc3\xa9\r\n", "invalid bulk length"),
        (b'ECHO "a\r\n', "unbalanced quotes in request"),
        (b"x" * 70_000, "too big inline request"),
    ],
)
def test_a_protocol_error_is_said_once_and_ends_the_connection(
    running: ServerProcess, data: bytes, text: str
) -> None:
    """H07, H08: a 600 MB bulk and 10,000 nested arrays among them."""
    client = running.client()
    client.send(client.pack("PING") + data)
    assert client.read() == "PONG"
    assert str(client.read()) == f"ERR Protocol error: {text}"
    assert client.at_end()
    assert running.client().call("PING") == "PONG"


def test_hostile_headers_cost_no_memory(alone: ServerProcess) -> None:
    """H07: under 1 MB each, held open."""
    probe = alone.client()
    probe.call("T.RSS")
    before = probe.call("T.RSS")
    clients = [alone.client() for _ in range(20)]
    for i, client in enumerate(clients):
        client.send(b"*1048576\r\n" if i % 2 else b"*2\r\n$4\r\nECHO\r\n$536870912\r\nabc")
    assert until(lambda: b" ".join(probe.call("CLIENT", "LIST").split()).count(b"id=") == 21)
    assert probe.call("T.RSS") - before < 20 * MB


def test_the_error_reaches_a_client_that_is_still_sending(running: ServerProcess) -> None:
    """H10: the refused blob is read away for a while, so no reset overtakes the error."""
    client = running.client()
    client.send(b"*2\r\n$5\r\nT.CRC\r\n$536870913\r\n" + b"x" * (8 * MB))
    assert str(client.read()) == "ERR Protocol error: invalid bulk length"
    client.socket.shutdown(socket.SHUT_WR)
    assert client.at_end()


@pytest.mark.parametrize("word", ["POST", "post", "Host:"])
def test_http_is_hung_up_on(alone: ServerProcess, word: str) -> None:
    """A web page must not be able to drive the server; nothing behind the word is executed."""
    client = alone.client()
    client.send(f"{word} / HTTP/1.1\r\nT.WRITE here evil\r\n\r\n".encode())
    assert client.at_end()
    array = alone.client()
    array.send(array.pack(word, "x") + array.pack("T.WRITE", "here", "evil"))
    assert array.at_end()
    assert alone.client().call("T.WRITTEN") == []


def test_an_http_get_stops_at_its_host_line(alone: ServerProcess) -> None:
    client = alone.client()
    client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nT.WRITE here evil\r\n\r\n")
    assert str(client.read()).startswith("ERR ")
    assert client.at_end()
    assert alone.client().call("T.WRITTEN") == []


def test_a_client_that_stops_inside_a_frame_costs_the_others_nothing(
    running: ServerProcess,
) -> None:
    halves = [b"*", b"*2\r\n", b"*2\r\n$4\r\nEC", b"*2\r\n$4\r\nECHO\r\n$300000\r\nabc", b"PIN"]
    stuck = [running.client() for _ in halves]
    for client, half in zip(stuck, halves, strict=True):
        client.send(half)
    other = running.client()
    assert all(other.call("ECHO", i) == b"%d" % i for i in range(100))
    for client in stuck[:2]:
        client.close()
    stuck[2].socket.shutdown(socket.SHUT_WR)
    assert stuck[2].at_end()
    stuck[4].send(b"G\r\n")
    assert stuck[4].read() == "PONG"


def test_a_half_closed_client_gets_all_its_replies(running: ServerProcess) -> None:
    """H13."""
    client = running.client()
    client.send(
        client.pack("T.WORK", 50, "a") + client.pack("T.LAZY", 3 * MB) + client.pack("PING")
    )
    client.socket.shutdown(socket.SHUT_WR)
    assert client.read() == b"a"
    assert len(client.read()) == 3 * MB
    assert client.read() == "PONG"
    assert client.at_end()


def test_clients_that_never_read_hold_no_payload_in_memory(alone: ServerProcess) -> None:
    """F07: eight clients ask for 4 MB a hundred times each and do not read."""
    probe = alone.client()
    before = probe.call("T.RSS")
    lazy = [alone.client() for _ in range(8)]
    for client in lazy:
        client.send((client.pack("T.LAZY", 4 * MB) + client.pack("T.FILE", 4, MB)) * 100)
    assert all(probe.call("ECHO", i) == b"%d" % i for i in range(200))
    assert probe.call("T.RSS") - before < 64 * MB
    assert len(lazy[0].read()) == 4 * MB


def test_a_client_that_never_reads_is_dropped_at_the_output_limit(server: Start) -> None:
    """F07: replies that do lie in memory are bounded."""
    running = server("--max-output", "4mb", extra=EXTRA)
    probe = running.client()
    before = probe.call("T.RSS")
    client = running.client()
    data = client.pack("T.EAGER", 60_000)
    with pytest.raises(OSError):  # noqa: PT012 - the pipe breaks somewhere in the loop
        for _ in range(100_000):
            client.send(data * 10)
    assert "does not read" in running.errors.read_text()
    assert probe.call("T.RSS") - before < 32 * MB
    assert probe.call("PING") == "PONG"


def test_many_slow_readers_together_are_bounded_too(server: Start) -> None:
    """F07: each below the limit of one, all of them above that of all."""
    running = server("--max-output", "4mb", extra=EXTRA)
    probe = running.client()
    before = probe.call("T.RSS")
    slow = [running.client() for _ in range(40)]
    for client in slow:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.send(client.pack("T.EAGER", 60_000) * 100)
    assert until(lambda: running.errors.read_text().count("does not read") >= 2)
    assert probe.call("T.RSS") - before < 64 * MB
    alive = [client for client in slow if _reads_all(client, 100)]
    assert alive
    assert probe.call("PING") == "PONG"


def _reads_all(client: RawClient, count: int) -> bool:
    try:
        return all(len(client.read()) == 60_000 for _ in range(count))
    except (EOFError, ConnectionError):
        return False


def test_one_clients_endless_pipeline_leaves_room_for_others(alone: ServerProcess) -> None:
    busy = alone.client()
    stop = threading.Event()
    replies = 0

    def send() -> None:
        data = busy.pack("PING") * 2000
        with contextlib.suppress(OSError):
            while not stop.is_set():
                busy.send(data)

    def read() -> None:
        nonlocal replies
        with contextlib.suppress(OSError):
            while not stop.is_set():
                replies += len(busy.socket.recv(MB))

    threads = [threading.Thread(target=target) for target in (send, read)]
    for thread in threads:
        thread.start()
    other = alone.client()
    assert all(other.call("ECHO", i) == b"%d" % i for i in range(50))
    assert until(lambda: replies > 100_000)
    stop.set()
    busy.socket.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()


def test_a_slow_command_delays_only_its_own_connection(running: ServerProcess) -> None:
    slow, waiting, other = running.client(), running.client(), running.client()
    slow.send(slow.pack("T.WORK", 1500, "slow") + slow.pack("PING"))
    waiting.send(waiting.pack("T.WAIT", 1500, "waited"))
    started = time.monotonic()
    assert all(other.call("ECHO", i) == b"%d" % i for i in range(50))
    other_took = time.monotonic() - started
    assert slow.read() == b"slow"
    assert slow.read() == "PONG"
    assert waiting.read() == b"waited"
    # Not a speed: the fifty came back before the slow one was due.
    assert other_took < 1.5


def test_writes_run_one_at_a_time(alone: ServerProcess) -> None:
    """Inline, in a thread and awaiting, from many clients at once."""
    clients = [alone.client() for _ in range(6)]
    for client in clients:
        for i in range(30):
            client.send(client.pack("T.WRITE", ("here", "thread", "task")[i % 3], i))
    replies = [client.read() for client in clients for _ in range(30)]
    assert sorted(replies) == list(range(1, 181))
    assert alone.client().call("T.WRITTEN").count(b"7") == 6


@pytest.mark.parametrize("how", ["here", "thread", "task", "encoding"])
def test_an_internal_error_is_one_reply_and_a_traceback(running: ServerProcess, how: str) -> None:
    client = running.client()
    assert client.error("T.RAISE", how).startswith("ERR internal error")
    assert client.call("ECHO", "alive") == b"alive"
    assert "rror" in running.errors.read_text()


def test_a_refusal_is_one_line_whatever_it_quotes(running: ServerProcess) -> None:
    client = running.client()
    assert client.error("T.RAISE", "missing") == "ERR thing not found??+OK"
    assert client.error("T.RAISE", "memory").startswith("OOM ")
    assert client.error(b"NO\r\n+SUCH\0\xff") == r"ERR unknown command 'NO\r\n+SUCH\x00\xff'"
    assert client.error(b"x" * 100_000).startswith("ERR unknown command 'xxx")
    assert client.error("") == "ERR unknown command ''"


def test_a_broken_payload_ends_the_connection_without_a_wrong_byte(running: ServerProcess) -> None:
    client = running.client()
    client.send(client.pack("PING") + client.pack("T.BROKEN") + client.pack("PING"))
    assert client.read() == "PONG"
    with pytest.raises(EOFError):
        client.read()
    assert "the disk is gone" in running.errors.read_text()
    assert running.client().call("PING") == "PONG"


def test_names_are_checked_before_any_effect(running: ServerProcess) -> None:
    client = running.client()
    odd = b"a\r\n\0\xff$-1"
    assert client.call("T.NAMES", odd, b"n" * 200) == [odd, b"n" * 200]
    for bad in (b"", b"n" * 201, b"n" * 300, b"n" * 100_000):
        assert "1 to 200 bytes" in client.error("T.NAMES", "fine", bad)
    assert client.call("T.SID", b"", b"s" * 205) == 205
    assert "1 to 205 bytes" in client.error("T.SID", "x", b"s" * 206)


def test_arity_errors_name_what_is_missing(running: ServerProcess) -> None:
    client = running.client()
    assert client.error("t.names") == "ERR T.NAMES requires: <ns> [<ns> ...]"
    assert client.error("T.SID", "a") == "ERR T.SID requires: <option> <sid>"
    assert client.error("T.RSS", "a") == "ERR T.RSS requires: no arguments"
    assert client.error("ping", 1, 2) == "ERR wrong number of arguments for 'ping' command"


def test_what_a_connection_owned_is_released_when_it_goes(alone: ServerProcess) -> None:
    probe = alone.client()
    for end in ("close", "quit", "broken", "post"):
        client = alone.client()
        assert client.call("T.OWN") == "OK"
        done = probe.call("T.CLOSED")
        if end == "close":
            client.close()
        else:
            client.send({"quit": b"QUIT\r\n", "broken": b"*x\r\n", "post": b"POST\r\n"}[end])
            client.socket.shutdown(socket.SHUT_WR)
        assert until(lambda done=done: probe.call("T.CLOSED") == done + 1), end  # type: ignore[misc]


def test_clients_beyond_the_bound_are_told_so(server: Start) -> None:
    running = server("--max-clients", "3")
    clients = [running.client() for _ in range(3)]
    assert [client.call("PING") for client in clients] == ["PONG"] * 3
    one_more = running.client()
    assert str(one_more.read()) == "ERR max number of clients reached"
    assert one_more.at_end()
    clients[0].close()

    def admitted() -> bool:
        client = running.client()
        client.send(client.pack("PING"))
        return bool(client.read() == "PONG")

    assert until(admitted)


def test_connections_leave_no_files_open(alone: ServerProcess) -> None:
    probe = alone.client()
    before = probe.call("T.FILES")
    for i in range(100):
        client = alone.client()
        client.send(client.pack("T.LAZY", 5 * MB) if i % 2 else b"*x\r\n")
        client.close()
    # Fewer, if a module was just being read when they were counted first.
    assert until(lambda: probe.call("T.FILES") <= before)


def test_sigterm_finishes_what_is_running(alone: ServerProcess) -> None:
    worker, reader, idle = alone.client(), alone.client(), alone.client()
    worker.send(worker.pack("T.WRITE", "thread", "w") + worker.pack("T.WORK", 300, "done"))
    reader.send(reader.pack("T.LAZY", 20 * MB))
    assert worker.read() == 1
    assert idle.call("PING") == "PONG"
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda c=c: answers.append(c.read())) for c in (worker, reader)
    ]
    for thread in threads:
        thread.start()
    assert alone.stop() == 0
    for thread in threads:
        thread.join()
    assert {len(answer) for answer in answers} == {4, 20 * MB}
    assert idle.at_end()


def test_sigterm_does_not_wait_for_a_client_that_never_reads(alone: ServerProcess) -> None:
    client = alone.client()
    client.send(client.pack("T.LAZY", 200 * MB))
    assert alone.stop(20) == 0


@pytest.mark.parametrize("words", [("SHUTDOWN",), ("shutdown", "nosave"), ("SHUTDOWN", "SAVE")])
def test_shutdown_ends_the_server_cleanly(alone: ServerProcess, words: tuple[str, ...]) -> None:
    client = alone.client()
    assert client.error("SHUTDOWN", "maybe") == "ERR syntax error"
    client.send(client.pack(*words))
    assert client.at_end()
    assert alone.wait() == 0


def test_a_server_can_be_killed_and_started_again(alone: ServerProcess) -> None:
    first = alone.pid
    alone.kill()
    alone.restart()
    assert alone.pid != first
    assert alone.client().call("PING") == "PONG"


def test_hundreds_of_clients_at_once(running: ServerProcess) -> None:
    clients: list[RawClient] = [running.client() for _ in range(400)]
    for i, client in enumerate(clients):
        client.send(client.pack("ECHO", i))
    assert [client.read() for client in clients] == [b"%d" % i for i in range(400)]


def test_it_serves_the_same_without_uvloop(server: Start, tmp_path: Path) -> None:
    """uvloop is taken where it is there; the standard loop must do as well."""
    extra = tmp_path / "extra.py"
    extra.write_text(
        f"import runpy, sys\nsys.modules['uvloop'] = None\nrunpy.run_path({str(EXTRA)!r})"
    )
    running = server(extra=extra)
    client = running.client()
    client.send(b"".join(client.pack("ECHO", i) for i in range(1000)))
    assert [client.read() for _ in range(1000)] == [b"%d" % i for i in range(1000)]
    assert len(client.call("T.LAZY", 20 * MB)) == 20 * MB
    assert [len(part) for part in client.call("T.FILE", 3, MB)] == [MB] * 3
    assert client.call("T.WORK", 1, "x") == b"x"
    slow = running.client()
    slow.send(slow.pack("T.LAZY", 50 * MB))
    assert client.call("T.CRC", b"b" * MB)[0] == MB
    assert running.stop(20) == 0


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("127.0.0.1", True),
        ("127.0.0.53", True),
        ("::1", True),
        ("::1%lo", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("fe80::1%eth0", False),
        ("2001:db8::1", False),
    ],
)
def test_a_peer_is_local_by_its_loopback_address_only(peer: str, local: bool) -> None:
    """WIRE.md 4.6: who may be told a path on this machine."""
    assert is_local(peer) is local


def test_a_reply_does_not_wait_for_the_rest_of_the_next_request(running: ServerProcess) -> None:
    """Replies gather while a request arrives, and only for a moment."""
    client = running.client()
    whole = client.pack("PING", "first")
    client.socket.sendall(whole + client.pack("ECHO", b"x" * 100_000)[:50_000])
    client.socket.settimeout(5)
    assert client.read() == b"first"
