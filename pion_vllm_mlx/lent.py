"""A prefix as one lent file: the layout asked for, and the tensors as caches take them.

A layout tells the server what each layer's rows are made of, a line a layer and side, and which
checksum the manifest gives them; the server checks those once, when it makes the file. Rows in the
very format of the cache come head-major and are used as they are; rows of other formats come PACKED
and are decoded here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import mlx.core as mx

from pion_patches.cache_rebuild import CacheImage, Leaf, RowPiece
from pion_patches.containers import unpack_arrays
from pion_patches.pieces import ITEMSIZE, HeadPiece, RebuildError, dtype_name
from pion_vllm_mlx.manifest import LeafEntry, Manifest, Rows
from pion_vllm_mlx.pieces import Landing, row_format
from pion_vllm_mlx.transport.local import Loan, NotLent

_CODES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
}


@dataclass(frozen=True, slots=True)
class Tensors:
    """How one side of a layer comes: `turned` as the cache keeps it, or as PACKED rows.

    `parts`: dtype and width, a head's, of each tensor.
    """

    name: str
    rows: Rows
    turned: bool
    heads: int
    parts: tuple[tuple[str, int], ...]

    @property
    def line(self) -> str:
        words = " ".join(f"{code}:{width}" for code, width, _ in self.stored)
        side, _, layer = self.name.partition(".")
        # Rows without a checksum are those of a segment, whose blocks have one.
        return f"{side} {layer} {self.rows.count} {self.rows.checksum or '-'} {self.heads} {words}"

    @property
    def stored(self) -> list[tuple[str, int, int]]:
        """Of each tensor its dtype as the file names it, width, and bytes a head's row has."""
        return [(_CODES[dtype], width, ITEMSIZE[dtype] * width) for dtype, width in self.parts]

    def piece(self, loaded: Mapping[str, mx.array]) -> RowPiece:
        parts = tuple(loaded[f"{self.name}.{index}"] for index in range(len(self.parts)))
        if self.turned:
            return HeadPiece(parts, self.rows.layout.fmt)
        landing = Landing(self.rows)
        landing.adopt(parts[0].reshape(-1))
        return landing.piece()


class Layout:
    """What a file holds that is to be the prefix of one manifest."""

    def __init__(self, manifest: Manifest) -> None:
        """Raises NotLent for rows that no file can hold."""
        self._manifest = manifest
        self._sides: dict[str, Tensors] = {}
        lines = []
        for entry in manifest.leaves:
            for side, rows in (("k", entry.keys), ("v", entry.values)):
                if rows is not None:
                    tensors = tensors_of(side, entry, rows)
                    self._sides[tensors.name] = tensors
                    lines.append(tensors.line)
        blobs = (entry.blob for entry in manifest.leaves if entry.blob is not None)
        lines += [f"s {blob.layer} {blob.nbytes} {blob.checksum}" for blob in blobs]
        self.text = "\n".join(lines).encode()
        self.digest = hashlib.blake2b(self.text, digest_size=16).digest()

    def read(self, loan: Loan) -> CacheImage:
        """The image, evaluated. Raises NotLent if the file is not what was asked for."""
        try:
            loaded: Any = mx.load(loan.path, format="safetensors")
            found = {name: (dtype_name(array), *array.shape) for name, array in loaded.items()}
            if found != self._expected():
                raise NotLent("unsound", "other tensors than were asked for")
            mx.eval(list(loaded.values()))
            leaves = tuple(self._leaf(entry, loaded) for entry in self._manifest.leaves)
        except (RuntimeError, OSError) as error:
            raise NotLent("unreadable", str(error)) from error
        except (RebuildError, ValueError) as error:
            raise NotLent("unsound", str(error)) from error
        return CacheImage(len(self._manifest.ids), leaves)

    def _expected(self) -> dict[str, tuple[str | int, ...]]:
        """Name, dtype and shape of every tensor."""
        expected: dict[str, tuple[str | int, ...]] = {}
        for name, side in self._sides.items():
            for index, (dtype, width) in enumerate(side.parts):
                expected[f"{name}.{index}"] = (dtype, 1, side.heads, side.rows.count, width)
        for entry in self._manifest.leaves:
            if entry.blob is not None:
                expected[f"s.{entry.blob.layer}"] = ("uint8", entry.blob.nbytes)
        return expected

    def _leaf(self, entry: LeafEntry, loaded: Mapping[str, mx.array]) -> Leaf:
        arrays: tuple[mx.array | None, ...] = ()
        if entry.blob is not None:
            state = memoryview(cast(Any, loaded[f"s.{entry.blob.layer}"]))
            arrays = unpack_arrays(entry.kind, state, len(self._manifest.ids))
        keys, values = (
            None if rows is None else self._sides[f"{side}.{rows.layer}"].piece(loaded)
            for side, rows in (("k", entry.keys), ("v", entry.values))
        )
        return Leaf(entry.path, entry.kind, dict(entry.meta), keys, values, arrays)


def tensors_of(side: str, entry: LeafEntry, rows: Rows) -> Tensors:
    """How rows of side "k" or "v" come; raises NotLent where no file can hold them."""
    name, layout = f"{side}.{rows.layer}", rows.layout
    if rows.store != layout.store_format:
        try:
            width = row_format(rows.store, layout).packed_row_bytes
        except ValueError as error:
            raise NotLent("unsound", str(error)) from error
        return Tensors(name, rows, False, 1, (("uint8", width),))
    heads = heads_of(entry, "keys" if side == "k" else "values", rows)
    if heads is None:
        raise NotLent("unsound", f"no heads of {name}")
    widths = (width // heads for width in layout.widths)
    return Tensors(name, rows, True, heads, tuple(zip(layout.dtypes, widths, strict=True)))


def heads_of(entry: LeafEntry, side: str, rows: Rows) -> int | None:
    """Over how many heads a row of this side is spread evenly; None where nothing says so."""
    shape = entry.meta.get(side)
    heads = shape.get("heads") if isinstance(shape, dict) else None
    if type(heads) is not int or heads < 1 or any(width % heads for width in rows.layout.widths):
        return None
    return heads
