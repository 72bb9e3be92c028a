"""Clients that take without giving: each is bounded, and the others are served meanwhile."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trustme

from pion_server.wire import tls

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

EXTRA = Path(__file__).with_name("extra_commands.py")
MB = 1 << 20
Start = Callable[..., "ServerProcess"]
PASSWORD = ("--requirepass", "root")


def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def crowd(server: ServerProcess, count: int, port: int = 0) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing."""
    silent = []
    try:
        for _ in range(count):
            address = (server.host, port or server.port)
            silent.append(socket.create_connection(address, timeout=30))
        yield silent
    finally:
        for sock in silent:
            sock.close()


def known(server: ServerProcess) -> RawClient:
    client = server.client()
    assert client.call("AUTH", "root") == "OK"
    return client


def is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return not sock.recv(1 << 16)
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("lane", [0, 1], ids=["resp", "binary"])
def test_a_byte_at_a_time_before_the_password_is_hung_up_on(server: Start, lane: int) -> None:
    """Slow loris: bytes keep coming, so silence is not what ends it."""
    running = server(*PASSWORD, "--auth-timeout", "1")
    friend = known(running)
    request = b"*1\r\n$1000\r\n" if lane == 0 else b"\x5e\xca\x24\x00\x10\x00\x00"
    with socket.create_connection((running.host, running.port + lane)) as loris:
        loris.sendall(request)

        def one_more() -> bool:
            with contextlib.suppress(OSError):
                loris.send(b"x")
            assert friend.call("ECHO", "x") == b"x"
            return is_closed(loris)

        assert until(one_more)
    assert "no password within 1 seconds" in running.errors.read_text()
    assert friend.call("PING") == "PONG"


def test_whoever_gives_the_password_in_time_may_be_idle(server: Start) -> None:
    running = server(*PASSWORD, "--auth-timeout", "1", "--stall-timeout", "1")
    friend, stranger = known(running), running.client()
    assert stranger.at_end()
    assert friend.call("PING") == "PONG"
    friend.call("RESET")  # a stranger again
    assert friend.at_end()


def test_a_crowd_of_strangers_keeps_nobody_out(server: Start) -> None:
    running = server(*PASSWORD, "--max-clients", "20", "--auth-timeout", "600")
    friends = [known(running)]
    with crowd(running, 100) as silent:
        friends += [known(running) for _ in range(10)]
        assert all(friend.call("PING") == "PONG" for friend in friends)
        # Those who came first have gone first.
        assert until(lambda: is_closed(silent[0]))
        assert not is_closed(silent[-1])
    # However many they were, one line tells of them.
    assert running.errors.read_text().count("made room") == 1


def test_strangers_who_guess_passwords_keep_nobody_out(server: Start) -> None:
    running = server(*PASSWORD, "--max-clients", "20", "--auth-timeout", "600")
    with crowd(running, 20) as guessing:
        for sock in guessing:
            sock.sendall(b"AUTH wrong\r\n" * 100)
        assert known(running).call("PING") == "PONG"


def test_those_who_know_the_password_are_not_driven_out(server: Start) -> None:
    running = server(*PASSWORD, "--max-clients", "3")
    friends = [known(running) for _ in range(3)]
    assert str(running.client().read()) == "ERR max number of clients reached"
    assert all(friend.call("PING") == "PONG" for friend in friends)


def test_one_address_has_so_many_connections(server: Start) -> None:
    running = server("--max-clients-per-address", "3")
    first = [running.client() for _ in range(3)]
    assert all(client.call("PING") == "PONG" for client in first)
    assert str(running.client().read()) == "ERR max number of clients reached"
    with socket.socket(socket.AF_UNIX) as unix:
        unix.connect(str(running.directory / "pion.sock"))
        unix.sendall(b"PING\r\n")
        assert unix.recv(7) == b"+PONG\r\n"
    first[0].close()

    def served() -> bool:
        client = running.client()
        client.send(b"PING\r\n")
        return str(client.read()) == "PONG"

    assert until(served)


def test_another_address_is_not_counted_with_it(server: Start) -> None:
    running = server("--max-clients-per-address", "1")
    assert running.client().call("PING") == "PONG"
    try:
        other = socket.create_connection((running.host, running.port), 30, ("127.0.0.2", 0))
    except OSError:
        pytest.skip("this system has one loopback address")
    with other:
        other.sendall(b"PING\r\n")
        assert other.recv(7) == b"+PONG\r\n"


def test_half_a_request_must_go_on(server: Start) -> None:
    running = server("--stall-timeout", "1")
    idle = running.client()
    for part in (b"*2\r\n$4\r\nECHO", b"*", b"PIN", b"*2\r\n$4\r\nECHO\r\n$100000\r\nx"):
        client = running.client()
        client.send(client.pack("PING") + part)
        assert client.read() == "PONG"
        assert client.at_end()
    assert idle.call("PING") == "PONG"


def test_replies_must_be_taken(server: Start) -> None:
    """F07: no limit of bytes is near; a client that takes some now and then stays."""
    running = server("--stall-timeout", "1", extra=EXTRA)
    slow, never = running.client(), running.client()
    for client in (slow, never):
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.send(client.pack("T.LAZY", 64 * MB))
    probe = running.client()
    count = len(probe.call("CLIENT", "LIST").splitlines())

    def one_is_gone() -> bool:
        slow.socket.recv(4 * MB)
        return len(probe.call("CLIENT", "LIST").splitlines()) == count - 1

    assert until(one_is_gone)
    assert slow.socket.recv(1)


