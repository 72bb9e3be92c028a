"""The writer lock, and the counters every command shares."""

from __future__ import annotations

import asyncio

from pion_server.state import Stats, WriterLock


def test_writers_take_turns_in_the_order_they_came() -> None:
    order: list[int] = []

    async def write(lock: WriterLock, number: int) -> None:
        async with lock:
            order.append(number)
            await asyncio.sleep(0)
            order.append(number)

    async def main() -> None:
        lock = WriterLock()
        await asyncio.gather(*(write(lock, number) for number in range(5)))
        assert not lock.held

    asyncio.run(main())
    assert order == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_nobody_overtakes_those_who_wait() -> None:
    async def main() -> None:
        lock = WriterLock()
        assert lock.try_acquire()
        waiting = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0)
        lock.release()
        # Handed over already, although the one who waited has not run yet.
        assert not lock.try_acquire()
        await waiting
        lock.release()
        assert lock.try_acquire()

    asyncio.run(main())


def test_a_cancelled_wait_passes_the_lock_on() -> None:
    async def main() -> None:
        lock = WriterLock()
        assert lock.try_acquire()
        first = asyncio.create_task(lock.acquire())
        second = asyncio.create_task(lock.acquire())
        third = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        lock.release()
        # Cancelled in the very moment the lock was handed to it.
        second.cancel()
        await asyncio.wait_for(third, 5)
        assert first.cancelled()
        assert second.cancelled()
        lock.release()
        assert not lock.held

    asyncio.run(main())


def test_a_reset_clears_every_counter() -> None:
    stats = Stats(1, 2, 3, 4, 5, 6, 7)
    stats.reset()
    assert stats == Stats()
