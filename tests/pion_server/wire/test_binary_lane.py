"""The binary lane of a real server: ports, passwords, replies bit-equal to RESP's, rude clients."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention_client import AttentionClient, fused_words, normal
from tests.pion_server.wire.binary_client import (
    AUTH,
    COLDMISS,
    ERROR,
    MISS,
    OK,
    PING,
    QUERY_FUSED,
    BinaryClient,
    fused_body,
    pack,
)

if TYPE_CHECKING:
    from tests.conftest import ServerProcess

Start = Callable[..., "ServerProcess"]

HEADS, TOKENS, DIM = 2, 50, 32
K, V = normal(1, HEADS, TOKENS, DIM), normal(2, HEADS, TOKENS, DIM)
Q = normal(3, 4, 1, DIM)
NONE = normal(4, HEADS, 0, DIM)
WIDE = normal(4, HEADS, 0, 64)
MAP = b"\0\0\1\1"
GOOD = fused_body(b"s", 0, Q, NONE, NONE, MAP)


@pytest.fixture(scope="module")
def shared(module_server: Start) -> ServerProcess:
    pytest.importorskip("mlx.core")
    server = module_server()
    AttentionClient(server).store("s", 0, K, V)
    return server


@pytest.fixture
def lane(shared: ServerProcess) -> Iterator[BinaryClient]:
    with closing(connect(shared)) as client:
        yield client


def connect(server: ServerProcess, timeout: float = 60.0) -> BinaryClient:
    return BinaryClient(server.host, server.port + 1, timeout)


# --- replies -----------------------------------------------------------------------------------


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 1 << 30),
    group=st.integers(1, 3),
    rows=st.integers(1, 4),
    suffix=st.integers(0, 5),
    window=st.sampled_from([None, 0, 1, 7, 49, 50, 1000]),
    sid=st.sampled_from([b"s", b"sid_attn", b"x" * 205, b"\0\xff"]),
)
def test_replies_are_resps_bit_for_bit(
    shared: ServerProcess,
    seed: int,
    group: int,
    rows: int,
    suffix: int,
    window: int | None,
    sid: bytes,
) -> None:
    resp = AttentionClient(shared)
    resp.raw.call("ATTEND.PREFIX.STORE", sid, 7, HEADS, TOKENS, DIM, K.tobytes(), V.tobytes())
    q = normal(seed, HEADS * group, rows, DIM)
    sk, sv = normal(seed + 1, HEADS, suffix, DIM), normal(seed + 2, HEADS, suffix, DIM)
    head_map = bytes(np.random.default_rng(seed).integers(0, HEADS, HEADS * group, np.uint8))
    words = list(fused_words("", 7, q, sk, sv, head_map, window))
    words[1] = sid
    with closing(connect(shared)) as lane:
        got = lane.call(QUERY_FUSED, fused_body(sid, 7, q, sk, sv, head_map, window))
    assert got == (OK, resp.raw.call(*words))
    assert len(got[1]) == q.nbytes
    resp.raw.close()


def test_no_window_is_the_servers_default(server: Start) -> None:
    pytest.importorskip("mlx.core")
    running = server("--fa-window", "3")
    resp = AttentionClient(running)
    resp.store("s", 0, K, V)
    lane = connect(running)

    def ask(window: int | None) -> bytes:
        status, reply = lane.call(QUERY_FUSED, fused_body(b"s", 0, Q, NONE, NONE, MAP, window))
        assert status == OK
        return reply

    assert ask(None) == ask(0xFFFFFFFF) == ask(3) != ask(0)
    assert ask(0) == ask(TOKENS) == ask(0xFFFFFFFE)
    assert ask(None) == resp.raw.call(*fused_words("s", 0, Q, NONE, NONE, MAP))


def test_a_reply_has_no_size_limit(server: Start) -> None:
    """Neither the 4 MB of the public server nor what may wait for slow readers."""
    pytest.importorskip("mlx.core")
    running = server("--max-output", "1mb")
    AttentionClient(running).store("s", 0, K[:, :4], V[:, :4])
    q = normal(5, 4, 12_000, DIM)
    lane = connect(running)
    status, reply = lane.call(QUERY_FUSED, fused_body(b"s", 0, q, NONE, NONE, MAP))
    assert (status, len(reply)) == (OK, q.nbytes)
    assert len(reply) > 6_000_000
    small = lane.call(QUERY_FUSED, fused_body(b"s", 0, q[:, -1:], NONE, NONE, MAP))[1]
    last = np.frombuffer(reply, np.float32).reshape(q.shape)[:, -1]
    np.testing.assert_allclose(np.frombuffer(small, np.float32).reshape(4, DIM), last, atol=1e-5)


def without_sizes(body: bytes, **changed: int) -> bytes:
    """`body` of sid `s` with header fields replaced, its blobs as they were."""
    names = ("layer", "heads", "dim", "kv_heads", "rows", "suffix")
    sizes = dict(zip(names, struct.unpack_from("<HHHHII", body, 3), strict=True)) | changed
    return body[:3] + struct.pack("<HHHHII", *sizes.values()) + body[19:]


FUSED_ERRORS: dict[str, bytes] = {
    "unknown session": fused_body(b"t", 0, Q, NONE, NONE, MAP),
    "unknown layer": fused_body(b"s", 1, Q, NONE, NONE, MAP),
    "no sid": fused_body(b"", 0, Q, NONE, NONE, MAP),
    "sid too long": fused_body(b"s" * 206, 0, Q, NONE, NONE, MAP),
    "no group": fused_body(b"s", 0, normal(0, 3, 1, DIM), NONE, NONE, b"\0\0\1"),
    "other kv heads": fused_body(b"s", 0, Q, NONE[:1], NONE[:1], bytes(4)),
    "other D": fused_body(b"s", 0, normal(0, 4, 1, 64), WIDE, WIDE, MAP),
    "head_map": fused_body(b"s", 0, Q, NONE, NONE, b"\0\0\1\2"),
    "no rows": fused_body(b"s", 0, Q[:, :0], NONE, NONE, MAP),
    "no dim": fused_body(b"s", 0, Q[..., :0], NONE[..., :0], NONE[..., :0], MAP),
    "no heads": fused_body(b"s", 0, Q[:0], NONE, NONE, b""),
    "no kv heads": fused_body(b"s", 0, Q, NONE[:0], NONE[:0], MAP),
}
UNPARSABLE: dict[str, bytes] = {
    "empty": b"",
    "half a length": b"\x01",
    "sid cut": b"\x05\x00abc",
    "sizes cut": GOOD[:18],
    "one byte short": GOOD[:-1],
    "one byte long": GOOD + b"\0",
    "half a window": GOOD + b"\0\0",
    "five bytes of window": GOOD + bytes(5),
    "more rows than sent": without_sizes(GOOD, rows=2),
    "fewer rows than sent": without_sizes(
        fused_body(b"s", 0, normal(0, 4, 2, 32), NONE, NONE, MAP), rows=1
    ),
    "a suffix that is not there": without_sizes(GOOD, suffix=1),
    "all at their largest": without_sizes(
        GOOD, heads=65535, dim=65535, kv_heads=65535, rows=2**32 - 1, suffix=2**32 - 1
    ),
}


@pytest.mark.parametrize("case", FUSED_ERRORS)
def test_what_the_engine_refuses_is_error(lane: BinaryClient, case: str) -> None:
    assert lane.call(QUERY_FUSED, FUSED_ERRORS[case]) == (ERROR, b"")
    assert lane.call(QUERY_FUSED, GOOD)[0] == OK


@pytest.mark.parametrize("case", UNPARSABLE)
def test_a_body_that_does_not_add_up_is_miss(lane: BinaryClient, case: str) -> None:
    assert lane.call(QUERY_FUSED, UNPARSABLE[case]) == (MISS, b"")
    assert lane.call(QUERY_FUSED, GOOD)[0] == OK


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(0, 40), byte=st.integers(0, 255), cut=st.integers(0, 12))
def test_any_body_gets_one_reply(lane: BinaryClient, position: int, byte: int, cut: int) -> None:
    body = bytearray(GOOD[: len(GOOD) - cut])
    body[position] = byte
    status, reply = lane.call(QUERY_FUSED, bytes(body))
    assert (status, len(reply)) in ((OK, Q.nbytes), (MISS, 0), (ERROR, 0))
    assert lane.call(PING) == (OK, b"")


def test_nan_queries_answer_nan_and_nothing_else_breaks(lane: BinaryClient) -> None:
    bad = np.full_like(Q, np.nan)
    status, reply = lane.call(QUERY_FUSED, fused_body(b"s", 0, bad, NONE, NONE, MAP))
    assert status == OK
    assert np.isnan(np.frombuffer(reply, np.float32)).all()
    assert lane.call(QUERY_FUSED, GOOD)[0] == OK


def test_every_other_command_is_error(lane: BinaryClient) -> None:
    for command in set(range(256)) - {PING, QUERY_FUSED, 0x38, 0x40, 0x41}:
        assert lane.call(command, b"some body") == (ERROR, b""), hex(command)
    assert lane.call(PING) == (OK, b"")


def test_a_cold_session_is_coldmiss_until_it_is_warmed(server: Start) -> None:
    pytest.importorskip("mlx.core")
    running = server("--sdpa-slots", "1")
    resp, lane = AttentionClient(running), connect(running)
    raw = resp.raw
    raw.call("KV.PREFIX.REGISTER", "n", HEADS * DIM, "fp32")
    for side, rows in (("pk", K), ("pv", V)):
        flat = np.ascontiguousarray(rows.transpose(1, 0, 2)).tobytes()
        raw.call("V.STOREBATCH", f"n_{side}", 0, 0, TOKENS, flat)
    resp.store("n_attn", 0, K, V)
    body = fused_body(b"n_attn", 0, Q, NONE, NONE, MAP)
    before = lane.call(QUERY_FUSED, body)
    assert before[0] == OK
    resp.store("other", 0, K, V)
    assert lane.call(QUERY_FUSED, body) == (COLDMISS, b"")
    assert raw.call("KV.PREFIX.WARM", "n", HEADS, DIM, "n_attn") == "1"
    assert lane.call(QUERY_FUSED, body) == before


def test_without_the_engine_queries_are_errors(server: Start) -> None:
    lane = connect(server("--no-attention"))
    assert lane.call(PING) == (OK, b"")
    assert lane.call(QUERY_FUSED, GOOD) == (ERROR, b"")
    assert lane.call(QUERY_FUSED, GOOD[:-1]) == (MISS, b"")


def test_prefixes_are_stored_and_found_beside_it(shared: ServerProcess) -> None:
    """The lane takes nothing from KV.PREFIX.*: same store, same figures, interleaved."""
    raw, lane = shared.client(), connect(shared)
    for i in range(20):
        assert lane.call(QUERY_FUSED, GOOD)[0] == OK
        assert raw.call("KV.PREFIX.LOOKUP", f"p{i}") == "MISS"
        assert raw.call("KV.PREFIX.REGISTER", f"p{i}", 32, "fp16") == "OK"
        assert lane.call(QUERY_FUSED, GOOD[:-1])[0] == MISS
        assert raw.call("KV.PREFIX.LOOKUP", f"p{i}") == "HIT"
        assert raw.call("KV.PREFIX.DROP", f"p{i}") == 1


# --- order and pieces --------------------------------------------------------------------------


def test_a_pipeline_written_whole_is_answered_in_order(lane: BinaryClient) -> None:
    widths = [1, 2, 3, 0, 5]
    frames = [
        pack(QUERY_FUSED, fused_body(b"s", 0, normal(i, 4, width, DIM), NONE, NONE, MAP))
        + pack(PING)
        for i, width in enumerate(widths)
    ]
    lane.socket.sendall(b"".join(frames) * 40)
    for width in widths * 40:
        assert lane.read()[0] == (OK if width else ERROR)
        assert lane.read() == (OK, b"")


def test_a_frame_may_come_byte_by_byte(lane: BinaryClient) -> None:
    expected = lane.call(QUERY_FUSED, GOOD)
    for byte in pack(QUERY_FUSED, GOOD):
        lane.socket.sendall(bytes((byte,)))
    assert lane.read() == expected


def test_a_frame_that_is_never_finished_holds_up_nobody(shared: ServerProcess) -> None:
    slow, other = connect(shared), connect(shared)
    slow.socket.sendall(pack(PING) + pack(QUERY_FUSED, GOOD)[:-1])
    assert slow.read() == (OK, b"")
    for _ in range(10):
        assert other.call(QUERY_FUSED, GOOD)[0] == OK
    slow.socket.sendall(GOOD[-1:])
    assert slow.read() == other.call(QUERY_FUSED, GOOD)
    slow.socket.sendall(pack(QUERY_FUSED, GOOD)[:50])
    slow.close()
    assert other.call(PING) == (OK, b"")


def test_half_a_frame_and_a_farewell_get_no_reply(lane: BinaryClient) -> None:
    lane.socket.sendall(pack(PING) + pack(QUERY_FUSED, GOOD)[:30])
    lane.socket.shutdown(socket.SHUT_WR)
    assert lane.read() == (OK, b"")
    assert lane.at_end()


@pytest.mark.parametrize(
    "stream",
    [
        b"*1\r\n$4\r\nPING\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x5e",
        b"\xca\x5e\xff\0\0\0\0",
        b"\x5e\xca\x24" + struct.pack("<I", (1 << 30) + 1),
        b"\x5e\xca\x24\xff\xff\xff\xff",
    ],
)
def test_bad_magic_and_oversize_close_after_the_replies_due(
    shared: ServerProcess, stream: bytes
) -> None:
    lane = connect(shared)
    lane.socket.sendall(pack(PING) + stream)
    assert lane.read() == (OK, b"")
    if stream == b"\x5e":  # this may still become a frame
        lane.socket.sendall(pack(PING)[1:])
        assert lane.read() == (OK, b"")
    else:
        assert lane.at_end()
    assert connect(shared).call(PING) == (OK, b"")


def test_a_header_alone_costs_no_memory(shared: ServerProcess) -> None:
    def resident() -> int:
        return int(Path(f"/proc/{shared.pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGESIZE"
        )

    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc")
    before = resident()
    lanes = [connect(shared) for _ in range(20)]
    for lane in lanes:
        lane.socket.sendall(b"\x5e\xca\x24" + struct.pack("<I", 1 << 30) + b"x" * 1000)
    assert connect(shared).call(PING) == (OK, b"")
    assert resident() - before < 50 << 20
    for lane in lanes:
        lane.close()


# --- passwords ---------------------------------------------------------------------------------


def test_before_the_password_everything_is_error(server: Start) -> None:
    running = server("--requirepass", "sesame")
    lane = connect(running)
    for command in (PING, QUERY_FUSED, 0x00, 0x38):
        assert lane.call(command) == (ERROR, b"")
    assert lane.call(QUERY_FUSED, bytes(3 << 20)) == (ERROR, b"")
    for wrong in (b"", b"sesam", b"sesame ", b"sesame\0", b"u\0wrong", b"\0", bytes(100_000)):
        assert lane.call(AUTH, wrong) == (ERROR, b"")
        assert lane.call(PING) == (ERROR, b"")
    assert lane.call(AUTH, b"sesame") == (OK, b"")
    assert lane.call(PING) == (OK, b"")
    assert lane.call(AUTH, b"wrong") == (ERROR, b"")
    assert lane.call(PING) == (OK, b"")
    assert connect(running).call(PING) == (ERROR, b"")


def test_a_name_before_the_password_is_nobodys(server: Start) -> None:
    lane = connect(server("--requirepass", "sesame"))
    assert lane.call(AUTH, b"somebody\0sesame") == (OK, b"")
    assert lane.call(PING) == (OK, b"")


def test_auth_without_a_password_set_is_error(lane: BinaryClient) -> None:
    """A client that believes it is protected is told that it is not."""
    assert lane.call(AUTH, b"sesame") == (ERROR, b"")
    assert lane.call(PING) == (OK, b"")


def test_a_wrong_password_waits_on_both_lanes_and_delays_nobody_else(server: Start) -> None:
    from pion_server.wire.auth import FAILURE_DELAY

    running = server("--requirepass", "sesame")
    lane, raw = connect(running), running.client()
    started = time.monotonic()
    lane.socket.sendall(pack(AUTH, b"wrong") + pack(AUTH, b"sesame") + pack(PING))
    raw.send(raw.pack("AUTH", "wrong"))
    assert connect(running).call(AUTH, b"sesame") == (OK, b"")
    assert [lane.read()[0] for _ in range(3)] == [ERROR, OK, OK]
    assert "WRONGPASS" in str(raw.read())
    assert time.monotonic() - started >= FAILURE_DELAY


# --- ports -------------------------------------------------------------------------------------


def test_the_lane_listens_on_every_address_of_resp(server: Start) -> None:
    running = server("--bind", "localhost")
    for family, _, _, _, address in socket.getaddrinfo(
        "localhost", running.port + 1, type=socket.SOCK_STREAM
    ):
        assert family in (socket.AF_INET, socket.AF_INET6)
        assert BinaryClient(str(address[0]), running.port + 1).call(PING) == (OK, b"")


def start_refused(port: int, directory: Path) -> str:
    flags = ["-p", str(port), "--dir", str(directory)]
    done = subprocess.run(
        [sys.executable, "-m", "pion_server", *flags], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return line


def test_a_taken_next_port_is_one_line_that_names_it(tmp_path: Path) -> None:
    for _ in range(50):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            line = start_refused(port - 1, tmp_path)
            if f":{port - 1} " not in line:
                break
    assert line == (
        f"pion-server: 127.0.0.1:{port} (the binary lane, next to --port) "
        "is in use by another program; choose another --port"
    )


def test_the_last_port_has_no_next_one(tmp_path: Path) -> None:
    assert "65535" in start_refused(65535, tmp_path)


def test_a_killed_server_gets_both_ports_back(server: Start) -> None:
    running = server()
    for _ in range(2):
        lane = connect(running)
        assert lane.call(PING) == (OK, b"")
        running.kill()
        running.restart()
    assert connect(running).call(PING) == (OK, b"")


def test_a_graceful_end_finishes_what_was_asked(server: Start) -> None:
    running = server("--no-attention")
    lane = connect(running)
    lane.socket.sendall(pack(PING) * 100)
    assert lane.read() == (OK, b"")
    assert running.stop() == 0
    for _ in range(99):
        assert lane.read() == (OK, b"")
    assert lane.at_end()
