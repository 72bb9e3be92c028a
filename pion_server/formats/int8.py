"""int8: one affine scale for all rows stored together.

    scale = 254 / (max - min)                        1 if the range is below 1e-8
    code  = min(round((v - min) · scale), 254) - 127     round: halves up, v - min is not negative
    value = (code + 127) / scale + min

The f32 pair (scale, min) is the run's header: it stays with its rows, a later batch has its own. A
PACKED row is f32 scale, f32 min, D codes.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from pion_server.formats.base import Format, InputType, Run
from pion_server.formats.blocks import bound_values, count_nonfinite
from pion_server.formats.floats import F32_MAX, F32Array
from pion_server.formats.registry import register
from pion_server.formats.row_format import as_bytes, read_input
from pion_server.payload import Buffer

_LEVELS = 254
# Runs one PACKED blob may hold: each is named in the record that stores it.
MAX_RUNS = 65_536
_SMALLEST_RANGE = np.float32(1e-8)


@register
class Int8(Format):
    """D bytes a row and 8 a run."""

    name = "int8"
    tag = 0
    header_bytes = 8

    def encode(self, blob: Buffer, count: int, input: InputType) -> Run:  # noqa: A002
        """As `Format.encode`, in two passes over the blob: the range, then the codes.

        NaN counts as 0, ±inf as the largest finite f32, for the range as well.
        """
        self._check_size("blob", blob, count, self.input_row_bytes(input))
        stored = np.empty((count, self.row_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            low, high, finite = self._find_range(blob, count, input)
            scale, saturated = _choose_scale(low, high), 0
            for start, values in read_input(self, blob, count, input):
                known = values if finite else bound_values(values)
                saturated += 0 if finite else count_nonfinite(values)
                part = stored[start : start + len(values)]
                np.copyto(part, _place_values(known, scale, low), casting="unsafe")
                # The byte of code - 127 as a signed number is the same byte unsigned, modulo 256.
                part -= 127
        header = np.array([scale, low], dtype=np.float32).tobytes()
        return Run(header, as_bytes(stored), count, saturated)

    def decode(self, run: Run) -> F32Array:
        """As `Format.decode`: one table of the run's 256 values serves all its rows."""
        self._check_run(run)
        table = _tabulate_values(run.header)
        codes = np.frombuffer(run.body, dtype=np.uint8).reshape(run.rows, self.dim)
        values = np.empty(codes.shape, dtype=np.float32)
        step = self.rows_at_once
        for start in range(0, run.rows, step):
            table.take(codes[start : start + step], out=values[start : start + step], mode="clip")
        return values

    def pack(self, run: Run) -> Buffer:
        """`rows` times (header, D codes)."""
        self._check_run(run)
        packed = np.empty((run.rows, self.packed_row_bytes), dtype=np.uint8)
        packed[:, : self.header_bytes] = np.frombuffer(run.header, dtype=np.uint8)
        codes = np.frombuffer(run.body, dtype=np.uint8).reshape(run.rows, self.dim)
        packed[:, self.header_bytes :] = codes
        return as_bytes(packed)

    def unpack(self, blob: Buffer, count: int) -> list[Run]:
        """As `Format.unpack`; a new run begins where the eight bytes of (scale, min) change.

        Raises ValueError for more than 65,536 runs, too.
        """
        self._check_size("blob", blob, count, self.packed_row_bytes)
        packed = np.frombuffer(blob, dtype=np.uint8).reshape(count, self.packed_row_bytes)
        headers = np.ascontiguousarray(packed[:, : self.header_bytes])
        codes = as_bytes(np.ascontiguousarray(packed[:, self.header_bytes :]))
        pairs: NDArray[np.uint64] = headers.view(np.uint64)[:, 0]
        edges = [0, *(np.flatnonzero(pairs[1:] != pairs[:-1]) + 1).tolist(), count]
        if len(edges) - 1 > MAX_RUNS:
            raise ValueError(f"{self.name}: {len(edges) - 1} runs in one batch exceed {MAX_RUNS}")
        return [
            Run(headers[start].tobytes(), codes[start * self.dim : end * self.dim], end - start)
            for start, end in itertools.pairwise(edges)
            if end > start
        ]

    def _find_range(
        self,
        blob: Buffer,
        count: int,
        input: InputType,  # noqa: A002
    ) -> tuple[np.float32, np.float32, bool]:
        """Smallest and largest value, and whether all values were finite."""
        lows, highs, finite = [], [], True
        for _, values in read_input(self, blob, count, input):
            low, high = values.min(), values.max()
            if not (np.isfinite(low) and np.isfinite(high)):
                finite = False
                known = bound_values(values)
                low, high = known.min(), known.max()
            lows.append(low)
            highs.append(high)
        # Adding +0.0 makes the header independent of the order in which ±0.0 were compared.
        zero = np.float32(0)
        return min(lows, default=zero) + zero, max(highs, default=zero) + zero, finite

    def _count_row_bytes(self) -> int:
        return self.dim


def _choose_scale(low: np.float32, high: np.float32) -> np.float32:
    width = high - low
    if width < _SMALLEST_RANGE:
        return np.float32(1)
    if np.isinf(width):
        return np.float32(_LEVELS / (float(high) - float(low)))
    return np.float32(_LEVELS) / width


def _place_values(values: F32Array, scale: np.float32, low: np.float32) -> NDArray[np.floating]:
    """Each value's distance from `low` in code steps plus a half, to be truncated to its code."""
    places: NDArray[np.floating] = values - low
    if np.isinf(places).any():
        places = values.astype(np.float64) - low
    places *= scale
    places += 0.5
    np.minimum(places, _LEVELS, out=places)
    return places


def _tabulate_values(header: bytes) -> F32Array:
    """The value of each of the 256 code bytes."""
    scale, low = np.frombuffer(header, dtype=np.float32)
    steps = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32) + np.float32(127)
    with np.errstate(all="ignore"):
        table: F32Array = steps / scale + low
        if not np.isfinite(table).all():
            # A range beyond f32's own: the quotient overflows although the sum does not.
            wide = steps.astype(np.float64) / scale + low
            table = np.clip(wide, -F32_MAX, F32_MAX).astype(np.float32)
    return table
