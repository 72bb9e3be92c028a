"""A prefix as one lent file: the layout asked for, and the tensors as caches take them.

A layout tells the server what each layer's rows are made of, a line a layer and side, and which
checksum the manifest gives them; the server checks those once, when it makes the file. Rows in the
very format of the cache come head-major and are used as they are, with room behind them where the
cache appends to its buffer; rows of other formats come PACKED and are decoded here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import mlx.core as mx

from pion_patches.cache_rebuild import CacheImage, Leaf, RowPiece
from pion_patches.containers import unpack_arrays
from pion_patches.pieces import ITEMSIZE, HeadPiece, RebuildError, dtype_name
from pion_vllm_mlx.manifest import LeafEntry, Manifest, Rows
from pion_vllm_mlx.pieces import Landing, row_format
from pion_vllm_mlx.process_lock import ProcessLock
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
#: Caches whose buffer may be longer than their rows.
_GROWING: Final = ("KVCache", "QuantizedKVCache")
#: Rows that can be appended in place. Without them the first append copies the whole prefix; each
#: costs its share of the read.
ROOM: Final = 128


@dataclass(frozen=True, slots=True)
class Tensors:
    """How one side of a layer comes: `turned` as the cache keeps it, or as PACKED rows.

    `parts`: dtype and width, a head's, of each tensor. `grows`: the cache takes the tensors as they
    are and appends to them. `room`: rows of zeros behind the rows.
    """

    name: str
    rows: Rows
    turned: bool
    heads: int
    parts: tuple[tuple[str, int], ...]
    grows: bool = False
    room: int = 0

    @property
    def line(self) -> str:
        words = " ".join(f"{code}:{width}" for code, width, _ in self.stored)
        side, _, layer = self.name.partition(".")
        # Rows without a checksum are those of a segment, whose blocks have one.
        checksum = self.rows.checksum or "-"
        length = f"{self.rows.count}+{self.room}" if self.room else f"{self.rows.count}"
        return f"{side} {layer} {length} {checksum} {self.heads} {words}"

    @property
    def stored(self) -> list[tuple[str, int, int]]:
        """Of each tensor its dtype as the file names it, width, and bytes a head's row has."""
        return [(_CODES[dtype], width, ITEMSIZE[dtype] * width) for dtype, width in self.parts]

    def piece(self, loaded: Mapping[str, mx.array]) -> RowPiece:
        parts = tuple(loaded[f"{self.name}.{index}"] for index in range(len(self.parts)))
        if self.turned:
            return HeadPiece(parts, self.rows.layout.fmt, self.room)
        landing = Landing(self.rows)
        landing.adopt(parts[0].reshape(-1))
        return landing.piece()


class Layout:
    """What a file holds that is to be the prefix of one manifest."""

    @classmethod
    def of(cls, manifest: Manifest) -> Layout:
        """As the constructor; that of a manifest asked for again is remembered."""
        known = _recent.get(id(manifest))
        if known is not None and known._manifest is manifest:
            return known
        layout = cls(manifest)
        with _making:
            _recent[id(manifest)] = layout
            while len(_recent) > _MOST_RECENT:
                _recent.popitem(last=False)
        return layout

    def __init__(self, manifest: Manifest) -> None:
        """Raises NotLent for rows that no file can hold."""
        self._manifest = manifest
        self._sides: dict[str, Tensors] = {}
        lines = []
        for entry in manifest.leaves:
            for side, rows in (("k", entry.keys), ("v", entry.values)):
                if rows is not None:
                    tensors = tensors_of(side, entry, rows)
                    if tensors.grows:
                        tensors = dataclasses.replace(tensors, room=ROOM)
                    self._sides[tensors.name] = tensors
                    lines.append(tensors.line)
        blobs = (entry.blob for entry in manifest.leaves if entry.blob is not None)
        lines += [f"s {blob.layer} {blob.nbytes} {blob.checksum}" for blob in blobs]
        self.text = "\n".join(lines).encode()
        self.digest = hashlib.blake2b(self.text, digest_size=16).digest()
        self._expected = self._tensors()

    def read(self, loan: Loan) -> CacheImage:
        """The image, evaluated. Raises NotLent if the file is not what was asked for."""
        try:
            loaded: Any = mx.load(loan.path, format="safetensors")
            found = {name: (dtype_name(array), *array.shape) for name, array in loaded.items()}
            if found != self._expected:
                raise NotLent("unsound", "other tensors than were asked for")
            mx.eval(list(loaded.values()))
            leaves = tuple(self._leaf(entry, loaded) for entry in self._manifest.leaves)
        except (RuntimeError, OSError) as error:
            raise NotLent("unreadable", str(error)) from error
        except (RebuildError, ValueError) as error:
            raise NotLent("unsound", str(error)) from error
        return CacheImage(len(self._manifest.ids), leaves)

    def _tensors(self) -> dict[str, tuple[str | int, ...]]:
        """Name, dtype and shape of every tensor."""
        expected: dict[str, tuple[str | int, ...]] = {}
        for name, side in self._sides.items():
            length = side.rows.count + side.room
            for index, (dtype, width) in enumerate(side.parts):
                expected[f"{name}.{index}"] = (dtype, 1, side.heads, length, width)
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


#: By the identity of the manifest, which its layout keeps alive.
_recent: OrderedDict[int, Layout] = OrderedDict()
_making = ProcessLock()
_MOST_RECENT: Final = 16


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
    parts = tuple(zip(layout.dtypes, widths, strict=True))
    return Tensors(name, rows, True, heads, parts, grows=entry.kind in _GROWING)


def heads_of(entry: LeafEntry, side: str, rows: Rows) -> int | None:
    """Over how many heads a row of this side is spread evenly; None where nothing says so."""
    shape = entry.meta.get(side)
    heads = shape.get("heads") if isinstance(shape, dict) else None
    if type(heads) is not int or heads < 1 or any(width % heads for width in rows.layout.widths):
        return None
    return heads
