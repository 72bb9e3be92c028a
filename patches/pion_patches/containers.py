"""The state of one recurrent layer as one blob, in two containers.

`pack_arrays`, `unpack_arrays`: ours. A safetensors file whose metadata says whose state it is
(`meta`: ``type=<class>|narr=<slots>``), at which token it was captured (`tokens`), and which slots
hold None (`none`); tensors `a0`, `a1`, … are the others. Every dtype and shape keeps its bits; a
blob of another class, token count or number of slots is refused.

`serialize_arrays_cache`, `deserialize_arrays_cache`: the documented reference container of
SSM.PREFIX, which other clients may write:

    u32 version = 1, u32 n_arrays, per array: u32 ndim, u32 shape[ndim], u32 dtype
    (0 float32, 1 float16, 2 bfloat16, stored as float32), raw bytes; all little-endian

It knows neither None nor other dtypes, so it cannot hold every cache.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from .pieces import Buffer, RebuildError, array_bytes, array_from, dtype_name
from .safetensors_blob import read_safetensors, write_safetensors

_VERSION: Final = 1
_DTYPES: Final = ("float32", "float16", "bfloat16")
_MOST_ARRAYS: Final = 4096
_MOST_DIMENSIONS: Final = 8
_META: Final = re.compile(r"type=(.{1,200})\|narr=(\d{1,4})")


def pack_arrays(kind: str, arrays: Sequence[mx.array | None], tokens: int) -> bytes:
    """The arrays of a leaf of class `kind`, captured at `tokens` tokens, as one blob."""
    absent = ",".join(str(slot) for slot, array in enumerate(arrays) if array is None)
    metadata = {"meta": f"type={kind}|narr={len(arrays)}", "tokens": str(tokens), "none": absent}
    tensors = {f"a{slot}": array for slot, array in enumerate(arrays) if array is not None}
    return write_safetensors(tensors, metadata)


def unpack_arrays(kind: str, blob: Buffer, tokens: int) -> tuple[mx.array | None, ...]:
    """The arrays of a blob, evaluated copies; raises RebuildError unless it is exactly that."""
    tensors, metadata = read_safetensors(blob)
    meta = _META.fullmatch(metadata.get("meta", ""))
    if meta is None or meta[1] != kind:
        raise RebuildError(f"blob is {metadata.get('meta')!r}, not the state of a {kind}")
    if metadata.get("tokens") != str(tokens):
        raise RebuildError(f"state at {metadata.get('tokens')} tokens, not at {tokens}")
    absent = set(filter(None, metadata.get("none", "").split(",")))
    slots = [str(slot) for slot in range(int(meta[2]))]
    present = {f"a{slot}" for slot in slots if slot not in absent}
    if tensors.keys() != present or not absent <= set(slots):
        raise RebuildError(f"blob holds {sorted(tensors)}, announced are {sorted(present)}")
    return tuple(tensors.get(f"a{slot}") for slot in slots)


def serialize_arrays_cache(arrays: Sequence[mx.array | None]) -> bytes:
    """Arrays in the reference container.

    Raises ValueError for what it cannot hold: None, and dtypes but float32, float16, bfloat16.
    """
    parts = [struct.pack("<2I", _VERSION, len(arrays))]
    for array in arrays:
        if array is None or dtype_name(array) not in _DTYPES:
            found = "None" if array is None else dtype_name(array)
            raise ValueError(f"the reference container holds no {found}")
        code = _DTYPES.index(dtype_name(array))
        parts.append(struct.pack(f"<{array.ndim + 2}I", array.ndim, *array.shape, code))
        parts.append(bytes(array_bytes(_widen(array) if array.dtype == mx.bfloat16 else array)))
    return b"".join(parts)


def deserialize_arrays_cache(blob: Buffer) -> list[mx.array]:
    """The arrays of a reference container, evaluated copies; RebuildError if it is malformed."""
    view, at = memoryview(blob).cast("B"), 0

    def words(count: int) -> tuple[int, ...]:
        nonlocal at
        if at + 4 * count > len(view):
            raise RebuildError("the container ends in its header")
        found: tuple[int, ...] = struct.unpack_from(f"<{count}I", view, at)
        at += 4 * count
        return found

    version, count = words(2)
    if version != _VERSION or count > _MOST_ARRAYS:
        raise RebuildError(f"container version {version} of {count} arrays")
    arrays = []
    for _ in range(count):
        (ndim,) = words(1)
        if ndim > _MOST_DIMENSIONS:
            raise RebuildError(f"an array of {ndim} dimensions")
        *shape, code = words(ndim + 1)
        if code >= len(_DTYPES):
            raise RebuildError(f"unknown dtype code {code}")
        end = at + math.prod(shape) * (2 if _DTYPES[code] == "float16" else 4)
        if end > len(view):
            raise RebuildError(f"an array of {tuple(shape)} exceeds the container")
        stored = "float16" if _DTYPES[code] == "float16" else "float32"
        array = array_from(view[at:end], stored, shape)
        arrays.append(_narrow(array) if _DTYPES[code] == "bfloat16" else array)
        at = end
    if at != len(view):
        raise RebuildError(f"{len(view) - at} bytes after the last array")
    mx.eval(arrays)
    return arrays


def _widen(array: mx.array) -> mx.array:
    """Bfloat16 as float32, by bits: a conversion might change what a NaN carries."""
    return (array.view(mx.uint16).astype(mx.uint32) << 16).view(mx.float32)


def _narrow(array: mx.array) -> mx.array:
    words = array.view(mx.uint32)
    if mx.any(words & 0xFFFF).item():
        raise RebuildError("an array announced as widened bfloat16 is not")
    return (words >> 16).astype(mx.uint16).view(mx.bfloat16)
