"""Numbers in and out in chunks, and formats whose rows do not depend on each other."""

from __future__ import annotations

import abc
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pion_server.formats.base import Format, InputType, Run
from pion_server.formats.floats import F32Array, U8Array, widen_bf16
from pion_server.formats.scratch import Scratch
from pion_server.payload import Buffer


class RowFormat(Format):
    """A format whose rows are encoded and decoded one by one: no row depends on its neighbours."""

    def encode(self, blob: Buffer, count: int, input: InputType) -> Run:  # noqa: A002
        """As `Format.encode`, chunk by chunk."""
        self._check_size("blob", blob, count, self.input_row_bytes(input))
        if input is self.native:
            return Run(b"", memoryview(blob).cast("B"), count)
        stored = np.empty((count, self.row_bytes), dtype=np.uint8)
        scratch = Scratch()
        with np.errstate(all="ignore"):
            for start, values in read_input(self, blob, count, input):
                self._encode_rows(values, stored[start : start + len(values)], scratch)
        return Run(b"", as_bytes(stored), count, scratch.saturated)

    def decode(self, run: Run) -> F32Array:
        """As `Format.decode`, chunk by chunk."""
        self._check_run(run)
        values = np.empty((run.rows, self.dim), dtype=np.float32)
        stored = np.frombuffer(run.body, dtype=np.uint8).reshape(run.rows, self.row_bytes)
        step = self.rows_at_once
        scratch = Scratch()
        with np.errstate(all="ignore"):
            for start in range(0, run.rows, step):
                part = slice(start, start + step)
                self._decode_rows(stored[part], values[part], scratch)
        return values

    @abc.abstractmethod
    def _encode_rows(self, values: F32Array, stored: U8Array, scratch: Scratch) -> None:
        """Fill `stored` `[n, row_bytes]` from `values` `[n, dim]`, which may be read-only."""

    @abc.abstractmethod
    def _decode_rows(self, stored: U8Array, values: F32Array, scratch: Scratch) -> None:
        """Fill `values` `[n, dim]` (contiguous) from `stored` `[n, row_bytes]`."""


def read_input(
    fmt: Format,
    blob: Buffer,
    count: int,
    input: InputType,  # noqa: A002
) -> Iterator[tuple[int, F32Array]]:
    """The blob's rows in chunks: first row and f32 `[n, dim]`, good until the next one."""
    step = fmt.rows_at_once
    if input is InputType.F32:
        floats = np.frombuffer(blob, dtype=np.float32).reshape(count, fmt.dim)
        for start in range(0, count, step):
            yield start, floats[start : start + step]
        return
    words = np.frombuffer(blob, dtype=np.uint16).reshape(count, fmt.dim)
    scratch = np.empty((min(step, count), fmt.dim), dtype=np.float32)
    for start in range(0, count, step):
        part = words[start : start + step]
        values = scratch[: len(part)]
        if input is InputType.F16:
            np.copyto(values, part.view(np.float16))
        else:
            widen_bf16(part, values)
        yield start, values


def as_bytes(array: NDArray[np.generic]) -> memoryview:
    """A contiguous array's memory as flat bytes, not copied."""
    return memoryview(array.reshape(-1).view(np.uint8).data)
