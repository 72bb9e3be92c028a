"""Chunks of retrieval as lent files: the bits that come over TCP, and what keeps them away."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pion_patches.cache_rebuild import dismantle
from pion_patches.pieces import array_bytes
from pion_vllm_mlx import HybridRetrievalCache
from pion_vllm_mlx.transport.local import OFF
from tests.pion_patches.zoo import VOCAB, build
from tests.pion_vllm_mlx.tiny import PREFIX, SUFFIX, cold_answer, continue_greedily, tiny_llama

Server = Any
PATIENT = 20.0
MODEL = tiny_llama()
STUB = [4, 4, 9]


def retrieval(server: Server, model: Any = MODEL, **settings: Any) -> HybridRetrievalCache:
    return HybridRetrievalCache(
        model, "pion", **({"port": server.port, "timeout": PATIENT} | settings)
    )


def until_lent(hr: HybridRetrievalCache, ask: Callable[[], list[Any]], files: int = 1) -> list[Any]:
    """The first cache all of whose `files` chunks came from files."""
    ends = time.monotonic() + PATIENT
    while time.monotonic() < ends:
        before = hr.stats()["hits_local"]
        cache = ask()
        if hr.stats()["hits_local"] == before + files:
            return cache
        time.sleep(0.05)
    raise AssertionError(f"nothing was lent: {hr.stats()}")


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3_text", "deepseek_v3", "mamba2"])
def test_one_chunk_comes_from_a_file_bit_for_bit(shared: Server, family: str) -> None:
    model: Any = build(family, seed=7)
    ids = [int(token) for token in np.random.default_rng(1).integers(0, VOCAB, 30)]
    with retrieval(shared, model) as hr:
        hr.ingest("doc", ids)
        lent = until_lent(hr, lambda: hr.prepare("doc", SUFFIX)[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(OFF, "1")
            fetched = hr.prepare("doc", SUFFIX)[0]
        assert bits_of(lent, len(ids)) == bits_of(fetched, len(ids)) != []
        assert hr.stats()["not_lent"].keys() <= {"unmade", "off", "absent"}
        assert hr.stats()["not_lent"]["off"] == 1


def bits_of(cache: list[Any], tokens: int) -> list[bytes]:
    image = dismantle(cache, tokens)
    rows = [piece for leaf in image.leaves for piece in (leaf.keys, leaf.values)]
    arrays = [array for leaf in image.leaves for array in leaf.arrays if array is not None]
    return [piece.to_bytes().tobytes() for piece in rows if piece is not None] + [
        array_bytes(array).tobytes() for array in arrays
    ]


def test_packs_are_composed_from_files_as_from_rows(shared: Server) -> None:
    with retrieval(shared, adapter="packs") as hr:
        hr.set_shared_stub(STUB)
        hr.ingest_pack("a", PREFIX)
        hr.ingest_pack("b", PREFIX[::-1])

        def ask() -> list[Any]:
            return hr.prepare_multi(["b", "a"], SUFFIX, recompute_tokens=4)[0]

        first = logits(ask())
        # The stub and two packs.
        assert np.array_equal(logits(until_lent(hr, ask, files=3)), first)


def logits(cache: list[Any]) -> np.ndarray[Any, Any]:
    return np.array(MODEL(mx.array(SUFFIX)[None], cache=cache))


def test_a_killed_server_means_computing_and_a_restarted_one_lends_again(
    server: Callable[..., Server],
) -> None:
    running = server("--requirepass", "secret")
    cold = cold_answer(MODEL, PREFIX)
    with retrieval(running, password="secret") as hr:
        hr.ingest("doc", PREFIX)
        until_lent(hr, lambda: hr.prepare("doc", SUFFIX)[0])
        running.kill()
        assert continue_greedily(MODEL, hr.prepare("doc", SUFFIX)[0]) == cold
    running.restart()
    with retrieval(running, password="secret") as again:
        cache = until_lent(again, lambda: again.prepare("doc", SUFFIX, PREFIX)[0])
        assert continue_greedily(MODEL, cache) == cold
        assert again.stats()["misses"] == 0


def test_an_evicted_chunk_is_no_longer_lent(shared: Server) -> None:
    with retrieval(shared, adapter="evicted") as hr:
        hr.ingest("doc", PREFIX)
        until_lent(hr, lambda: hr.prepare("doc", SUFFIX)[0])
        lent = hr.stats()["hits_local"]
        assert hr.evict("doc")
        with pytest.raises(KeyError):
            hr.prepare("doc", SUFFIX)
        assert hr.stats()["hits_local"] == lent


def test_no_descriptor_is_left_open(shared: Server) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("nothing lists this process's descriptors")
    with retrieval(shared, adapter="descriptors") as hr:
        hr.ingest("doc", PREFIX)
        until_lent(hr, lambda: hr.prepare("doc", SUFFIX)[0])
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            hr.prepare("doc", SUFFIX)
        assert len(os.listdir("/proc/self/fd")) == before
