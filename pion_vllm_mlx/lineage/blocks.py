"""Blocks of 64 tokens and their names: what makes two prefixes the same one.

A digest stands for everything before it. The first is that of the scope: which model, adapter,
dtype, format, layout and tenant; each next one covers the digest before it and 64 token ids. So
equal digests mean equal prefixes in the same scope, whichever process computed them. Fields are
tagged and length-prefixed: no two different lists of fields give the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

#: Tokens a block.
BLOCK: Final = 64
#: Of what is stored under a name; another version gives other names.
LAYOUT_VERSION: Final = 1
#: What names of the four kinds of record begin with.
SEGMENT: Final = b"pls1-"
CHECKPOINT: Final = b"plc1-"
TRACE: Final = b"plt1-"
STATE: Final = b"plx1-"


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose prefixes: of which model (its fingerprint), stored how, for whom.

    `dtype`: that of the model's activations; `format`: how rows are stored and quantised;
    `tenant`: a salt that keeps prefixes of different users apart.
    """

    model: str
    adapter: str = ""
    dtype: str = ""
    format: str = ""
    tenant: str = ""

    def root(self) -> bytes:
        """The digest before the first block, 32 bytes."""
        fields = (
            ("model", self.model),
            ("adapter", self.adapter),
            ("dtype", self.dtype),
            ("format", self.format),
            ("layout", str(LAYOUT_VERSION)),
            ("tenant", self.tenant),
        )
        encoded = [(tag, text.encode("utf-8", "surrogatepass")) for tag, text in fields]
        return hashlib.sha256(tagged(("pion-lineage", b"1"), *encoded)).digest()


def tagged(*fields: tuple[str, bytes]) -> bytes:
    """Tags and values, each with its length in front: `5:model3:abc`."""
    return b"".join(
        b"%d:%s%d:%s" % (len(tag), tag.encode(), len(value), value) for tag, value in fields
    )


def as_ids(ids: Sequence[int]) -> NDArray[np.uint32]:
    """Token ids as u32 little-endian; ValueError for what is no token id."""
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros(0, dtype="<u4")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError("token ids are one flat sequence of integers")
    if int(array.min()) < 0 or int(array.max()) >= 1 << 32:
        raise ValueError("token ids are 0 to 2**32 - 1")
    return array.astype("<u4")


def chain(root: bytes, ids: NDArray[np.uint32]) -> list[bytes]:
    """The digest at the end of each whole block of `ids`, 32 bytes each."""
    digests = []
    parent = root
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        block = ids[start : start + BLOCK].tobytes()
        parent = hashlib.sha256(tagged(("parent", parent), ("ids", block))).digest()
        digests.append(parent)
    return digests


def floor_block(tokens: int) -> int:
    """The last block end at or before `tokens`."""
    return tokens - tokens % BLOCK


def ceil_block(tokens: int) -> int:
    """The first block end at or after `tokens`."""
    return -(-tokens // BLOCK) * BLOCK


def common(left: NDArray[np.uint32], right: NDArray[np.uint32]) -> int:
    """How many leading ids two lists share."""
    count = min(len(left), len(right))
    different = np.flatnonzero(left[:count] != right[:count])
    return int(different[0]) if len(different) else count


def segment_name(start: bytes, digest: bytes) -> bytes:
    """The namespace of rows that begin with the block of `digest`, for plain attention models."""
    return start + SEGMENT + digest.hex().encode()


def checkpoint_name(start: bytes, digest: bytes) -> bytes:
    """The namespace of the segment that ends at the block end `digest`, where state was kept."""
    return start + CHECKPOINT + digest.hex().encode()


def state_name(start: bytes, digest: bytes) -> bytes:
    """The namespace of all state at the block end `digest`."""
    return start + STATE + digest.hex().encode()


def trace_name(start: bytes, digest: bytes) -> bytes:
    """The namespace of the ids of a segment that begins with the block of `digest`."""
    return start + TRACE + digest.hex().encode()
