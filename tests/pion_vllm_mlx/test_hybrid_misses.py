"""Recurrent and mixed models through a real server: whatever is wrong with a piece, all is a miss.

Every test ends with the answer a cold run gives, and the prefix whole again where it was damaged.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import xxhash

from pion_patches.containers import pack_arrays, serialize_arrays_cache, unpack_arrays
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.manifest import read_manifest, write_manifest
from tests.pion_patches.shipping import continuation, feed, token_ids
from tests.pion_patches.zoo import build

Server = Any
Stats = dict[str, Any]
Arrays = tuple[mx.array | None, ...]
TOKENS = 40
PREFIX = token_ids(0, TOKENS)
#: A block and two decoding steps: enough for a wrong state to show.
CALLS = (4, 1, 1)
PATIENT = 20.0
#: Three recurrent layers, then one of attention (F-Q35).
HYBRID = "qwen3_5"
MODELS: dict[tuple[str, int], Any] = {
    (family, seed): build(family, seed=seed)
    for family in (HYBRID, "mamba2", "rwkv7")
    for seed in (1, 2)
}


pytestmark = pytest.mark.usefixtures("no_lane_in_process")


def cold(family: str, seed: int = 1, prefix: int = TOKENS) -> bytes:
    """The bits of a run that knows no server."""
    model = MODELS[family, seed]
    cache = model.make_cache()
    feed(family, model, cache, 0, prefix)
    return continuation(family, model, cache, prefix, CALLS).tobytes()


def warm(
    server: Server, namespace: str, family: str = HYBRID, seed: int = 1, prefix: int = TOKENS
) -> tuple[bytes, Stats]:
    """The bits of one call of a client of its own, and that client's figures."""
    model = MODELS[family, seed]
    with PionPromptCache(model, port=server.port, timeout=PATIENT, store="sync") as pc:
        cache = pc.get_or_prefill(PREFIX[:prefix], namespace)
        return continuation(family, model, cache, prefix, CALLS).tobytes(), pc.stats()


def expect_miss_that_heals(
    server: Server, namespace: str, reason: str, family: str = HYBRID, seed: int = 1
) -> None:
    answer, stats = warm(server, namespace, family, seed)
    assert stats["miss_reasons"] == {reason: 1}
    assert stats["stores"] == 1
    assert answer == cold(family, seed)
    answer, stats = warm(server, namespace, family, seed)
    assert (stats["hits"], stats["misses"]) == (1, 0)
    assert answer == cold(family, seed)


def rewrite(
    server: Server, namespace: str, layer: int, change: Callable[[bytes], bytes], *, honest: bool
) -> None:
    """Replace the blob of a layer in a fill of its own; `honest`: the manifest vouches for it."""
    raw = server.client()
    _, manifest = raw.call("KV.PREFIX.META", namespace, "GET")
    blob = change(raw.call("SSM.PREFIX.FETCH", namespace, layer))
    gen = raw.call("KV.PREFIX.META", namespace, "BEGIN")
    raw.call("SSM.PREFIX.STORE", namespace, layer, blob, "GEN", gen)
    said = vouch(manifest, layer, blob) if honest else manifest
    raw.call("KV.PREFIX.META", namespace, "SET", gen, said)


def vouch(manifest: bytes, layer: int, blob: bytes) -> bytes:
    """The same manifest with size and checksum of another blob."""
    read = read_manifest(manifest)
    leaves = list(read.leaves)
    entry = leaves[layer].blob
    assert entry is not None
    entry = dataclasses.replace(entry, nbytes=len(blob), checksum=xxhash.xxh3_64_hexdigest(blob))
    leaves[layer] = dataclasses.replace(leaves[layer], blob=entry)
    return write_manifest(dataclasses.replace(read, leaves=tuple(leaves)))


def repacked(
    change: Callable[[Arrays], Arrays] = lambda arrays: arrays,
    kind: str = "ArraysCache",
    tokens: int = TOKENS,
) -> Callable[[bytes], bytes]:
    """A lie in our own container, well-formed."""
    return lambda blob: pack_arrays(
        kind, change(unpack_arrays("ArraysCache", blob, TOKENS)), tokens
    )


def with_nan(arrays: Arrays) -> Arrays:
    first, *rest = arrays
    assert first is not None
    return (mx.full(first.shape, mx.nan, dtype=first.dtype), *rest)


def twice(arrays: Arrays) -> Arrays:
    return tuple(None if array is None else mx.concatenate([array, array]) for array in arrays)


def reference(blob: bytes) -> bytes:
    return serialize_arrays_cache(unpack_arrays("ArraysCache", blob, TOKENS))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_dropped_layer_makes_the_whole_prefix_a_miss(
    shared: Server, namespace: str, layer: int
) -> None:
    """C15: its manifest goes with the piece."""
    warm(shared, namespace)
    raw = shared.client()
    raw.call("SSM.PREFIX.DROP", namespace, layer)
    assert raw.call("KV.PREFIX.META", namespace, "GET") is None
    expect_miss_that_heals(shared, namespace, "absent")


