"""One client object, many callers: threads, event loops, cancelled calls, a forked child."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from pion_vllm_mlx import background
from pion_vllm_mlx.prompt_cache import PionPromptCache
from tests.pion_vllm_mlx.fake_peer import Answer, FakePeer, Words, seconds_of
from tests.pion_vllm_mlx.mini_server import MiniServer
from tests.pion_vllm_mlx.tiny import PREFIX, cold_answer, continue_greedily, tiny_llama

MODEL = tiny_llama()
COLD = cold_answer(MODEL, PREFIX)
OTHER = list(reversed(PREFIX))
#: Generous: on a busy machine the fake peer's threads may take long to be scheduled.
PATIENT = 20.0


def client(port: int, **settings: Any) -> PionPromptCache:
    defaults: dict[str, Any] = {"timeout": PATIENT, "store": "sync"}
    return PionPromptCache(MODEL, port=port, **(defaults | settings))


def in_threads(count: int, work: Any, patience: float = PATIENT) -> list[Any]:
    """What `work(number)` returned in each of `count` threads that start at once."""
    results: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        barrier.wait(PATIENT)
        results[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience)
    return results


def bits_of(cache: list[Any]) -> bytes:
    rows = [mx.contiguous(side[..., : c.offset, :]) for c in cache for side in (c.keys, c.values)]
    return b"".join(bytes(memoryview(row)) for row in rows)  # type: ignore[arg-type]


def test_threads_that_miss_at_once_compute_the_prefix_once() -> None:
    chunks: list[int] = []
    with MiniServer() as server, client(server.port, store="background") as pc:
        caches = in_threads(
            4,
            lambda _: bits_of(pc.get_or_prefill(PREFIX, "ns", lambda done, _: chunks.append(done))),
        )
        assert pc.flush()
        assert chunks == [0, len(PREFIX)]
        assert len(set(caches)) == 1
        assert pc.stats()["stores"] == 1
        assert pc.stats()["hits_in_process"] == 3


def test_threads_with_prefixes_of_their_own_get_their_own() -> None:
    prefixes = [[(token + number) % 61 for token in PREFIX] for number in range(4)]
    with MiniServer() as server, client(server.port) as one, client(server.port) as pc:
        expected = [bits_of(one.get_or_prefill(p, f"ns{n}")) for n, p in enumerate(prefixes)]
        assert len(set(expected)) == 4
        for _ in range(5):
            found = in_threads(
                4, lambda number: bits_of(pc.get_or_prefill(prefixes[number], f"ns{number}"))
            )
            assert found == expected
        assert pc.stats()["misses"] == 0


def test_threads_clients_and_drops_never_make_a_mixture(server: Callable[..., Any]) -> None:
    """G01, G03: names that grow, shrink and go while others store and read them, at random."""
    running, step = server(), 8
    ids = PREFIX * 2
    cold = {count: cold_answer(MODEL, ids[:count], step) for count in (8, 16, 40, 80)}
    generating = threading.Lock()
    settings: dict[str, Any] = {"store": "background", "prefill_step_size": step}
    clients = [client(running.port, held_bytes=size, **settings) for size in (0, 0, 1 << 30)]

    def work(number: int) -> list[int]:
        draw, wrong, raw = random.Random(number), [], running.client()
        for _ in range(60):
            pc, count, name = (
                draw.choice(clients),
                draw.choice(list(cold)),
                f"ns{draw.randrange(3)}",
            )
            cache = pc.get_or_prefill(ids[:count], name)
            with generating:
                wrong += [count] if continue_greedily(MODEL, cache) != cold[count] else []
            if draw.random() < 0.1:
                raw.call("KV.PREFIX.DROP", name)
        return wrong

    assert in_threads(4, work, patience=120) == [[]] * 4
    for pc in clients:
        pc.close()
        stats = pc.stats()
        # Nothing ever looked damaged, and a prefix that somebody dropped is no failure.
        assert set(stats["miss_reasons"]) <= {"absent", "length", "changed"}
        assert stats["hits"]
        assert stats["stores"]
        assert stats["stores_failed"] == 0


def test_an_awaited_call_gets_the_cold_answer_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the model, from the server, in process; the loop's own thread goes on with the cache."""
    ticks: list[tuple[int, int]] = []

    def slow(words: Words, answer: Answer) -> Answer:
        return [0.2, answer] if isinstance(answer, bytes) else answer

    async def turn(pc: PionPromptCache) -> Any:
        ticks.clear()
        task = asyncio.ensure_future(
            pc.aget_or_prefill(PREFIX, "ns", lambda done, total: ticks.append((done, total)))
        )
        beats = 0
        while not task.done():
            await asyncio.sleep(0.01)
            beats += 1
        return continue_greedily(MODEL, task.result()), beats

    async def calls(pc: PionPromptCache) -> None:
        answer, beats = await turn(pc)
        assert answer == COLD
        assert beats > 5
        assert ticks == [(0, len(PREFIX)), (len(PREFIX), len(PREFIX))]
        answer, _ = await turn(pc)
        assert answer == COLD
        assert ticks == []
        monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
        answer, beats = await turn(pc)
        assert answer == COLD
        assert beats > 5
        assert pc.stats()["hits"] == 2
        assert pc.stats()["hits_in_process"] == 1

    with MiniServer(slow) as server, client(server.port) as pc:
        asyncio.run(calls(pc))


