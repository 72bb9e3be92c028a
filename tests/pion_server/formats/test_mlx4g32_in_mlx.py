"""mlx4g32 rows are what MLX itself reads and writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pion_server.formats import InputType, make_format

mx: Any = pytest.importorskip("mlx.core")

DIM = 128
FORMAT = make_format("mlx4g32", DIM)


def parts(rows: bytes | bytearray | memoryview) -> tuple[Any, Any, Any]:
    """Stored rows as the three arrays of a quantised cache: codes, scales, biases."""
    table = np.frombuffer(rows, dtype=np.uint8).reshape(-1, FORMAT.row_bytes)
    ends = DIM // 2, DIM // 2 + DIM // 16
    codes = np.ascontiguousarray(table[:, : ends[0]]).view(np.uint32)
    scales = np.ascontiguousarray(table[:, ends[0] : ends[1]]).view(np.float16)
    biases = np.ascontiguousarray(table[:, ends[1] :]).view(np.float16)
    return mx.array(codes), mx.array(scales), mx.array(biases)


def dequantize(codes: Any, scales: Any, biases: Any, dtype: Any) -> NDArray[Any]:
    made = mx.dequantize(
        codes, scales.astype(dtype), biases.astype(dtype), group_size=32, bits=4, stream=mx.cpu
    )
    mx.eval(made)
    return np.array(made)


def normal() -> NDArray[np.float32]:
    return np.random.default_rng(11).standard_normal((40, DIM), dtype=np.float32)


def store(values: NDArray[np.float32]) -> bytes:
    return bytes(FORMAT.encode(values.tobytes(), len(values), InputType.F32).body)


def test_mlx_reads_our_rows_as_we_do() -> None:
    values = normal()
    run = FORMAT.encode(values.tobytes(), len(values), InputType.F32)
    ours = FORMAT.decode(run)
    theirs = dequantize(*parts(run.body), mx.float32)
    # One of the two may fuse the product and the sum; the product is exact, so nothing differs.
    assert np.array_equal(ours, theirs)
    half = dequantize(*parts(run.body), mx.float16)
    assert np.abs(half.astype(np.float32) - ours).max() <= 2.0**-8


def test_rows_mlx_quantised_are_read_as_mlx_reads_them() -> None:
    values = mx.array(normal()).astype(mx.float16)
    codes, scales, biases = mx.quantize(values, group_size=32, bits=4, stream=mx.cpu)
    mx.eval(codes, scales, biases)
    assert scales.dtype == mx.float16
    table = np.concatenate(
        [np.array(part).view(np.uint8).reshape(40, -1) for part in (codes, scales, biases)], axis=1
    )
    (run,) = FORMAT.unpack(table.tobytes(), 40)
    assert np.array_equal(FORMAT.decode(run), dequantize(codes, scales, biases, mx.float32))


def test_our_rows_are_as_exact_as_those_of_mlx() -> None:
    values = normal()
    ours = np.abs(dequantize(*parts(store(values)), mx.float32) - values).mean()
    codes, scales, biases = mx.quantize(mx.array(values), group_size=32, bits=4, stream=mx.cpu)
    theirs = np.abs(dequantize(codes, scales, biases, mx.float32) - values).mean()
    assert ours <= theirs * 1.1


def test_small_and_uneven_groups() -> None:
    """D14: a group of zeros and a constant are exact, 1e-9·i is lost, one 1000 swamps the rest."""
    values = np.zeros((1, DIM), dtype=np.float32)
    values[0, 32:64] = 3.7
    values[0, 64:96] = 1e-9 * np.arange(32)
    values[0, 96:] = np.linspace(0, 0.3, 32)
    values[0, 127] = 1000
    read = FORMAT.decode(FORMAT.encode(values.tobytes(), 1, InputType.F32))
    assert not read[0, :32].any()
    assert (read[0, 32:64] == np.float32(np.float16(3.7))).all()
    assert not read[0, 64:96].any()
    errors = np.abs(read - values)[0, 96:]
    assert errors[:31].max() == pytest.approx(values[0, 126])
    scale = float(np.float16(1000 / 15))
    assert errors.max() <= scale / 2 + 1000 * 2.0**-11


def test_one_infinity_does_not_make_its_group_nan() -> None:
    """D13: MLX makes all 32 values NaN."""
    values = np.zeros((1, DIM), dtype=np.float32)
    values[0, 3], values[0, 40] = np.inf, np.nan
    read = dequantize(*parts(store(values)), mx.float32)
    assert np.isfinite(read).all()
    assert read[0, 3] > 60000
    assert not read[0, 32:64].any()


def test_e4m3_bytes_are_those_of_mlx() -> None:
    """D13: for the finite numbers both define, and every byte read back."""
    from pion_server.formats.floats import narrow_to_e4m3, widen_e4m3
    from pion_server.formats.scratch import Scratch

    rng = np.random.default_rng(12)
    values = np.concatenate(
        [
            rng.uniform(-448, 448, 4096),
            rng.standard_normal(4096) * 2.0 ** rng.integers(-12, 4, 4096),
            [0.0, 480.0, -480.0, 2.0**-10, 2.0**-9],
        ]
    ).astype(np.float32)
    theirs = np.array(mx.to_fp8(mx.array(values), stream=mx.cpu))
    codes = np.empty(values.shape, dtype=np.uint8)
    narrow_to_e4m3(values.copy(), codes, Scratch())
    assert np.array_equal(codes, theirs)

    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], dtype=np.uint8)
    read = np.empty(finite.shape, dtype=np.float32)
    widen_e4m3(finite, read)
    back = mx.from_fp8(mx.array(finite), mx.float32, stream=mx.cpu)
    assert np.array_equal(read, np.array(back))
