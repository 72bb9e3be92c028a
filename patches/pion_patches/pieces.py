"""What a prompt cache is taken apart into: rows, arrays and a little meta, one leaf a cache.

    image = dismantle(cache, tokens)            # pion_patches.cache_rebuild
    for leaf in image.leaves:
        leaf.keys.to_bytes()                    # rows, a token each, for the V-store
        pack_arrays(leaf.kind, leaf.arrays, image.tokens)   # pion_patches.containers: the rest

and back: ``RowPiece.from_buffer(data, leaf.keys.layout, rows)``, ``unpack_arrays``, ``rebuild``.
Everything here is values: frozen, evaluated, sharing nothing with a live cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import mlx.core as mx
import numpy as np

Buffer: TypeAlias = bytes | bytearray | memoryview

#: Dtypes a cache tensor may have, by the name a manifest gives them, with bytes an element.
ITEMSIZE: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
}
#: The V-store format that keeps rows of a dtype bit for bit; rows of any other dtype are "raw".
NATIVE_FORMAT: Mapping[str, str] = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_MOST_PARTS = 8


class UnsupportedCache(Exception):
    """A cache that cannot be stored exactly; nothing was taken.

    `found` says what was met and where, `known` lists the cache classes that can be stored.
    """

    def __init__(self, found: str, known: Sequence[str]) -> None:
        super().__init__(f"cannot store {found}; known caches: {', '.join(known)}")
        self.found = found
        self.known = tuple(known)


class RebuildError(Exception):
    """An image that does not fit the template, or lies about shape, dtype or token count."""


def dtype_name(array: mx.array) -> str:
    """`float16`, `uint32`, …: the name a manifest and a container give a dtype."""
    return _name_of(array.dtype)


@functools.cache
def _name_of(dtype: mx.Dtype) -> str:
    name = str(dtype).rpartition(".")[2]
    return "bool" if name == "bool_" else name


def dtype_named(name: str) -> mx.Dtype:
    """The dtype of that name; raises RebuildError for one no cache tensor has."""
    if name not in ITEMSIZE:
        raise RebuildError(f"unknown dtype {name!r}")
    return cast(mx.Dtype, getattr(mx, "bool_" if name == "bool" else name))


def array_bytes(array: mx.array) -> memoryview:
    """The little-endian bytes of an array, row-major; MLX's own memory where it is contiguous."""
    if array.nbytes == 0:
        return memoryview(b"")
    if array.dtype != mx.bfloat16:
        mx.eval(array)
        view = memoryview(cast(Any, array))
        if view.c_contiguous:  # as it nearly always is; spares an operation
            return view.cast("B").toreadonly()
    words = array.view(mx.uint16) if array.dtype == mx.bfloat16 else mx.contiguous(array)
    mx.eval(words)
    return memoryview(cast(Any, words)).cast("B").toreadonly()


