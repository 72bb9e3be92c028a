"""A generation whose suffix is in the server, whatever happens to server and replies."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pion_server.attend import reference
from pion_vllm_mlx.decode_session import DecodeSession
from pion_vllm_mlx.transport import Patience, ServerError, TimedOut, TransportError
from pion_vllm_mlx.transport.binary import F32, BinaryLane, ColdEntry
from pion_vllm_mlx.transport.endpoint import Endpoint
from tests.attention_client import AttentionClient, normal

if TYPE_CHECKING:
    from tests.conftest import ServerProcess

pytest.importorskip("mlx.core")

Start = Callable[..., "ServerProcess"]

HEADS, KV_HEADS, TOKENS, DIM, LAYERS = 4, 2, 30, 32, 2
PREFIX = normal(1, KV_HEADS, TOKENS, DIM), normal(2, KV_HEADS, TOKENS, DIM)
MAP = b"\0\0\1\1"
PATIENCE = Patience(first_byte=20, stall=20)


class Relay:
    """Between a client and a port: counts bytes both ways, loses the next replies if told to."""

    def __init__(self, port: int) -> None:
        self.sent = self.received = 0
        self.lose = 0
        self._target = port
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += (client, server)
                for pair in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if up:
                    self.sent += len(data)
                elif self.lose:
                    self.lose -= 1
                    break
                else:
                    self.received += len(data)
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _rows(k: F32, v: F32, start: int) -> tuple[F32, F32]:
    return k[:, start:], v[:, start:]


class Text:
    """The K and V a client has of its own suffix, a layer at a time, and what attention is."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.kv = np.zeros((LAYERS, 2, KV_HEADS, 0, DIM), np.float32)

    def grow(self, rows: int) -> None:
        new = self._random.standard_normal((LAYERS, 2, KV_HEADS, rows, DIM), dtype=np.float32)
        self.kv = np.concatenate([self.kv, new], axis=3)

    def trim(self, rows: int) -> None:
        self.kv = self.kv[:, :, :, : self.kv.shape[3] - rows]

    def check(self, session: DecodeSession, many: int, window: int = 0) -> None:
        """Ask every layer for its last `many` positions and compare with float64."""
        for layer in range(LAYERS):
            k, v = self.kv[layer]
            q = self._random.standard_normal((HEADS, many, DIM), dtype=np.float32)
            rows = partial(_rows, k, v)
            out, lse = session.attend(layer, q, k.shape[1], rows, MAP, window)
            wanted, wanted_lse = reference.decode(q, PREFIX, (k, v), list(MAP), window)
            np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(lse, wanted_lse, rtol=2e-5, atol=2e-6)

    def step(self, session: DecodeSession, rows: int = 1, window: int = 0) -> None:
        self.grow(rows)
        self.check(session, rows, window)


def store(server: ServerProcess, sid: str = "s") -> AttentionClient:
    client = AttentionClient(server)
    for layer in range(LAYERS):
        client.store(sid, layer, *PREFIX)
    return client


