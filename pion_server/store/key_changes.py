"""What a command does to the keyspace, as one record: how it is written down and read again.

A record's metadata is JSON, `{"o": [operation, ...]}`; its body holds the values, one after another
in the order the operations name their lengths. Names travel as Latin-1 text. Of several values the
metadata has each small one's checksum, too (`"c"`): damage to one costs the others nothing.

    ["s", key, length, expiry]                a string, whatever the key was before
    ["h", key, fresh, [[field, length], ...]] fields of a hash; fresh: of a new one
    ["H", key, [field, ...]]                  fields gone
    ["z", key, fresh, [[member, score], ...]] members of a sorted set
    ["Z", key, [member, ...]]                 members gone
    ["x", key, expiry]                        expiry in milliseconds since the epoch, or null
    ["d", key]                                the key is gone
    ["f"]                                     all keys are gone

`fresh` makes replay independent of the clock: that a key expired is in no record, but that a hash
began anew afterwards is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pion_server.payload import Buffer
from pion_server.store.checksum import crc32c
from pion_server.store.entries import dump_meta
from pion_server.store.key_values import LARGE

# Metadata is bounded; a command of more values than this is whole or damaged as one.
MOST_SUMS = 1 << 16


@dataclass(slots=True)
class Change:
    """Operations of one command, in order; made under the writer lock, then committed."""

    operations: list[list[Any]] = field(default_factory=list)
    values: list[Buffer] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.operations)

    def put_string(self, key: bytes, value: Buffer, expires_at: int | None = None) -> None:
        """Replace whatever `key` holds."""
        self.operations.append(["s", key, len(value), expires_at])
        self.values.append(value)

    def put_fields(
        self, key: bytes, fields: Iterable[tuple[bytes, Buffer]], *, fresh: bool
    ) -> None:
        """Set fields of a hash."""
        pairs = list(fields)
        self.operations.append(["h", key, fresh, [[name, len(value)] for name, value in pairs]])
        self.values.extend(value for _, value in pairs)

    def remove_fields(self, key: bytes, fields: Sequence[bytes]) -> None:
        """Remove fields of a hash that has others."""
        self.operations.append(["H", key, list(fields)])

    def put_members(
        self, key: bytes, members: Iterable[tuple[bytes, float]], *, fresh: bool
    ) -> None:
        """Set scores in a sorted set."""
        pairs = [[member, score] for member, score in members]
        self.operations.append(["z", key, fresh, pairs])

    def remove_members(self, key: bytes, members: Sequence[bytes]) -> None:
        """Remove members of a sorted set that has others."""
        self.operations.append(["Z", key, list(members)])

    def set_expiry(self, key: bytes, expires_at: int | None) -> None:
        """From when on the key is gone, in milliseconds since the epoch; None: never."""
        self.operations.append(["x", key, expires_at])

    def delete(self, key: bytes) -> None:
        """Forget a key."""
        self.operations.append(["d", key])

    def clear(self) -> None:
        """Forget all keys."""
        self.operations.append(["f"])

    def keys(self) -> set[bytes]:
        """The keys it is about."""
        return {operation[1] for operation in self.operations if len(operation) > 1}

    def meta(self) -> bytes:
        """The record's metadata."""
        fields: dict[str, Any] = {"o": self.operations}
        if 1 < len(self.values) <= MOST_SUMS:
            fields["c"] = [crc32c(one) if len(one) < LARGE else None for one in self.values]
        return dump_meta(fields)


def load_operations(meta: dict[str, Any]) -> list[list[Any]]:
    """The operations in a record's metadata, names as bytes again."""
    return [_with_names(operation) for operation in meta["o"]]


def _with_names(operation: list[Any]) -> list[Any]:
    code, *rest = operation
    if not rest:
        return [code]
    rest[0] = rest[0].encode("latin-1")
    if code in ("H", "Z"):
        rest[1] = [name.encode("latin-1") for name in rest[1]]
    elif code in ("h", "z"):
        rest[2] = [[name.encode("latin-1"), value] for name, value in rest[2]]
    return [code, *rest]


def value_lengths(operations: Iterable[Sequence[Any]]) -> list[int]:
    """The lengths of the values in the body, in order."""
    lengths: list[int] = []
    for operation in operations:
        if operation[0] == "s":
            lengths.append(operation[2])
        elif operation[0] == "h":
            lengths.extend(length for _, length in operation[3])
    return lengths