@pytest.mark.parametrize("layers", [(0,), (2,), (0, 1, 2)])
def test_a_layer_that_is_gone_under_its_manifest_is_a_miss(
    shared: Server, namespace: str, layers: tuple[int, ...]
) -> None:
    """C15, C04: a faulty writer's manifest announces state that was never captured."""
    warm(shared, namespace)
    raw = shared.client()
    gen, manifest = raw.call("KV.PREFIX.META", namespace, "GET")
    gen = raw.call("KV.PREFIX.META", namespace, "BEGIN")
    for layer in layers:
        raw.call("SSM.PREFIX.DROP", namespace, layer)
    raw.call("KV.PREFIX.META", namespace, "SET", gen, manifest)
    expect_miss_that_heals(shared, namespace, "rows")


@pytest.mark.parametrize(
    ("foreign", "reason"),
    [
        pytest.param(lambda own, other: other, "checksum", id="of another prompt"),
        pytest.param(lambda own, other: own[:-1], "rows", id="cut short"),
        pytest.param(lambda own, other: b"", "rows", id="empty"),
        pytest.param(lambda own, other: own[:-1] + bytes([own[-1] ^ 1]), "checksum", id="one bit"),
    ],
)
def test_a_foreign_blob_is_a_miss(
    shared: Server, namespace: str, foreign: Callable[[bytes, bytes], bytes], reason: str
) -> None:
    """E02, C09: what the manifest was not written for."""
    other = f"{namespace}-other"
    warm(shared, namespace)
    with PionPromptCache(MODELS[HYBRID, 1], port=shared.port, timeout=PATIENT, store="sync") as pc:
        pc.get_or_prefill(PREFIX[::-1], other)
    blob = shared.client().call("SSM.PREFIX.FETCH", other, 1)
    rewrite(shared, namespace, 1, lambda own: foreign(own, blob), honest=False)
    expect_miss_that_heals(shared, namespace, reason)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(repacked(tokens=TOKENS - 1), id="token count one less"),
        pytest.param(repacked(tokens=TOKENS + 1), id="token count one more"),
        pytest.param(repacked(kind="KVCache"), id="another class"),
        pytest.param(repacked(lambda arrays: arrays[:1]), id="a slot too few"),
        pytest.param(repacked(lambda arrays: (*arrays, None)), id="a slot too many"),
        pytest.param(repacked(with_nan), id="not finite"),
        pytest.param(repacked(twice), id="two sequences"),
        pytest.param(lambda blob: blob.replace(b'"F32"', b'"F64"'), id="another dtype"),
        pytest.param(lambda blob: blob.replace(b"[1,", b"[2,"), id="another shape"),
        pytest.param(lambda blob: b"", id="empty"),
        pytest.param(lambda blob: blob[:200], id="cut short"),
        pytest.param(lambda blob: bytes(len(blob)), id="zeros"),
        pytest.param(lambda blob: b"\x80\x04K\x01.", id="a pickle"),
        pytest.param(reference, id="the reference container, which names no token"),
    ],
)
def test_a_blob_that_lies_is_a_miss_even_if_the_manifest_vouches_for_it(
    shared: Server, namespace: str, change: Callable[[bytes], bytes]
) -> None:
    """C08, C09, E18: the container itself says whose state it is, and of which token."""
    warm(shared, namespace)
    before = shared.client().call("SSM.PREFIX.FETCH", namespace, 1)
    assert change(before) != before
    rewrite(shared, namespace, 1, change, honest=True)
    expect_miss_that_heals(shared, namespace, "rebuild")


def test_a_blob_rewritten_as_it_was_is_a_hit(shared: Server, namespace: str) -> None:
    """The control of the tests above: what they do to a prefix does not by itself make a miss."""
    warm(shared, namespace)
    rewrite(shared, namespace, 1, repacked(), honest=True)
    answer, stats = warm(shared, namespace)
    assert stats["hits"] == 1
    assert answer == cold(HYBRID)


@pytest.mark.parametrize("family", [HYBRID, "mamba2", "rwkv7"])
def test_other_weights_under_the_same_name_are_a_miss(
    shared: Server, namespace: str, family: str
) -> None:
    """E13: two models of equal configuration, and back again."""
    warm(shared, namespace, family, seed=1)
    expect_miss_that_heals(shared, namespace, "model", family, seed=2)
    expect_miss_that_heals(shared, namespace, "model", family, seed=1)


@pytest.mark.parametrize("family", ["mamba2", "rwkv7"])
def test_a_pure_recurrent_model_is_a_manifest_and_blobs_only(
    server: Callable[..., Server], family: str
) -> None:
    running = server()
    assert warm(running, "pure", family)[1]["stores"] == 1
    running.kill()
    running.restart()
    answer, stats = warm(running, "pure", family)
    assert (stats["hits"], stats["misses"]) == (1, 0)
    assert stats["tokens_restored"] == TOKENS
    assert answer == cold(family)
    raw = running.client()
    for side in ("pk", "pv"):
        assert "not found" in raw.error("V.INFO", f"pure_{side}")
    info = raw.call("KV.PREFIX.INFO").decode()
    assert "vstore_sessions:0\r\n" in info
    assert "vstore_bytes:0\r\n" in info
    manifest = read_manifest(raw.call("KV.PREFIX.META", "pure", "GET")[1])
    assert [leaf.keys or leaf.values for leaf in manifest.leaves] == [None] * len(manifest.leaves)
    assert all(leaf.blob is not None for leaf in manifest.leaves)


