"""Inline commands, as redis-cli and Redis quote them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion_server.wire.inline import UnbalancedQuotes, split_inline


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", []),
        (b"   \t ", []),
        (b"PING", [b"PING"]),
        (b"  SET  a\tb ", [b"SET", b"a", b"b"]),
        (b"SET \"a b\" 'c d'", [b"SET", b"a b", b"c d"]),
        (b'""', [b""]),
        (b"'' x", [b"", b"x"]),
        (rb'"\x00\xfF\n\r\t\a\b\q\""', [b'\x00\xff\n\r\t\a\bq"']),
        (rb"'\n \' \x41'", [rb"\n ' \x41"]),
        (rb'"\x4"', [b"x4"]),
        (rb'"\xzz"', [b"xzz"]),
        (b'ab"cd"', [b"abcd"]),
        (b"\xff\xfe", [b"\xff\xfe"]),
    ],
)
def test_words_of_a_line(line: bytes, words: list[bytes]) -> None:
    assert split_inline(line) == words


@pytest.mark.parametrize("line", [b'"', b"'", b'"a"b', b"'a'b", b'"a\\', b"a 'b"])
def test_open_quotes_are_refused(line: bytes) -> None:
    with pytest.raises(UnbalancedQuotes):
        split_inline(line)


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_escaped_words_come_back(words: list[bytes]) -> None:
    line = b" ".join(b'"' + b"".join(b"\\x%02x" % b for b in word) + b'"' for word in words)
    assert split_inline(line) == words
