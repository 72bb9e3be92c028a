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
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pion_server.payload import Buffer

if TYPE_CHECKING:
    from pion_server.formats.floats import F32Array

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

    `saturated`: numbers that encoding made quite others, for want of anything near: NaN, infinities
    (but where the format has them) and what is beyond the format's largest number.
    """

    header: bytes
    body: Buffer
    rows: int
    saturated: int = 0


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

    @property
    def rows_at_once(self) -> int:
        """Rows of a chunk that work arrays are sized for."""
        return max(1, CHUNK_VALUES // self.dim)

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
