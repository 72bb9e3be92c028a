"""The request behind a command that runs off the loop: read meanwhile, answered in its turn."""

from __future__ import annotations

import random
import socket
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import has_input

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

EXTRA = Path(__file__).with_name("extra_commands.py")
MB = 1 << 20
Start = Callable[..., "ServerProcess"]


@pytest.fixture(scope="module")
def running(module_server: Start) -> ServerProcess:
    return module_server(extra=EXTRA)


def in_pieces(client: RawClient, data: bytes, draw: random.Random) -> None:
    """Send it cut at random places, some of them a little apart."""
    view, largest = memoryview(data), draw.choice((7, 1000, 70_000, MB))
    while view:
        size = draw.randint(1, largest) if len(view) < 200 * largest else 200 * largest
        client.socket.sendall(view[:size])
        view = view[size:]
        if draw.random() < 0.02:
            time.sleep(0.002)


@pytest.mark.parametrize("seed", range(8))
def test_replies_keep_their_order_wherever_requests_are_cut(
    running: ServerProcess, seed: int
) -> None:
    """Slow and quick commands, arguments of every size, in one stream."""
    draw = random.Random(seed)
    client = running.client()
    requests = b""
    expected: list[Any] = []
    for number in range(30):
        blob = draw.randbytes(draw.choice((0, 1, 100, 65_535, 65_536, 65_537, 300_000, 2 * MB)))
        kind: Any = draw.choice(("T.WORK", "T.WORK", "T.CRC", "PING", "T.WAIT"))
        if kind == "T.CRC":
            requests += client.pack(kind, blob, number, blob)
            crc = [len(blob), zlib.crc32(blob)]
            text = b"%d" % number
            expected.append([*crc, len(text), zlib.crc32(text), *crc])
        elif kind == "PING":
            requests += client.pack("PING", number)
            expected.append(b"%d" % number)
        else:
            requests += client.pack(kind, draw.randint(0, 4), blob)
            expected.append(blob)
    in_pieces(client, requests, draw)
    assert [client.read() for _ in expected] == expected


def test_the_next_request_is_taken_in_while_a_command_runs(running: ServerProcess) -> None:
    """Not a speed: all of it has left the client before the first reply is there."""
    client = running.client()
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
    blob = bytes(7 * MB)
    client.send(client.pack("T.WORK", 2000, "first"))
    client.send(client.pack("T.CRC", blob))
    assert not has_input(client.socket)
    assert client.read() == b"first"
    assert client.read() == [len(blob), zlib.crc32(blob)]


def test_a_larger_argument_waits_for_its_turn_and_arrives(running: ServerProcess) -> None:
    client = running.client()
    blob = bytes(range(256)) * (9 * MB // 256)
    client.send(client.pack("T.WORK", 100, "first") + client.pack("T.CRC", blob) * 2)
    assert client.read() == b"first"
    for _ in range(2):
        assert client.read() == [len(blob), zlib.crc32(blob)]


@pytest.mark.parametrize("nonsense", [b"*1\r\n+PING\r\n", b"*1\r\n$-2\r\n", b"*9999999999\r\n"])
@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_nonsense_behind_a_running_command_is_told_after_its_reply(
    running: ServerProcess, nonsense: bytes, pause: float
) -> None:
    client = running.client()
    client.send(client.pack("T.WORK", 150, "first"))
    time.sleep(pause)
    client.send(nonsense + client.pack("PING"))
    assert client.read() == b"first"
    assert "Protocol error" in str(client.read())
    assert client.at_end()


@pytest.mark.parametrize(
    "behind", [b"", b"*1\r\n$4\r\nPING\r\n", b"*2\r\n$4\r\nECHO\r\n$100000\r\n"]
)
def test_a_client_that_half_closes_meanwhile_gets_its_replies(
    running: ServerProcess, behind: bytes
) -> None:
    client = running.client()
    client.send(client.pack("T.WORK", 150, "first"))
    time.sleep(0.05)
    client.send(behind)
    client.socket.shutdown(socket.SHUT_WR)
    assert client.read() == b"first"
    if b"PING" in behind:
        assert client.read() == "PONG"
    assert client.at_end()


def test_a_client_that_goes_meanwhile_is_released_after_its_command(
    running: ServerProcess,
) -> None:
    watcher = running.client()
    before = watcher.call("T.CLOSED")
    client = running.client()
    client.send(
        client.pack("T.OWN") + client.pack("T.WORK", 300, "first") + b"*2\r\n$4\r\nECHO\r\n"
    )
    assert client.read() == "OK"
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()  # a reset, not an orderly end
    deadline = time.monotonic() + 20
    while watcher.call("T.CLOSED") == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert watcher.call("T.CLOSED") == before + 1


def test_what_follows_a_login_is_read_by_the_limits_of_the_one_logged_in(server: Start) -> None:
    """A wrong password is answered late, off the loop; the stranger's limits hold meanwhile."""
    secured = server("--requirepass", "secret", extra=EXTRA)
    client = secured.client()
    blob = bytes(MB)
    client.send(client.pack("AUTH", "secret") + client.pack("T.CRC", blob))
    assert client.read() == "OK"
    assert client.read() == [len(blob), zlib.crc32(blob)]
    stranger = secured.client()
    stranger.send(stranger.pack("AUTH", "wrong") + stranger.pack("T.CRC", blob))
    assert "WRONGPASS" in str(stranger.read())
    assert "unauthenticated bulk length" in str(stranger.read())
