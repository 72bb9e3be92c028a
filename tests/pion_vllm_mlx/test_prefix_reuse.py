"""A prompt cache without namespaces: any stored beginning is restored, the rest is computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from pion_patches.cache_rebuild import UnsupportedCache
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.transport.endpoint import Endpoint
from tests.pion_patches.shipping import largest_difference
from tests.pion_patches.zoo import build
from tests.pion_vllm_mlx.conversation import PATIENT, Cold, ids_of, logits_of

Server = Any
FIRST = ids_of(11, 200)
SECOND = [*FIRST[:150], *ids_of(12, 170)]
FAMILIES = ("llama", "qwen3_5", "gemma3_text", "mamba2")


@pytest.fixture(scope="module")
def shared(module_server: Callable[..., Server]) -> Server:
    return module_server("--vstore-sessions", "1024")


def client(server: Server, model: Any, **settings: Any) -> PionPromptCache:
    lane = Endpoint("127.0.0.1", server.port, connect_timeout=PATIENT)
    return PionPromptCache(model, lane=lane, timeout=PATIENT, prefill_step_size=64, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_process_restores_what_its_prompt_shares(
    shared: Server, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C01, C02, B01 through the public door; each client begins with nothing."""
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    model = build(family, seed=3)
    cold = Cold(model)
    reused = []
    for ids in (FIRST, SECOND, SECOND, FIRST):
        with client(shared, model, store="sync") as pc:
            cache = pc.get_or_prefill(ids)
            stats = pc.stats()
        reused.append(stats["tokens_restored"])
        assert stats["hits"] + stats["misses"] == 1
        ends = [*_pauses(family, reused, ids), len(ids)]
        whole = cold.run(ids, reused[-1], [end for end in ends if end > reused[-1]], 64)
        assert largest_difference(logits_of(model, cache), logits_of(model, whole)) == 0.0
    assert reused == ([0, 150, 320, 200] if family == "llama" else [0, 0, 320, 192])


def _pauses(family: str, reused: list[int], ids: list[int]) -> list[int]:
    """Where the prefill of this turn paused: a stateful model's where the prompt left the first
    one, and at the last block end."""
    if family == "llama":
        return []
    return [*([128] if len(reused) == 2 else []), len(ids) - len(ids) % 64]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_in_one_process_the_next_prompt_begins_with_what_is_held(
    shared: Server, family: str
) -> None:
    """A13: the figures count the tokens reused, not those that were held."""
    model = build(family, seed=5)
    cold = Cold(model)
    with client(shared, model, store="off") as pc:
        pc.get_or_prefill(FIRST)
        again = pc.get_or_prefill(FIRST)
        assert pc.stats()["hits_in_process"] == 1
        assert pc.stats()["tokens_restored"] == len(FIRST)
        longer = pc.get_or_prefill([*FIRST, *ids_of(13, 40)])
        assert pc.stats()["hits_in_process"] == 2
        assert pc.stats()["tokens_restored"] == 2 * len(FIRST)
        pc.get_or_prefill(SECOND)
        # 150 tokens are shared; a hybrid's state at 150 is nowhere.
        shared_tokens = 150 if family == "llama" else 0
        assert pc.stats()["tokens_restored"] == 2 * len(FIRST) + shared_tokens
        pc.get_or_prefill(ids_of(14, 100))
        assert pc.stats()["tokens_restored"] == 2 * len(FIRST) + shared_tokens
        assert pc.stats()["stores"] == 0
    ends = [200] if family == "llama" else [192, 200]
    whole = cold.run(FIRST, 0, ends, 64)
    assert largest_difference(logits_of(model, again), logits_of(model, whole)) == 0.0
    ids = [*FIRST, *ids_of(13, 40)]
    whole = cold.run(ids, 200, [240], 64)
    assert largest_difference(logits_of(model, longer), logits_of(model, whole)) == 0.0