@pytest.mark.parametrize("family", [HYBRID, "mamba2"])
@pytest.mark.parametrize("length", [1, 30, 39])
def test_recurrent_state_serves_no_shorter_prefix(
    shared: Server, namespace: str, family: str, length: int
) -> None:
    """C02: 30 of 40 tokens are no hit; the state exists at 40 only."""
    warm(shared, namespace, family)
    answer, stats = warm(shared, namespace, family, prefix=length)
    assert stats["miss_reasons"] == {"length": 1}
    assert answer == cold(family, prefix=length)


@pytest.mark.parametrize("lane", ["1", "0"])
def test_what_a_caller_does_to_its_cache_reaches_nobody_else(
    shared: Server, namespace: str, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    """C14, C01: fetched three times from one client, continued in between; all the same."""
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", lane)
    model = MODELS[HYBRID, 1]
    answers = set()
    with PionPromptCache(model, port=shared.port, timeout=PATIENT, store="sync") as pc:
        for _ in range(3):
            cache = pc.get_or_prefill(PREFIX, namespace)
            answers.add(continuation(HYBRID, model, cache, TOKENS, CALLS).tobytes())
        assert pc.stats()["hits"] == 2
        assert pc.stats()["hits_in_process"] == (2 if lane == "0" else 0)
    assert answers == {cold(HYBRID)}


def test_state_evicted_by_the_budget_takes_its_prefix_along(server: Callable[..., Server]) -> None:
    """Three prefixes, room for two; the oldest is a clean miss, the others are whole."""
    nbytes = blob_bytes()
    running = server("--ssm-budget", str(nbytes * 5 // 2))
    for name in ("one", "two", "three"):
        assert warm(running, name)[1]["stores"] == 1
    for name in ("two", "three"):
        answer, stats = warm(running, name)
        assert stats["hits"] == 1
        assert answer == cold(HYBRID)
    expect_miss_that_heals(running, "one", "absent")


def test_state_over_the_budget_costs_nothing_but_the_store(
    server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    """F04: an entry larger than everything is refused; what was there stays."""
    running = server("--ssm-budget", str(blob_bytes() // 6))
    running.client().call("SSM.PREFIX.STORE", "small", 0, b"kept")
    for _ in range(2):
        answer, stats = warm(running, "too large")
        assert answer == cold(HYBRID)
        assert stats["miss_reasons"] == {"absent": 1}
        assert stats["stores_failed"] == 1
    assert running.client().call("KV.PREFIX.META", "too large", "GET") is None
    assert running.client().call("SSM.PREFIX.FETCH", "small", 0) == b"kept"
    assert "OOM" in caplog.text


def blob_bytes() -> int:
    """Bytes of state of the hybrid model, a little less than its blobs have."""
    cache = MODELS[HYBRID, 1].make_cache()
    feed(HYBRID, MODELS[HYBRID, 1], cache, 0, 1)
    return sum(array.nbytes for leaf in cache[:3] for array in leaf.cache)


def test_a_state_that_is_not_finite_is_the_callers_but_never_stored(
    shared: Server, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C04: a model that overflows answers what it answers; one warning, nothing on the server."""
    model: Any = build("mamba2", seed=1)
    model.backbone.layers[1].mixer.dt_bias[0] = mx.nan
    with PionPromptCache(model, port=shared.port, timeout=PATIENT, store="sync") as pc:
        for _ in range(2):
            cache = pc.get_or_prefill(PREFIX, namespace)
            said = continuation("mamba2", model, cache, TOKENS, (1,))
        assert np.isnan(said).all()
        assert pc.stats()["stores_failed"] == 2
        assert not pc.lookup(namespace)
    warnings = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "not finite" in warnings[0]
    assert shared.client().call("SSM.PREFIX.FETCH", namespace, 0) is None


@pytest.mark.parametrize("bitexact", [False, True])
def test_softmax_layers_of_a_hybrid_keep_their_bits_where_asked(
    shared: Server, namespace: str, bitexact: bool
) -> None:
    model = MODELS[HYBRID, 1]
    answers = []
    for _ in range(2):
        with PionPromptCache(
            model, "int8", port=shared.port, timeout=PATIENT, softmax_bitexact=bitexact
        ) as pc:
            cache = pc.get_or_prefill(PREFIX, namespace)
            answers.append(continuation(HYBRID, model, cache, TOKENS, CALLS).tobytes())
            figures = pc.stats()
    assert figures["hits"] == 1
    assert answers[0] == cold(HYBRID)
    assert (answers[1] == cold(HYBRID)) is bitexact
