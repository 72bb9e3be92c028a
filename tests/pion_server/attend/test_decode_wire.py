"""Decode sessions over the wire: both lanes, strangers, lost replies, cold prefixes, bad frames."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention_client import AttentionClient, fused_words, normal
from tests.pion_server.attend.decoding import (
    CLOSE,
    COLDMISS,
    ERROR,
    F32,
    MISS,
    OK,
    REPLAY,
    SIZES,
    STEP,
    TOKEN,
    Step,
    assert_equal_to_float64,
)
from tests.pion_server.wire.binary_client import BinaryClient, pack

if TYPE_CHECKING:
    from tests.conftest import ServerProcess

pytest.importorskip("mlx.core")

Start = Callable[..., "ServerProcess"]

HEADS, KV_HEADS, TOKENS, DIM = 4, 2, 50, 32
PREFIX = normal(1, KV_HEADS, TOKENS, DIM), normal(2, KV_HEADS, TOKENS, DIM)
K, V = normal(3, KV_HEADS, 40, DIM), normal(4, KV_HEADS, 40, DIM)
Q = normal(5, HEADS, 40, DIM)
MAP = b"\0\0\1\1"


def piece(start: int, stop: int, **changed: object) -> Step:
    """The step that appends rows start..stop of K, V and asks at each of them."""
    rows = slice(start, stop)
    return Step(Q[:, rows], K[:, rows], V[:, rows], MAP, TOKENS, start).but(**changed)


@pytest.fixture(scope="module")
def shared(module_server: Start) -> ServerProcess:
    server = module_server()
    resp = AttentionClient(server)
    for layer in range(3):
        resp.store("s", layer, *PREFIX)
    return server


class Lanes:
    """A connection to each lane of a server."""

    def __init__(self, server: ServerProcess) -> None:
        self.resp = AttentionClient(server)
        self.binary = BinaryClient(server.host, server.port + 1)

    def frame(self, step: Step) -> bytes:
        status, reply = self.binary.call(STEP, step.body())
        assert status == OK
        return reply

    def call(self, step: Step) -> bytes:
        reply = self.resp.raw.call(*step.words())
        assert isinstance(reply, bytes)
        return reply

    def refusal(self, step: Step) -> tuple[str, int]:
        """The error on RESP and the status of the frame, whose body is empty."""
        status, reply = self.binary.call(STEP, step.body())
        assert reply == b""
        return self.resp.raw.error(*step.words()), status

    def figures(self) -> tuple[int, int]:
        info = self.resp.info()
        return info["decode_sessions"], info["decode_bytes"]


@pytest.fixture
def lanes(shared: ServerProcess) -> Lanes:
    return Lanes(shared)


_TOKENS = (b"%016d" % number for number in range(10_000))


@pytest.fixture
def token() -> bytes:
    return next(_TOKENS)


# --- what a session answers --------------------------------------------------------------------


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cuts=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    window=st.sampled_from([0, 1, 5, 48, 60, 1000]),
    lane_of=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_both_lanes_share_a_session_and_answer_the_same_bits(
    lanes: Lanes, cuts: list[int], window: int, lane_of: list[bool]
) -> None:
    """Every step goes to one lane and is repeated on the other, which appends nothing."""
    token, at = next(_TOKENS), 0
    for rows, over_resp in zip(cuts, lane_of, strict=False):
        step = piece(at, at + rows, token=token, window=window)
        at += rows
        asked = [lanes.call, lanes.frame]
        first, again = asked if over_resp else asked[::-1]
        reply = first(step)
        assert again(step) == reply
        assert_equal_to_float64(step, reply, PREFIX, (K[:, :at], V[:, :at]))


def test_a_step_equals_query_fused_with_all_of_the_suffix(lanes: Lanes, token: bytes) -> None:
    """To rounding: the tiles are cut alike, the masks are not."""
    lanes.frame(piece(0, 10, token=token))
    for at in range(10, 14):
        step = piece(at, at + 1, token=token)
        out, _ = step.parts(lanes.frame(step))
        suffix = K[:, : at + 1], V[:, : at + 1]
        wanted = lanes.resp.ask(fused_words("s", 0, step.q, *suffix, MAP), *out.shape)
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


def test_sessions_of_two_clients_do_not_meet(shared: ServerProcess) -> None:
    """Interleaved on one prefix, three layers each, different texts, one rewinds."""
    clients = [(Lanes(shared), next(_TOKENS)) for _ in range(2)]
    texts = [(K, V), (normal(8, *K.shape), normal(9, *V.shape))]
    for at in range(0, 20, 2):
        for (lanes, token), (k, v) in zip(clients, texts, strict=True):
            for layer in range(3):
                rows = slice(at, at + 2)
                step = Step(Q[:, rows], k[:, rows], v[:, rows], MAP, TOKENS, at)
                step = step.but(token=token, layer=layer)
                reply = lanes.frame(step) if layer else lanes.call(step)
                assert_equal_to_float64(step, reply, PREFIX, (k[:, : at + 2], v[:, : at + 2]))
    lanes, token = clients[0]
    lanes.frame(piece(5, 6, token=token, length=20, drop=15))
    lanes, token = clients[1]
    step = piece(20, 21, token=token)
    suffix = [
        np.concatenate([t[:, :20], n[:, 20:21]], axis=1)
        for t, n in zip(texts[1], (K, V), strict=True)
    ]
    assert_equal_to_float64(step, lanes.frame(step), PREFIX, (suffix[0], suffix[1]))


def test_a_rewind_and_new_rows_are_one_step(lanes: Lanes, token: bytes) -> None:
    """Speculation: five drafts, three of them wrong."""
    lanes.frame(piece(0, 8, token=token))
    lanes.frame(piece(8, 13, token=token))
    step = piece(10, 11, token=token).but(k=K[:, 30:31], v=V[:, 30:31], length=13, drop=3)
    suffix = tuple(np.concatenate([t[:, :10], t[:, 30:31]], axis=1) for t in (K, V))
    reply = lanes.frame(step)
    assert_equal_to_float64(step, reply, PREFIX, (suffix[0], suffix[1]))
    assert lanes.call(step) == reply


def test_the_bytes_of_a_step_do_not_depend_on_the_suffix(lanes: Lanes, token: bytes) -> None:
    sizes = set()
    for at in range(10, 30):
        step = piece(at, at + 1, token=token, length=at if at > 10 else 0)
        if at == 10:
            step = piece(0, 11, token=token)
            lanes.frame(step)
            continue
        reply = lanes.frame(step)
        sizes.add(
            (len(pack(STEP, step.body())), len(lanes.resp.raw.pack(*step.words())), len(reply))
        )
    floats = (HEADS + 2 * KV_HEADS) * DIM * 4
    ((binary, resp, reply_bytes),) = sizes
    assert binary == 7 + 60 + floats + HEADS + 1
    assert reply_bytes == HEADS * (DIM + 1) * 4
    assert resp < binary + 200


def stored_words(sid: str) -> tuple[Any, ...]:
    """Of ATTEND.PREFIX.STORE: `PREFIX` as layer 0 of `sid`."""
    return sid, 0, *PREFIX[0].shape, *(side.tobytes() for side in PREFIX)


# --- who may, and what is forgotten ------------------------------------------------------------


def test_a_stranger_finds_nothing(lanes: Lanes, token: bytes) -> None:
    lanes.frame(piece(0, 5, token=token))
    for other in (piece(5, 6, token=next(_TOKENS)), piece(5, 6, token=token, layer=1)):
        text, status = lanes.refusal(other)
        assert text.startswith("REPLAY ")
        assert status == REPLAY
        assert token.decode() not in text
    lanes.frame(piece(5, 6, token=token))


def test_close_forgets_on_either_lane(lanes: Lanes, token: bytes) -> None:
    before = lanes.figures()
    lanes.frame(piece(0, 5, token=token))
    lanes.frame(piece(0, 5, token=token, layer=2))
    room = 2 * 2 * 4 * KV_HEADS * DIM * 64
    assert lanes.figures() == (before[0] + 1, before[1] + room)
    assert lanes.resp.raw.call("ATTEND.DECODE.CLOSE", "s", token) == 1
    assert lanes.resp.raw.call("ATTEND.DECODE.CLOSE", "s", token) == 0
    assert lanes.figures() == before
    lanes.frame(piece(0, 5, token=token))
    body = struct.pack("<H", 1) + b"s" + token
    assert lanes.binary.call(CLOSE, body) == lanes.binary.call(CLOSE, body) == (OK, b"")
    assert lanes.figures() == before
    assert lanes.refusal(piece(5, 6, token=token))[1] == REPLAY


def test_a_connection_that_ends_takes_nothing_along(shared: ServerProcess, token: bytes) -> None:
    """A step whose reply was lost is asked again on another connection."""
    lost = BinaryClient(shared.host, shared.port + 1)
    lost.call(STEP, piece(0, 5, token=token).body())
    lost.socket.sendall(pack(STEP, piece(5, 6, token=token).body()))
    lost.close()
    lanes = Lanes(shared)
    step = piece(5, 6, token=token)
    assert_equal_to_float64(step, lanes.frame(step), PREFIX, (K[:, :6], V[:, :6]))
    assert lanes.refusal(piece(5, 7, token=token))[1] == REPLAY
    lanes.frame(piece(6, 7, token=token))


def test_dropping_the_prefix_drops_what_continues_it(lanes: Lanes, token: bytes) -> None:
    lanes.resp.store("gone", 0, *PREFIX)
    lanes.frame(piece(0, 5, token=token, sid=b"gone"))
    lanes.resp.raw.call("ATTEND.PREFIX.DROP", "gone")
    assert lanes.refusal(piece(5, 6, token=token, sid=b"gone")) == ("ERR session not found", ERROR)
    lanes.resp.store("gone", 0, *PREFIX)
    assert lanes.refusal(piece(5, 6, token=token, sid=b"gone"))[1] == REPLAY


def test_another_prefix_under_the_name_is_refused(lanes: Lanes, token: bytes) -> None:
    """N is part of every step: positions count on it."""
    lanes.resp.store("other", 0, *PREFIX)
    lanes.frame(piece(0, 5, token=token, sid=b"other"))
    lanes.resp.store("other", 0, PREFIX[0][:, :40], PREFIX[1][:, :40])
    text, status = lanes.refusal(piece(5, 6, token=token, sid=b"other"))
    assert text == "ERR ATTEND.DECODE.STEP: the prefix has 40 tokens, not 50"
    assert status == ERROR
    assert lanes.refusal(piece(5, 6, token=token, sid=b"other", prefix=40))[1] == REPLAY


def test_a_prefix_of_the_same_shape_stored_anew_is_another_prefix(
    lanes: Lanes, token: bytes
) -> None:
    """What was appended belongs to the K/V it was computed behind, not to their shape."""
    lanes.resp.store("anew", 0, *PREFIX)
    lanes.frame(piece(0, 5, token=token, sid=b"anew"))
    lanes.resp.store("anew", 0, *PREFIX[::-1])
    assert lanes.refusal(piece(5, 6, token=token, sid=b"anew"))[1] == REPLAY
    whole = piece(0, 6, token=next(_TOKENS), sid=b"anew").but(q=Q[:, 5:6])
    assert_equal_to_float64(whole, lanes.frame(whole), PREFIX[::-1], (K[:, :6], V[:, :6]))


def test_a_step_behind_another_fill_finds_no_session(lanes: Lanes, token: bytes) -> None:
    lanes.resp.store("filled", 0, *PREFIX)
    for fill in (1, 2**63 - 1):
        text, status = lanes.refusal(piece(0, 5, token=token, sid=b"filled", fill=fill))
        assert text == "ERR session not found: it is of fill 0"
        assert status == ERROR
    lanes.frame(piece(0, 5, token=token, sid=b"filled"))


def test_a_restart_forgets_sessions_and_prefixes(server: Start) -> None:
    running = server()
    lanes = Lanes(running)
    lanes.resp.store("s", 0, *PREFIX)
    lanes.frame(piece(0, 5))
    running.kill()
    running.restart()
    lanes = Lanes(running)
    assert lanes.refusal(piece(5, 6)) == ("ERR session not found", ERROR)
    lanes.resp.store("s", 0, *PREFIX)
    assert lanes.refusal(piece(5, 6))[1] == REPLAY
    whole = piece(0, 6, token=b"another token...").but(q=Q[:, 5:6])
    assert_equal_to_float64(whole, lanes.frame(whole), PREFIX, (K[:, :6], V[:, :6]))


def test_a_cold_prefix_is_coldmiss_and_appends_nothing(server: Start) -> None:
    running = server("--sdpa-slots", "1")
    lanes = Lanes(running)
    raw = lanes.resp.raw
    raw.call("KV.PREFIX.REGISTER", "n", KV_HEADS * DIM, "fp32")
    fill = raw.call("KV.PREFIX.META", "n", "BEGIN")
    for side, rows in zip(("pk", "pv"), PREFIX, strict=True):
        flat = np.ascontiguousarray(rows.transpose(1, 0, 2)).tobytes()
        raw.call("V.STOREBATCH", f"n_{side}", 0, 0, TOKENS, flat, "GEN", fill)
    raw.call("KV.PREFIX.META", "n", "SET", fill, b"whole")
    lanes.resp.raw.call("ATTEND.PREFIX.STORE", *stored_words("n_attn"), "GEN", fill)
    lanes.frame(piece(0, 5, sid=b"n_attn", fill=fill))
    lanes.resp.store("other", 0, *PREFIX)
    step = piece(5, 6, sid=b"n_attn", fill=fill)
    text, status = lanes.refusal(step)
    assert text.startswith("COLDMISS session evicted to cold tier")
    assert status == COLDMISS
    silent = step.but(q=Q[:, :0])  # rows alone need no prefix in memory
    assert lanes.frame(silent) == lanes.call(silent) == b""
    assert raw.call("KV.PREFIX.WARM", "n", HEADS, DIM, "n_attn") == "1"
    assert_equal_to_float64(step, lanes.frame(step), PREFIX, (K[:, :6], V[:, :6]))


def test_memory_counts_and_the_oldest_session_makes_room(server: Start) -> None:
    """Slot and three sessions of 64 rows fit; the fourth ends the first, never its own."""
    room = 2 * 4 * KV_HEADS * DIM * 64
    slot = 2 * 4 * KV_HEADS * DIM * TOKENS
    running = server("--maxmemory", str(slot + 3 * room + 100))
    lanes = Lanes(running)
    lanes.resp.store("s_attn", 0, *PREFIX)
    tokens = [b"%016d" % number for number in range(4)]
    for token in tokens:
        lanes.frame(piece(0, 5, token=token, sid=b"s_attn"))
    assert lanes.figures() == (3, 3 * room)
    info = lanes.resp.info()
    assert (info["decode_evictions"], info["sdpa_demotions"]) == (1, 0)
    assert lanes.refusal(piece(5, 6, token=tokens[0], sid=b"s_attn"))[1] == REPLAY
    lanes.frame(piece(5, 6, token=tokens[1], sid=b"s_attn"))
    big = np.zeros((KV_HEADS, 3000, DIM), np.float32)
    text, status = lanes.refusal(piece(6, 7, token=tokens[1], sid=b"s_attn", k=big, v=big))
    assert text.startswith("OOM ")
    assert status == ERROR
    lanes.frame(piece(6, 7, token=tokens[1], sid=b"s_attn"))


def test_count_and_idleness_end_sessions(server: Start) -> None:
    running = server("--decode-sessions", "2", "--decode-idle", "1")
    lanes = Lanes(running)
    lanes.resp.store("s", 0, *PREFIX)
    for number in range(3):
        lanes.frame(piece(0, 5, token=b"%016d" % number))
    assert lanes.figures()[0] == 2
    deadline = time.monotonic() + 20
    while lanes.figures() != (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert lanes.refusal(piece(5, 6, token=b"%016d" % 2))[1] == REPLAY


# --- bad input ---------------------------------------------------------------------------------

GOOD = piece(3, 5)
WIDE = normal(6, HEADS, 2, 64), normal(7, KV_HEADS, 2, 64)

REFUSED: dict[str, Step] = {
    "unknown sid": GOOD.but(sid=b"nobody"),
    "unknown layer": GOOD.but(layer=9),
    "no sid": GOOD.but(sid=b""),
    "sid too long": GOOD.but(sid=b"s" * 206),
    "other D": GOOD.but(q=WIDE[0], k=WIDE[1], v=WIDE[1]),
    "other kv heads": GOOD.but(k=K[:1, 3:5], v=V[:1, 3:5], head_map=bytes(4)),
    "no group": GOOD.but(q=Q[:3, 3:5], head_map=b"\0\0\1"),
    "head_map": GOOD.but(head_map=b"\0\0\1\2"),
    "other N": GOOD.but(prefix=TOKENS + 1),
    "no N": GOOD.but(prefix=0),
    "drops more than there is": GOOD.but(drop=4),
    "more queries than rows": GOOD.but(q=Q[:, :6]),
    "no row at all": GOOD.but(length=0, k=K[:, :0], v=V[:, :0]),
    "positions beyond 2^31": GOOD.but(length=2**31 - 50),
    "a length beyond 2^31": GOOD.but(length=2**32 - 1),
    "a window beyond 2^31": GOOD.but(window=2**31),
}


def with_sizes(body: bytes, **changed: int) -> bytes:
    """`body` with header fields replaced, what follows as it was."""
    names = "sid_length layer heads kv_heads dim zero prefix length drop many rows window"
    fields = [*names.split(), "token", "fill"]
    sizes = dict(zip(fields, struct.unpack_from(SIZES, body), strict=True)) | changed
    return struct.pack(SIZES, *sizes.values()) + body[struct.calcsize(SIZES) :]


LARGEST = {"heads": 65535, "kv_heads": 65535, "dim": 65535, "many": 2**32 - 1, "rows": 2**32 - 1}
UNPARSABLE: dict[str, bytes] = {
    "one byte long": GOOD.body() + b"\0",
    "reserved bits": with_sizes(GOOD.body(), zero=1),
    "more queries than sent": with_sizes(GOOD.body(), many=3),
    "fewer queries than sent": with_sizes(GOOD.body(), many=1),
    "more rows than sent": with_sizes(GOOD.body(), rows=3),
    "fewer rows than sent": with_sizes(GOOD.body(), rows=1),
    "a longer sid": with_sizes(GOOD.body(), sid_length=2),
    "a sid of all there is": with_sizes(GOOD.body(), sid_length=65535),
    "all at their largest": with_sizes(GOOD.body(), **LARGEST),
    "one size at its largest": with_sizes(GOOD.body(), rows=2**32 - 1),
}


@pytest.fixture
def begun(lanes: Lanes, token: bytes) -> Callable[[], None]:
    """A session of three rows; the fixture's value checks that it still has just these."""
    lanes.frame(piece(0, 3, token=token))

    def unchanged() -> None:
        step = piece(3, 4, token=token)
        assert_equal_to_float64(step, lanes.frame(step), PREFIX, (K[:, :4], V[:, :4]))

    return unchanged


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_an_error_and_changes_nothing(
    lanes: Lanes, begun: Callable[[], None], token: bytes, case: str
) -> None:
    before = lanes.figures()
    text, status = lanes.refusal(REFUSED[case].but(token=token))
    assert text.startswith("ERR ")
    assert status == ERROR
    assert lanes.figures() == before
    begun()


