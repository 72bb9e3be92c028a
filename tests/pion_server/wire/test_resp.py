"""The request parser: what it accepts, what it refuses, and what it never does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion_server.process import rss_bytes
from pion_server.wire.resp import SCRATCH, UNAUTHENTICATED, Limits, ProtocolError, RequestParser

SMALL = Limits(bulk=1 << 20, elements=1000, request=1 << 21)


def make_parser(limits: Limits | None = None) -> RequestParser:
    return RequestParser(memoryview(bytearray(SCRATCH)), limits)


def pack(*args: bytes) -> bytes:
    body = b"".join(b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args)
    return b"*%d\r\n%b" % (len(args), body)


def feed(
    parser: RequestParser, data: bytes, requests: list[list[bytes]] | None = None
) -> list[list[bytes]]:
    """Everything `data` completes, written into the parser's own buffers as a socket would."""
    requests = [] if requests is None else requests
    view = memoryview(data)
    while view:
        buffer = parser.get_buffer()
        n = min(len(buffer), len(view))
        buffer[:n] = view[:n]
        view = view[n:]
        parser.buffer_updated(n)
        while (request := parser.next_request()) is not None:
            requests.append([bytes(arg) for arg in request])
    return requests


def refusal(data: bytes, limits: Limits | None = None) -> str:
    with pytest.raises(ProtocolError) as caught:
        feed(make_parser(limits), data)
    return str(caught.value)


EIGHT_ARGS = [b"SET", b"", b"a" * 3, b"\r\n$-1\r\n", bytes(range(256)), b"b" * 70_000]
EIGHT_ARGS += [b"c" * SCRATCH, b"d" * 999_999]


def test_a_large_command_survives_any_single_split() -> None:
    """H05: eight arguments, cut at each of the header bytes and around them."""
    data = pack(*EIGHT_ARGS)
    cuts = set(range(200)) | {len(data) - n for n in range(1, 20)}
    position = len(b"*8\r\n")
    for arg in EIGHT_ARGS:
        cuts.update(range(position - 3, position + 14))
        position += len(b"$%d\r\n" % len(arg)) + len(arg) + 2
        cuts.update((position - 2, position - 1))
    for cut in sorted(cut for cut in cuts if 0 < cut < len(data)):
        parser = make_parser()
        got = feed(parser, data[:cut]) + feed(parser, data[cut:])
        assert got == [EIGHT_ARGS], f"split at byte {cut}"


def test_commands_fed_byte_by_byte() -> None:
    """H05: the slowest possible sender."""
    data = pack(b"PING") + b"inline 'two words'\r\n" + pack(b"ECHO", b"x" * 2000) + b"\r\nPING\n"
    parser = make_parser()
    got = [request for i in range(len(data)) for request in feed(parser, data[i : i + 1])]
    assert got == [[b"PING"], [b"inline", b"two words"], [b"ECHO", b"x" * 2000], [b"PING"]]
    assert not parser.in_request


@given(
    st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=6), min_size=1, max_size=6),
    st.lists(st.integers(1, 97), min_size=1),
)
def test_what_was_packed_comes_out_whatever_the_pieces(
    commands: list[list[bytes]], sizes: list[int]
) -> None:
    data = b"".join(pack(*command) for command in commands)
    parser, got, position, step = make_parser(), [], 0, 0
    while position < len(data):
        size = sizes[step % len(sizes)]
        got += feed(parser, data[position : position + size])
        position, step = position + size, step + 1
    assert got == commands


_FRAGMENT = st.sampled_from(
    [
        b"*",
        b"$",
        b"\r\n",
        b"\n",
        b"\r",
        b"0",
        b"1",
        b"3",
        b"-1",
        b"99999999999",
        b"PING",
        b'"',
        b"'",
    ]
)


@given(st.lists(st.one_of(_FRAGMENT, st.binary(max_size=8)), max_size=40))
def test_arbitrary_bytes_are_requests_or_a_protocol_error(fragments: list[bytes]) -> None:
    """And the same ones, whether they come at once or one by one."""
    data = b"".join(fragments)
    assert outcome([data]) == outcome([data[i : i + 1] for i in range(len(data))])


def outcome(chunks: list[bytes]) -> list[list[bytes]]:
    """The requests, with the refusal, if any, as a last one."""
    parser = make_parser(SMALL)
    requests: list[list[bytes]] = []
    try:
        for chunk in chunks:
            feed(parser, chunk, requests)
    except ProtocolError as error:
        requests.append([b"refused", str(error).encode("ascii")])
    assert all(requests)
    return requests


@pytest.mark.parametrize("length", [b"-2", b"-1", b"+5", b"05", b" 5", b"5 ", b"5a", b"", b"1e3"])
def test_only_canonical_lengths_are_accepted(length: bytes) -> None:
    """H08."""
    assert refusal(b"*1\r\n$" + length + b"\r\n") == "invalid bulk length"


@pytest.mark.parametrize(
    "length", [536870913, 2147483645, 2147483648, 4294967296, 2**63 - 1, 2**64, 10**30]
)
def test_bulk_lengths_over_the_limit_are_refused(length: int) -> None:
    """H07, H08: nothing wraps at 32 or 64 bits."""
    assert refusal(b"*1\r\n$%d\r\n" % length) == "invalid bulk length"


