"""The frame parser and encoder, without a socket: any cut of the stream is the same stream."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_server.errors import BadArgument, ColdMiss, CommandError, EngineOff, Replay
from pion_server.payload import Payload
from pion_server.wire import binary
from pion_server.wire.binary import FrameParser, Unparsable, encode_frame
from pion_server.wire.resp import Limits, ProtocolError

ROOM = 4096


def make_parser(limits: Limits | None = None) -> FrameParser:
    return FrameParser(memoryview(bytearray(ROOM)), limits)


def pack(command: int, body: bytes = b"", magic: bytes = b"\x5e\xca") -> bytes:
    return magic + struct.pack("<BI", command, len(body)) + body


def feed(parser: FrameParser, data: bytes, step: int) -> list[tuple[int, bytes | None]]:
    """All frames out of `data`, given to the parser `step` bytes at a time."""
    frames: list[tuple[int, bytes | None]] = []
    while data:
        target = parser.get_buffer()
        n = min(step, len(target), len(data))
        target[:n] = data[:n]
        parser.buffer_updated(n)
        data = data[n:]
        while (frame := parser.next_request()) is not None:
            frames.append((frame.command, None if frame.body is None else bytes(frame.body)))
    return frames


def test_a_frame_cut_at_every_byte() -> None:
    stream = pack(0xFF) + pack(0x24, b"body \x5e\xca" * 3) + pack(0x37, b"p")
    expected = [(0xFF, b""), (0x24, b"body \x5e\xca" * 3), (0x37, b"p")]
    for cut in range(len(stream) + 1):
        parser = make_parser()
        assert feed(parser, stream[:cut], ROOM) + feed(parser, stream[cut:], ROOM) == expected
        assert not parser.in_request


def test_one_byte_at_a_time() -> None:
    stream = pack(0x24, bytes(range(256)) * 40) + pack(0xFF)
    assert feed(make_parser(), stream, 1) == [(0x24, bytes(range(256)) * 40), (0xFF, b"")]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=9000)), max_size=6),
    st.integers(1, 5000),
)
def test_any_frames_in_any_pieces(frames: list[tuple[int, bytes]], step: int) -> None:
    parser = make_parser()
    assert feed(parser, b"".join(pack(*frame) for frame in frames), step) == frames
    assert not parser.in_request


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 40))
def test_noise_is_refused_or_incomplete_whatever_its_pieces(noise: bytes, step: int) -> None:
    def outcome(step: int) -> object:
        parser = make_parser()
        try:
            return feed(parser, noise, step)
        except ProtocolError:
            return "refused"

    whole = outcome(ROOM)
    assert outcome(step) == whole
    if noise and not b"\x5e\xca".startswith(noise[:2]):
        assert whole == "refused"


@pytest.mark.parametrize("data", [b"*", b"GET ", b"\x5e\xcb", b"\xca\x5e", b"\x5e*1\r\n"])
def test_a_stranger_is_known_by_its_first_bytes(data: bytes) -> None:
    """A RESP client must not wait for the seven bytes a header has."""
    with pytest.raises(ProtocolError, match="magic"):
        feed(make_parser(), data, ROOM)


def test_a_body_may_have_1_gib_and_no_byte_more() -> None:
    limits = Limits(bulk=1 << 30, request=1 << 31)
    parser = make_parser(limits)
    assert feed(parser, b"\x5e\xca\x24" + struct.pack("<I", 1 << 30), ROOM) == []
    assert len(parser.get_buffer()) == 1 << 30
    with pytest.raises(ProtocolError, match="1073741825"):
        feed(make_parser(limits), b"\x5e\xca\x24" + struct.pack("<I", (1 << 30) + 1), ROOM)
    with pytest.raises(ProtocolError):
        feed(make_parser(Limits(request=99)), pack(0x24, b"x" * 100), ROOM)


@pytest.mark.parametrize("step", [1, 7, 100, ROOM])
def test_a_body_too_long_to_keep_is_read_past(step: int) -> None:
    stream = pack(0x24, b"\x5e\xca" * 5000) + pack(0x37, b"right") + pack(0x24, b"x" * 101)
    frames = feed(make_parser(Limits(bulk=100)), stream, step)
    assert frames == [(0x24, None), (0x37, b"right"), (0x24, None)]


def test_a_large_body_is_received_in_place() -> None:
    parser = make_parser()
    assert feed(parser, pack(0x24, b"x" * 20_000)[:1000], ROOM) == []
    rest = parser.get_buffer()
    assert len(rest) == 20_000 - (1000 - binary.HEADER.size)
    rest[:] = b"y" * len(rest)
    parser.buffer_updated(len(rest))
    frame = parser.next_request()
    assert frame is not None
    assert isinstance(frame.body, memoryview)
    rest[-1:] = b"z"
    assert bytes(frame.body[-1:]) == b"z"


def test_replies_carry_a_status() -> None:
    assert encode_frame(b"abc") == [b"\x5e\xca\x00\x03\x00\x00\x00", b"abc"]
    assert encode_frame(memoryview(b"")) == [b"\x5e\xca\x00\x00\x00\x00\x00", b""]
    assert encode_frame(None) == [b"\x5e\xca\x00\x00\x00\x00\x00"]
    lazy = Payload(5, lambda: iter([b"12345"]))
    assert encode_frame(lazy) == [b"\x5e\xca\x00\x05\x00\x00\x00", lazy]
    for error, status in (
        (Unparsable("x"), 1),
        (CommandError("x"), 2),
        (BadArgument("x"), 2),
        (EngineOff("x"), 2),
        (ColdMiss("x"), 3),
        (Replay("x"), 4),
    ):
        assert encode_frame(error) == [b"\x5e\xca%c\x00\x00\x00\x00" % status]
    with pytest.raises(TypeError):
        encode_frame(["a", "list"])
