"""What LMCache's plugins of ours do when things go well and when they do not, without LMCache.

python tests/test_lmcache_plugins.py       # as pytest runs it
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest

from tests.conftest import has_input
from tests.lmcache_stand_in import Chunk, Memory, stand_in

Server = Any


@dataclass(frozen=True)
class Key:
    """A CacheEngineKey, or an ObjectKey of the L2 adapters."""

    number: int
    cache_salt: str = ""
    model_name: str = "model"
    kv_rank: int = 1
    object_group_id: int = 0

    @property
    def chunk_hash(self) -> bytes:
        return b"%08d" % self.number

    def to_string(self) -> str:
        return f"model@8@0@{self.number}@half"


@pytest.fixture(scope="module", autouse=True)
def lmcache() -> Iterator[None]:
    with stand_in():
        yield


def connector(url: str, memory: Memory) -> Any:
    """As LMCache makes one."""
    adapter = import_module("pion_lmcache.connector").PionConnectorAdapter()
    assert adapter.can_parse(url)

    class Context:
        pass

    context: Any = Context()
    context.url, context.loop, context.local_cpu_backend = url, None, memory
    return adapter.create_connector(context)


def test_chunks_through_the_connector(shared: Server) -> None:
    async def use() -> None:
        memory = Memory()
        opened = connector(f"pion://127.0.0.1:{shared.port}", memory)
        keys = [Key(number) for number in range(5)]
        assert not await opened.exists(keys[0])
        assert await opened.get(keys[0]) is None
        await opened.batched_put(keys, [Chunk(30_000 + k.number, bytes([k.number])) for k in keys])
        await opened.put(Key(9), Chunk(10, b"x"))
        assert opened.exists_sync(keys[4])
        assert opened.remove_sync(keys[2])
        assert opened.batched_contains(keys) == 2
        assert await opened.batched_async_contains("lookup", keys[3:]) == 2
        found = await opened.batched_get(keys)
        assert [None if one is None else len(one.byte_array) for one in found] == [
            30_000, 30_001, None, 30_003, 30_004,
        ]  # fmt: skip
        assert found[3].byte_array == b"\3" * 30_003
        assert sorted(await opened.list())[:2] == ["model@8@0@0@half", "model@8@0@1@half"]
        assert await opened.ping() == 0
        await opened.close()

    asyncio.run(use())


def test_no_room_in_lmcaches_memory_is_a_miss_and_leaks_nothing(shared: Server) -> None:
    async def use() -> None:
        memory = Memory(left=1)
        opened = connector(f"pion://127.0.0.1:{shared.port}", memory)
        keys = [Key(100), Key(101)]
        await opened.batched_put(keys, [Chunk(20_000, b"a"), Chunk(20_000, b"b")])
        first, second = await opened.batched_get(keys)
        assert first.byte_array == b"a" * 20_000
        assert second is None
        assert [one.uses for one in memory.made] == [1]
        await opened.close()

    asyncio.run(use())


def test_the_connector_without_its_server(server: Callable[..., Server]) -> None:
    running = server()

    async def use() -> None:
        memory = Memory()
        opened = connector(f"pion://127.0.0.1:{running.port}", memory)
        await opened.put(Key(1), Chunk(20_000))
        running.kill()
        assert await opened.get(Key(1)) is None
        assert not opened.exists_sync(Key(1))
        assert await opened.batched_async_contains("lookup", [Key(1)]) == 0
        assert await opened.ping() == 1
        with pytest.raises(RuntimeError, match="1 of 1 chunks were not stored"):
            await opened.put(Key(2), Chunk(5))
        assert [one.uses for one in memory.made] == []
        await opened.close()

    asyncio.run(use())


def l2_adapter(port: int) -> Any:
    """As LMCache makes one."""
    module = import_module("pion_lmcache.l2_adapter")
    return module.PionL2Adapter({"url": f"pion://127.0.0.1:{port}", "connections": 2})


def ended(fd: int) -> None:
    """Wait for one task's end."""
    assert has_input(fd, 20), "nobody was told"
    os.read(fd, 1)


def test_tasks_through_the_l2_adapter(shared: Server) -> None:
    adapter = l2_adapter(shared.port)
    keys = [Key(0), Key(0, cache_salt="ann"), Key(1)]
    objects = [Chunk(25_000, b"0"), Chunk(25_000, b"s"), Chunk(100, b"1")]
    task = adapter.submit_store_task(keys, objects)
    ended(adapter.get_store_event_fd())
    assert adapter.pop_completed_store_tasks() == {task: 50_100}
    assert adapter.pop_completed_store_tasks() == {}
    assert adapter.told == [("stored", keys, [25_000, 25_000, 100])]

    task = adapter.submit_lookup_and_lock_task([*keys, Key(7)], {})
    ended(adapter.get_lookup_and_lock_event_fd())
    assert adapter.query_lookup_and_lock_result(task) == [True, True, True, False]
    assert adapter.query_lookup_and_lock_result(task) is None

    targets = [Chunk(25_000), Chunk(25_000), Chunk(99)]
    task = adapter.submit_load_task(keys, targets)
    ended(adapter.get_load_event_fd())
    # The last one's memory is too small for what is stored.
    assert adapter.query_load_result(task) == [True, True, False]
    assert targets[0].byte_array == b"0" * 25_000
    assert targets[1].byte_array == b"s" * 25_000

    adapter.delete(keys)
    assert adapter.told[-1][0] == "accessed"
    adapter.submit_unlock(keys)
    adapter.delete(keys)
    assert adapter.told[-1] == ("deleted", keys, [25_000, 25_000, 100])
    assert adapter.report_status()["is_healthy"]
    adapter.close()


def test_who_waits_for_a_task_is_told_even_without_a_server(server: Callable[..., Server]) -> None:
    running = server()
    adapter = l2_adapter(running.port)
    running.kill()
    task = adapter.submit_store_task([Key(1)], [Chunk(10)])
    ended(adapter.get_store_event_fd())
    assert adapter.pop_completed_store_tasks() == {task: -1}
    task = adapter.submit_lookup_and_lock_task([Key(1)], {})
    ended(adapter.get_lookup_and_lock_event_fd())
    assert adapter.query_lookup_and_lock_result(task) == [False]
    # An object of the wrong kind, which no code of ours expects.
    task = adapter.submit_load_task([Key(1)], [object()])
    ended(adapter.get_load_event_fd())
    assert adapter.query_load_result(task) == [False]
    assert not adapter.report_status()["is_healthy"]
    assert adapter.told == []
    adapter.close()


@pytest.mark.parametrize("url", ["resp://127.0.0.1:1974", "pion://", "pion://host:70000"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        import_module("pion_lmcache.connector").open_backend(url, 1)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
