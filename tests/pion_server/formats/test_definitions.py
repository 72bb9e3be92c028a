"""Each scaled format against its definition, written number by number in f32 scalars."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from pion_server.formats import InputType, make_format

f32 = np.float32
Blocks = list[list[np.float32]]


def rha(x: np.float32) -> int:
    return int(x + f32(0.5)) if x >= 0 else int(x - f32(0.5))


def clamp(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


def f16(x: np.float32) -> np.float32:
    return f32(np.float16(x))


def scale16(scale: np.float32) -> np.float32:
    return min(max(f16(min(scale, f32(65504))), f32(2.0**-14)), f32(65504))


def e4m3_values() -> list[float]:
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        values.append((8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa / 512)
    return values


E4M3 = e4m3_values()


def e4m3(x: np.float32) -> int:
    """The nearest of all positive values, the even code of two equally near."""
    magnitude = min(abs(float(x)), 448.0)
    code = min(range(127), key=lambda c: (abs(E4M3[c] - magnitude), c & 1))
    return code | (0x80 if math.copysign(1, x) < 0 else 0)


def pack_bits(codes: Sequence[int], width: int, bits: int) -> bytes:
    word = sum(code << bits * i for i, code in enumerate(codes))
    return word.to_bytes(width, "little")


def turbo4(v: list[np.float32]) -> tuple[np.float32, bytes, list[float]]:
    scale = max(abs(x) for x in v) / f32(7)
    if scale == 0:
        scale = f32(1)
    s = scale16(scale)
    u = [clamp(rha(x / s), -8, 7) + 8 for x in v]
    body = bytes(u[i] | u[i + 16] << 4 for i in range(16))
    return scale, np.float16(s).tobytes() + body, [float(c - 8) for c in u]


def turbo3(v: list[np.float32]) -> tuple[np.float32, bytes, list[float]]:
    scale = max(abs(x) for x in v) / f32(3)
    s = scale16(scale)
    u = [clamp(rha(x / s), -4, 3) + 4 for x in v]
    body = b"".join(pack_bits(u[i : i + 8], 3, 3) for i in range(0, 32, 8))
    return scale, np.float16(s).tobytes() + body, [float(c - 4) for c in u]


def turbo2(v: list[np.float32]) -> tuple[np.float32, bytes, list[float]]:
    scale = max(abs(x) for x in v) / f32(3)
    s = scale16(scale)
    u = [clamp(rha(x / (f32(2) * s) + f32(1.5)), 0, 3) for x in v]
    body = pack_bits(u[:16], 4, 2) + pack_bits(u[16:], 4, 2)
    return scale, np.float16(s).tobytes() + body, [float(2 * c - 3) for c in u]


def fp8(v: list[np.float32]) -> tuple[np.float32, bytes, list[float]]:
    scale = max(abs(x) for x in v) / f32(240)
    if scale == 0:
        scale = f32(1)
    s = scale16(scale)
    codes = bytes(e4m3(x / s) for x in v)
    levels = [math.copysign(E4M3[c & 127], -1 if c & 128 else 1) for c in codes]
    return scale, np.float16(s).tobytes() + codes, levels


Definition = Callable[[list[np.float32]], tuple[np.float32, bytes, list[float]]]
SCALED: dict[str, Definition] = {"turbo4": turbo4, "turbo3": turbo3, "turbo2": turbo2, "fp8": fp8}


def split(values: NDArray[np.float32]) -> Blocks:
    return [list(values[i : i + 32]) for i in range(0, len(values), 32)]


def quarter(row: NDArray[np.float32]) -> NDArray[np.float32]:
    return row * f32(0.25)


def numbers(blocks: int) -> st.SearchStrategy[NDArray[np.float32]]:
    """Rows whose blocks differ in size, with ties, zeros and every kind of finite number."""
    floats = st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.floats(-4, 4, width=32),
        st.integers(-64, 64).map(lambda n: n / 16),
    )
    # Values beyond half the range overflow in differences, which the definitions leave open.
    return arrays(np.float32, 32 * blocks, elements=floats).map(quarter)


def spread(rows: int) -> list[NDArray[np.float32]]:
    """Normal rows of 64 whose f16 scales are below, in and above the normal range."""
    rng = np.random.default_rng(4)
    values = rng.standard_normal((rows, 64)) * 10.0 ** rng.uniform(-7, 7, (rows, 1))
    return list(values.astype(np.float32))


@pytest.mark.parametrize("name", SCALED)
@settings(max_examples=25, deadline=None)
@given(values=numbers(2))
def test_a_stored_row_is_its_definition(name: str, values: NDArray[np.float32]) -> None:
    check_row(name, values)


@pytest.mark.parametrize("name", SCALED)
def test_rows_of_every_magnitude_are_stored_as_defined(name: str) -> None:
    for values in spread(40):
        check_row(name, values)


def check_row(name: str, values: NDArray[np.float32]) -> None:
    fmt = make_format(name, 64)
    with np.errstate(all="ignore"):
        expected = [SCALED[name](block) for block in split(values)]
    run = fmt.encode(values.tobytes(), 1, InputType.F32)
    body = bytes(run.body)
    assert body[4:] == b"".join(block for _, block, _ in expected)

    read = []
    for _, block, levels in expected:
        s = float(np.frombuffer(block[:2], dtype=np.float16)[0])
        read += [f32(level) * f32(s) for level in levels]
    assert np.array_equal(fmt.decode(run)[0], np.array(read, dtype=np.float32))

    norm2 = math.fsum((level * float(scale)) ** 2 for scale, _, row in expected for level in row)
    stored = struct.unpack("<f", body[:4])[0]
    assert stored == pytest.approx(min(norm2, float(np.finfo(np.float32).max)), rel=1e-6, abs=1e-44)


@settings(max_examples=15, deadline=None)
@given(values=numbers(2))
def test_a_rotary_part_is_bf16_and_the_body_fp8_without_a_norm(
    values: NDArray[np.float32],
) -> None:
    fmt = make_format("bf16_rope_fp8_body", 64, rope=32)
    body = bytes(fmt.encode(values.tobytes(), 1, InputType.F32).body)
    bf16 = make_format("bf16", 32).encode(values[:32].tobytes(), 1, InputType.F32)
    assert body[:64] == bytes(bf16.body)
    with np.errstate(all="ignore"):
        assert body[64:] == fp8(list(values[32:]))[1]


def mlx4g32(v: list[np.float32]) -> tuple[list[int], np.float16, np.float16]:
    low, high = min(v) + f32(0), max(v)
    scale = (high - low) / f32(15)
    if scale <= 0:
        scale = f32(1e-8)
    s, b = f16(min(scale, f32(65504))), f16(min(max(low, f32(-65504)), f32(65504)))
    if s == 0:
        return [0] * 32, np.float16(1), np.float16(b)
    places = [(x - b) / s + f32(0.5) for x in v]
    return [clamp(math.floor(p), 0, 15) for p in places], np.float16(s), np.float16(b)


@settings(max_examples=25, deadline=None)
@given(values=numbers(2))
def test_a_row_of_mlx4g32_is_its_definition(values: NDArray[np.float32]) -> None:
    check_affine_row(values)


def test_affine_rows_of_every_magnitude_are_stored_as_defined() -> None:
    for values in spread(40):
        check_affine_row(values + values[0])


def check_affine_row(values: NDArray[np.float32]) -> None:
    fmt = make_format("mlx4g32", 64)
    with np.errstate(all="ignore"):
        expected = [mlx4g32(block) for block in split(values)]
    run = fmt.encode(values.tobytes(), 1, InputType.F32)
    words = b"".join(
        pack_bits(codes[i : i + 8], 4, 4) for codes, _, _ in expected for i in range(0, 32, 8)
    )
    scales = b"".join(s.tobytes() for _, s, _ in expected)
    biases = b"".join(b.tobytes() for _, _, b in expected)
    assert bytes(run.body) == words + scales + biases
    read = [f32(q) * f32(s) + f32(b) for codes, s, b in expected for q in codes]
    assert np.array_equal(fmt.decode(run)[0], np.array(read, dtype=np.float32))


@settings(max_examples=25, deadline=None)
@given(values=numbers(2))
def test_a_run_of_int8_is_its_definition(values: NDArray[np.float32]) -> None:
    fmt = make_format("int8", 32)
    low, high = values.min() + f32(0), values.max()
    with np.errstate(all="ignore"):
        scale = f32(1) if high - low < f32(1e-8) else f32(254) / (high - low)
        codes = [min(rha((x - low) * scale), 254) - 127 for x in values]
        read = [f32(code + 127) / scale + low for code in codes]
    run = fmt.encode(values.tobytes(), 2, InputType.F32)
    assert run.header == struct.pack("<ff", scale, low)
    assert list(np.frombuffer(run.body, dtype=np.int8)) == codes
    assert np.array_equal(fmt.decode(run).reshape(-1), np.array(read, dtype=np.float32))


@pytest.mark.parametrize("name", ["turbo4", "turbo3", "turbo2"])
def test_an_error_is_at_most_half_a_step(name: str) -> None:
    """Codes are chosen against the rounded scale, so half a step of it bounds the error."""
    step = {"turbo4": 1.0, "turbo3": 1.0, "turbo2": 2.0}[name]
    values = np.random.default_rng(5).standard_normal((64, 1024), dtype=np.float32)
    fmt = make_format(name, 1024)
    run = fmt.encode(values.tobytes(), 64, InputType.F32)
    size = (fmt.row_bytes - 4) // 32
    blocks = np.frombuffer(run.body, dtype=np.uint8).reshape(64, -1)[:, 4:].reshape(64, 32, size)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    errors = np.abs(fmt.decode(run) - values).reshape(64, 32, 32).max(axis=-1)
    assert (errors <= scales * step * 0.5 * 1.001).all()


def test_a_scale_below_the_normal_range_is_raised_into_it() -> None:
    values = np.full((1, 32), 1e-7, dtype=np.float32)
    for name in ("turbo4", "turbo3", "turbo2", "fp8"):
        body = bytes(make_format(name, 32).encode(values.tobytes(), 1, InputType.F32).body)
        assert np.frombuffer(body[4:6], dtype=np.float16)[0] == np.float16(2.0**-14), name


@pytest.mark.parametrize(
    ("name", "scale"), [("turbo4", 1), ("fp8", 1), ("turbo3", 2.0**-14), ("turbo2", 2.0**-14)]
)
def test_the_scale_of_a_block_of_zeros(name: str, scale: float) -> None:
    body = bytes(make_format(name, 32).encode(bytes(128), 1, InputType.F32).body)
    assert body[:4] == (b"\0\0\0\0" if name != "turbo2" else body[:4])
    assert np.frombuffer(body[4:6], dtype=np.float16)[0] == np.float16(scale)
