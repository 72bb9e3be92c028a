"""The keyspace as snapshot items: small values many to a record, large ones one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pion_server.store.compaction import Item, Part, drain
from pion_server.store.entries import RecordType
from pion_server.store.key_changes import Change
from pion_server.store.key_values import Data, Hash, Slice, SortedSet
from pion_server.store.keyspace import Keyspace
from pion_server.store.log import Record

# A record of small values ends at about so many bytes, names counted.
BATCH_BYTES = 1 << 18
# Elements of one hash or sorted set in one operation.
BATCH_ELEMENTS = 1024


class KeyspaceFreeze:
    """All keys at one moment, as `compaction.Frozen`; made under the writer lock."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._held = [
            (key, _copied(entry.data), entry.expires_at) for key, entry in keyspace.held()
        ]
        # Large values in the order of their items, and the copies of them in the new file.
        self._large: list[tuple[bytes, bytes | None, Slice]] = []
        self._copies: list[Record] = []

    def items(self) -> Iterator[Item]:
        """As `Frozen.items`; the keys in their order of use, which replay keeps."""
        batch = _Batch()
        for key, data, expires_at in self._held:
            if isinstance(data, Slice):
                yield from batch.flush()
                yield self._large_item(["s", key, data.length, expires_at], key, None, data)
                continue
            if isinstance(data, SortedSet):
                yield from batch.add_sorted_set(key, data)
            elif isinstance(data, dict):
                yield from self._hash_items(batch, key, data)
            else:
                batch.add_string(key, data, expires_at)
                expires_at = None
            if expires_at is not None:
                batch.change.set_expiry(key, expires_at)
            if batch.nbytes >= BATCH_BYTES:
                yield from batch.flush()
        yield from batch.flush()

    def _hash_items(self, batch: _Batch, key: bytes, data: Hash) -> Iterator[Item]:
        small = [(name, value) for name, value in data.items() if not isinstance(value, Slice)]
        large = [(name, value) for name, value in data.items() if isinstance(value, Slice)]
        yield from batch.add_fields(key, small)
        for index, (name, value) in enumerate(large):
            yield from batch.flush()
            fresh = not small and index == 0
            yield self._large_item(["h", key, fresh, [[name, value.length]]], key, name, value)

    def _large_item(
        self, operation: list[Any], key: bytes, field: bytes | None, value: Slice
    ) -> Item:
        meta = Change([operation]).meta()
        self._large.append((key, field, value))

        def damaged() -> list[Item]:
            return [Item(RecordType.KEYS, meta, [], self._copies.append, damaged=True)]

        part = Part(value.record, value.offset, value.length)
        return Item(RecordType.KEYS, meta, [part], self._copies.append, damaged)

    def adopt(self) -> Iterator[None]:
        """As `Frozen.adopt`."""
        for (key, field, old), record in zip(self._large, self._copies, strict=True):
            self._keyspace.adopt(key, field, old, Slice(record, 0, old.length))
            yield

    def take_apart(self) -> None:
        """As `Frozen.take_apart`."""
        drain(self._held)
        drain(self._large)
        drain(self._copies)


class _Batch:
    """Operations gathered for one record."""

    def __init__(self) -> None:
        self.change = Change()
        self.nbytes = 0

    def add_string(self, key: bytes, value: bytes, expires_at: int | None) -> None:
        self.change.put_string(key, value, expires_at)
        self.nbytes += len(key) + len(value)

    def add_fields(self, key: bytes, fields: list[tuple[bytes, bytes]]) -> Iterator[Item]:
        for start in range(0, len(fields), BATCH_ELEMENTS):
            group = fields[start : start + BATCH_ELEMENTS]
            self.change.put_fields(key, group, fresh=start == 0)
            self.nbytes += len(key) + sum(len(name) + len(value) for name, value in group)
            if self.nbytes >= BATCH_BYTES:
                yield from self.flush()

    def add_sorted_set(self, key: bytes, data: SortedSet) -> Iterator[Item]:
        elements = data.items()
        for start in range(0, len(elements), BATCH_ELEMENTS):
            group = [(m, score) for score, m in elements[start : start + BATCH_ELEMENTS]]
            self.change.put_members(key, group, fresh=start == 0)
            self.nbytes += len(key) + sum(len(member) + 24 for member, _ in group)
            if self.nbytes >= BATCH_BYTES:
                yield from self.flush()

    def flush(self) -> Iterator[Item]:
        """The item of what was gathered, if there is anything."""
        if self.change:
            body: list[Part | bytes] = [b"".join(self.change.values)]
            yield Item(RecordType.KEYS, self.change.meta(), body)
            self.change, self.nbytes = Change(), 0


def _copied(data: Data) -> Data:
    """A value that later writes do not change."""
    if isinstance(data, dict):
        return dict(data)
    return data.copy() if isinstance(data, SortedSet) else data