def test_awaited_calls_of_one_object_get_each_their_own() -> None:
    async def both(pc: PionPromptCache) -> list[Any]:
        asked = [pc.aget_or_prefill(ids, name) for ids, name in ((PREFIX, "ns"), (OTHER, "other"))]
        return [continue_greedily(MODEL, cache) for cache in await asyncio.gather(*asked)]

    with MiniServer() as server, client(server.port) as pc:
        assert asyncio.run(both(pc)) == [COLD, cold_answer(MODEL, OTHER)]


def test_an_awaited_call_without_a_namespace_goes_on_from_what_was_computed() -> None:
    async def grow(pc: PionPromptCache) -> Any:
        await pc.aget_or_prefill(PREFIX * 4)
        return continue_greedily(MODEL, await pc.aget_or_prefill([*PREFIX * 4, *PREFIX]))

    with MiniServer() as server, client(server.port) as pc:
        tokens, _ = asyncio.run(grow(pc))
        assert tokens == cold_answer(MODEL, [*PREFIX * 4, *PREFIX])[0]
        assert pc.stats()["tokens_restored"] > 0


def test_wrong_arguments_are_refused_where_the_call_is_awaited() -> None:
    async def wrong(pc: PionPromptCache, *arguments: Any) -> None:
        with pytest.raises(ValueError):
            await pc.aget_or_prefill(*arguments)

    pc = client(1)
    asyncio.run(wrong(pc, ["text"], "ns"))
    asyncio.run(wrong(pc, PREFIX, ""))


def test_a_cancelled_call_hands_its_reply_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """H01: cancelled at 50 ms, while the reply takes 150 ms; the next call gets its own prefix."""
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")

    def slow(words: Words, answer: Answer) -> Answer:
        return [0.15, answer] if isinstance(answer, bytes) else answer

    async def cancel_then_ask(pc: PionPromptCache) -> Any:
        first = asyncio.ensure_future(pc.aget_or_prefill(OTHER, "other"))
        await asyncio.sleep(0.05)
        first.cancel()
        waiting = asyncio.ensure_future(pc.aget_or_prefill(OTHER, "other"))
        await asyncio.sleep(0)
        waiting.cancel()
        cache = await pc.aget_or_prefill(PREFIX, "ns")
        assert first.cancelled()
        assert waiting.cancelled()
        return continue_greedily(MODEL, cache)

    with MiniServer() as server:
        with client(server.port) as pc:
            pc.get_or_prefill(PREFIX, "ns")
            pc.get_or_prefill(OTHER, "other")
        server.meddle = slow
        with client(server.port) as pc:
            assert asyncio.run(cancel_then_ask(pc)) == COLD
            assert pc.stats()["hits"] == 2  # the one cancelled under way, and the last
            assert pc.stats()["misses"] == 0


