"""int8 rows keep the scale they were stored with, whatever is stored before or after."""

from __future__ import annotations

import itertools
import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pion_server.formats import InputType, Run, make_format

INT8 = make_format("int8", 16)


def store(values: NDArray[np.float32]) -> Run:
    return INT8.encode(values.tobytes(), len(values), InputType.F32)


def test_a_run_has_one_scale_and_the_range_of_all_its_rows() -> None:
    values = np.linspace(-2, 6, 48, dtype=np.float32).reshape(3, 16)
    run = store(values)
    assert struct.unpack("<ff", run.header) == (254 / 8, -2.0)
    assert np.abs(INT8.decode(run) - values).max() <= 8 / 254 / 2 * 1.001
    assert (INT8.decode(run)[0, 0], INT8.decode(run)[-1, -1]) == (-2, 6)


def test_a_range_too_small_to_divide_by_reads_as_its_minimum() -> None:
    values = np.full((2, 16), 3.7, dtype=np.float32)
    run = store(values)
    assert struct.unpack("<ff", run.header) == (1.0, float(np.float32(3.7)))
    assert np.array_equal(INT8.decode(run), values)
    tiny = np.linspace(0, 9e-9, 16, dtype=np.float32).reshape(1, 16)
    assert not INT8.decode(store(tiny)).any()


def test_a_later_batch_leaves_earlier_rows_as_they_were() -> None:
    """The public server keeps one scale a layer, which each batch overwrites."""
    first = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
    second = first * 100
    packed = bytes(INT8.pack(store(first))) + bytes(INT8.pack(store(second)))
    runs = INT8.unpack(packed, 4)
    assert [run.rows for run in runs] == [2, 2]
    assert np.abs(INT8.decode(runs[0]) - first).max() <= 0.005
    assert np.abs(INT8.decode(runs[1]) - second).max() <= 0.5


def test_a_packed_row_is_scale_minimum_and_codes() -> None:
    values = np.linspace(0, 254, 16, dtype=np.float32).reshape(1, 16)
    run = store(values)
    packed = bytes(INT8.pack(run))
    assert packed == struct.pack("<ff", 1.0, 0.0) + bytes(run.body)
    assert np.frombuffer(packed[8:], dtype=np.int8)[[0, -1]].tolist() == [-127, 127]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.binary(min_size=16, max_size=16)), max_size=20))
def test_packed_rows_split_where_the_scale_changes(rows: list[tuple[int, bytes]]) -> None:
    headers = [struct.pack("<ff", 2.0**kind, -float(kind & 1)) for kind, _ in rows]
    packed = b"".join(header + codes for header, (_, codes) in zip(headers, rows, strict=True))
    runs = INT8.unpack(packed, len(rows))
    assert b"".join(bytes(INT8.pack(run)) for run in runs) == packed
    for before, after in itertools.pairwise(runs):
        assert before.header != after.header
    assert [header for run in runs for header in [run.header] * run.rows] == headers


def test_headers_are_compared_as_bytes() -> None:
    """A NaN is unequal to itself as a number, and -0.0 equal to 0.0."""
    nan, zero, minus = (struct.pack("<ff", 1.0, x) for x in (float("nan"), 0.0, -0.0))
    packed = b"".join(header + bytes(16) for header in (nan, nan, zero, minus))
    assert [run.rows for run in INT8.unpack(packed, 4)] == [2, 1, 1]


def test_the_widest_range_there_is_does_not_overflow() -> None:
    largest = np.finfo(np.float32).max
    values = np.array([[largest, -largest, *([0.0] * 14)]], dtype=np.float32)
    read = INT8.decode(store(values))
    assert np.isfinite(read).all()
    assert np.abs(read / largest - values / largest).max() <= 1 / 254