def test_half_sent_requests_together_are_bounded(server: Start) -> None:
    """H07: each within `--max-request`; the one that rests longest goes, whoever goes on stays."""
    running = server("--max-request", "4mb", extra=EXTRA)
    probe = running.client()
    before = probe.call("T.RSS")
    body = bytes(range(256)) * (3 * MB // 256)
    clients = [running.client() for _ in range(20)]
    gone = 0
    for client in clients:
        with contextlib.suppress(OSError):
            client.send(client.pack("T.CRC", body)[: -MB // 2])
        assert len(probe.call("T.CRC", body)) == 2
    errors = running.errors.read_text
    assert until(lambda: errors().count("does not finish its request") >= 10)
    assert probe.call("T.RSS") - before < 64 * MB
    for client in clients[:5]:
        gone += client.at_end()
    assert gone == 5
    clients[-1].send(clients[-1].pack("T.CRC", body)[-MB // 2 :])
    assert clients[-1].read()[0] == len(body)


def test_requests_half_sent_behind_running_commands_are_bounded_with_them(server: Start) -> None:
    running = server("--max-request", "4mb", extra=EXTRA)
    probe = running.client()
    before = probe.call("T.RSS")
    body = bytes(3 * MB)
    clients = [running.client() for _ in range(20)]
    for client in clients:
        with contextlib.suppress(OSError):
            client.send(client.pack("T.WAIT", 20_000, "x") + client.pack("T.CRC", body)[: -MB // 2])
    errors = running.errors.read_text
    assert until(lambda: errors().count("does not finish its request") >= 10)
    assert probe.call("T.RSS") - before < 64 * MB
    assert probe.call("ECHO", "x") == b"x"


def test_a_strangers_unread_refusals_are_few(server: Start) -> None:
    running = server(*PASSWORD, "--auth-timeout", "600", extra=EXTRA)
    friend = known(running)
    before = friend.call("T.RSS")
    stranger = running.client()
    with pytest.raises(OSError):  # noqa: PT012 - the pipe breaks somewhere in the loop
        for _ in range(100_000):
            stranger.send(b"PING\r\n" * 10_000)
    assert "does not read" in running.errors.read_text()
    assert friend.call("T.RSS") - before < 16 * MB


def test_slow_readers_evict_nothing(server: Start) -> None:
    """F07: what waits for readers is not what `--maxmemory` is about."""
    running = server("--maxmemory", "40mb", "--max-output", "8mb")
    probe = running.client()
    for number in range(8):
        assert probe.call("SET", f"k{number}", bytes(4 * MB)) == "OK"
    lazy = [running.client() for _ in range(8)]
    for number, client in enumerate(lazy):
        with contextlib.suppress(OSError):
            client.send(client.pack("GET", f"k{number}") * 50)
    assert all(probe.call("ECHO", i) == b"%d" % i for i in range(100))
    assert probe.call("DBSIZE") == 8
    assert b"evicted_keys:0" in probe.call("INFO", "Stats")


@pytest.mark.parametrize("tls_too", [False, True], ids=["plain", "tls"])
def test_no_more_clients_than_files_can_be_open(
    server: Start, tmp_path: Path, tls_too: bool
) -> None:
    """A crowd never takes the descriptor that a log, or a module to import, needs."""
    files = 1500 if tls_too else 300
    extra = tmp_path / "few.py"
    extra.write_text(
        f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))\n"
    )
    flags = tls_flags(tmp_path) if tls_too else ()
    running = server("--max-clients", "9000", *flags, extra=extra)
    friend = running.client()
    fitting = (files - 256 - 1024) // 3 if tls_too else files - 256
    assert f"{fitting} clients, not --max-clients 9000" in running.errors.read_text()
    assert f"maxclients:{fitting}" in friend.call("INFO", "Clients").decode()
    with crowd(running, fitting + 50):
        assert all(friend.call("ECHO", i) == b"%d" % i for i in range(100))
        assert friend.call("SET", "key", bytes(MB)) == "OK"
    assert until(lambda: b"connected_clients:1\r" in friend.call("INFO", "Clients"))
    if tls_too:
        with (
            socket.create_connection((running.host, tls_port(running)), timeout=30) as plain,
            anybody().wrap_socket(plain) as client,
        ):
            client.sendall(b"PING\r\n")
            assert client.recv(7) == b"+PONG\r\n"
    assert "Traceback" not in running.errors.read_text()


def anybody() -> ssl.SSLContext:
    """Takes every certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def tls_port(server: ServerProcess) -> int:
    return int(server.ready_line.rpartition("TLS on 127.0.0.1:")[2].rstrip(")\n"))


def tls_flags(folder: Path) -> tuple[str, ...]:
    signed = trustme.CA().issue_cert("localhost")
    cert, key = folder / "cert.pem", folder / "key.pem"
    signed.cert_chain_pems[0].write_to_path(str(cert))
    signed.private_key_pem.write_to_path(str(key))
    return "--tls-port", "0", "--tls-cert", str(cert), "--tls-key", str(key)


def test_a_crowd_that_never_finishes_its_handshake_keeps_no_tls_client_out(
    server: Start, tmp_path: Path
) -> None:
    running = server(*tls_flags(tmp_path), extra=EXTRA)
    probe = running.client()
    before = probe.call("T.RSS")
    with crowd(running, tls.MOST_HANDSHAKES + 20, tls_port(running)) as silent:
        assert until(lambda: all(map(is_closed, silent[:20])))
        with (
            socket.create_connection((running.host, tls_port(running)), timeout=30) as plain,
            anybody().wrap_socket(plain) as client,
        ):
            client.sendall(b"PING\r\n")
            assert client.recv(7) == b"+PONG\r\n"
        assert probe.call("T.RSS") - before < 256 * MB
