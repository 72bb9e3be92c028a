"""The targets, fed by hypothesis: a few seconds each, part of the test suite.

H05, H07, H08, H14, H03: parsers and the greeting. Memory is bounded whatever comes.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pion_server.process import peak_rss_bytes
from tests.fuzz.edits import edited
from tests.fuzz.targets import DICTIONARY, TARGETS, record_log

MB = 1 << 20
EXAMPLES = {"commands": 1000}
MOST_MEMORY = 64 * MB


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_keep_the_promise(name: str) -> None:
    target = TARGETS[name]
    word = st.sampled_from(DICTIONARY[name])
    pieces = st.lists(st.one_of(word, st.binary(max_size=12), st.binary(max_size=300)), max_size=24)

    @settings(
        max_examples=EXAMPLES.get(name, 500),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(pieces.map(b"".join))
    def check(data: bytes) -> None:
        target(data)

    target(b"")  # what is made once is not the input's doing
    before = peak_rss_bytes()
    check()
    assert peak_rss_bytes() - before < MOST_MEMORY


def test_edits_reach_everywhere() -> None:
    assert edited(b"abc", b"") == b"abc"
    assert edited(b"abc", b"\1\0\0x") == b"axc"
    assert edited(b"abc", b"\3\0\1x") == b"abcx"
    assert edited(b"abc", b"\0\0\2\2") == b"c"
    assert edited(b"abc", b"\1\0\4\0") == b"a"
    assert edited(b"abc", b"\2\0\3\1") == b"ababc"


def test_an_unspoilt_log_is_read_whole() -> None:
    """Else the target of logs holds for a reader that finds nothing."""
    from tests.fuzz import targets

    base, said = targets._example_log()
    assert len(said) == 3
    record_log(b"")
    assert len(base) > 400