def array_from(data: Buffer, dtype: str, shape: Sequence[int]) -> mx.array:
    """An evaluated copy of `data` as an array; raises RebuildError if the sizes disagree."""
    target = dtype_named(dtype)
    nbytes = ITEMSIZE[dtype] * math.prod(shape)
    if memoryview(data).nbytes != nbytes:
        found = memoryview(data).nbytes
        raise RebuildError(f"{found} bytes for {dtype} {tuple(shape)}, which takes {nbytes}")
    # numpy has no bfloat16: its words travel as uint16, which is exact for every bit pattern.
    words = "uint16" if dtype == "bfloat16" else dtype
    try:
        array = mx.array(np.frombuffer(data, dtype=np.dtype(words)).reshape(shape))
    except (OverflowError, ValueError) as error:  # the right size, yet sides no array may have
        raise RebuildError(f"no array is {tuple(shape)}: {error}") from error
    array = array.view(target) if array.dtype != target else array
    mx.eval(array)
    return array


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What one row is made of: the bytes of `widths[i]` elements of `dtypes[i]`, one after another.

    `fmt`: "dense", one part of numbers; "mlx4g32", 4-bit codes, fp16 scales and biases in groups
    of 32; "raw", any other parts, which only travel as bytes.
    """

    fmt: str
    dtypes: tuple[str, ...]
    widths: tuple[int, ...]

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes a row of each part."""
        return tuple(ITEMSIZE[d] * w for d, w in zip(self.dtypes, self.widths, strict=True))

    @property
    def row_bytes(self) -> int:
        """Bytes a row."""
        return sum(self.part_bytes)

    @property
    def store_format(self) -> str:
        """The V-store format that keeps such rows bit for bit."""
        if self.fmt == "dense":
            return NATIVE_FORMAT.get(self.dtypes[0], "raw")
        return self.fmt

    @property
    def store_dim(self) -> int:
        """The V-store's dim for such rows: values a row, or bytes a row where it is raw."""
        if self.store_format == "raw":
            return self.row_bytes
        return 8 * self.widths[0] if self.fmt == "mlx4g32" else self.widths[0]

    def check(self) -> None:
        """Raise RebuildError unless the fields agree with each other."""
        if not 0 < len(self.dtypes) == len(self.widths) <= _MOST_PARTS:
            raise RebuildError(f"a row of {len(self.dtypes)} dtypes and {len(self.widths)} widths")
        if any(d not in ITEMSIZE for d in self.dtypes) or any(w < 1 for w in self.widths):
            raise RebuildError(f"no row is {self.dtypes} of {self.widths}")
        codes = self.widths[0]
        fits = {
            "dense": len(self.widths) == 1,
            "mlx4g32": self.dtypes == ("uint32", "float16", "float16")
            and self.widths == (codes, codes // 4, codes // 4)
            and codes % 4 == 0,
            "raw": True,
        }
        if not fits.get(self.fmt, False):
            raise RebuildError(f"{self.dtypes} of {self.widths} is no {self.fmt} row")


def join_parts(views: Sequence[memoryview], layout: RowLayout, rows: int) -> memoryview:
    """The bytes of all parts as rows `[rows][row_bytes]`; one part is the very same memory."""
    if len(views) == 1:
        return views[0]
    table = np.empty((rows, layout.row_bytes), dtype=np.uint8)
    at = 0
    for view, width in zip(views, layout.part_bytes, strict=True):
        table[:, at : at + width] = np.frombuffer(view, dtype=np.uint8).reshape(rows, width)
        at += width
    return memoryview(table.reshape(-1).data)


@dataclass(frozen=True, slots=True)
class RowPiece:
    """K or V of one attention leaf, a row a token: `parts` are arrays `[N, width_i]`.

    A row concatenates the heads, `[H][D]` flattened. Dense rows are one part in the cache's own
    dtype; quantised ones are codes, scales and biases.
    """

    parts: tuple[mx.array, ...]
    fmt: str

    @property
    def rows(self) -> int:
        """Number of rows, N."""
        return int(self.parts[0].shape[0])

    @property
    def layout(self) -> RowLayout:
        """What a row is made of."""
        widths = tuple(int(part.shape[1]) for part in self.parts)
        return RowLayout(self.fmt, tuple(dtype_name(part) for part in self.parts), widths)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(part.nbytes for part in self.parts)

    def first(self, rows: int) -> RowPiece:
        """The first rows, sharing memory."""
        return RowPiece(tuple(part[:rows] for part in self.parts), self.fmt)

    def to_bytes(self) -> memoryview:
        """All rows, `[N][row_bytes]` little-endian: what `FMT PACKED` carries of its store format.

        One part is MLX's own memory, which the view keeps alive; several are copied.
        """
        return join_parts(self.views(), self.layout, self.rows)

    def views(self) -> tuple[memoryview, ...]:
        """The bytes of each part, in MLX's own memory, which they keep alive.

        They may be read by any thread, without MLX.
        """
        return tuple(array_bytes(part) for part in self.parts)

    @classmethod
    def from_buffer(cls, data: Buffer, layout: RowLayout, rows: int) -> RowPiece:
        """The piece whose `to_bytes` is `data`, copied; raises RebuildError if it cannot be."""
        layout.check()
        if rows < 0 or memoryview(data).nbytes != rows * layout.row_bytes:
            found = memoryview(data).nbytes
            raise RebuildError(f"{found} bytes for {rows} rows of {layout.row_bytes}")
        if len(layout.widths) == 1:
            part = array_from(data, layout.dtypes[0], (rows, layout.widths[0]))
            return cls((part,), layout.fmt)
        table = np.frombuffer(data, np.uint8).reshape(rows, layout.row_bytes)
        parts, at = [], 0
        for dtype, width, nbytes in zip(
            layout.dtypes, layout.widths, layout.part_bytes, strict=True
        ):
            column = np.ascontiguousarray(table[:, at : at + nbytes])
            parts.append(array_from(column.reshape(-1).data, dtype, (rows, width)))
            at += nbytes
        return cls(tuple(parts), layout.fmt)


@dataclass(frozen=True, slots=True)
class HeadPiece(RowPiece):
    """A piece whose `parts` are `[1, H, N + room, width_i / H]`: rows turned as a cache keeps them.

    A rebuilt cache takes these very tensors, without a copy. They may be views of rows. The last
    `room` rows are zeros that belong to nobody yet: the first appends go there.
    """

    room: int = 0

    @classmethod
    def of(cls, piece: RowPiece, heads: int) -> HeadPiece:
        """The rows of a piece head by head, not evaluated, sharing its memory."""
        by_row = (part.reshape(1, piece.rows, heads, -1) for part in piece.parts)
        return cls(tuple(part.swapaxes(1, 2) for part in by_row), piece.fmt)

    @property
    def rows(self) -> int:
        """Number of rows, N."""
        return int(self.parts[0].shape[2]) - self.room

    @property
    def layout(self) -> RowLayout:
        """What a row is made of."""
        widths = tuple(int(part.shape[1]) * int(part.shape[3]) for part in self.parts)
        return RowLayout(self.fmt, tuple(dtype_name(part) for part in self.parts), widths)

    def first(self, rows: int) -> RowPiece:
        """The first rows, sharing memory, without room."""
        return HeadPiece(tuple(part[:, :, :rows] for part in self.parts), self.fmt)

    def turned(self) -> RowPiece:
        """The same rows as `[N, width_i]`, copied where there are several heads."""
        rows = self.rows
        parts = (part[0, :, :rows].swapaxes(0, 1).reshape(rows, -1) for part in self.parts)
        return RowPiece(tuple(mx.contiguous(part) for part in parts), self.fmt)

    def views(self) -> tuple[memoryview, ...]:
        """The bytes of each part as `RowPiece.views` gives them."""
        return self.turned().views()


@dataclass(frozen=True, slots=True)
class Leaf:
    """One cache of the list: rows for the V-store, other arrays for a blob, meta for a manifest.

    `path`: slot in the cache list, then the positions inside each CacheList. `kind`: name of the
    cache class. `meta`: JSON values; its fields are listed with each class in `cache_rebuild`.
    `keys`, `values`: None where that side has no bytes. `arrays`: recurrent or opaque state, None
    where a slot is unused.
    """

    path: tuple[int, ...]
    kind: str
    meta: dict[str, Any]
    keys: RowPiece | None
    values: RowPiece | None
    arrays: tuple[mx.array | None, ...]

    @property
    def place(self) -> str:
        """Where the leaf sits, for messages: `3` or `3.1`."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class CacheImage:
    """A whole prompt cache at `tokens` tokens, one leaf a cache, in the order of the cache list."""

    tokens: int
    leaves: tuple[Leaf, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and arrays."""
        return sum(array.nbytes for array in self.arrays())

    def evaluate(self) -> None:
        """Have every array computed, so that any thread may go on with it."""
        mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        """Every array of every leaf."""
        found: list[mx.array] = []
        for leaf in self.leaves:
            for piece in (leaf.keys, leaf.values):
                found += piece.parts if piece is not None else ()
            found += [array for array in leaf.arrays if array is not None]
        return found
