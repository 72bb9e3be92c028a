"""The manifest of a stored prefix: whose it is, what it holds, and how to tell that it is whole.

It is written last and read first. A line

    pion-prefix 1 <xxh3-128 of everything after this line, 32 hex>

and one JSON object: the token ids, the model's fingerprint, and for every cache leaf its pieces,
each with rows, widths, dtypes, storage format and a checksum of the stored bytes. Nothing in it is
code, and reading one is all or nothing: whatever is missing, unknown, repeated, of another type or
out of range raises ManifestError, which is a miss.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pion_vllm_mlx.manifest_fields import (
    LARGEST,
    LAYOUT,
    MOST_LEAVES,
    MOST_TOKENS,
    Blob,
    LeafEntry,
    ManifestError,
    Rows,
    check_places,
    fields_of,
    hex_in,
    ids_in,
    ids_out,
    integer_in,
    leaf_in,
    leaf_out,
    list_in,
    seal,
    unseal,
)

__all__ = [
    "LARGEST",
    "LAYOUT",
    "VERSION",
    "Blob",
    "LeafEntry",
    "Manifest",
    "ManifestError",
    "Rows",
    "mismatch",
    "read_manifest",
    "write_manifest",
]

KIND: Final = "pion-prefix"
VERSION: Final = 1
#: Manifests up to this length are remembered decoded.
_SMALL: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole prefix.

    `prefill_ms`, `prefill_step`: how long the cold prefill took, and its chunk size in tokens;
    a cold run of the same split and chunk size is what a restored prefix equals bit for bit.
    """

    ids: tuple[int, ...]
    fingerprint: str
    leaves: tuple[LeafEntry, ...]
    prefill_ms: int
    prefill_step: int

    def pieces(self) -> Iterator[tuple[str, Rows]]:
        """Every piece that is rows, each with its side, "keys" or "values"."""
        for leaf in self.leaves:
            for side, rows in (("keys", leaf.keys), ("values", leaf.values)):
                if rows is not None:
                    yield side, rows


def mismatch(manifest: Manifest, ids: Sequence[int] | int, fingerprint: str) -> str | None:
    """Say why a manifest is not about `ids` computed by this model, or None if it is.

    A number instead of ids asks only for that many tokens.
    """
    if manifest.fingerprint != fingerprint:
        return "model"
    if len(manifest.ids) != (ids if isinstance(ids, int) else len(ids)):
        return "length"
    return None if isinstance(ids, int) or manifest.ids == tuple(ids) else "ids"


def write_manifest(manifest: Manifest) -> bytes:
    """Encode; ManifestError if it exceeds what the server stores."""
    return seal(
        KIND,
        VERSION,
        {
            "layout": LAYOUT,
            "tokens": len(manifest.ids),
            "ids": ids_out(manifest.ids),
            "model": manifest.fingerprint,
            "prefill_ms": manifest.prefill_ms,
            "prefill_step": manifest.prefill_step,
            "leaves": [leaf_out(leaf) for leaf in manifest.leaves],
        },
    )


def read_manifest(blob: bytes | bytearray | memoryview) -> Manifest:
    """Decode and check everything that can be checked without the prefix itself."""
    data = bytes(blob)
    return _read(data) if len(data) <= _SMALL else unseal(KIND, VERSION, data, _manifest_in)


@functools.lru_cache(maxsize=64)
def _read(blob: bytes) -> Manifest:
    """The same bytes are the same manifest, and a prefix is often asked for again."""
    return unseal(KIND, VERSION, blob, _manifest_in)


def _manifest_in(loaded: Any) -> Manifest:
    names = ("layout", "tokens", "ids", "model", "prefill_ms", "prefill_step", "leaves")
    layout, tokens, ids, model, prefill_ms, prefill_step, leaves = fields_of(loaded, names)
    if layout != LAYOUT:
        raise ManifestError("another layout")
    manifest = Manifest(
        ids=ids_in(ids, integer_in(tokens, 1, MOST_TOKENS)),
        fingerprint=hex_in(model, 64),
        leaves=tuple(leaf_in(leaf) for leaf in list_in(leaves, MOST_LEAVES)),
        prefill_ms=integer_in(prefill_ms, 0, 86_400_000),
        prefill_step=integer_in(prefill_step, 1, MOST_TOKENS),
    )
    check_places(manifest.leaves)
    return manifest
