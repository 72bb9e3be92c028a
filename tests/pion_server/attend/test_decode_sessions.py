"""Decode sessions without an engine: who is held, for how long, and what counts."""

from __future__ import annotations

import numpy as np
import pytest

from pion_server.attend.decode import DecodeSessions, Suffix
from pion_server.attend.sessions import Shape
from pion_server.errors import BadArgument, Replay
from tests.pion_server.attend.decoding import Step

PREFIX = Shape(1, 9, 32)
ROW = 2 * 4 * 32


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(token: int = 0, length: int = 0, rows: int = 1, layer: int = 0, sid: bytes = b"s") -> Step:
    none, new = np.zeros((1, 0, 32), np.float32), np.zeros((1, rows, 32), np.float32)
    return Step(none, new, new, b"\0", 9, length, sid=sid, layer=layer, token=b"%016d" % token)


def take(sessions: DecodeSessions, one: Step, prefix: Shape = PREFIX) -> Suffix:
    """A step as the service does it, the engine's part played here."""
    request = one.request()
    with sessions.stepping(request) as session:
        suffix = sessions.open(session, request, prefix)
        suffix.length = request.end
    return suffix


def held(sessions: DecodeSessions, token: int, sid: bytes = b"s") -> bool:
    return sessions.close((sid, b"%016d" % token))


def test_a_session_begins_at_length_0_and_nowhere_else() -> None:
    sessions = DecodeSessions()
    with pytest.raises(Replay, match=r"^REPLAY no such decode session"):
        take(sessions, step(length=1))
    assert (sessions.count, sessions.nbytes) == (0, 0)
    first = take(sessions, step())
    assert take(sessions, step(length=1)) is first
    with pytest.raises(Replay, match="layer 7"):
        take(sessions, step(length=1, layer=7))
    assert take(sessions, step(layer=7)) is not first
    assert sessions.count == 1


def test_room_grows_by_half_and_is_counted() -> None:
    sessions = DecodeSessions()
    take(sessions, step())
    assert sessions.nbytes == 64 * ROW
    take(sessions, step(length=1, rows=63))
    assert sessions.nbytes == 64 * ROW
    take(sessions, step(length=64))
    assert sessions.nbytes == 128 * ROW
    take(sessions, step(layer=1, rows=1000))
    assert sessions.nbytes == (128 + 1536) * ROW
    assert held(sessions, 0)
    assert sessions.nbytes == 0


def test_beyond_the_limit_the_least_recently_used_ends() -> None:
    sessions = DecodeSessions(limit=2)
    take(sessions, step(1))
    take(sessions, step(2))
    take(sessions, step(1, length=1))
    take(sessions, step(3))
    assert (sessions.count, sessions.evictions, sessions.nbytes) == (2, 1, 2 * 64 * ROW)
    assert [held(sessions, token) for token in (1, 2, 3)] == [True, False, True]


def test_an_idle_session_ends() -> None:
    clock = Clock()
    sessions = DecodeSessions(idle=10, clock=clock)
    take(sessions, step(1))
    clock.now = 5
    take(sessions, step(2))
    clock.now = 10
    sessions.drop_idle()
    assert [held(sessions, token) for token in (1, 2)] == [False, True]
    assert (sessions.nbytes, sessions.evictions) == (0, 1)


def test_a_step_under_way_keeps_its_session() -> None:
    clock = Clock()
    sessions = DecodeSessions(limit=1, idle=10, clock=clock)
    take(sessions, step(1))
    request = step(1, length=1).request()
    with sessions.stepping(request) as session:
        clock.now = 100
        sessions.drop_idle()
        take(sessions, step(2))
        (victim,) = sessions.victims(None)
        victim.evict()
        assert sessions.open(session, request, PREFIX).length == 1
    assert [held(sessions, token) for token in (1, 2)] == [True, False]


def test_a_session_closed_during_a_step_is_replay() -> None:
    sessions = DecodeSessions()
    take(sessions, step(1))
    request = step(1, length=1).request()
    with sessions.stepping(request) as session:
        assert held(sessions, 1)
        with pytest.raises(Replay, match="closed"):
            sessions.open(session, request, PREFIX)
    assert (sessions.count, sessions.nbytes) == (0, 0)


def test_a_step_that_outlives_its_session_leaves_the_next_of_that_name_alone() -> None:
    sessions = DecodeSessions()
    with sessions.stepping(step(1).request()) as session:
        assert held(sessions, 1)
        take(sessions, step(1))
        with pytest.raises(Replay, match="closed"):
            sessions.open(session, step(1).request(), PREFIX)
    assert (sessions.count, sessions.nbytes) == (1, 64 * ROW)


def test_a_first_step_that_fails_leaves_nothing() -> None:
    sessions = DecodeSessions()
    with pytest.raises(BadArgument), sessions.stepping(step().request()):
        raise BadArgument("no")
    assert sessions.count == 0


def test_memory_is_made_by_ending_sessions_of_any_namespace() -> None:
    sessions = DecodeSessions()
    for token, sid in ((1, b"a_attn"), (2, b"b"), (3, b"a_attn")):
        take(sessions, step(token, sid=sid))
    victims = list(sessions.victims(b"a"))
    assert [victim.nbytes for victim in victims] == [64 * ROW] * 3
    victims[0].evict()
    victims[0].evict()
    assert (sessions.count, sessions.evictions, sessions.nbytes) == (2, 1, 128 * ROW)
    assert not held(sessions, 1, b"a_attn")


def test_what_continues_a_dropped_prefix_goes_with_it() -> None:
    sessions = DecodeSessions()
    for token, sid, layer in ((1, b"a", 0), (1, b"a", 1), (2, b"b", 0)):
        take(sessions, step(token, sid=sid, layer=layer))
    sessions.drop(b"a", 1)
    assert sessions.nbytes == 2 * 64 * ROW
    with pytest.raises(Replay):
        take(sessions, step(1, sid=b"a", layer=1, length=1))
    sessions.drop(b"a")
    assert (sessions.count, sessions.nbytes) == (1, 64 * ROW)


def test_a_prefix_of_another_shape_is_replay() -> None:
    sessions = DecodeSessions()
    take(sessions, step())
    with pytest.raises(Replay, match="replaced"):
        take(sessions, step(length=1), PREFIX._replace(tokens=10))
