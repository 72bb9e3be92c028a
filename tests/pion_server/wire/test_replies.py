"""Python values as RESP2 and RESP3, compared with bytes and read back by hiredis."""

from __future__ import annotations

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion_server.errors import BadArgument
from pion_server.payload import Payload
from pion_server.wire.replies import Attached, Verbatim, encode, one_line


def joined(value: object, protocol: int) -> bytes:
    out = b""
    for piece in encode(value, protocol):
        if isinstance(piece, Payload):
            out += b"".join(bytes(chunk) for chunk in piece.chunks())  # type: ignore[arg-type]
        else:
            assert not isinstance(piece, Attached)
            out += bytes(piece)
    return out


@pytest.mark.parametrize(
    ("value", "resp2", "resp3"),
    [
        ("OK", b"+OK\r\n", b"+OK\r\n"),
        (None, b"$-1\r\n", b"_\r\n"),
        (b"", b"$0\r\n\r\n", b"$0\r\n\r\n"),
        (7, b":7\r\n", b":7\r\n"),
        (-(2**63), b":-9223372036854775808\r\n", b":-9223372036854775808\r\n"),
        (True, b":1\r\n", b"#t\r\n"),
        (0.5, b"$3\r\n0.5\r\n", b",0.5\r\n"),
        ([1, None], b"*2\r\n:1\r\n$-1\r\n", b"*2\r\n:1\r\n_\r\n"),
        ((), b"*0\r\n", b"*0\r\n"),
        ({b"a": 1}, b"*2\r\n$1\r\na\r\n:1\r\n", b"%1\r\n$1\r\na\r\n:1\r\n"),
        (Verbatim("x"), b"$1\r\nx\r\n", b"=5\r\ntxt:x\r\n"),
        (BadArgument("no"), b"-ERR no\r\n", b"-ERR no\r\n"),
        ([b"a", BadArgument("b")], b"*2\r\n$1\r\na\r\n-ERR b\r\n", b"*2\r\n$1\r\na\r\n-ERR b\r\n"),
    ],
)
def test_wire_bytes(value: object, resp2: bytes, resp3: bytes) -> None:
    """H14: null and empty stay apart."""
    assert joined(value, 2) == resp2
    assert joined(value, 3) == resp3


_VALUE = st.recursive(
    st.one_of(st.none(), st.binary(max_size=50), st.integers(-(2**63), 2**63 - 1)),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=20,
)


@given(_VALUE, st.sampled_from([2, 3]))
def test_what_is_encoded_can_be_read_back(value: object, protocol: int) -> None:
    reader = hiredis.Reader()
    reader.feed(joined(value, protocol))
    assert reader.gets() == value
    assert reader.gets() is False


def test_payloads_and_large_values_are_not_copied() -> None:
    big = bytearray(b"x" * 100_000)
    payload = Payload(3, lambda: iter([b"abc"]))
    pieces = encode([big, payload], 2)
    assert any(piece is big for piece in pieces)
    assert any(piece is payload for piece in pieces)
    assert joined([big, payload], 2) == b"*2\r\n$100000\r\n" + big + b"\r\n$3\r\nabc\r\n"


def test_a_view_of_wider_items_counts_in_bytes() -> None:
    view = memoryview(b"\0" * 16).cast("I")
    assert joined(view, 2) == b"$16\r\n" + b"\0" * 16 + b"\r\n"
    wide = memoryview(b"\0" * 80_000).cast("d")
    assert joined(wide, 2) == b"$80000\r\n" + b"\0" * 80_000 + b"\r\n"


@pytest.mark.parametrize("text", ["a\r\nb", "a\nb"])
def test_a_simple_string_must_be_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="one line"):
        encode(text)


def test_an_error_is_one_line_whatever_its_text() -> None:
    assert joined(BadArgument("a\r\n+OK\r\n\0"), 2) == b"-ERR a??+OK???\r\n"
    assert one_line("plain") == "plain"


def test_what_resp_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        encode(object())