@pytest.mark.parametrize("case", UNPARSABLE)
def test_a_body_that_does_not_add_up_is_miss(
    lanes: Lanes, begun: Callable[[], None], token: bytes, case: str
) -> None:
    assert lanes.binary.call(STEP, with_token(UNPARSABLE[case], token)) == (MISS, b"")
    begun()


def with_token(body: bytes, token: bytes) -> bytes:
    return body[:36] + token + body[52:]


def test_a_body_cut_at_every_byte_is_miss(
    lanes: Lanes, begun: Callable[[], None], token: bytes
) -> None:
    small = piece(3, 4, token=token)
    body = replace(small, q=small.q[:2], head_map=b"\0\1").body()
    frames = [pack(STEP, body[:cut]) for cut in range(len(body))]
    for chunk in (frames[:100], frames[100:]):
        lanes.binary.socket.sendall(b"".join(chunk))
        assert {lanes.binary.read() for _ in chunk} == {(MISS, b"")}
    begun()


@pytest.mark.parametrize(
    "body", [b"", b"\x01", b"\x01\0s", b"\x01\0s" + bytes(15), b"\0\0" + TOKEN]
)
def test_a_close_that_does_not_add_up_closes_nothing(
    lanes: Lanes, begun: Callable[[], None], body: bytes
) -> None:
    assert lanes.binary.call(CLOSE, body)[0] in (MISS, ERROR)
    assert lanes.resp.raw.error("ATTEND.DECODE.CLOSE", "s", body).startswith("ERR ")
    begun()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(0, 59), byte=st.integers(0, 255), cut=st.integers(0, 9))
