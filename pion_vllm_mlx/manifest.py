"""The manifest of a stored prefix: whose it is, what it holds, and how to tell that it is whole.

It is written last and read first. A line

    pion-prefix 1 <xxh3-128 of everything after this line, 32 hex>

and one JSON object: the token ids, the model's fingerprint, and for every cache leaf its pieces,
each with rows, widths, dtypes, storage format and a checksum of the stored bytes. Nothing in it is
code, and reading one is all or nothing: whatever is missing, unknown, repeated, of another type or
out of range raises ManifestError, which is a miss.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from pion_patches.pieces import RebuildError, RowLayout

VERSION: Final = 1
#: The server takes no larger one.
LARGEST: Final = 4 << 20
#: Axis order and endianness of every piece, named so that no reader has to assume them.
LAYOUT: Final = "[token][head][dim] little-endian"
_MOST_TOKENS: Final = 1 << 20
_WIDEST: Final = 1 << 16
_MOST_LEAVES: Final = 1 << 12


class ManifestError(ValueError):
    """The blob is no manifest this version can vouch for; the message says why."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One side of an attention leaf: `count` rows in layer `layer` of the V-store.

    `layout`: what a row was made of before it was stored. `store`: the V-store format;
    `checksum`: xxh3-64 (hex) of all rows as PACKED bytes.
    """

    layer: int
    count: int
    layout: RowLayout
    store: str
    checksum: str


@dataclass(frozen=True, slots=True)
class Blob:
    """State that is no rows, as one SSM.PREFIX blob of `nbytes`."""

    layer: int
    nbytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class LeafEntry:
    """One cache leaf: where it sits in the cache list, its class and meta, its pieces."""

    path: tuple[int, ...]
    kind: str
    meta: Mapping[str, Any]
    keys: Rows | None
    values: Rows | None
    blob: Blob | None


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
    body = json.dumps(
        {
            "layout": LAYOUT,
            "tokens": len(manifest.ids),
            "ids": base64.b64encode(np.array(manifest.ids, dtype="<u4").tobytes()).decode(),
            "model": manifest.fingerprint,
            "prefill_ms": manifest.prefill_ms,
            "prefill_step": manifest.prefill_step,
            "leaves": [_leaf_out(leaf) for leaf in manifest.leaves],
        },
        separators=(",", ":"),
        allow_nan=False,
    ).encode()
    blob = b"pion-prefix %d %s\n%s" % (VERSION, xxhash.xxh3_128_hexdigest(body).encode(), body)
    if len(blob) > LARGEST:
        raise ManifestError(f"manifest of {len(blob)} bytes, the limit is {LARGEST}")
    return blob


def read_manifest(blob: bytes | bytearray | memoryview) -> Manifest:
    """Decode and check everything that can be checked without the prefix itself."""
    if len(blob) > LARGEST:
        raise ManifestError("too large")
    head, newline, body = bytes(blob).partition(b"\n")
    words = head.split(b" ")
    if not newline or len(words) != 3 or words[0] != b"pion-prefix":
        raise ManifestError("not a manifest")
    if words[1] != b"%d" % VERSION:
        raise ManifestError(f"version {words[1][:8].decode('ascii', 'replace')}, not {VERSION}")
    if words[2].decode("ascii", "replace") != xxhash.xxh3_128_hexdigest(body):
        raise ManifestError("checksum does not match")
    try:
        loaded = json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant)
        return _manifest_in(loaded)
    except ManifestError:
        raise
    except (RecursionError, ValueError) as error:
        raise ManifestError(f"not JSON: {type(error).__name__}") from error


def _leaf_out(leaf: LeafEntry) -> dict[str, Any]:
    blob = leaf.blob
    return {
        "path": list(leaf.path),
        "kind": leaf.kind,
        "meta": dict(leaf.meta),
        "keys": _rows_out(leaf.keys),
        "values": _rows_out(leaf.values),
        "blob": blob and {"layer": blob.layer, "bytes": blob.nbytes, "xxh3": blob.checksum},
    }


def _rows_out(rows: Rows | None) -> dict[str, Any] | None:
    if rows is None:
        return None
    return {
        "layer": rows.layer,
        "rows": rows.count,
        "kind": rows.layout.fmt,
        "parts": [list(part) for part in zip(rows.layout.dtypes, rows.layout.widths, strict=True)],
        "store": rows.store,
        "xxh3": rows.checksum,
    }


def _manifest_in(loaded: Any) -> Manifest:
    names = ("layout", "tokens", "ids", "model", "prefill_ms", "prefill_step", "leaves")
    layout, tokens, ids, model, prefill_ms, prefill_step, leaves = _fields(loaded, names)
    if layout != LAYOUT:
        raise ManifestError("another layout")
    manifest = Manifest(
        ids=tuple(_ids_in(ids, _integer(tokens, 1, _MOST_TOKENS)).tolist()),
        fingerprint=_hex(model, 64),
        leaves=tuple(_leaf_in(leaf) for leaf in _list(leaves, _MOST_LEAVES)),
        prefill_ms=_integer(prefill_ms, 0, 86_400_000),
        prefill_step=_integer(prefill_step, 1, _MOST_TOKENS),
    )
    if len({leaf.path for leaf in manifest.leaves}) != len(manifest.leaves):
        raise ManifestError("two leaves in one place")
    for side in ("keys", "values"):
        layers = [rows.layer for leaf in manifest.leaves if (rows := getattr(leaf, side))]
        if len(set(layers)) != len(layers):
            raise ManifestError("two leaves in one layer")
    return manifest


def _ids_in(text: Any, tokens: int) -> NDArray[np.uint32]:
    try:
        data = base64.b64decode(_text(text, LARGEST), validate=True)
    except binascii.Error as error:
        raise ManifestError("ids are not base64") from error
    if len(data) != 4 * tokens:
        raise ManifestError(f"{len(data)} bytes of ids for {tokens} tokens")
    return np.frombuffer(data, dtype="<u4")


def _leaf_in(loaded: Any) -> LeafEntry:
    names = ("path", "kind", "meta", "keys", "values", "blob")
    path, kind, meta, keys, values, blob = _fields(loaded, names)
    if not isinstance(meta, dict):
        raise ManifestError("meta is no object")
    places = tuple(_integer(place, 0, _MOST_LEAVES) for place in _list(path, 8))
    if not places:
        raise ManifestError("a leaf without a place")
    return LeafEntry(
        places, _text(kind, 64), meta, _rows_in(keys), _rows_in(values), _blob_in(blob)
    )


def _rows_in(loaded: Any) -> Rows | None:
    if loaded is None:
        return None
    layer, count, kind, parts, store, checksum = _fields(
        loaded, ("layer", "rows", "kind", "parts", "store", "xxh3")
    )
    pairs = [_part_in(part) for part in _list(parts, 8)]
    layout = RowLayout(
        _text(kind, 16), tuple(dtype for dtype, _ in pairs), tuple(width for _, width in pairs)
    )
    try:
        layout.check()
    except RebuildError as error:
        raise ManifestError(str(error)) from error
    return Rows(
        layer=_integer(layer, 0, 255),
        count=_integer(count, 1, _MOST_TOKENS),
        layout=layout,
        store=_text(store, 32),
        checksum=_hex(checksum, 16),
    )


def _part_in(loaded: Any) -> tuple[str, int]:
    dtype, width = _list(loaded, 2, exactly=True)
    return _text(dtype, 16), _integer(width, 1, _WIDEST)


def _blob_in(loaded: Any) -> Blob | None:
    if loaded is None:
        return None
    layer, nbytes, checksum = _fields(loaded, ("layer", "bytes", "xxh3"))
    return Blob(_integer(layer, 0, 2**32 - 2), _integer(nbytes, 0, 1 << 30), _hex(checksum, 16))


def _fields(loaded: Any, names: Sequence[str]) -> list[Any]:
    if not isinstance(loaded, dict) or loaded.keys() != set(names):
        raise ManifestError(f"expected exactly the fields {', '.join(names)}")
    return [loaded[name] for name in names]


def _integer(value: Any, lowest: int, highest: int) -> int:
    if type(value) is not int or not lowest <= value <= highest:
        raise ManifestError(f"expected an integer in {lowest}..{highest}")
    return value


def _text(value: Any, longest: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise ManifestError("expected a text")
    return value


def _hex(value: Any, digits: int) -> str:
    text = _text(value, digits)
    if len(text) != digits or any(digit not in "0123456789abcdef" for digit in text):
        raise ManifestError(f"expected {digits} hex digits")
    return text


def _list(value: Any, longest: int, *, exactly: bool = False) -> list[Any]:
    if not isinstance(value, list) or len(value) > longest or (exactly and len(value) != longest):
        raise ManifestError("expected a list")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ManifestError("a field twice")
    return fields


def _no_constant(name: str) -> Any:
    raise ManifestError(f"{name} is no number")
