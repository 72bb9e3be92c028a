"""Reading and writing safetensors in memory, strictly.

MLX's own reader follows the offsets it is given. This one refuses a file unless its header is
exact: every field there and no other, every size equal to its shape, the tensors filling the data
from end to end without gap or overlap (the format's own rule). Nothing is evaluated or unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import mlx.core as mx

from .pieces import ITEMSIZE, Buffer, RebuildError, array_bytes, array_from, dtype_name

_NAMES: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
}
_CODES: Final = {name: code for code, name in _NAMES.items()}
_LARGEST_HEADER: Final = 1 << 20
_MOST_DIMENSIONS: Final = 8


def write_safetensors(tensors: Mapping[str, mx.array], metadata: Mapping[str, str]) -> bytes:
    """The file, header padded to 8 bytes. Raises ValueError for a dtype the format lacks."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at, data = 0, []
    for name, tensor in tensors.items():
        code = _CODES.get(dtype_name(tensor))
        if code is None:
            raise ValueError(f"safetensors has no {dtype_name(tensor)}")
        end = at + tensor.nbytes
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, end]}
        data.append(array_bytes(tensor))
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *data))


def read_safetensors(blob: Buffer) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Tensors, copied and evaluated, and metadata; raises RebuildError for anything inexact."""
    view = memoryview(blob).cast("B")
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or length > min(len(view) - 8, _LARGEST_HEADER):
        raise RebuildError(f"no safetensors header in {len(view)} bytes")
    try:
        header = json.loads(bytes(view[8 : 8 + length]), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise RebuildError(f"safetensors header: {type(error).__name__}") from None
    if not isinstance(header, dict):
        raise RebuildError("safetensors header is no object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise RebuildError("safetensors metadata is not text")
    data, at, tensors = view[8 + length :], 0, {}
    entries = [(name, *_entry(name, entry)) for name, entry in header.items()]
    for name, dtype, shape, start, end in sorted(entries, key=lambda entry: entry[3:]):
        if start != at or end > len(data):
            raise RebuildError(f"tensor {name!r} does not follow the one before it")
        tensors[name] = array_from(data[start:end], dtype, shape)
        at = end
    if at != len(data):
        raise RebuildError(f"{len(data) - at} bytes belong to no tensor")
    return tensors, metadata


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise RebuildError(f"tensor {name!r} has other fields")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [-1]
    if any(type(number) is not int or not 0 <= number < 1 << 40 for number in numbers):
        raise RebuildError(f"tensor {name!r} has no shape")
    if not isinstance(code, str) or code not in _NAMES:
        raise RebuildError(f"tensor {name!r} is {code!r}")
    if len(shape) > _MOST_DIMENSIONS or len(offsets) != 2:
        raise RebuildError(f"tensor {name!r} has {len(shape)} dimensions")
    nbytes = ITEMSIZE[_NAMES[code]]
    for size in shape:
        nbytes *= size
    if offsets[1] - offsets[0] != nbytes:
        raise RebuildError(f"tensor {name!r} is {offsets[1] - offsets[0]} bytes, not {nbytes}")
    return _NAMES[code], tuple(shape), offsets[0], offsets[1]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field twice")
    return fields