def test_any_header_gets_one_reply(lanes: Lanes, position: int, byte: int, cut: int) -> None:
    good = piece(0, 2, token=b"any header......")
    body = bytearray(good.body())
    body[position] = byte
    status, reply = lanes.binary.call(STEP, bytes(body[: len(body) - cut]))
    assert (status == OK) == bool(reply)
    assert status in (OK, MISS, ERROR, REPLAY)
    assert lanes.binary.call(0xFF) == (OK, b"")


def test_wrong_words_are_errors(lanes: Lanes, begun: Callable[[], None], token: bytes) -> None:
    words = list(piece(3, 5, token=token).words())
    wrong: list[tuple[int, str | bytes | int]] = [
        *((2, "x"), (2, -1), (3, token[:15]), (3, token + b"x"), (4, 0), (4, 70000))
    ]
    for position, word in wrong:
        assert lanes.resp.raw.error(*words[:position], word, *words[position + 1 :])
    for position in set(range(4, 15)) - {11}:  # without queries a step only appends
        for word in ("-1", "", "1e3", "99999999999999999999"):
            assert lanes.resp.raw.error(*words[:position], word, *words[position + 1 :])
    assert lanes.resp.raw.error(*words[:-1])
    assert lanes.resp.raw.error(*words, 0, 0)
    begun()


