"""What a storage format is: rows of numbers in, stored bytes out, and back.

A *row* is one token's vector for one layer and side: `dim` numbers. A format says how a row is
stored; it knows no session, no log and no socket. The byte layouts are those of the protocol
specification, section "Storage formats, bit by bit"; each format's file repeats its own.

Layouts are little-endian and so are all the machines we run on; another one is refused here rather
than served swapped bytes.
"""

from __future__ import annotations

import abc
import enum
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pion_server.formats.floats import F32Array, U8Array, widen_bf16
from pion_server.formats.scratch import Scratch
from pion_server.payload import Buffer

if sys.byteorder != "little":
    raise ImportError("pion_server.formats needs a little-endian machine")

MAX_DIM = 8192

# Numbers handled at once: 256 KiB of f32. The few work arrays of this size stay in a core's cache,
# calls into numpy are few, and a 355 MB blob needs no more memory for them than a small one.
CHUNK_VALUES = 1 << 16


class InputType(enum.Enum):
    """How the numbers of a stored blob arrive: `FMT F32 | F16 | BF16`."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"

    @property
    def itemsize(self) -> int:
        """Bytes a number."""
        return 4 if self is InputType.F32 else 2


@dataclass(frozen=True, slots=True)
class Run:
    """Rows stored together: `rows` times `row_bytes` of `body` behind one `header`.

    The header is empty but for int8 (f32 scale, f32 min). The body may be the very buffer the rows
    came in, so neither side may write to it afterwards.
    """

    header: bytes
    body: Buffer
    rows: int


class Format(abc.ABC):
    """One storage format for rows of one width. Instances hold no state and may cross threads."""

    name: ClassVar[str]
    tag: ClassVar[int]
    block: ClassVar[int] = 1
    """Numbers quantised together; a width that is no multiple is refused."""
    native: ClassVar[InputType | None] = None
    """Input of this type is stored bit by bit as it came."""
    header_bytes: ClassVar[int] = 0
    takes_rope: ClassVar[bool] = False

    dim: int
    rope: int
    row_bytes: int
    """Stored bytes a row, without the run's header."""

    def __init__(self, dim: int, rope: int = 0) -> None:
        """`dim`: numbers a row (raw: bytes), 1..8192. `rope`: leading numbers kept as bf16.

        Raises ValueError for a width this format cannot hold.
        """
        if not 1 <= dim <= MAX_DIM:
            raise ValueError(f"{self.name}: dim must be in 1..{MAX_DIM}, not {dim}")
        if self.takes_rope and not rope:
            raise ValueError(f"{self.name}: missing rope=")
        if self.takes_rope and not 0 < rope < dim:
            raise ValueError(
                f"{self.name}: rope must be in (0, dim), here 1..{dim - 1}, not {rope}"
            )
        if rope and not self.takes_rope:
            raise ValueError(f"{self.name}: rope= is for bf16_rope_fp8_body only")
        if (dim - rope) % self.block:
            width = f"dim - rope = {dim - rope}" if rope else f"dim {dim}"
            raise ValueError(f"{self.name}: {width} must be a multiple of {self.block}")
        self.dim = dim
        self.rope = rope
        self.row_bytes = self._count_row_bytes()

    @property
    def packed_row_bytes(self) -> int:
        """Bytes a row of a PACKED blob or reply: every row carries its run's header."""
        return self.header_bytes + self.row_bytes

    def input_row_bytes(self, input: InputType) -> int:  # noqa: A002 - the interface's word
        """Bytes a row of a blob of this input type."""
        return self.dim * input.itemsize

    @abc.abstractmethod
    def encode(self, blob: Buffer, count: int, input: InputType) -> Run:  # noqa: A002
        """Store `count` rows, row-major `[count][dim]` of `input` words, as one run.

        Input of the native type keeps every bit pattern and is not copied. Other input is widened
        to f32, then converted. Raises ValueError unless the blob is exactly count rows long.
        """

    @abc.abstractmethod
    def decode(self, run: Run) -> F32Array:
        """The run's rows as f32 `[rows, dim]`; read-only where that saves a copy.

        Raises ValueError if the run's bytes are not exactly its rows.
        """

    def pack(self, run: Run) -> Buffer:
        """The run's rows as PACKED bytes; without a header this is the body itself."""
        self._check_run(run)
        return run.body

    def unpack(self, blob: Buffer, count: int) -> list[Run]:
        """`count` PACKED rows as the runs that store them, bit by bit as they came, in order.

        Raises ValueError unless the blob is exactly count rows long.
        """
        self._check_size("blob", blob, count, self.packed_row_bytes)
        return [Run(b"", memoryview(blob).cast("B"), count)]

    @abc.abstractmethod
    def _count_row_bytes(self) -> int:
        """Stored bytes of one row of this width."""

    def _rows_at_once(self) -> int:
        return max(1, CHUNK_VALUES // self.dim)

    def _read_input(
        self,
        blob: Buffer,
        count: int,
        input: InputType,  # noqa: A002
    ) -> Iterator[tuple[int, F32Array]]:
        """The blob's rows in chunks: first row and f32 `[n, dim]`, good until the next one."""
        step = self._rows_at_once()
        if input is InputType.F32:
            floats = np.frombuffer(blob, dtype=np.float32).reshape(count, self.dim)
            for start in range(0, count, step):
                yield start, floats[start : start + step]
            return
        words = np.frombuffer(blob, dtype=np.uint16).reshape(count, self.dim)
        scratch = np.empty((min(step, count), self.dim), dtype=np.float32)
        for start in range(0, count, step):
            part = words[start : start + step]
            values = scratch[: len(part)]
            if input is InputType.F16:
                np.copyto(values, part.view(np.float16))
            else:
                widen_bf16(part, values)
            yield start, values

    def _check_run(self, run: Run) -> None:
        self._check_size("body", run.body, run.rows, self.row_bytes)
        if len(run.header) != self.header_bytes:
            raise ValueError(
                f"{self.name}: header size {len(run.header)}, expected {self.header_bytes}"
            )

    def _check_size(self, what: str, data: Buffer, rows: int, row_bytes: int) -> None:
        if rows < 0:
            raise ValueError(f"{self.name}: {rows} rows")
        size = memoryview(data).nbytes
        if size != rows * row_bytes:
            raise ValueError(
                f"{self.name}: {what} size {size}, expected {rows * row_bytes}"
                f" = {rows} rows of {row_bytes} bytes"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Format):
            return NotImplemented
        return (self.name, self.dim, self.rope) == (other.name, other.dim, other.rope)

    def __hash__(self) -> int:
        return hash((self.name, self.dim, self.rope))

    def __repr__(self) -> str:
        rope = f", rope={self.rope}" if self.rope else ""
        return f"{self.name}({self.dim}{rope})"


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
            for start, values in self._read_input(blob, count, input):
                self._encode_rows(values, stored[start : start + len(values)], scratch)
        return Run(b"", as_bytes(stored), count)

    def decode(self, run: Run) -> F32Array:
        """As `Format.decode`, chunk by chunk."""
        self._check_run(run)
        values = np.empty((run.rows, self.dim), dtype=np.float32)
        stored = np.frombuffer(run.body, dtype=np.uint8).reshape(run.rows, self.row_bytes)
        step = self._rows_at_once()
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


def as_bytes(array: NDArray[np.generic]) -> memoryview:
    """A contiguous array's memory as flat bytes, not copied."""
    return memoryview(array.reshape(-1).view(np.uint8).data)