class Connected:
    """A server's two lanes behind relays."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.relays = Relay(server.port), Relay(server.port + 1)
        self.now = 100.0
        self.resp = Endpoint("127.0.0.1", self.relays[0].port, clock=lambda: self.now)
        self.binary = BinaryLane("127.0.0.1", self.relays[1].port, clock=lambda: self.now)

    def session(self, lane: str = "binary", sid: bytes = b"s", **options: Any) -> DecodeSession:
        binary = self.binary if lane == "binary" else None
        return DecodeSession(self.resp, binary, sid, TOKENS, PATIENCE, **options)

    def held(self) -> int:
        return AttentionClient(self.server).info()["decode_sessions"]


@pytest.fixture(scope="module")
def running(module_server: Start) -> ServerProcess:
    server = module_server()
    store(server)
    return server


@pytest.fixture
def connected(running: ServerProcess) -> Iterator[Connected]:
    connected = Connected(running)
    yield connected
    for relay in connected.relays:
        relay.stop()


@pytest.mark.parametrize("lane", ["binary", "RESP"])
@pytest.mark.parametrize("window", [0, 6, 35])
def test_a_generation_equals_float64(connected: Connected, lane: str, window: int) -> None:
    session, text = connected.session(lane), Text(1)
    text.step(session, 7, window)
    for _ in range(5):
        text.step(session, 1, window)
    text.step(session, 4, window)
    before = connected.held()
    session.close()
    assert connected.held() == before - 1
    assert session.replays == 0
    used = [relay.sent > 0 for relay in connected.relays]
    assert used == ([False, True] if lane == "binary" else [True, False])


@pytest.mark.parametrize("lane", ["binary", "RESP"])
def test_every_step_sends_and_receives_as_many_bytes(connected: Connected, lane: str) -> None:
    """Counted where the network is. RESP writes lengths in decimals: two digits throughout."""
    session, text = connected.session(lane), Text(2)
    relay = connected.relays[lane == "binary"]
    text.step(session, 10)
    sizes = set()
    for _ in range(40):
        before = relay.sent, relay.received
        text.step(session)
        sizes.add((relay.sent - before[0], relay.received - before[1]))
    ((sent, received),) = sizes
    floats = LAYERS * (HEADS + 2 * KV_HEADS) * DIM * 4
    assert floats < sent < floats + LAYERS * 250
    reply = LAYERS * HEADS * (DIM + 1) * 4
    assert reply < received < reply + LAYERS * 16


@pytest.mark.parametrize("lane", ["binary", "RESP"])
def test_rewinds_need_no_call(connected: Connected, lane: str) -> None:
    session, text = connected.session(lane), Text(3)
    text.step(session, 6)
    text.step(session, 5)
    text.trim(3)
    text.step(session)
    text.trim(7)
    text.step(session, 2)
    text.trim(text.kv.shape[3])
    text.step(session, 3)
    text.check(session, 2)  # asked again: the last two rows are sent again
    assert session.replays == 0


def test_sessions_of_two_clients_do_not_meet(connected: Connected) -> None:
    pairs = [(connected.session(lane), Text(seed)) for seed, lane in ((4, "binary"), (5, "RESP"))]
    for rows in (3, 1, 1, 2):
        for session, text in pairs:
            text.step(session, rows)
    assert [session.replays for session, _ in pairs] == [0, 0]


@pytest.mark.parametrize("lane", ["binary", "RESP"])
def test_a_restart_costs_the_suffix_once(server: Start, lane: str) -> None:
    running = server()
    store(running)
    connected = Connected(running)
    session, text = connected.session(lane), Text(6)
    text.step(session, 9)
    running.kill()
    running.restart()
    with pytest.raises((ServerError, TransportError)):  # the prefix went as well
        text.step(session)
    store(running)
    text.check(session, 1)
    assert session.replays == 1
    relay = connected.relays[lane == "binary"]
    before = relay.sent
    text.step(session)
    assert relay.sent - before < LAYERS * 2000
    assert session.replays == 1


def test_a_lost_reply_does_not_append_twice(connected: Connected) -> None:
    """The step was done; done again on RESP, and later on the binary lane again, it is the same."""
    session, text = connected.session(), Text(7)
    text.step(session, 5)
    connected.relays[1].lose = 2  # the kept connection's reply, and the new one's greeting
    text.step(session)
    assert connected.relays[0].sent > 0
    assert not connected.binary.usable
    text.step(session)
    connected.now += 10
    text.step(session)
    assert connected.binary.usable
    assert session.replays == 0


def test_a_step_that_failed_on_both_lanes_can_be_asked_again(connected: Connected) -> None:
    session, text = connected.session("RESP"), Text(8)
    text.step(session, 5)
    connected.relays[0].lose = 2
    with pytest.raises(TransportError):
        text.step(session)
    connected.now += 10
    text.check(session, 1)
    assert session.replays == 0


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "rewind", "again", "lose", "close", "evict", "lane"]),
            st.integers(0, 1),
            st.integers(1, 5),
        ),
        max_size=14,
    )
)
def test_whatever_happens_answers_are_right(
    connected: Connected, events: list[tuple[str, int, int]]
) -> None:
    """Two generations, one event after another; every answer is compared with float64."""
    pairs = [(connected.session("RESP"), Text(20)), (connected.session(), Text(21))]
    forgotten = [0, 0]
    for session, text in pairs:
        text.step(session, 2)
    for event, who, count in events:
        session, text = pairs[who]
        match event:
            case "rewind":
                text.trim(min(count, text.kv.shape[3]))
            case "again":
                text.check(session, min(count, text.kv.shape[3]))
            case "lose":
                connected.relays[1].lose = 1
            case "close":
                session.close()
            case "evict":  # as the server does it: the client is not told
                session._close()
                forgotten[who] += 1
            case "lane":  # whatever was lost before, both lanes are tried again
                connected.now += 10
        text.step(session, count)
    assert all(session.replays <= lost for (session, _), lost in zip(pairs, forgotten, strict=True))


def test_a_slow_server_is_not_asked_twice(connected: Connected) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        lane = BinaryLane("127.0.0.1", deaf.getsockname()[1], connect_timeout=0.1)
        session = DecodeSession(connected.resp, lane, b"s", TOKENS, PATIENCE)
        started = time.monotonic()
        with pytest.raises(TimedOut):
            Text(9).step(session)
        assert time.monotonic() - started < 5
    assert connected.relays[0].sent == 0
    Text(9).step(session)  # the lane is out of use for a while, RESP is not


@pytest.mark.parametrize("lane", ["binary", "RESP"])
def test_eviction_elsewhere_is_one_replay(server: Start, lane: str) -> None:
    running = server("--decode-sessions", "1")
    store(running)
    connected = Connected(running)
    pairs = [(connected.session(lane), Text(seed)) for seed in (10, 11)]
    for session, text in pairs:
        text.step(session, 4)
    session, text = pairs[0]
    text.step(session)
    text.step(session)
    assert session.replays == 1
    assert connected.held() == 1


def test_more_clients_at_once_than_sessions_are_slow_and_right(server: Start) -> None:
    running = server("--decode-sessions", "2")
    store(running)
    texts = [(Connected(running).session(lane), Text(seed)) for seed, lane in
             enumerate(["binary", "RESP"] * 2, 30)]  # fmt: skip

    def generate(session: DecodeSession, text: Text) -> int:
        for rows in (5, 1, 1, 2, 1, 1, 1, 1):
            text.step(session, rows)
        return session.replays

    with ThreadPoolExecutor(len(texts)) as pool:
        replays = sum(pool.map(lambda one: generate(*one), texts))
    info = AttentionClient(running).info()
    assert info["decode_sessions"] <= 4
    assert info["decode_evictions"] >= replays > 0


@pytest.mark.parametrize("lane", ["binary", "RESP"])
def test_a_cold_prefix_is_said_and_the_step_repeated(server: Start, lane: str) -> None:
    running = server("--sdpa-slots", str(LAYERS))
    client = AttentionClient(running)
    client.raw.call("KV.PREFIX.REGISTER", "n", KV_HEADS * DIM, "fp32")
    for side, rows in zip(("pk", "pv"), PREFIX, strict=True):
        flat = np.ascontiguousarray(rows.transpose(1, 0, 2)).tobytes()
        for layer in range(LAYERS):
            client.raw.call("V.STOREBATCH", f"n_{side}", layer, 0, TOKENS, flat)
    store(running, "n_attn")
    session, text = Connected(running).session(lane, b"n_attn"), Text(12)
    text.step(session, 5)
    store(running, "other")
    text.grow(1)
    for _ in range(2):
        with pytest.raises(ColdEntry):
            text.check(session, 1)
    assert client.raw.call("KV.PREFIX.WARM", "n", HEADS, DIM, "n_attn") == str(LAYERS)
    text.check(session, 1)
    assert session.replays == 1  # nobody said that these are the K/V there were before


@pytest.mark.parametrize("lane", ["binary", "RESP"])
def test_a_refusal_says_why(connected: Connected, lane: str) -> None:
    with pytest.raises(ServerError, match="session not found"):
        Text(13).step(connected.session(lane, b"nobody"))
    longer = DecodeSession(
        connected.resp, connected.binary if lane == "binary" else None, b"s", TOKENS + 1, PATIENCE
    )
    with pytest.raises(ServerError, match="has 30 tokens, not 31"):
        Text(13).step(longer)


def rows_of(*shape: int) -> Callable[[int], tuple[F32, F32]]:
    return lambda start: (np.zeros(shape, np.float32), np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("q", "length", "rows", "head_map"),
    [
        ((4, 2, 32), 1, (2, 1, 32), MAP),
        ((4, 0, 32), 1, (2, 1, 32), MAP),
        ((4, 1, 32), 2, (2, 1, 32), MAP),
        ((4, 1, 32), 1, (2, 1, 64), MAP),
        ((4, 1, 32), 1, (2, 1, 32), MAP + b"\0"),
    ],
)
def test_shapes_that_do_not_fit_never_leave(
    connected: Connected,
    q: tuple[int, ...],
    length: int,
    rows: tuple[int, ...],
    head_map: bytes,
) -> None:
    session = connected.session()
    with pytest.raises(ValueError):
        session.attend(0, np.zeros(q, np.float32), length, rows_of(*rows), head_map)
    with pytest.raises(ValueError, match="no frame"):
        session.attend(70_000, normal(1, 4, 1, 32), 1, rows_of(2, 1, 32), MAP)
    assert connected.relays[1].sent == 0