def test_a_cancelled_prefill_ends_with_its_chunk() -> None:
    chunks: list[int] = []

    async def cancel(pc: PionPromptCache) -> None:
        task = asyncio.ensure_future(
            pc.aget_or_prefill(PREFIX * 20, "long", lambda done, _: chunks.append(done))
        )
        while len(chunks) < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answer = continue_greedily(MODEL, await pc.aget_or_prefill(PREFIX, "ns"))
        assert answer == cold_answer(MODEL, PREFIX, step=1)

    with MiniServer() as server, client(server.port, prefill_step_size=1) as pc:
        asyncio.run(cancel(pc))
        assert len(chunks) < 20 * len(PREFIX)
        assert b"long" not in server.manifests


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, even in a test run that a shell has put in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_prefill_holds_up_nobody() -> None:
    """Ctrl-C in one call; the lock it held is free again."""

    def interrupt(done: int, total: int) -> None:
        if done:
            signal.raise_signal(signal.SIGINT)

    with MiniServer() as server, client(server.port) as pc:
        with pytest.raises(KeyboardInterrupt):
            pc.get_or_prefill(PREFIX, "ns", interrupt)
        (cache,) = in_threads(1, lambda _: bits_of(pc.get_or_prefill(PREFIX, "ns")))
        assert cache


def test_a_forked_child_touches_neither_the_parents_connection_nor_its_stores() -> None:
    """The child may ask, flush, close and end; the parent's store goes on and is whole."""
    held, opened = threading.Event(), threading.Event()

    def hold(words: Words, answer: Answer) -> Answer:
        if words[0] == b"V.STOREBATCH" and not opened.is_set():
            held.set()
            opened.wait(PATIENT)
        return answer

    def child() -> bool:
        found = pc.lookup("there"), pc.lookup("ns")
        whole = pc.flush(0)
        pc.close()
        background._finish()
        return found == (True, False) and whole

    with MiniServer() as server, client(server.port, store="background") as pc:
        pc.get_or_prefill(OTHER, "there")
        assert pc.flush()
        server.meddle = hold
        pc.get_or_prefill(PREFIX, "ns")
        assert held.wait(PATIENT)
        pid = os.fork()
        if pid == 0:
            good = False
            try:
                good = child()
            finally:
                os._exit(0 if good else 1)
        deadline = time.monotonic() + PATIENT
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        opened.set()
        assert ended == (pid, 0)
        assert pc.flush()
        assert pc.stats()["stores"] == 2
        assert pc.lookup("there")
        with client(server.port, store="off") as other:
            assert continue_greedily(MODEL, other.get_or_prefill(PREFIX, "ns")) == COLD
            assert other.stats()["hits"] == 1


ENDING = """
import sys
from tests.pion_vllm_mlx.tiny import PREFIX, tiny_llama
from pion_vllm_mlx import PionPromptCache
pc = PionPromptCache(tiny_llama(), port=int(sys.argv[1]), timeout=20, store_wait=float(sys.argv[2]))
pc.get_or_prefill(PREFIX, "ns")
"""


def end_of_a_program(port: int, wait: float) -> float:
    """Run a program that only computes a prefix; the seconds it took."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path])}
    words = [sys.executable, "-c", ENDING, str(port), str(wait)]
    return seconds_of(lambda: subprocess.run(words, env=environment, timeout=60, check=False))


def test_the_end_of_a_program_waits_for_its_stores() -> None:
    with MiniServer() as server:
        end_of_a_program(server.port, 20)
        assert b"ns" in server.manifests
        with client(server.port, store="off") as other:
            assert continue_greedily(MODEL, other.get_or_prefill(PREFIX, "ns")) == COLD
            assert other.stats()["hits"] == 1


def test_the_end_of_a_program_does_not_wait_for_ever(tmp_path: Path) -> None:
    def silent(words: Words, answer: Answer) -> Answer:
        return [60.0] if words[-1] == b"BEGIN" else answer

    with MiniServer(silent) as server:
        assert end_of_a_program(server.port, 0.5) < 30
        assert sum(words[-1] == b"BEGIN" for words in server.requests) == 1
        assert server.manifests == {}


def test_a_dead_server_delays_a_call_by_no_more_than_its_deadline() -> None:
    """Nor the calls of the next five seconds, whichever thread makes them, nor the close."""
    with FakePeer(lambda words: [60.0]) as peer:
        pc = client(peer.port, timeout=0.25, store="background")
        base = min(seconds_of(lambda: cold_answer(MODEL, PREFIX)) for _ in range(3))
        assert seconds_of(lambda: pc.get_or_prefill(PREFIX, "ns")) < base + 2
        for number in range(5):
            pc.get_or_prefill(PREFIX, f"ns{number}")
        assert len(peer.requests) == 1
        assert seconds_of(pc.close) < 2
        assert pc.stats()["stores_failed"] == 6