def test_a_slow_frame_holds_up_nobody(shared: ServerProcess, token: bytes) -> None:
    lanes = Lanes(shared)
    with closing(socket.create_connection((shared.host, shared.port + 1))) as slow:
        slow.sendall(pack(STEP, piece(0, 3, token=token).body())[:-5])
        lanes.frame(piece(0, 3, token=next(_TOKENS)))
    assert lanes.refusal(piece(3, 4, token=token))[1] == REPLAY


def test_values_that_are_no_numbers_stay_with_their_session(lanes: Lanes, token: bytes) -> None:
    bad: F32 = np.full((KV_HEADS, 1, DIM), np.nan, np.float32)
    step = piece(0, 1, token=token).but(k=bad, v=bad)
    assert np.isnan(step.parts(lanes.frame(step))[0]).all()
    assert lanes.call(step) == lanes.frame(step)
    good = piece(0, 1, token=token, length=1, drop=1)
    assert_equal_to_float64(good, lanes.frame(good), PREFIX, (K[:, :1], V[:, :1]))


def test_queries_that_are_no_numbers_spoil_themselves_only(lanes: Lanes, token: bytes) -> None:
    lanes.frame(piece(0, 3, token=token))
    step = piece(3, 5, token=token)
    bad = step.q.copy()
    bad[1, 0, 7] = np.nan
    out, lse = step.parts(lanes.frame(step.but(q=bad)))
    assert np.isnan(out[1, 0]).all()
    assert np.isnan(lse[1, 0])
    assert np.isnan(out).sum() == DIM
    # Asked again with numbers: what was appended is what is there.
    assert_equal_to_float64(step, lanes.frame(step), PREFIX, (K[:, :5], V[:, :5]))


def test_one_prefix_token_no_new_row_and_a_window_longer_than_all(
    lanes: Lanes, token: bytes
) -> None:
    single = PREFIX[0][:, :1], PREFIX[1][:, :1]
    lanes.resp.store("single", 0, *single)
    first = piece(0, 2, token=token, sid=b"single", prefix=1)
    assert_equal_to_float64(first, lanes.frame(first), single, (K[:, :2], V[:, :2]))
    again = first.but(length=2, k=K[:, :0], v=V[:, :0])
    for window in (0, 3, 4, 2**31 - 1):
        step = again.but(window=window)
        assert_equal_to_float64(step, lanes.frame(step), single, (K[:, :2], V[:, :2]))
        assert lanes.call(step) == lanes.frame(step)


def test_without_the_engine_steps_are_errors(server: Start) -> None:
    lanes = Lanes(server("--no-attention"))
    text, status = lanes.refusal(piece(0, 2))
    assert text.startswith("ERR attention engine not available")
    assert status == ERROR