def test_two_calls_get_caches_of_their_own(shared: Server) -> None:
    """C14: what one caller appends no other sees."""
    model = build("qwen3_5", seed=6)
    with client(shared, model) as pc:
        first = pc.get_or_prefill(FIRST)
        expected = logits_of(model, pc.get_or_prefill(FIRST))
        assert largest_difference(logits_of(model, first), expected) == 0.0
        assert largest_difference(logits_of(model, pc.get_or_prefill(FIRST)), expected) == 0.0


def test_background_stores_are_there_after_a_flush_and_progress_counts_the_whole_prompt(
    shared: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    model = build("llama", seed=8)
    seen: list[tuple[int, int]] = []
    with client(shared, model) as pc:
        pc.get_or_prefill(FIRST)
        assert pc.flush(60)
        pc.get_or_prefill(SECOND, progress=lambda done, total: seen.append((done, total)))
        assert pc.stats()["tokens_restored"] == 150
    assert seen[0] == (150, 320)
    assert seen[-1] == (320, 320)


def test_a_prompt_shorter_than_a_block_is_computed_and_an_empty_one_is_empty(
    shared: Server,
) -> None:
    """A16: an empty list is a clean miss."""
    model = build("llama", seed=8)
    with client(shared, model, store="sync") as pc:
        cache = pc.get_or_prefill(FIRST[:63])
        assert cache[0].offset == 63
        assert pc.get_or_prefill([])[0].offset == 0
        assert pc.stats()["miss_reasons"] == {"short": 1, "empty": 1}
        assert pc.stats()["stores"] == 0


def test_named_formats_and_quantised_caches_reuse_beginnings_too(
    shared: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D03: another format or other bits are other prefixes; D01: a cut quantised cache is whole."""
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    model = build("llama", seed=9, head_dim=32)
    for settings in ({"vquant": "int8"}, {"vquant": "fp16"}, {"kv_bits": 8, "kv_group_size": 32}):
        with client(shared, model, store="sync", **settings) as pc:
            pc.get_or_prefill(FIRST)
            assert pc.stats()["hits"] == 0, settings
            cache = pc.get_or_prefill(SECOND)
            assert pc.stats()["tokens_restored"] == 150, settings
            assert [leaf.offset for leaf in cache] == [320] * len(cache)
            mx.eval(model(mx.array([[1, 2]]), cache=cache))
    with (
        pytest.raises(UnsupportedCache),
        client(shared, model, kv_bits=8, kv_group_size=32, quantized_kv_start=100) as pc,
    ):
        pc.get_or_prefill(FIRST)


def test_threads_that_ask_at_once_compute_a_prompt_once(shared: Server) -> None:
    model = build("llama", seed=16)
    caches: list[Any] = []
    with client(shared, model, store="off") as pc:
        threads = [
            threading.Thread(target=lambda: caches.append(pc.get_or_prefill(FIRST)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert pc.stats()["hits_in_process"] == 3
    expected = logits_of(model, caches[0])
    for cache in caches[1:]:
        assert largest_difference(logits_of(model, cache), expected) == 0.0


def test_an_event_loop_awaits_it_too(shared: Server) -> None:
    model = build("llama", seed=17)

    async def ask(pc: PionPromptCache) -> Any:
        return await pc.aget_or_prefill(FIRST)

    with client(shared, model, store="off") as pc:
        one, other = asyncio.run(ask(pc)), asyncio.run(ask(pc))
        assert pc.stats()["hits_in_process"] == 1
    assert largest_difference(logits_of(model, one), logits_of(model, other)) == 0.0


def test_the_servers_receipt_counts_each_restore_once_with_its_tokens(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV.PREFIX.LOOKUP <leaf> TOKENS <n>, once, however many segments it came from."""
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    model = build("llama", seed=18)
    running = server()
    with client(running, model, store="sync") as pc:
        pc.get_or_prefill(FIRST)
        pc.get_or_prefill(SECOND)
        pc.get_or_prefill(SECOND)
    flat = running.client().call("PION.STATS")
    stats = {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
    assert stats["kvprefix_misses"] == 1
    assert stats["kvprefix_hits"] == 2
    assert stats["kvprefix_tokens_served"] == 150 + 320
