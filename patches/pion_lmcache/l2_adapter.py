"""LMCache's multiprocess L2 adapter plugin.

    {"type": "plugin", "module_path": "pion_lmcache.l2_adapter", "class_name": "PionL2Adapter",
     "adapter_params": {"url": "pion://127.0.0.1:1974"}}

`adapter_params` may also name `connections` (8). A cache salt is the last part of a key's name.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from pion_lmcache.connector import open_backend

log = logging.getLogger("pion_lmcache")

CONNECTIONS: Final = 8


class PionL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Objects of LMCache in a Pion server's keyspace: tasks in threads, ends told by descriptors.

    A lookup's lock is the server's: what EXISTS found is not evicted for ten seconds.
    """

    def __init__(self, params: dict[str, Any], **_: Any) -> None:
        super().__init__()
        connections = int(params.get("connections", CONNECTIONS))
        self._backend = open_backend(str(params["url"]), connections)
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="pion-l2")
        self._lock = threading.Lock()
        self._next_task = 0
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._sizes: dict[Any, int] = {}
        self._locks: Counter[Any] = Counter()
        self._ends = self._store_end, self._lookup_end, self._load_end = (
            create_event_notifier(),
            create_event_notifier(),
            create_event_notifier(),
        )

    def get_store_event_fd(self) -> int:
        return int(self._store_end.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookup_end.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._load_end.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store a batch; the task's number."""

        def work() -> L2StoreResult:
            views = [_view(one) for one in objects]
            chunks = [(_name(k), view, b"") for k, view in zip(keys, views, strict=True)]
            kept = self._backend.put_many(chunks)
            stored = [(k, len(v)) for k, v, ok in zip(keys, views, kept, strict=True) if ok]
            self._account(stored)
            return L2StoreResult(all(kept), sum(size for _, size in stored))

        failed = L2StoreResult(False, 0)
        return self._submit(work, failed, self._stored, self._store_end)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Results of tasks that ended since the last call."""
        with self._lock:
            done, self._stored = dict(self._stored), {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        """Look a batch up; what is there stays for a while."""

        def work() -> Bitmap:
            found = self._backend.contains_many([_name(key) for key in keys])
            with self._lock:
                self._locks.update(key for key, there in zip(keys, found, strict=True) if there)
            return _bitmap(found)

        return self._submit(work, _bitmap([False] * len(keys)), self._found, self._lookup_end)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing to send: the server's lease ends by itself."""
        with self._lock:
            self._locks.subtract(keys)
            self._locks = +self._locks

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Load a batch into the objects' memory."""

        def work() -> Bitmap:
            rooms = [_room(_view(one)) for one in objects]
            loaded = self._backend.get_into([_name(key) for key in keys], rooms)
            hits = [key for key, ok in zip(keys, loaded, strict=True) if ok]
            if hits:
                self._notify_keys_accessed(hits)
            return _bitmap(loaded)

        return self._submit(work, _bitmap([False] * len(keys)), self._loaded, self._load_end)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._loaded.pop(task_id, None)

    def delete(self, keys: list[Any]) -> None:
        """Forget a batch, but for what is locked."""
        with self._lock:
            free = [key for key in keys if not self._locks[key]]
        gone = self._backend.remove_many([_name(key) for key in free])
        with self._lock:
            sizes = {key: self._sizes.pop(key, 0) for key, ok in zip(free, gone, strict=True) if ok}
        if sizes:
            self._notify_keys_deleted(list(sizes), list(sizes.values()))

    def report_status(self) -> dict[str, Any]:
        """Whether the server answers."""
        return {"is_healthy": self._backend.ping(), "type": "pion"}

    def close(self) -> None:
        """Wait for the tasks under way, then close the connections and descriptors."""
        self._threads.shutdown(wait=True)
        self._backend.close()
        for end in self._ends:
            end.close()

    def _submit(
        self, work: Callable[[], Any], failed: Any, results: dict[int, Any], end: Any
    ) -> int:
        with self._lock:
            task = self._next_task
            self._next_task += 1

        def run() -> None:
            result = failed
            try:
                result = work()
            except Exception:
                log.exception("a task of LMCache failed")
            # Whatever happened, who waits for the task is told.
            with self._lock:
                results[task] = result
            end.notify()

        self._threads.submit(run)
        return task

    def _account(self, stored: list[tuple[Any, int]]) -> None:
        """Tell listeners of what is new."""
        with self._lock:
            new = [(key, size) for key, size in stored if key not in self._sizes]
            self._sizes.update(new)
        if new:
            self._notify_keys_stored([key for key, _ in new], [size for _, size in new])


def _name(key: Any) -> str:
    parts = (key.model_name, f"{key.kv_rank:08x}", f"{key.object_group_id:x}", key.chunk_hash.hex())
    return "@".join((*parts, key.cache_salt) if key.cache_salt else parts)


def _view(one: Any) -> memoryview:
    return memoryview(one.byte_array).cast("B")


def _room(view: memoryview) -> Callable[[bytes, int], memoryview]:
    return lambda description, nbytes: view


def _bitmap(bits: list[bool]) -> Bitmap:
    made = Bitmap(len(bits))
    for index, bit in enumerate(bits):
        if bit:
            made.set(index)
    return made
