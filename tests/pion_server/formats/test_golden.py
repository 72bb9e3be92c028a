"""Stored bytes that must never change: the specification's rows and files of our own."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pion_server.formats import Format, InputType, format_names, make_format

GOLDEN = Path(__file__).parent / "golden"
DIM, TAME, ROWS = 64, 5, 8
NAMES = tuple(name for name in format_names() if name != "raw")
NORMED = ("turbo4", "turbo3", "turbo2", "fp8")

RAMP = np.array([((37 * i) % 101 - 50) / 16 for i in range(32)], dtype=np.float32)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("turbo4", "04cfe042 2537 d1469bf268bd2479ce358ae157acf368"),
        ("turbo3", "54dde342 2b3c 59458b5f338b56bf8616bd7e"),
        ("turbo2", "8de30a43 2b3c 249d2789 e749e279"),
        ("fp8", "40a0d842 ab22 f7e86ef4d672f16075ec6af6e470f30073f06476ea6cf5e071f25674ee6877e8"),
        ("mlx4g32", "601bd793 4e0ac672 3df9a561 2cd8945f ab36 40c2"),
        ("int8", "81df3d9af856b41270cd2b89e745a2005ebb1977d53390ee4caa0866c3217fdc"),
    ],
)
def test_the_rows_of_the_specification(name: str, row: str) -> None:
    expected = bytes.fromhex(row)
    run = make_format(name, 32).encode(RAMP.tobytes(), 1, InputType.F32)
    body = bytes(run.body)
    if name in NORMED:
        assert_same_norm(body[:4], expected[:4])
        body, expected = body[4:], expected[4:]
    assert body == expected
    if name == "int8":
        assert run.header == struct.pack("<ff", 40.64, -3.125)


@pytest.mark.parametrize("name", NAMES)
def test_golden_rows_are_stored_as_ever(name: str) -> None:
    fmt, stored, _ = load(name)
    values = golden_values()
    packed = encode(fmt, values[:TAME]) + encode(fmt, values[TAME:])
    ours = np.frombuffer(packed, dtype=np.uint8).reshape(ROWS, -1)
    theirs = np.frombuffer(stored, dtype=np.uint8).reshape(ROWS, -1)
    if name in NORMED:
        for row in range(ROWS):
            assert_same_norm(ours[row, :4].tobytes(), theirs[row, :4].tobytes())
        ours, theirs = ours[:, 4:], theirs[:, 4:]
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_golden_rows_are_read_as_ever(name: str) -> None:
    """N04: a blob of the first version loads bit-equal."""
    fmt, stored, read = load(name)
    runs = fmt.unpack(stored, ROWS)
    assert b"".join(fmt.decode(run).tobytes() for run in runs) == read


def test_golden_values_hold_what_their_description_says() -> None:
    values = golden_values()
    assert np.isfinite(values[:TAME]).all()
    assert np.array_equal(values[2, :32], RAMP)
    assert set(values[4].view(np.uint32)) == {0, 1 << 31}
    subnormal = (values[5] != 0) & (np.abs(values[5]) < np.finfo(np.float32).tiny)
    assert subnormal.any()
    assert np.isnan(values[6]).any()
    assert {float("inf"), float("-inf")} <= {float(value) for value in values[6]}
    assert np.abs(values[7]).max() == np.finfo(np.float32).max


def golden_values() -> NDArray[np.float32]:
    blob = (GOLDEN / "values.f32").read_bytes()
    return np.frombuffer(blob, dtype=np.float32).reshape(ROWS, DIM)


def load(name: str) -> tuple[Format, bytes, bytes]:
    """A format, its golden PACKED rows, and the bytes of the f32 they read as."""
    fmt = make_format(name, DIM, 32 if name == "bf16_rope_fp8_body" else 0)
    blob = (GOLDEN / f"{name}.bin").read_bytes()
    size = ROWS * fmt.packed_row_bytes
    assert len(blob) == size + ROWS * DIM * 4
    return fmt, blob[:size], blob[size:]


def encode(fmt: Format, values: NDArray[np.float32]) -> bytes:
    return bytes(fmt.pack(fmt.encode(values.tobytes(), len(values), InputType.F32)))


def assert_same_norm(ours: bytes, theirs: bytes) -> None:
    """A norm's last bits depend on the order of its sum; nothing reads them."""
    assert struct.unpack("<f", ours)[0] == pytest.approx(struct.unpack("<f", theirs)[0], rel=1e-6)