@pytest.mark.parametrize(
    "count", [b"1048577", b"4294967295", b"9223372036854775807", b"-2", b"+1", b"01", b"x", b""]
)
def test_array_lengths_out_of_range_are_refused(count: bytes) -> None:
    """H07."""
    assert refusal(b"*" + count + b"\r\n") == "invalid multibulk length"


def test_a_bad_length_is_refused_before_its_line_ends() -> None:
    """A client that counts characters waits for an answer: none of its bytes may be waited for."""
    assert refusal(b"*1\r\n$4x") == "invalid bulk length"
    assert refusal(b"*1\r\n$12345678901") == "invalid bulk length"
    assert refusal(b"*1x") == "invalid multibulk length"


@pytest.mark.parametrize("size", [1, 4, 20_000, SCRATCH + 5])
def test_a_client_that_counts_characters_is_refused_at_once(size: int) -> None:
    """`é` counts 1 and takes 2 bytes: the byte where CR should stand decides."""
    name = "é".encode() * size
    data = b"*2\r\n$4\r\nECHO\r\n$%d\r\n" % size + name
    assert refusal(data) == "invalid bulk length"


@pytest.mark.parametrize("first", [b"*", b":", b"+", b"-", b"%", b"4", b"\x00", b"\n"])
def test_anything_but_a_bulk_string_inside_a_command_is_refused(first: bytes) -> None:
    """H07: nested arrays among them, so depth is always 1."""
    text = refusal(b"*2\r\n$4\r\nPING\r\n" + first)
    assert text.startswith("expected '$', got '")
    assert text.isprintable()


def test_deep_nesting_is_refused_at_its_second_level() -> None:
    """H07."""
    assert refusal(b"*1\r\n" * 10_000) == "expected '$', got '*'"


def test_empty_arrays_and_empty_lines_ask_for_nothing() -> None:
    assert feed(make_parser(), b"*0\r\n*-1\r\n\r\n\n  \r\n" + pack(b"PING")) == [[b"PING"]]


def test_an_empty_command_name_is_a_command() -> None:
    assert feed(make_parser(), pack(b"")) == [[b""]]


def test_a_huge_bulk_header_costs_nothing_until_its_bytes_come() -> None:
    """H07: 100 connections announce 500 MB each."""
    parsers = [make_parser() for _ in range(100)]
    before = rss_bytes()
    for parser in parsers:
        feed(parser, b"*1\r\n$524288000\r\nabc")
    for parser in parsers:
        feed(parser, b"d" * 1000)
    # A page or two each, where the announced 50 GB would be ten times this machine.
    assert rss_bytes() - before < 100 * (2 << 20)


def test_a_huge_array_header_costs_nothing() -> None:
    """H07."""
    parser = make_parser()
    before = rss_bytes()
    feed(parser, b"*1048576\r\n")
    assert rss_bytes() - before < 1 << 20


def test_long_arguments_are_views_of_their_own_buffer() -> None:
    parser = make_parser()
    first = _one(parser, pack(b"SET", b"a" * (SCRATCH + 1)))
    second = _one(parser, pack(b"SET", b"b" * (SCRATCH + 1)))
    assert isinstance(first[1], memoryview)
    assert bytes(first[1]) == b"a" * (SCRATCH + 1)
    assert bytes(second[1]) == b"b" * (SCRATCH + 1)
    assert isinstance(_one(parser, pack(b"SET", b"c" * SCRATCH))[1], bytes)


def _one(parser: RequestParser, data: bytes) -> list[bytes | bytearray | memoryview]:
    view = memoryview(data)
    while True:
        buffer = parser.get_buffer()
        n = min(len(buffer), len(view))
        buffer[:n] = view[:n]
        view = view[n:]
        parser.buffer_updated(n)
        request = parser.next_request()
        if request is not None:
            return request


def test_the_whole_request_is_limited() -> None:
    limits = Limits(bulk=1000, elements=100, request=2000)
    assert feed(make_parser(limits), pack(b"a" * 900, b"b" * 900)) == [[b"a" * 900, b"b" * 900]]
    text = refusal(pack(b"a" * 900, b"b" * 900, b"c" * 900), limits)
    assert text == "request exceeds 2000 bytes"
    # Each request counts alone.
    assert len(feed(make_parser(limits), pack(b"a" * 900) * 5)) == 5


def test_strangers_may_only_send_little() -> None:
    parser = make_parser(UNAUTHENTICATED)
    assert feed(parser, pack(b"HELLO", b"3", b"AUTH", b"default", b"p" * 128)) != []
    assert refusal(b"*11\r\n", UNAUTHENTICATED) == "unauthenticated multibulk length"
    assert refusal(b"*2\r\n$16385\r\n", UNAUTHENTICATED) == "unauthenticated bulk length"


def test_an_endless_inline_line_is_refused() -> None:
    assert refusal(b"a" * (SCRATCH + 1)) == "too big inline request"
    assert refusal(b"a" * (SCRATCH + 1) + b"\r\n") == "too big inline request"


def test_unbalanced_quotes_are_refused() -> None:
    for line in (b'GET "a', b"GET 'a", b'GET "a"b', b"GET 'a\\'"):
        assert refusal(line + b"\r\n") == "unbalanced quotes in request"
