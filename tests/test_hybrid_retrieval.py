"""Retrieved chunks are hydrated: one exactly, several composed, and what cannot be is refused.

python tests/test_hybrid_retrieval.py      # as pytest runs it, both backends
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.rotation import CannotRotate
from pion_vllm_mlx import HybridRetrievalCache
from tests.pion_patches.zoo import VOCAB, build
from tests.pion_vllm_mlx.tiny import PREFIX, SUFFIX, cold_answer, continue_greedily, tiny_llama

Server = Any
Make = Callable[..., HybridRetrievalCache]
STUB = [4, 4, 9]
DOC = [int(token) for token in np.random.default_rng(11).integers(0, 61, 300)]
MODEL = tiny_llama()


@pytest.fixture(params=["inproc", "pion"])
def make(request: pytest.FixtureRequest, shared: Server) -> Iterator[Make]:
    """Caches of one backend; each test on the server names an adapter of its own."""
    opened: list[HybridRetrievalCache] = []

    def open_one(model: Any = MODEL, **settings: Any) -> HybridRetrievalCache:
        if request.param == "pion":
            settings = {"port": shared.port, "timeout": 20.0} | settings
        settings = {"adapter": request.node.nodeid} | settings
        opened.append(HybridRetrievalCache(model, request.param, **settings))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def logits(model: Any, ids: list[int], cache: Any = None) -> np.ndarray[Any, Any]:
    cache = make_prompt_cache(model) if cache is None else cache
    out: mx.array = model(mx.array(ids)[None], cache=cache)[0].astype(mx.float32)
    return np.array(out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_chunk_equals_a_cold_prefill_bit_for_bit(make: Make, dtype: str) -> None:
    model = tiny_llama(dtype=getattr(mx, dtype))
    hr = make(model)
    hr.ingest("eiffel", PREFIX)
    cache, suffix = hr.prepare("eiffel", SUFFIX)
    assert suffix == SUFFIX
    assert continue_greedily(model, cache) == cold_answer(model, PREFIX)
    # The caller's own: what was generated on it changed nothing.
    again, _ = hr.prepare("eiffel", SUFFIX)
    assert continue_greedily(model, again) == cold_answer(model, PREFIX)
    assert hr.stats()["hits"] == 2


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3_text", "deepseek_v3", "mamba2"])
def test_one_chunk_is_exact_where_composition_is_refused(make: Make, family: str) -> None:
    """O08: recurrent, windowed and latent models keep single chunks."""
    model: Any = build(family, seed=7)
    ids = [int(token) for token in np.random.default_rng(1).integers(0, VOCAB, 20)]
    hr = make(model)
    hr.ingest("doc", ids)
    cold: Any = make_prompt_cache(model)
    model(mx.array(ids)[None], cache=cold)
    cache, suffix = hr.prepare("doc", [3, 1])
    assert np.array_equal(logits(model, suffix, cache), logits(model, suffix, cold))
    hr.set_shared_stub(STUB)
    with pytest.raises(CannotRotate, match="cannot have its keys moved"):
        hr.ingest_pack("doc", ids)
    with pytest.raises(CannotRotate):
        hr.prepare_multi(["doc"], SUFFIX)


def test_a_pack_in_place_is_exact(make: Make) -> None:
    hr = make()
    hr.set_shared_stub(STUB)
    hr.ingest_pack("doc", PREFIX)
    cache, suffix = hr.prepare_multi(["doc"], SUFFIX)
    cold: Any = make_prompt_cache(MODEL)
    for part in (STUB, PREFIX):
        MODEL(mx.array(part)[None], cache=cold)
    assert np.array_equal(logits(MODEL, suffix, cache), logits(MODEL, suffix, cold))


def test_packs_computed_again_whole_are_exact_in_any_order(make: Make) -> None:
    hr = make()
    hr.set_shared_stub(STUB)
    packs = {"a": DOC[:30], "b": DOC[30:41], "c": DOC[41:90]}
    for name, ids in packs.items():
        hr.ingest_pack(name, ids)
    for order in (["a", "b", "c"], ["c", "a", "b"], ["b", "b", "a"]):
        ids = STUB + [token for name in order for token in packs[name]]
        cold = logits(MODEL, ids + SUFFIX)[-3:]
        errors = []
        for k in (0, 8, 1000):
            cache, suffix = hr.prepare_multi(order, SUFFIX, recompute_tokens=k)
            errors.append(float(np.abs(logits(MODEL, suffix, cache) - cold).max()))
        assert errors[2] < 1e-4 < errors[0]


def test_a_composition_holds_each_packs_keys_where_they_stand_now(make: Make) -> None:
    """O05: system text and questions of different lengths before one document."""
    hr = make()
    hr.set_shared_stub(STUB)
    hr.ingest_pack("doc", DOC)
    turned = []
    for question in ([5] * 7, [6] * 13):
        hr.ingest_pack(f"question {len(question)}", question)
        prefilled = hr.stats()["prefill_ms_total"]
        cache, _ = hr.prepare_multi([f"question {len(question)}", "doc"], SUFFIX)
        assert hr.stats()["prefill_ms_total"] == prefilled  # all of the document is reused
        assert cache[0].offset == len(STUB) + len(question) + len(DOC)
        start = len(STUB) + len(question)
        turned.append(cache[0].keys[..., start : start + len(DOC), :])
        in_place: Any = make_prompt_cache(MODEL)
        MODEL(mx.array(STUB + question + DOC)[None], cache=in_place)
        wanted = in_place[0].keys[..., start : start + len(DOC), :]
        assert float(mx.max(mx.abs(turned[-1] - wanted))) < 1e-3


@pytest.mark.parametrize("vquant", ["auto", "mlx4g32"])
def test_moving_a_pack_ten_times_loses_no_more_than_once(make: Make, vquant: str) -> None:
    """O03: every move starts from the stored rows."""
    model: Any = tiny_llama(num_key_value_heads=2, head_dim=32, hidden_size=128)
    hr = make(model, vquant=vquant)
    hr.set_shared_stub(STUB)
    hr.ingest_pack("doc", PREFIX)
    hr.ingest_pack("other", DOC[:50])

    def error() -> float:
        cache, _ = hr.prepare_multi(["other", "doc"], SUFFIX)
        in_place: Any = make_prompt_cache(model)
        model(mx.array(STUB + DOC[:50] + PREFIX)[None], cache=in_place)
        rows = slice(len(STUB) + 50, len(STUB) + 50 + len(PREFIX))
        return float(mx.max(mx.abs(cache[0].keys[..., rows, :] - in_place[0].keys[..., rows, :])))

    once = error()
    for _ in range(9):
        last = error()
    assert last <= 1.2 * once


def test_changed_text_under_a_known_id_replaces_the_chunk(make: Make) -> None:
    hr = make()
    hr.ingest("page", PREFIX)
    hr.ingest("page", DOC)
    cache, _ = hr.prepare("page", SUFFIX)
    assert continue_greedily(MODEL, cache) == cold_answer(MODEL, DOC)


def test_tokens_verify_what_the_chunk_consists_of(make: Make) -> None:
    hr = make()
    hr.ingest("page", PREFIX)
    cache, _ = hr.prepare("page", SUFFIX, tokens=DOC)
    assert continue_greedily(MODEL, cache) == cold_answer(MODEL, DOC)
    cache, _ = hr.prepare("unheard of", SUFFIX, tokens=PREFIX)
    assert continue_greedily(MODEL, cache) == cold_answer(MODEL, PREFIX)
    assert hr.has("unheard of")


def test_another_model_never_hits(make: Make) -> None:
    make().ingest("page", PREFIX)
    other = make(tiny_llama(seed=1))
    assert not other.has("page")
    with pytest.raises(KeyError, match="page"):
        other.prepare("page", SUFFIX)


def test_ids_that_look_alike_are_different_chunks(make: Make) -> None:
    """I02, I03: every field of a name is tagged and length-prefixed."""
    hr = make()
    hr.ingest("a|b", PREFIX)
    for other in ("a", "b", "a|", "|b", "chunk", "A|b", "a|b "):
        assert not hr.has(other)
    hr.set_shared_stub(STUB)
    with pytest.raises(KeyError):
        hr.prepare_multi(["a|b"], SUFFIX)  # a chunk is no pack


def test_evicted_chunks_and_packs_are_gone(make: Make) -> None:
    hr = make()
    hr.set_shared_stub(STUB)
    hr.ingest("page", PREFIX)
    hr.ingest_pack("page", PREFIX)
    assert hr.evict("page")
    assert not hr.has("page")
    assert not hr.evict("page")
    with pytest.raises(KeyError, match="evicted"):
        hr.prepare("page", SUFFIX)
    with pytest.raises(KeyError, match="evicted"):
        hr.prepare_multi(["page"], SUFFIX)


def test_a_new_stub_makes_other_packs(make: Make) -> None:
    hr = make()
    hr.set_shared_stub(STUB)
    hr.ingest_pack("doc", PREFIX)
    hr.set_shared_stub([1, 2])
    with pytest.raises(KeyError):
        hr.prepare_multi(["doc"], SUFFIX)


def test_bad_requests_say_what_is_wrong(make: Make) -> None:
    hr = make()
    with pytest.raises(RuntimeError, match="set_shared_stub"):
        hr.ingest_pack("doc", PREFIX)
    with pytest.raises(RuntimeError, match="set_shared_stub"):
        hr.prepare_multi(["doc"], SUFFIX)
    with pytest.raises(KeyError, match="'nowhere'"):
        hr.prepare("nowhere", SUFFIX)
    with pytest.raises(ValueError, match="no tokens"):
        hr.ingest("empty", [])
    with pytest.raises(ValueError, match=r"0\.\.60"):
        hr.ingest("foreign", [61])
    hr.ingest("page", PREFIX)
    with pytest.raises(ValueError, match="empty suffix"):
        hr.prepare("page", [])
    hr.set_shared_stub(STUB)
    with pytest.raises(ValueError, match="9 packs: a list of 1 to 8"):
        hr.prepare_multi(["page"] * 9, SUFFIX)
    with pytest.raises(ValueError, match="0 packs"):
        hr.prepare_multi([], SUFFIX)
    with pytest.raises(ValueError, match="text"):
        hr.prepare_multi("page", SUFFIX)
    with pytest.raises(ValueError, match="recompute_tokens"):
        hr.prepare_multi(["page"], SUFFIX, recompute_tokens=-1)


def test_a_chunk_larger_than_the_budget_is_refused_and_evicts_nothing() -> None:
    with HybridRetrievalCache(MODEL, budget_bytes=60_000) as hr:
        hr.ingest("small", PREFIX)
        with pytest.raises(ValueError, match="'huge' takes 153600 bytes, budget_bytes is 60000"):
            hr.ingest("huge", DOC)
        assert hr.has("small")
        cache, _ = hr.prepare("huge", SUFFIX)  # its tokens are known, so it is computed
        assert continue_greedily(MODEL, cache) == cold_answer(MODEL, DOC)


def test_the_least_recently_used_chunk_leaves_first_and_is_computed_again() -> None:
    with HybridRetrievalCache(MODEL, budget_bytes=50_000) as hr:
        hr.ingest("old", PREFIX)
        hr.ingest("kept", PREFIX[:30])
        hr.prepare("old", SUFFIX)
        hr.ingest("new", PREFIX[:35])
        assert [hr.has(name) for name in ("old", "kept", "new")] == [True, False, True]
        assert hr.stats()["bytes_held"] <= 50_000
        cache, _ = hr.prepare("kept", SUFFIX)
        assert continue_greedily(MODEL, cache) == cold_answer(MODEL, PREFIX[:30])


def test_chunks_packs_and_stub_outlive_process_and_server(
    module_server: Callable[..., Server],
) -> None:
    server = module_server()
    settings: dict[str, Any] = {"port": server.port, "timeout": 20.0}
    with HybridRetrievalCache(MODEL, "pion", **settings) as hr:
        hr.set_shared_stub(STUB)
        hr.ingest("page", PREFIX)
        hr.ingest_pack("one", DOC[:40])
        hr.ingest_pack("two", DOC[40:70])
        composed = logits(MODEL, SUFFIX, hr.prepare_multi(["two", "one"], SUFFIX)[0])
    server.kill()
    server.start()
    with HybridRetrievalCache(MODEL, "pion", **settings) as fresh:
        fresh.set_shared_stub(STUB)
        cache, _ = fresh.prepare("page", SUFFIX)
        assert continue_greedily(MODEL, cache) == cold_answer(MODEL, PREFIX)
        cache, _ = fresh.prepare_multi(["two", "one"], SUFFIX)
        assert np.array_equal(logits(MODEL, SUFFIX, cache), composed)
        assert fresh.stats()["prefill_ms_total"] == 0
        assert fresh.evict("page")
    with HybridRetrievalCache(MODEL, "pion", **settings) as another:
        assert not another.has("page")


def test_a_dead_server_costs_nothing_but_time(module_server: Callable[..., Server]) -> None:
    server = module_server()
    with HybridRetrievalCache(MODEL, "pion", port=server.port, adapter="dead") as hr:
        hr.ingest("page", PREFIX)
        server.kill()
        cache, _ = hr.prepare("page", SUFFIX)
        assert continue_greedily(MODEL, cache) == cold_answer(MODEL, PREFIX)
        hr.ingest("later", DOC)  # one warning, no exception
        cache, _ = hr.prepare("later", SUFFIX)
        assert continue_greedily(MODEL, cache) == cold_answer(MODEL, DOC)
        with pytest.raises(KeyError):
            hr.prepare("never", SUFFIX)


def test_threads_share_one_object(make: Make) -> None:
    """G03, G09: a chunk ingested in one thread is used in others."""
    hr = make()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            ids = DOC[seed : seed + 20]
            for _ in range(5):
                hr.ingest(f"page {seed % 3}", DOC[seed % 3 : seed % 3 + 20])
                cache, _ = hr.prepare(f"own {seed}", SUFFIX, tokens=ids)
                assert continue_greedily(MODEL, cache) == cold_answer(MODEL, ids)
                hr.evict(f"page {seed % 3}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
