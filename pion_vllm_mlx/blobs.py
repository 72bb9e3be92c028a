"""Recurrent and other state that is no rows: one safetensors blob a cache leaf.

Metadata `meta` is `type=<class>|narr=<n>`, tensors are `a0`, `a1`, …; an index without a tensor is
None. Bytes are kept as they are, in every dtype and shape, empty arrays included.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx


class BlobError(ValueError):
    """A blob that is not what `pack_arrays` writes for this class of leaf."""


def pack_arrays(kind: str, arrays: Sequence[mx.array | None]) -> bytes:
    """The arrays of a leaf of class `kind` as one blob."""
    file = io.BytesIO()
    tensors = {f"a{i}": mx.contiguous(a) for i, a in enumerate(arrays) if a is not None}
    _safetensors().save_safetensors(file, tensors, {"meta": f"type={kind}|narr={len(arrays)}"})
    return file.getvalue()


def unpack_arrays(kind: str, blob: bytes | bytearray | memoryview) -> tuple[mx.array | None, ...]:
    """The arrays of a blob written for a leaf of class `kind`, evaluated; raises BlobError."""
    try:
        tensors, metadata = _safetensors().load(
            io.BytesIO(blob), format="safetensors", return_metadata=True
        )
        mx.eval(*tensors.values())
    except (RuntimeError, ValueError) as error:
        raise BlobError(f"not a safetensors blob: {error}") from error
    meta = re.fullmatch(r"type=(.*)\|narr=(\d{1,4})", metadata.get("meta", ""))
    if meta is None or meta[1] != kind:
        raise BlobError(f"not the state of a {kind}")
    names = [f"a{index}" for index in range(int(meta[2]))]
    if not tensors.keys() <= set(names):
        raise BlobError("more arrays than announced")
    return tuple(tensors.get(name) for name in names)


def _safetensors() -> Any:
    """`mlx.core`, whose stubs know files by name only."""
    return mx
