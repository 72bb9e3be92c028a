"""LMCache's RemoteConnector plugin: `remote_url: pion://host:port`, chunks with their description.

    remote_storage_plugins: ["pion"]
    extra_config:
      remote_storage_plugin.pion.module_path: pion_lmcache.connector
      remote_storage_plugin.pion.class_name: PionConnectorAdapter

`pion://user:password@host:port` authenticates, `pions://` is the same with TLS. Every
failure is a miss, as LMCache expects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from pion_lmcache.backend import LMCacheRemoteBackend
from pion_vllm_mlx.transport.address import parse_url

T = TypeVar("T")

#: Chunks on their way at once, each by a thread and a connection of its own.
CONNECTIONS: Final = 4


class PionConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes connectors for `pion://` and `pions://` addresses."""

    def __init__(self) -> None:
        super().__init__("pion://")

    def can_parse(self, url: str) -> bool:
        return url.startswith(("pion://", "pions://"))

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Raises ValueError for an address without a host."""
        return PionConnector(context.url, context.loop, context.local_cpu_backend)


class PionConnector(RemoteConnector):  # type: ignore[misc]
    """Chunks of LMCache in a Pion server's keyspace."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any) -> None:
        super().__init__(local_cpu_backend.config, local_cpu_backend.metadata)
        self._loop = loop
        self._memory = local_cpu_backend
        self._backend = open_backend(url, CONNECTIONS)
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="pion-connector")

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def exists(self, key: Any) -> bool:
        """Whether the chunk is there; it then stays for ten seconds at least."""
        return await self._run(self._backend.contains, key.to_string())

    def exists_sync(self, key: Any) -> bool:
        """The same from any thread."""
        return self._backend.contains(key.to_string())

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """How many of the first chunks are there, up to one that is not."""
        found = self._backend.contains_many([key.to_string() for key in keys])
        return (*found, False).index(False)

    async def batched_async_contains(
        self, lookup_id: str, keys: list[Any], pin: bool = False
    ) -> int:
        """The same."""
        return await self._run(self.batched_contains, keys)

    async def get(self, key: Any) -> Any | None:
        """The chunk in memory of the local backend, None if it is not there or there is no room."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any | None]:
        """Chunks by key, None for each that is missing."""
        return await self._run(self._get_all, keys)

    def _get_all(self, keys: list[Any]) -> list[Any | None]:
        made: dict[int, Any] = {}

        def room_for(index: int) -> Callable[[bytes, int], memoryview | None]:
            def room(description: bytes, nbytes: int) -> memoryview | None:
                metadata = RemoteMetadata.deserialize(description)
                chunk = self._memory.allocate(metadata.shapes, metadata.dtypes, metadata.fmt)
                if chunk is None:
                    return None
                made[index] = chunk
                return _view(chunk)

            return room

        rooms = [room_for(index) for index in range(len(keys))]
        whole = self._backend.get_into([key.to_string() for key in keys], rooms)
        for index, chunk in made.items():
            if not whole[index]:
                chunk.ref_count_down()
        return [made[index] if ok else None for index, ok in enumerate(whole)]

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Keep a chunk; raises RuntimeError if the server did not acknowledge it."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        """Keep chunks; raises RuntimeError unless all were acknowledged."""
        chunks = []
        for key, chunk in zip(keys, memory_objs, strict=True):
            data = _view(chunk)
            shapes, dtypes = chunk.get_shapes(), chunk.get_dtypes()
            metadata = RemoteMetadata(len(data), shapes, dtypes, chunk.get_memory_format())
            chunks.append((key.to_string(), data, metadata.serialize()))
        kept = await self._run(self._backend.put_many, chunks)
        if not all(kept):
            raise RuntimeError(f"{kept.count(False)} of {len(kept)} chunks were not stored")

    def remove_sync(self, key: Any) -> bool:
        """Forget a chunk; whether it was there."""
        return self._backend.remove_many([key.to_string()])[0]

    async def list(self) -> list[str]:
        """The keys of all chunks."""
        return await self._run(self._backend.keys)

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        """0 if the server answers."""
        return 0 if await self._run(self._backend.ping) else 1

    async def close(self) -> None:
        """Close the connections."""
        self._backend.close()
        self._threads.shutdown(wait=False)


def open_backend(url: str, connections: int) -> LMCacheRemoteBackend:
    """The backend at `pion[s]://[user:password@]host[:port]`; ValueError for anything else."""
    at = parse_url(url)
    return LMCacheRemoteBackend(
        at.host,
        at.port,
        user=at.username,
        password=at.password,
        tls=at.tls,
        connections=connections,
    )


def _view(chunk: Any) -> memoryview:
    return memoryview(chunk.byte_array).cast("B")
