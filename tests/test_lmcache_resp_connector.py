"""The wire patterns of LMCache's stock `resp://` and `redis://` connectors, byte for byte.

LMCache itself is not needed; `make interop` runs it. Its RESP client is native code that reads
replies of exactly the bytes it expects: `$<n>\\r\\n`, the value into the caller's buffer, `\\r\\n`;
`+OK\\r\\n`; `:1\\r\\n` or `:0\\r\\n`. Anything else leaves it waiting for ever.

python tests/test_lmcache_resp_connector.py       # as pytest runs it
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis.asyncio

Server = Any

# Keys as LMCache writes them: model, world size, worker, hash, dtype; and of its L2 adapters.
KEY = b"meta-llama/Llama-3.1-8B@8@%d@-6f3a%08x@bfloat16"
L2_KEY = b"meta-llama/Llama-3.1-8B@00000001@0@%064x@team-a"
SIZES = [0, 36, 4096, 65_536, 65_537, 1 << 20, 5 << 20]


class NativeClient:
    """Reads exactly as many bytes as the reply it expects has."""

    def __init__(self, server: Server) -> None:
        self._client = server.client()
        self._socket = self._client.socket

    def _ask(self, expected: bytes, *words: bytes) -> None:
        self._socket.sendall(self._client.pack(*words))
        assert self._exactly(len(expected)) == expected

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            assert piece, "closed"
            data += piece
        return data

    def set(self, key: bytes, value: bytes) -> None:
        self._ask(b"+OK\r\n", b"SET", key, value)

    def exists(self, key: bytes, there: bool) -> None:
        self._ask(b":%d\r\n" % there, b"EXISTS", key)

    def get(self, key: bytes, size: int) -> bytes:
        self._ask(b"$%d\r\n" % size, b"GET", key)
        value = self._exactly(size)
        assert self._exactly(2) == b"\r\n"
        return value

    def delete(self, key: bytes, there: bool) -> None:
        self._ask(b":%d\r\n" % there, b"DEL", key)


@pytest.mark.parametrize("size", SIZES)
def test_replies_have_exactly_the_bytes_the_native_client_waits_for(
    shared: Server, size: int
) -> None:
    client = NativeClient(shared)
    value = random.Random(size).randbytes(size)
    for key in (KEY % (0, size), L2_KEY % size):
        client.exists(key, False)
        client.set(key, value)
        client.exists(key, True)
        assert client.get(key, size) == value
        client.set(key, value[::-1])
        assert client.get(key, size) == value[::-1]
        client.delete(key, True)
        client.exists(key, False)


def test_eight_threads_of_a_connector_at_once(shared: Server) -> None:
    """One connection a worker thread, batches spread over them."""
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            client = NativeClient(shared)
            for chunk in range(20):
                client.set(KEY % (worker, chunk), bytes([worker]) * 50_000)
            for chunk in range(20):
                assert client.get(KEY % (worker, chunk), 50_000) == bytes([worker]) * 50_000
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_what_exists_is_there_to_get_while_others_fill_the_store(
    server: Callable[..., Server],
) -> None:
    """The native client cannot read a null: what it was promised must come."""
    running = server("--maxmemory", "4mb")
    client, others = NativeClient(running), running.client()
    for chunk in range(3):
        client.set(KEY % (0, chunk), bytes(500_000))
    for chunk in range(3):
        client.exists(KEY % (0, chunk), True)
    for flood in range(20):
        others.call("SET", KEY % (1, flood), bytes(500_000))
    for chunk in range(3):
        assert client.get(KEY % (0, chunk), 500_000) == bytes(500_000)


def test_password_and_tenant_before_anything_else(server: Callable[..., Server]) -> None:
    running = server("--requirepass", "root", "--tenant", "team-a=apple")
    for words in ((b"root",), (b"team-a", b"apple")):
        client = NativeClient(running)
        client._ask(b"+OK\r\n", b"AUTH", *words)
        client.exists(KEY % (0, 1), False)
        client.set(KEY % (0, 1), words[-1] * 1000)
        assert client.get(KEY % (0, 1), 1000 * len(words[-1])) == words[-1] * 1000


def test_the_redis_connector_of_two_keys_a_chunk(shared: Server) -> None:
    """`redis://`: redis-py's own handshake, bytes first, then the metadata that says so."""

    async def use() -> None:
        url = f"redis://127.0.0.1:{shared.port}"
        pool = redis.asyncio.ConnectionPool.from_url(url, max_connections=150)
        connection = redis.asyncio.Redis.from_pool(pool)
        key = (KEY % (0, 77)).decode()

        async def put(chunk: int) -> None:
            value = random.Random(chunk).randbytes(200_000)
            await connection.set(f"{key}{chunk}kv_bytes", memoryview(value))
            await connection.set(f"{key}{chunk}metadata", b"m" * 36)

        assert not await connection.exists(key + "0metadata")
        await asyncio.gather(*(put(chunk) for chunk in range(12)))
        for chunk in range(12):
            assert await connection.exists(f"{key}{chunk}metadata")
            assert await connection.get(f"{key}{chunk}metadata") == b"m" * 36
            value = await connection.get(f"{key}{chunk}kv_bytes")
            assert value == random.Random(chunk).randbytes(200_000)
        assert await connection.delete(key + "0metadata") == 1
        assert await connection.get(key + "0metadata") is None
        await connection.aclose()

    asyncio.run(use())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
