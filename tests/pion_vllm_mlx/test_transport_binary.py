"""The client's binary lane against a scripted peer: what it sends, and what it does not forgive."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import pytest

from pion_vllm_mlx.transport import Patience, ProtocolError, Refused, TimedOut, Unavailable
from pion_vllm_mlx.transport.binary import F32, BinaryLane, ColdEntry, Declined

Q = np.arange(4 * 3 * 32, dtype=np.float32).reshape(4, 3, 32)
SK = np.arange(2 * 5 * 32, dtype=np.float32).reshape(2, 5, 32) + 1000
SV = SK + 1000
MAP = b"\0\0\1\1"
FAST = Patience(first_byte=0.5, stall=0.5, total=5)
#: Bytes to send, or None to close.
Answer: TypeAlias = "bytes | None"


def frame(status: int, body: bytes = b"", magic: bytes = b"\x5e\xca") -> bytes:
    return magic + struct.pack("<BI", status, len(body)) + body


class FramePeer:
    """Answers PING and AUTH with OK and every query with `answer(body)`, unless told otherwise."""

    def __init__(self, answer: Callable[[bytes], Answer]) -> None:
        self.answer = answer
        # 0x38: a server of before there was such a frame.
        self.greetings: dict[int, Answer] = {0xFF: frame(0), 0x37: frame(0), 0x38: frame(2)}
        self.requests: list[tuple[int, bytes]] = []
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def commands(self) -> list[int]:
        return [command for command, _ in self.requests]

    def hang_up(self) -> None:
        """Close every connection made so far."""
        for sock in self.connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as stream, contextlib.suppress(OSError):
            while len(header := stream.read(7)) == 7:
                magic, command, length = struct.unpack("<HBI", header)
                assert magic == 0xCA5E
                body = stream.read(length)
                self.requests.append((command, body))
                greeting = command in self.greetings
                answer = self.greetings[command] if greeting else self.answer(body)
                if answer is None:
                    return
                sock.sendall(answer)


@pytest.fixture
def peer() -> Iterator[FramePeer]:
    """A peer that answers queries with their own Q."""
    peer = FramePeer(lambda body: frame(0, body[19 : 19 + Q.nbytes]))
    yield peer
    peer.stop()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def lane_to(peer: FramePeer, clock: Clock | None = None, password: str | None = None) -> BinaryLane:
    return BinaryLane("127.0.0.1", peer.port, password=password, clock=clock or Clock())


def ask(lane: BinaryLane, window: int | None = None, q: F32 = Q) -> F32:
    return lane.query_fused(b"s", 3, q, SK, SV, MAP, window, FAST)


def test_a_query_is_one_frame_after_the_probe(peer: FramePeer) -> None:
    lane = lane_to(peer)
    reply = ask(lane)
    np.testing.assert_array_equal(reply, Q)
    assert reply.flags.aligned
    np.testing.assert_array_equal(ask(lane, window=7), Q)
    sizes = struct.pack("<HsHHHHII", 1, b"s", 3, 4, 32, 2, 3, 5)
    body = sizes + Q.tobytes() + SK.tobytes() + SV.tobytes() + MAP
    assert peer.requests == [(0xFF, b""), (0x24, body), (0x24, body + struct.pack("<I", 7))]


def test_strided_tensors_are_sent_in_order(peer: FramePeer) -> None:
    turned = np.ascontiguousarray(Q.transpose(2, 0, 1)).transpose(1, 2, 0)
    assert not turned.flags.c_contiguous
    np.testing.assert_array_equal(ask(lane_to(peer), q=turned), Q)


def test_a_password_comes_before_the_probe(peer: FramePeer) -> None:
    ask(lane_to(peer, password="sesame"))
    assert peer.requests[:2] == [(0x37, b"sesame"), (0xFF, b"")]
    named = BinaryLane("127.0.0.1", peer.port, username="ann", password="sesame")
    ask(named)
    assert (0x37, b"ann\0sesame") in peer.requests


@pytest.mark.parametrize("command", [0xFF, 0x37])
@pytest.mark.parametrize("answer", [frame(2), frame(1), frame(3)])
def test_a_lane_that_does_not_let_us_in_is_never_tried_again(
    peer: FramePeer, command: int, answer: bytes
) -> None:
    peer.greetings[command] = answer
    clock = Clock()
    lane = lane_to(peer, clock, password="sesame")
    with pytest.raises(Refused):
        ask(lane)
    clock.now += 1e6
    assert not lane.usable
    with pytest.raises(Unavailable, match="not in use"):
        ask(lane)
    assert len(peer.connections) == 1


@pytest.mark.parametrize(
    "answer",
    [
        frame(0),
        frame(0, Q.tobytes()[:-4]),
        frame(0, Q.tobytes() + b"more"),
        frame(4),
        frame(255, Q.tobytes()),
        frame(1, b"why"),
        frame(2, b"why"),
        frame(3, b"why"),
        frame(2) + b"more",
        frame(0, Q.tobytes(), magic=b"\xca\x5e"),
        b"-ERR unknown command\r\n",
    ],
)
def test_a_breach_of_protocol_ends_the_lane_for_good(peer: FramePeer, answer: bytes) -> None:
    peer.answer = lambda body: answer
    clock = Clock()
    lane = lane_to(peer, clock)
    with pytest.raises(ProtocolError):
        ask(lane)
    clock.now += 1e6
    assert not lane.usable
    with pytest.raises(Unavailable, match="not in use"):
        ask(lane)
    assert peer.commands() == [0xFF, 0x24]


def test_a_refused_query_leaves_the_lane_as_it_was(peer: FramePeer) -> None:
    lane = lane_to(peer)
    answers = [frame(3), frame(2), frame(1), frame(0, Q.tobytes())]
    peer.answer = lambda body: answers.pop(0)
    with pytest.raises(ColdEntry):
        ask(lane)
    for _ in range(2):
        with pytest.raises(Declined):
            ask(lane)
    np.testing.assert_array_equal(ask(lane), Q)
    assert len(peer.connections) == 1


def test_a_kept_connection_that_went_stale_is_replaced_once(peer: FramePeer) -> None:
    lane = lane_to(peer)
    ask(lane)
    peer.hang_up()
    np.testing.assert_array_equal(ask(lane), Q)
    assert peer.commands() == [0xFF, 0x24, 0xFF, 0x24]
    assert lane.usable


def test_a_surplus_behind_a_reply_never_becomes_the_next_one(peer: FramePeer) -> None:
    peer.answer = lambda body: frame(0, Q.tobytes()) + frame(0, SK.tobytes())
    lane = lane_to(peer)
    for _ in range(3):
        with contextlib.suppress(ProtocolError, Unavailable):
            np.testing.assert_array_equal(ask(lane), Q)


@pytest.mark.parametrize("part", [b"", frame(0, Q.tobytes())[:3], frame(0, Q.tobytes())[:-1]])
def test_a_silent_peer_costs_its_deadline_once(peer: FramePeer, part: bytes) -> None:
    peer.answer = lambda body: part
    clock = Clock()
    lane = lane_to(peer, clock)
    with pytest.raises(TimedOut):
        ask(lane)
    with pytest.raises(Unavailable, match="not in use"):
        ask(lane)
    peer.answer = lambda body: frame(0, Q.tobytes())
    clock.now += 5.1
    np.testing.assert_array_equal(ask(lane), Q)


def test_a_peer_that_hangs_up_is_gone_for_a_while(peer: FramePeer) -> None:
    peer.answer = lambda body: None
    lane = lane_to(peer)
    with pytest.raises(Unavailable):
        ask(lane)
    assert not lane.usable


def test_nobody_there_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    lane = BinaryLane("127.0.0.1", port)
    with pytest.raises(Unavailable):
        ask(lane)
    assert not lane.usable


def test_a_large_query_is_sent_whole_to_a_slow_reader(peer: FramePeer) -> None:
    """One call of the kernel does not take 12 MB; what it leaves must follow."""
    q = np.random.default_rng(1).standard_normal((4, 3, 1 << 18), dtype=np.float32)
    none = np.empty((2, 0, 1 << 18), np.float32)
    q, none = q.reshape(4, -1, 256), none.reshape(2, 0, 256)
    peer.answer = lambda body: frame(0, body[19 : 19 + q.nbytes])
    reply = lane_to(peer).query_fused(b"s", 0, q, none, none, MAP, None, Patience(first_byte=10))
    assert reply.tobytes() == q.tobytes()


@pytest.mark.parametrize(
    ("sid", "layer", "q", "sk", "head_map", "window"),
    [
        (b"s" * 65536, 0, Q, SK, MAP, None),
        (b"s", 65536, Q, SK, MAP, None),
        (b"s", -1, Q, SK, MAP, None),
        (b"s", 0, Q.astype(np.float64), SK, MAP, None),
        (b"s", 0, Q[..., :16], SK, MAP, None),
        (b"s", 0, Q, SK[:, 1:], MAP, None),
        (b"s", 0, Q, SK, MAP[1:], None),
        (b"s", 0, Q, SK, MAP, -1),
    ],
)
def test_what_no_frame_can_say_is_not_sent(
    peer: FramePeer, sid: bytes, layer: int, q: F32, sk: F32, head_map: bytes, window: int | None
) -> None:
    lane = lane_to(peer)
    with pytest.raises(ValueError, match=r".+"):
        lane.query_fused(sid, layer, q, sk, SV, head_map, window, FAST)
    assert peer.requests == []
    np.testing.assert_array_equal(ask(lane), Q)
