"""Formats by name and tag, and two of one kind refused."""

from __future__ import annotations

import pytest

from pion_server.formats import format_by_tag, format_names, make_format, register
from pion_server.formats.fp16 import Fp16


def test_a_second_format_of_a_name_is_refused_where_it_is_defined() -> None:
    with pytest.raises(ValueError, match="two formats named fp16"):

        @register
        class Again(Fp16):
            tag = 77

    with pytest.raises(ValueError, match="unknown format tag 77"):
        format_by_tag(77, 32)


def test_a_second_format_of_a_tag_is_refused_where_it_is_defined() -> None:
    with pytest.raises(ValueError, match="fp16 and other share tag 2"):

        @register
        class Other(Fp16):
            name = "other"

    assert "other" not in format_names()


@pytest.mark.parametrize("name", format_names())
def test_a_format_is_found_by_any_spelling_of_its_name_and_by_its_tag(name: str) -> None:
    rope = 32 if name == "bf16_rope_fp8_body" else 0
    fmt = make_format(name.upper(), 64, rope)
    assert fmt.name == name
    assert format_by_tag(fmt.tag, 64, rope) == fmt


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="int8, turbo4, fp16, turbo3, turbo2, fp8") as refused:
        make_format("int7", 64)
    assert all(name in str(refused.value) for name in format_names())


def test_formats_are_equal_if_name_and_widths_are() -> None:
    assert make_format("fp8", 64) == make_format("fp8", 64)
    assert len({make_format("fp8", 64), make_format("fp8", 64)}) == 1
    assert make_format("fp8", 64) != make_format("fp8", 96)
    assert make_format("fp8", 64) != make_format("mlx4g32", 64)
    assert repr(make_format("bf16_rope_fp8_body", 64, 32)) == "bf16_rope_fp8_body(64, rope=32)"
