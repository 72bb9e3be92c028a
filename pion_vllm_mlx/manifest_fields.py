"""The fields that manifests share: cache leaves, checked values, and the sealed line in front.

A manifest of any kind begins with a line

    <kind> <version> <xxh3-128 of everything after this line, 32 hex>

and is one JSON object. Nothing in it is code, and reading one is all or nothing: whatever is
missing, unknown, repeated, of another type or out of range raises ManifestError, which is a miss.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import xxhash

from pion_patches.pieces import RebuildError, RowLayout

#: The server takes no larger one.
LARGEST: Final = 4 << 20
#: Axis order and endianness of every piece, named so that no reader has to assume them.
LAYOUT: Final = "[token][head][dim] little-endian"
MOST_TOKENS: Final = 1 << 20
MOST_LEAVES: Final = 1 << 12
_WIDEST: Final = 1 << 16
Read = TypeVar("Read")


class ManifestError(ValueError):
    """The blob is no manifest this version can vouch for; the message says why."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One side of an attention leaf: `count` rows in layer `layer` of the V-store.

    `layout`: what a row was made of before it was stored. `store`: the V-store format;
    `checksum`: xxh3-64 (hex) of all rows as PACKED bytes; empty where a manifest keeps its
    checksums elsewhere.
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


def seal(kind: str, version: int, fields: Mapping[str, Any]) -> bytes:
    """Encode; ManifestError if it exceeds what the server stores."""
    body = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    digest = xxhash.xxh3_128_hexdigest(body)
    blob = f"{kind} {version} {digest}\n".encode() + body
    if len(blob) > LARGEST:
        raise ManifestError(f"manifest of {len(blob)} bytes, the limit is {LARGEST}")
    return blob


def unseal(
    kind: str, version: int, blob: bytes | bytearray | memoryview, read: Callable[[Any], Read]
) -> Read:
    """What `read` makes of the JSON of a blob of that kind and version whose checksum matches.

    Raises ManifestError and nothing else.
    """
    if len(blob) > LARGEST:
        raise ManifestError("too large")
    head, newline, body = bytes(blob).partition(b"\n")
    words = head.split(b" ")
    if not newline or len(words) != 3 or words[0] != kind.encode():
        raise ManifestError(f"not a {kind}")
    if words[1] != b"%d" % version:
        raise ManifestError(f"version {words[1][:8].decode('ascii', 'replace')}, not {version}")
    if words[2].decode("ascii", "replace") != xxhash.xxh3_128_hexdigest(body):
        raise ManifestError("checksum does not match")
    try:
        return read(json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant))
    except ManifestError:
        raise
    except (RecursionError, ValueError) as error:
        raise ManifestError(f"not a manifest: {type(error).__name__}") from error


def ids_out(ids: Sequence[int]) -> str:
    """Token ids as base64 of u32 little-endian."""
    return base64.b64encode(np.array(ids, dtype="<u4").tobytes()).decode()


def leaf_out(leaf: LeafEntry) -> dict[str, Any]:
    """A leaf as JSON; rows without a checksum of their own have none there either."""
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
        **({"xxh3": rows.checksum} if rows.checksum else {}),
    }


def ids_in(text: Any, tokens: int) -> tuple[int, ...]:
    """So many token ids, as `ids_out` writes them."""
    try:
        data = base64.b64decode(text_in(text, LARGEST), validate=True)
    except binascii.Error as error:
        raise ManifestError("ids are not base64") from error
    if len(data) != 4 * tokens:
        raise ManifestError(f"{len(data)} bytes of ids for {tokens} tokens")
    return tuple(np.frombuffer(data, dtype="<u4").tolist())


def leaf_in(loaded: Any, *, summed: bool = True) -> LeafEntry:
    """A leaf; `summed`: each side of rows has a checksum of its own."""
    names = ("path", "kind", "meta", "keys", "values", "blob")
    path, kind, meta, keys, values, blob = fields_of(loaded, names)
    if not isinstance(meta, dict):
        raise ManifestError("meta is no object")
    places = tuple(integer_in(place, 0, MOST_LEAVES) for place in list_in(path, 8))
    if not places:
        raise ManifestError("a leaf without a place")
    sides = (_rows_in(keys, summed), _rows_in(values, summed))
    return LeafEntry(places, text_in(kind, 64), meta, *sides, blob=_blob_in(blob))


def check_places(leaves: Sequence[LeafEntry]) -> None:
    """Raise ManifestError if two leaves are in one place, or two pieces in one layer."""
    if len({leaf.path for leaf in leaves}) != len(leaves):
        raise ManifestError("two leaves in one place")
    for side in ("keys", "values"):
        layers = [rows.layer for leaf in leaves if (rows := getattr(leaf, side))]
        if len(set(layers)) != len(layers):
            raise ManifestError("two leaves in one layer")


def _rows_in(loaded: Any, summed: bool) -> Rows | None:
    if loaded is None:
        return None
    names = ("layer", "rows", "kind", "parts", "store")
    layer, count, kind, parts, store, *checksum = fields_of(
        loaded, (*names, "xxh3") if summed else names
    )
    pairs = [_part_in(part) for part in list_in(parts, 8)]
    layout = RowLayout(
        text_in(kind, 16), tuple(dtype for dtype, _ in pairs), tuple(width for _, width in pairs)
    )
    try:
        layout.check()
    except RebuildError as error:
        raise ManifestError(str(error)) from error
    return Rows(
        layer=integer_in(layer, 0, 255),
        count=integer_in(count, 1, MOST_TOKENS),
        layout=layout,
        store=text_in(store, 32),
        checksum=hex_in(checksum[0], 16) if summed else "",
    )


def _part_in(loaded: Any) -> tuple[str, int]:
    dtype, width = list_in(loaded, 2, exactly=True)
    return text_in(dtype, 16), integer_in(width, 1, _WIDEST)


def _blob_in(loaded: Any) -> Blob | None:
    if loaded is None:
        return None
    layer, nbytes, checksum = fields_of(loaded, ("layer", "bytes", "xxh3"))
    return Blob(
        integer_in(layer, 0, 2**32 - 2), integer_in(nbytes, 0, 1 << 30), hex_in(checksum, 16)
    )


def fields_of(loaded: Any, names: Sequence[str]) -> list[Any]:
    """The values of exactly these fields, in order."""
    if not isinstance(loaded, dict) or loaded.keys() != set(names):
        raise ManifestError(f"expected exactly the fields {', '.join(names)}")
    return [loaded[name] for name in names]


def integer_in(value: Any, lowest: int, highest: int) -> int:
    """An integer in that range."""
    if type(value) is not int or not lowest <= value <= highest:
        raise ManifestError(f"expected an integer in {lowest}..{highest}")
    return value


def text_in(value: Any, longest: int) -> str:
    """A text of 1 to `longest` characters."""
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise ManifestError("expected a text")
    return value


def hex_in(value: Any, digits: int) -> str:
    """So many lower-case hex digits."""
    text = text_in(value, digits)
    if len(text) != digits or any(digit not in "0123456789abcdef" for digit in text):
        raise ManifestError(f"expected {digits} hex digits")
    return text


def list_in(value: Any, longest: int, *, exactly: bool = False) -> list[Any]:
    """A list of at most, or exactly, so many elements."""
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
