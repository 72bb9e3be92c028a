"""The few names of LMCache that our plugins import, for tests where LMCache is not installed.

Shapes of arguments and results are those of LMCache 0.5.6; `make interop` runs the plugins in the
real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any


class Chunk:
    """A MemoryObj: bytes, a shape, and a count of who uses it."""

    def __init__(self, size: int, fill: bytes = b"\0") -> None:
        self.byte_array = memoryview(bytearray((fill * size)[:size]))
        self.uses = 1

    def get_shapes(self) -> list[int]:
        return [len(self.byte_array)]

    def get_dtypes(self) -> list[str]:
        return ["uint8"]

    def get_memory_format(self) -> int:
        return 1

    def ref_count_down(self) -> None:
        self.uses -= 1


class Memory:
    """A LocalCPUBackend: hands out chunks until `left` are gone."""

    config = metadata = None

    def __init__(self, left: int = 1000) -> None:
        self.left = left
        self.made: list[Chunk] = []

    def allocate(self, shapes: list[int], dtypes: list[str], fmt: int) -> Chunk | None:
        if self.left == 0:
            return None
        self.left -= 1
        self.made.append(Chunk(shapes[0]))
        return self.made[-1]


@dataclass
class _Metadata:
    length: int
    shapes: list[int]
    dtypes: list[str]
    fmt: int

    def serialize(self) -> bytes:
        return json.dumps([self.length, self.shapes, self.dtypes, self.fmt]).encode()

    @staticmethod
    def deserialize(data: bytes) -> _Metadata:
        return _Metadata(*json.loads(data))


class _Connector:
    def __init__(self, config: object, metadata: object) -> None:
        pass


class _Adapter:
    def __init__(self, schema: str) -> None:
        self.schema = schema


class _L2Adapter:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.told.append(("stored", keys, sizes))

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        self.told.append(("accessed", keys))

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        self.told.append(("deleted", keys, sizes))


class _Bitmap(list[bool]):
    def __init__(self, size: int) -> None:
        super().__init__([False] * size)

    def set(self, index: int) -> None:
        self[index] = True


class _StoreResult(int):
    def __new__(cls, success: bool, nbytes: int) -> _StoreResult:
        return super().__new__(cls, nbytes if success else -1)


class _Notifier:
    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def notify(self) -> None:
        os.write(self._write, b"!")

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


_NAMES: dict[str, dict[str, Any]] = {
    "lmcache": {},
    "lmcache.lmcache_native": {"Bitmap": _Bitmap},
    "lmcache.v1": {},
    "lmcache.v1.platform": {"create_event_notifier": _Notifier},
    "lmcache.v1.protocol": {"RemoteMetadata": _Metadata},
    "lmcache.v1.storage_backend": {},
    "lmcache.v1.storage_backend.connector": {
        "ConnectorAdapter": _Adapter,
        "ConnectorContext": object,
    },
    "lmcache.v1.storage_backend.connector.base_connector": {"RemoteConnector": _Connector},
    "lmcache.v1.distributed": {},
    "lmcache.v1.distributed.internal_api": {"L2StoreResult": _StoreResult},
    "lmcache.v1.distributed.l2_adapters": {},
    "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": _L2Adapter},
}


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """These names in the place of LMCache, until the end of the block."""
    for name, names in _NAMES.items():
        module = ModuleType(name)
        vars(module).update(names)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in [*_NAMES, "pion_lmcache.connector", "pion_lmcache.l2_adapter"]:
            sys.modules.pop(name, None)
