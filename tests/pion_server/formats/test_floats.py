"""Rounding to bf16, f16 and E4M3FN: nearest even, overflow, NaN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from pion_server.formats import InputType, make_format
from pion_server.formats.floats import narrow_to_e4m3, widen_e4m3
from pion_server.formats.scratch import Scratch


def convert(name: str, bits: list[int]) -> list[int]:
    """f32 bit patterns to the 16-bit words a format stores."""
    blob = np.array(bits, dtype=np.uint32).tobytes()
    run = make_format(name, len(bits)).encode(blob, 1, InputType.F32)
    return [int(word) for word in np.frombuffer(run.body, dtype=np.uint16)]


def e4m3_codes(values: list[float] | NDArray[np.float32]) -> list[int]:
    row = np.array(values, dtype=np.float32)
    codes = np.empty(row.shape, dtype=np.uint8)
    narrow_to_e4m3(row, codes, Scratch())
    return [int(code) for code in codes]


def e4m3_value(code: int) -> float:
    value = np.empty(1, dtype=np.float32)
    widen_e4m3(np.array([code], dtype=np.uint8), value)
    return float(value[0])


@pytest.mark.parametrize(
    ("bits", "word"),
    [
        (0x3F800000, 0x3F80),
        (0x3F807FFF, 0x3F80),
        (0x3F808000, 0x3F80),  # a tie, down to even
        (0x3F808001, 0x3F81),
        (0x3F818000, 0x3F82),  # a tie, up to even
        (0x3FFFFFFF, 0x4000),  # into the next power of two
        (0x7F7F7FFF, 0x7F7F),
        (0x7F7F8000, 0x7F80),  # beyond the largest: inf
        (0xFF7FFFFF, 0xFF80),
        (0x80000000, 0x8000),
        (0x00008000, 0x0000),
        (0x00018000, 0x0002),  # subnormals round the same way
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
    ],
)
def test_f32_becomes_bf16_by_nearest_even(bits: int, word: int) -> None:
    assert convert("bf16", [bits]) == [word]


@pytest.mark.parametrize("bits", [0x7F800001, 0x7F80FFFF, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF])
@pytest.mark.parametrize(("name", "infinity"), [("bf16", 0x7F80), ("fp16", 0x7C00)])
def test_a_nan_stays_a_nan_of_its_sign(name: str, infinity: int, bits: int) -> None:
    (word,) = convert(name, [bits])
    assert word & 0x7FFF > infinity
    assert word >> 15 == bits >> 31


def test_widened_bf16_is_narrowed_to_the_same_bits() -> None:
    """N03: all words, signalling NaNs included."""
    words = np.arange(1 << 16, dtype=np.uint32)
    blob = (words << 16).astype(np.uint32).tobytes()
    run = make_format("bf16", 4096).encode(blob, 16, InputType.F32)
    assert np.array_equal(np.frombuffer(run.body, dtype=np.uint16), words)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (1.0, 0x3C00),
        (1 + 2.0**-11, 0x3C00),  # a tie, down to even
        (1 + 3 * 2.0**-11, 0x3C02),  # a tie, up to even
        (65504.0, 0x7BFF),
        (65519.0, 0x7BFF),
        (65520.0, 0x7C00),  # beyond the largest: inf
        (-1e30, 0xFC00),
        (-0.0, 0x8000),
        (2.0**-25, 0x0000),
        (2.0**-24, 0x0001),
        (float("inf"), 0x7C00),
    ],
)
def test_f32_becomes_f16_by_nearest_even(value: float, word: int) -> None:
    assert convert("fp16", [int(np.array(value, dtype=np.float32).view(np.uint32))]) == [word]


def test_an_overflow_is_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    for name in ("fp16", "bf16", "int8", "turbo4", "turbo2", "fp8", "mlx4g32"):
        values = np.full((1, 32), 3e38, dtype=np.float32)
        values[0, :2] = -3e38, np.nan
        fmt = make_format(name, 32)
        fmt.decode(fmt.encode(values.tobytes(), 1, InputType.F32))
    assert not recwarn.list


def test_every_e4m3_value_is_encoded_as_itself() -> None:
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    assert e4m3_codes([e4m3_value(code) for code in codes]) == codes


def test_e4m3_holds_the_values_of_its_specification() -> None:
    assert e4m3_value(0x7E) == 448
    assert e4m3_value(0x08) == 2.0**-6
    assert e4m3_value(0x01) == 2.0**-9
    assert e4m3_value(0x38) == 1
    assert e4m3_value(0xC0) == -2
    assert np.isnan(e4m3_value(0x7F))
    assert np.isnan(e4m3_value(0xFF))


def test_a_number_halfway_between_e4m3_values_goes_to_the_even_one() -> None:
    values = [e4m3_value(code) for code in range(127)]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    even = [code + (code & 1) for code in range(126)]
    assert e4m3_codes(middles) == even
    above = np.nextafter(np.array(middles, dtype=np.float32), np.float32(1e9))
    assert e4m3_codes(above) == list(range(1, 127))
    below = np.nextafter(np.array(middles, dtype=np.float32), np.float32(0))
    assert e4m3_codes(below) == list(range(126))


def test_e4m3_at_its_edges() -> None:
    """D13: beyond 448 saturates, 2^-10 is a tie that goes to 0, -0.0 keeps its sign."""
    edges = [480.0, 1e38, -480.0, 464.0, 2.0**-10, 2.0**-10 * 1.0001, 0.0, -0.0, 1e-45]
    assert e4m3_codes(edges) == [0x7E, 0x7E, 0xFE, 0x7E, 0, 1, 0, 0x80, 0]
