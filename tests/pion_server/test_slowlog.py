"""SLOWLOG: what is kept of slow commands, whose, and what never is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pion_server.slowlog import MOST_ENTRIES, SlowLog
from pion_server.wire.connection import Connection
from tests.pion_server.wire.binary_client import AUTH, BinaryClient

EXTRA = Path(__file__).parent / "wire" / "extra_commands.py"
USERS = ("--requirepass", "root", "--tenant", "ann=apple")
Server = Any


def someone() -> Connection:
    return Connection(1, "127.0.0.1:1", "127.0.0.1:2", peer_is_local=True)


@pytest.mark.parametrize("how", ["WAIT", "WORK"])
def test_slow_commands_are_kept_newest_first(server: Callable[..., Server], how: str) -> None:
    client = server("--slowlog-ms", "200", extra=EXTRA).client()
    client.call("CLIENT", "SETNAME", "me")
    before = int(time.time())
    for word in (b"first", b"sec\nond"):
        assert client.call(f"T.{how}", 250, word) == word
        client.call("PING")
    assert client.call("SLOWLOG", "LEN") == 2
    newest, oldest = client.call("SLOWLOG", "GET")
    number, ended, took, words, address, name = newest
    assert (number, oldest[0]) == (1, 0)
    assert before <= ended <= time.time()
    assert 200_000 < took < 60_000_000
    assert words == [f"T.{how}".encode(), b"250", rb"sec\nond"]
    host, port = client.socket.getsockname()
    assert (address, name) == (f"{host}:{port}".encode(), b"me")
    assert client.call("SLOWLOG", "GET", 1) == [newest]
    assert client.call("slowlog", "get", -1) == [newest, oldest]
    assert client.call("SLOWLOG", "RESET") == "OK"
    assert client.call("SLOWLOG", "GET", -1) == []


def test_a_slow_refusal_is_kept_and_0_keeps_nothing(server: Callable[..., Server]) -> None:
    client = server("--slowlog-ms", "0", extra=EXTRA).client()
    client.call("T.WAIT", 100, "x")
    assert client.call("SLOWLOG", "LEN") == 0
    assert client.error("SLOWLOG", "GET", "-2").startswith("ERR count should be")
    assert client.error("SLOWLOG", "LEN", "1").startswith("ERR unknown subcommand")
    assert client.error("SLOWLOG", "WHAT\r\n").startswith("ERR unknown subcommand")
    assert client.call("SLOWLOG", "HELP")[0].startswith(b"SLOWLOG")


def test_passwords_are_never_kept(server: Callable[..., Server]) -> None:
    """A refused one takes long, so it is certain to be among the slow."""
    running = server(*USERS, "--slowlog-ms", "50")
    client = running.client()
    hello = ("HELLO", 3, "AUTH", "x", "s3cret")
    for words in (("AUTH", "s3cret"), ("auth", "ann", "s3cret"), hello):
        assert client.error(*words).startswith("WRONGPASS")
    frames = BinaryClient(running.host, running.port + 1)
    frames.call(AUTH, b"ann\0s3cret")
    client.call("AUTH", "root")
    kept = client.call("SLOWLOG", "GET", -1)
    assert [entry[3] for entry in kept[1:]] == [
        [b"HELLO", b"(redacted)"],
        [b"AUTH", b"(redacted)"],
        [b"AUTH", b"(redacted)"],
    ]
    assert "s3cret" not in repr(kept)


def test_everybody_sees_their_own(server: Callable[..., Server]) -> None:
    running = server(*USERS, "--slowlog-ms", "50", extra=EXTRA)
    admin, ann = running.client(), running.client()
    admin.call("AUTH", "root")
    ann.call("AUTH", "ann", "apple")
    ann.call("T.WAIT", 100, "hers")
    admin.call("T.WAIT", 100, "his")
    assert [entry[3][-1] for entry in ann.call("SLOWLOG", "GET")] == [b"hers"]
    assert [entry[3][-1] for entry in admin.call("SLOWLOG", "GET")] == [b"his"]
    admin.call("SLOWLOG", "RESET")
    assert ann.call("SLOWLOG", "LEN") == 1


def test_what_is_kept_is_bounded_and_on_one_line() -> None:
    log, large = SlowLog(), memoryview(bytes(range(256)) * 4096)
    for _ in range(MOST_ENTRIES + 5):
        log.note(someone(), "MSET", [large] * 1000, 1.5)
    assert len(log.entries) == MOST_ENTRIES
    assert log.total == MOST_ENTRIES + 5
    entry = log.entries[-1]
    assert entry.number == MOST_ENTRIES + 4
    assert entry.microseconds == 1_500_000
    assert len(entry.words) == 32
    assert entry.words[-1] == "... (970 more arguments)"
    assert all(text.isascii() and text.isprintable() and len(text) < 200 for text in entry.words)
    assert entry.words[1].endswith(f"... ({len(large) - 128} more bytes)")
