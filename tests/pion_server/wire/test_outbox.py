"""The reply queue: order, partial sends, files, payloads that fail, and what it holds in memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_server.payload import Chunk, FileSpan, Payload
from pion_server.wire.outbox import BrokenPayload, Outbox
from pion_server.wire.replies import Outgoing, encode


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A sending socket with a small buffer, and its reader; both non-blocking."""
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    for end in (left, right):
        end.setblocking(False)
    yield left, right
    left.close()
    right.close()


def make_outbox() -> Outbox:
    return Outbox(memoryview(bytearray(4096)))


def pump(outbox: Outbox, pair: tuple[socket.socket, socket.socket]) -> bytes:
    """Send and receive by turns until everything has arrived."""
    got = b""
    while True:
        done = outbox.send(pair[0], 1 << 20)
        try:
            while piece := pair[1].recv(10_000):
                got += piece
        except BlockingIOError:
            if done:
                return got


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[BinaryIO]:
    path = tmp_path / "rows"
    path.write_bytes(os.urandom(300_000))
    with path.open("rb") as file:
        yield file


def test_small_large_and_streamed_replies_keep_their_order(
    pair: tuple[socket.socket, socket.socket], stored: BinaryIO
) -> None:
    content = os.pread(stored.fileno(), 300_000, 0)
    spans = Payload(
        250_010,
        lambda: iter([b"head", FileSpan(stored, 50_000, 250_000), b"", b"tail!!"]),
    )
    outbox = make_outbox()
    values = ["OK", b"x" * 100_000, spans, 7, [spans, None], b"end"]
    for value in values:
        outbox.put(encode(value))
    streamed = b"$250010\r\nhead" + content[50_000:] + b"tail!!\r\n"
    expected = b"+OK\r\n$100000\r\n" + b"x" * 100_000 + b"\r\n" + streamed + b":7\r\n"
    expected += b"*2\r\n" + streamed + b"$-1\r\n$3\r\nend\r\n"
    assert pump(outbox, pair) == expected
    assert not outbox
    assert outbox.held == 0


def test_a_file_is_read_where_it_cannot_be_sent(
    pair: tuple[socket.socket, socket.socket], stored: BinaryIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sendfile", refuse)
    outbox = make_outbox()
    outbox.put([Payload(299_990, lambda: iter([FileSpan(stored, 10, 299_990)]))])
    assert pump(outbox, pair) == os.pread(stored.fileno(), 299_990, 10)


def test_queued_payloads_cost_no_memory_for_their_bytes() -> None:
    made = []

    def chunks() -> Iterator[Chunk]:
        made.append(1)
        yield b""

    outbox = make_outbox()
    for _ in range(1000):
        outbox.put(encode(Payload(1 << 30, chunks)))
    assert not made
    assert outbox.held < 1_000_000


def _short() -> Iterator[Chunk]:
    yield b"abc"


def _long() -> Iterator[Chunk]:
    yield b"abc"
    yield b"defgh"


def _raising() -> Iterator[Chunk]:
    yield b"abc"
    raise RuntimeError("checksum")


def _not_even_started() -> Iterator[Chunk]:
    raise RuntimeError("no such file")


@pytest.mark.parametrize("chunks", [_short, _long, _raising, _not_even_started])
def test_a_payload_that_fails_or_lies_breaks_off_the_frame(
    pair: tuple[socket.socket, socket.socket], chunks: object
) -> None:
    outbox = make_outbox()
    outbox.put(encode([b"before", Payload(7, chunks), b"after"]))  # type: ignore[arg-type]
    with pytest.raises(BrokenPayload):
        pump(outbox, pair)
    got = pair[1].recv(1000)
    # Never more than the frame announces, and nothing of what follows it.
    assert got in (b"*3\r\n$6\r\nbefore\r\n$7\r\n", b"*3\r\n$6\r\nbefore\r\n$7\r\nabc")


def test_a_file_shorter_than_promised_breaks_off_the_frame(
    pair: tuple[socket.socket, socket.socket], stored: BinaryIO
) -> None:
    outbox = make_outbox()
    outbox.put(encode(Payload(10_000, lambda: iter([FileSpan(stored, 295_000, 10_000)]))))
    with pytest.raises(BrokenPayload, match="shorter"):
        pump(outbox, pair)


def test_abandoning_closes_the_running_payload(pair: tuple[socket.socket, socket.socket]) -> None:
    closed = []

    def chunks() -> Iterator[Chunk]:
        try:
            while True:
                yield b"x" * 100_000
        finally:
            closed.append(True)

    outbox = make_outbox()
    outbox.put([Payload(1 << 40, chunks)])
    assert outbox.send(pair[0], 1 << 20) is False
    outbox.abandon()
    assert closed
    assert not outbox


def test_one_turn_sends_about_its_budget(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    outbox = make_outbox()
    outbox.put([Payload(100 * 1000, lambda: iter([b"x" * 1000] * 100))])
    assert outbox.send(pair[0], 5000) is False
    assert len(pair[1].recv(1 << 20)) == 5000


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 50_000), st.lists(st.integers(0, 9000), max_size=4))))
def test_held_bytes_return_to_zero(sizes: list[int | list[int]]) -> None:
    left, right = socket.socketpair()
    for end in (left, right):
        end.setblocking(False)
    outbox = make_outbox()
    expected = b""
    for size in sizes:
        pieces: list[Outgoing]
        if isinstance(size, int):
            pieces = [b"a" * size]
            expected += b"a" * size
        else:
            parts = [b"p" * part for part in size]
            pieces = [Payload(sum(size), lambda parts=parts: iter(parts))]  # type: ignore[misc]
            expected += b"".join(parts)
        outbox.put(pieces)
    assert pump(outbox, (left, right)) == expected
    assert outbox.held == 0
    left.close()
    right.close()
