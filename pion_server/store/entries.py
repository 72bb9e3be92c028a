"""The record types of the V-store, SSM and keyspace logs, and how their metadata is written.

Metadata is JSON; names are arbitrary bytes and travel as Latin-1 text, one character a byte.
"""

from __future__ import annotations

import enum
import json
from typing import Any

_encode = json.JSONEncoder(separators=(",", ":")).encode


class RecordType(enum.IntEnum):
    """What a record says; its metadata keys in brackets. Numbers are part of the file format."""

    CREATE = 1
    """Sessions made [s: list of [sid, schema], x: sids emptied before, b: [sid, block size] of a
    block table]; body: its u64 hashes."""
    ROWS = 2
    """Rows stored [s sid, l layer, a first row, r: list of [rows, run header hex], f: format tag
    and dim]; body: rows."""
    DROP = 3
    """Sessions [s] and everything kept of namespaces [n] are gone."""
    CUT = 4
    """Rows from a count on are gone [s sid, c: list of [layer, count]]."""
    BLOCKS = 5
    """Block hash table of a session [s sid, b block size]; body: u64 hashes."""
    FILL = 6
    """A fill was opened, the manifest is gone [n ns, g generation]."""
    MANIFEST = 7
    """A fill was completed [n ns, g generation]; body: the blob."""
    UNMANIFEST = 8
    """The manifest is gone [n ns]."""
    PIN = 9
    """A namespace is pinned or not [n ns, p bool]."""
    EXPIRE = 10
    """A namespace goes at a time [n ns, t Unix seconds]."""
    LOST = 11
    """Rows whose bytes were damaged when a snapshot was written [s sid, l, a, r rows]."""
    GENERATION = 12
    """The highest fill generation ever given out [g]; stands in snapshots."""
    RELEASED = 13
    """Bodies whose bytes were given back to the disk, nothing refers to them any more [c: covers of
    the snapshot they lie in, or null for this log, o: their offsets]."""
    STATE = 20
    """Recurrent state stored [s sid, l layer]; body: the blob."""
    STATE_DROP = 21
    """Recurrent state gone [s sid, l layer or null for all]."""
    KEYS = 30
    """What one command did to the keyspace [o operations, see `key_changes`]; body: the values."""


def dump_meta(meta: dict[str, Any]) -> bytes:
    """JSON with every bytes value (also in lists) as Latin-1 text."""
    return _encode(_texts(meta)).encode("ascii")


def load_meta(data: bytes) -> dict[str, Any]:
    """Metadata of a record whose head checksum held."""
    meta: dict[str, Any] = json.loads(data.decode("ascii"))
    return meta


def name_bytes(text: str) -> bytes:
    """A name out of metadata."""
    return text.encode("latin-1")


def _texts(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {key: _texts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_texts(item) for item in value]
    return value
