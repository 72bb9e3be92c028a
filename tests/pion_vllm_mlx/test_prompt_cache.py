"""The prompt cache against a real server: hits equal cold runs bit for bit, doubts are misses."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from pion_patches.cache_rebuild import UnsupportedCache
from pion_vllm_mlx import PionPromptCache, require_suffix
from pion_vllm_mlx.manifest import read_manifest, write_manifest
from tests.pion_vllm_mlx.tiny import PREFIX, cold_answer, continue_greedily, tiny_llama

Server = Any
#: Generous: the first answer of a server on a busy machine may take long.
PATIENT = 20.0
MODEL = tiny_llama()
COLD = cold_answer(MODEL, PREFIX)


pytestmark = pytest.mark.usefixtures("no_lane_in_process")


def client(server: Server, model: Any = MODEL, **settings: Any) -> PionPromptCache:
    return PionPromptCache(
        model, port=server.port, timeout=PATIENT, **({"store": "sync"} | settings)
    )


def fetch(
    server: Server, namespace: str, model: Any = MODEL, prefix: list[int] = PREFIX, **settings: Any
) -> tuple[tuple[list[int], bytes], dict[str, Any]]:
    """One call of a client of its own: what the model answers on top, and the client's figures."""
    with client(server, model, **settings) as pc:
        answer = continue_greedily(model, pc.get_or_prefill(prefix, namespace))
        return answer, pc.stats()


def was_hit(stats: dict[str, Any]) -> bool:
    assert stats["hits"] + stats["misses"] == 1
    return bool(stats["hits"])


def missed_for(stats: dict[str, Any], reason: str) -> bool:
    reasons: dict[str, int] = stats["miss_reasons"]
    return stats["hits"] == 0 and reasons == {reason: 1}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_second_client_gets_the_very_bits_in_the_models_own_dtype(
    shared: Server, namespace: str, dtype: str
) -> None:
    """N03: bf16 included, which NumPy cannot read."""
    model = tiny_llama(dtype=getattr(mx, dtype))
    cold = cold_answer(model, PREFIX)
    first, stored = fetch(shared, namespace, model)
    second, hit = fetch(shared, namespace, model)
    assert first == second == cold
    assert missed_for(stored, "absent")
    assert stored["stores"] == 1
    assert was_hit(hit)
    info = shared.client().call("V.INFO", f"{namespace}_pk").decode()
    formats = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    assert f"v_format:{formats[dtype]}\r\n" in info
    assert "layer_1_tokens:40\r\n" in info


SECOND_PROCESS = """
import json, sys
from tests.pion_vllm_mlx.tiny import PREFIX, continue_greedily, tiny_llama
from pion_vllm_mlx import PionPromptCache
model = tiny_llama()
with PionPromptCache(model, port=int(sys.argv[1]), timeout=20) as pc:
    tokens, bits = continue_greedily(model, pc.get_or_prefill(PREFIX, sys.argv[2]))
    with open(sys.argv[3], "w") as file:
        json.dump([tokens, bits.hex(), pc.stats()], file)
"""


def start_process(server: Server, namespace: str, outcome: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path])}
    words = [sys.executable, "-c", SECOND_PROCESS, str(server.port), namespace, str(outcome)]
    return subprocess.Popen(words, env=environment)


def outcome_of(process: subprocess.Popen[bytes], outcome: Path) -> tuple[Any, dict[str, Any]]:
    """Judged by what it wrote: MLX's CPU build may abort while the interpreter exits."""
    process.wait(120)
    tokens, bits, stats = json.loads(outcome.read_text())
    return (tokens, bytes.fromhex(bits)), stats


def test_another_process_and_a_restarted_server_answer_the_same(
    server: Callable[..., Server], namespace: str, tmp_path: Path
) -> None:
    """The main job: A prefills, B hits, the server is killed and restarted, C hits."""
    running = server()
    answer, stats = fetch(running, namespace)
    assert answer == COLD
    assert not was_hit(stats)
    outcome = tmp_path / "b"
    answer, stats = outcome_of(start_process(running, namespace, outcome), outcome)
    assert answer == COLD
    assert was_hit(stats)
    running.kill()
    running.restart()
    answer, stats = fetch(running, namespace)
    assert answer == COLD
    assert was_hit(stats)


def test_two_processes_that_miss_at_once_leave_a_valid_prefix(
    shared: Server, namespace: str, tmp_path: Path
) -> None:
    """WIRE 15.10: both miss, one or both store; either way the next one hits."""
    outcomes = [tmp_path / "one", tmp_path / "two"]
    processes = [start_process(shared, namespace, outcome) for outcome in outcomes]
    for process, outcome in zip(processes, outcomes, strict=True):
        answer, _ = outcome_of(process, outcome)
        assert answer == COLD
    answer, stats = fetch(shared, namespace)
    assert answer == COLD
    assert was_hit(stats)


def test_clients_in_threads_leave_a_valid_prefix(shared: Server, namespace: str) -> None:
    """WIRE 15.10, many at once on one name: nobody gets anything but the cold cache."""
    barrier = threading.Barrier(4)
    guard = threading.Lock()  # the model itself is run by one thread at a time
    wrong: list[object] = []

    def work() -> None:
        with client(shared) as pc:
            barrier.wait(30)
            for _ in range(3):
                with guard:
                    cache = pc.get_or_prefill(PREFIX, namespace)
                    mx.eval([leaf.state for leaf in cache])
                    answer = continue_greedily(MODEL, cache)
                if answer != COLD:
                    wrong.append(answer[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert was_hit(fetch(shared, namespace)[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ids: [*ids[:-1], (ids[-1] + 1) % 61], "ids"),
        (lambda ids: [(ids[0] + 1) % 61, *ids[1:]], "ids"),
        (lambda ids: ids[:-1], "length"),
        (lambda ids: [*ids, 3], "length"),
    ],
)
def test_other_ids_under_the_same_name_miss_and_heal(
    shared: Server, namespace: str, change: Callable[[list[int]], list[int]], reason: str
) -> None:
    """G01: the ids are compared, whatever the name says; the newcomer is stored instead."""
    fetch(shared, namespace)
    other = change(PREFIX)
    cold = cold_answer(MODEL, other)
    answer, stats = fetch(shared, namespace, prefix=other)
    assert answer == cold
    assert missed_for(stats, reason)
    answer, stats = fetch(shared, namespace, prefix=other)
    assert answer == cold
    assert was_hit(stats)


@pytest.mark.parametrize("settings", [{"seed": 1}, {"rope_theta": 5000.0}, {"dtype": mx.bfloat16}])
def test_another_model_under_the_same_name_misses_and_heals(
    shared: Server, namespace: str, settings: dict[str, Any]
) -> None:
    """E13: same name, same ids, but other weights, another rope_theta, another dtype."""
    fetch(shared, namespace)
    other = tiny_llama(**settings)
    cold = cold_answer(other, PREFIX)
    answer, stats = fetch(shared, namespace, other)
    assert answer == cold
    assert missed_for(stats, "model")
    answer, stats = fetch(shared, namespace, other)
    assert answer == cold
    assert was_hit(stats)


def test_weights_changed_in_place_after_the_client_was_made_are_another_model(
    shared: Server, namespace: str
) -> None:
    """E13 within one process: the fingerprint is that of the model as it is at the call."""
    model = tiny_llama()
    with client(shared, model) as pc:
        pc.get_or_prefill(PREFIX, namespace)
        model.model.layers[0].self_attn.v_proj.weight[0, 0] += 1
        answer = continue_greedily(model, pc.get_or_prefill(PREFIX, namespace))
        assert answer == cold_answer(model, PREFIX)
        assert pc.stats()["miss_reasons"] == {"absent": 1, "model": 1}


def test_a_half_written_prefix_is_absent_and_its_fill_is_not_disturbed(
    shared: Server, namespace: str
) -> None:
    """E01: while another client fills, this one prefills and skips its own store."""
    other = shared.client()
    gen = other.call("KV.PREFIX.META", namespace, "BEGIN")
    other.call("KV.PREFIX.REGISTER", namespace, 32, "fp32")
    other.call("V.STOREBATCH", f"{namespace}_pk", 0, 0, 1, bytes(128), "FMT", "PACKED", "GEN", gen)
    answer, stats = fetch(shared, namespace)
    assert answer == COLD
    assert missed_for(stats, "absent")
    assert stats["stores_skipped"] == 1
    other.call("KV.PREFIX.META", namespace, "ABORT", gen)
    fetch(shared, namespace)
    assert was_hit(fetch(shared, namespace)[1])


def test_rows_written_past_the_manifest_remove_it(shared: Server, namespace: str) -> None:
    """A foreign client's write takes the manifest with it: a miss, then whole again."""
    fetch(shared, namespace)
    row = np.zeros(32, dtype=np.float32).tobytes()
    shared.client().call("V.STOREBATCH", f"{namespace}_pk", 0, 0, 1, row)
    answer, stats = fetch(shared, namespace)
    assert answer == COLD
    assert missed_for(stats, "absent")
    assert was_hit(fetch(shared, namespace)[1])


def rewrite(server: Server, namespace: str, change: Callable[[bytes], bytes]) -> None:
    """Replace the manifest of a stored prefix, as a faulty client would."""
    raw = server.client()
    _, blob = raw.call("KV.PREFIX.META", namespace, "GET")
    gen = raw.call("KV.PREFIX.META", namespace, "BEGIN")
    raw.call("KV.PREFIX.META", namespace, "SET", gen, change(blob))


def with_rows(blob: bytes, **changes: Any) -> bytes:
    """A manifest whose first leaf's keys say something else."""
    manifest = read_manifest(blob)
    first, *rest = manifest.leaves
    assert first.keys is not None
    keys = dataclasses.replace(first.keys, **changes)
    leaves = (dataclasses.replace(first, keys=keys), *rest)
    return write_manifest(dataclasses.replace(manifest, leaves=leaves))


def without_leaf(blob: bytes) -> bytes:
    manifest = read_manifest(blob)
    return write_manifest(dataclasses.replace(manifest, leaves=manifest.leaves[:-1]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda blob: b"", "manifest"),
        (lambda blob: b"\x80\x04K\x01.", "manifest"),
        (lambda blob: blob[:-1], "manifest"),
        (lambda blob: b"pion-prefix 9" + blob[13:], "manifest"),
        (lambda blob: with_rows(blob, checksum="0" * 16), "checksum"),
        (lambda blob: with_rows(blob, count=39), "checksum"),
        (lambda blob: with_rows(blob, count=41), "rows"),
        (lambda blob: with_rows(blob, count=1 << 20), "rows"),
        (lambda blob: with_rows(blob, store="fp16"), "format"),
        (lambda blob: with_rows(blob, store="no such"), "format"),
        (without_leaf, "rebuild"),
    ],
)
def test_a_manifest_that_lies_is_a_miss_that_heals(
    shared: Server, namespace: str, change: Callable[[bytes], bytes], reason: str
) -> None:
    """N02, C09, C15, E18: dtype, row count, checksum, layers or version that do not fit."""
    fetch(shared, namespace)
    rewrite(shared, namespace, change)
    answer, stats = fetch(shared, namespace)
    assert answer == COLD
    assert stats["hits"] == 0
    assert missed_for(stats, reason)
    answer, stats = fetch(shared, namespace)
    assert answer == COLD
    assert was_hit(stats)


def test_rows_replaced_under_a_valid_manifest_are_a_miss_that_heals(
    shared: Server, namespace: str
) -> None:
    """E02: bytes that are not those the manifest was written for."""
    fetch(shared, namespace)
    raw = shared.client()
    _, blob = raw.call("KV.PREFIX.META", namespace, "GET")
    gen = raw.call("KV.PREFIX.META", namespace, "BEGIN")
    raw.call("V.STOREBATCH", f"{namespace}_pv", 1, 39, 1, bytes(128), "FMT", "PACKED", "GEN", gen)
    raw.call("KV.PREFIX.META", namespace, "SET", gen, blob)
    answer, stats = fetch(shared, namespace)
    assert answer == COLD
    assert missed_for(stats, "checksum")
    assert was_hit(fetch(shared, namespace)[1])


def test_a_prefix_of_a_client_without_manifests_is_a_miss(shared: Server, namespace: str) -> None:
    """WIRE 6.11: what the public client stored proves nothing about ids or weights."""
    raw = shared.client()
    raw.call("KV.PREFIX.REGISTER", namespace, 32, "fp32")
    rows = np.zeros((40, 32), dtype=np.float32).tobytes()
    for side in ("pk", "pv"):
        for layer in (0, 1):
            raw.call("V.STOREBATCH", f"{namespace}_{side}", layer, 0, 40, rows)
    answer, stats = fetch(shared, namespace)
    assert answer == COLD
    assert missed_for(stats, "absent")
    assert was_hit(fetch(shared, namespace)[1])


@pytest.mark.parametrize("length", [1, 5, 255, 256, 257, 600])
def test_prefixes_of_every_length_continue_as_cold(
    shared: Server, namespace: str, length: int
) -> None:
    """A07, A10: around the 256-token buffer step; only real rows are stored."""
    prefix = [token % 61 for token in range(3, 3 + length)]
    cold = cold_answer(MODEL, prefix)
    first, stats = fetch(shared, namespace, prefix=prefix)
    assert stats["bytes_stored"] == length * 2 * 2 * 32 * 4
    with client(shared) as pc:
        cache = pc.get_or_prefill(prefix, namespace)
        assert [leaf.offset for leaf in cache] == [length, length]
        assert pc.stats()["hits"] == 1
        assert first == continue_greedily(MODEL, cache) == cold


def test_more_rows_than_one_command_takes(
    shared: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pion_vllm_mlx.fill.ROWS_A_COMMAND", 7)
    fetch(shared, namespace)
    answer, stats = fetch(shared, namespace)
    assert answer == COLD
    assert was_hit(stats)


def test_each_returned_cache_is_the_callers_own(shared: Server, namespace: str) -> None:
    """C14: generating on one copy changes neither the next nor what is held."""
    fetch(shared, namespace)
    with client(shared) as pc:
        for _ in range(3):
            cache = pc.get_or_prefill(PREFIX, namespace)
            assert continue_greedily(MODEL, cache) == COLD
            cache[0].keys[...] = 0
        assert pc.stats()["hits"] == 3


def test_the_second_call_in_a_process_needs_no_wire(
    shared: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PION_PROMPT_CACHE_NO_INPROC")
    with client(shared) as pc:
        for _ in range(3):
            cache = pc.get_or_prefill(PREFIX, namespace)
            assert continue_greedily(MODEL, cache) == COLD
            cache[0].keys[...] = 0
        stats = pc.stats()
        assert (stats["misses"], stats["hits"], stats["hits_in_process"]) == (1, 2, 2)
        assert stats["bytes_fetched"] == 0
        # The same name for other ids, or another model, is not answered from memory.
        other = PREFIX[::-1]
        answer = continue_greedily(MODEL, pc.get_or_prefill(other, namespace))
        assert answer == cold_answer(MODEL, other)
        assert pc.stats()["hits_in_process"] == 2
    with client(shared) as pc:
        pc.get_or_prefill(other, namespace)
        answer = continue_greedily(MODEL, pc.get_or_prefill(other, namespace))
        assert answer == cold_answer(MODEL, other)
        assert pc.stats()["hits_in_process"] == 1


def test_what_is_held_in_process_keeps_to_its_budget(
    shared: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PION_PROMPT_CACHE_NO_INPROC")
    one = 40 * 2 * 2 * 32 * 4
    with client(shared, held_bytes=2 * one) as pc:
        for turn in range(4):
            pc.get_or_prefill(PREFIX, f"{namespace}{turn}")
        assert pc._named.held.nbytes == 2 * one
    with client(shared, held_bytes=one - 1) as pc:
        pc.get_or_prefill(PREFIX, namespace)
        assert pc._named.held.nbytes == 0


@pytest.mark.parametrize(
    "vquant", ["fp16", "bf16", "int8", "fp8", "mlx4g32", "turbo4", "turbo3", "turbo2"]
)
def test_a_named_format_restores_what_it_can_keep(
    shared: Server, namespace: str, vquant: str
) -> None:
    """A lossy tier: near the cold cache, the same on every hit, and in one format on the server."""
    with client(shared, vquant=vquant) as pc:
        exact = pc.get_or_prefill(PREFIX, namespace)
    with client(shared, vquant=vquant) as pc:
        first, second = (pc.get_or_prefill(PREFIX, namespace) for _ in range(2))
        assert pc.stats()["hits"] == 2
    info = shared.client().call("V.INFO", f"{namespace}_pv").decode()
    assert f"v_format:{vquant}\r\n" in info
    for leaf, one, two in zip(exact, first, second, strict=True):
        want, got = leaf.keys[..., :40, :], one.keys[..., :40, :]
        assert mx.array_equal(one.keys, two.keys).item()
        assert got.dtype == want.dtype
        error: Any = (mx.abs(got - want).mean() / mx.abs(want).mean()).item()
        assert error < {"turbo3": 0.3, "turbo2": 0.5}.get(vquant, 0.15)
        assert error > 0


def test_a_lossless_client_does_not_take_a_lossy_prefix_but_the_other_way_round(
    shared: Server, namespace: str
) -> None:
    fetch(shared, namespace, vquant="int8")
    answer, stats = fetch(shared, namespace)
    assert answer == COLD
    assert missed_for(stats, "format")
    answer, stats = fetch(shared, namespace, vquant="int8")
    assert answer == COLD
    assert was_hit(stats)


def test_fp32_rows_of_a_half_precision_model_count_as_lossless(
    shared: Server, namespace: str
) -> None:
    for dtype in (mx.float16, mx.bfloat16):
        model = tiny_llama(dtype=dtype)
        fetch(shared, namespace, model, vquant="fp32")
        answer, stats = fetch(shared, namespace, model)
        assert answer == cold_answer(model, PREFIX)
        assert was_hit(stats)


def test_boundary_protection_is_a_schema_of_two_sides(shared: Server, namespace: str) -> None:
    """D05: K and the outer layers of V are fp16, the middle is the named format; it reloads."""
    model = tiny_llama(num_hidden_layers=4)
    settings: dict[str, Any] = {"vquant": "fp8", "boundary_protect": 1}
    fetch(shared, namespace, model, **settings)
    _, stats = fetch(shared, namespace, model, **settings)
    assert was_hit(stats)
    raw = shared.client()
    keys = raw.call("V.INFO", f"{namespace}_pk").decode()
    values = raw.call("V.INFO", f"{namespace}_pv").decode()
    assert [f"layer_{i}_fmt:fp16" in keys for i in range(4)] == [True] * 4
    assert [f"layer_{i}_fmt:fp16" in values for i in range(4)] == [True, False, False, True]
    assert [f"layer_{i}_fmt:fp8" in values for i in range(4)] == [False, True, True, False]


def test_protect_dtype_auto_keeps_the_models_bits(shared: Server, namespace: str) -> None:
    model = tiny_llama(num_hidden_layers=3)
    settings: dict[str, Any] = {
        "vquant": "fp8",
        "boundary_protect": 1,
        "protect_dtype": "auto",
    }
    with client(shared, model, **settings) as pc:
        exact = pc.get_or_prefill(PREFIX, namespace)
        restored = pc.get_or_prefill(PREFIX, namespace)
        assert pc.stats()["hits"] == 1
    for layer in range(3):
        assert mx.array_equal(exact[layer].keys[..., :40, :], restored[layer].keys[..., :40, :])
        same = mx.array_equal(exact[layer].values[..., :40, :], restored[layer].values[..., :40, :])
        assert same.item() == (layer != 1)


def test_a_width_that_is_no_multiple_of_the_block_stays_lossless(
    shared: Server, namespace: str
) -> None:
    """D12: head_dim 10, two heads: such rows cannot be stored in blocks of 32, and are not."""
    model = tiny_llama(head_dim=10)
    fetch(shared, namespace, model, vquant="turbo4")
    answer, stats = fetch(shared, namespace, model, vquant="turbo4")
    assert answer == cold_answer(model, PREFIX)
    assert was_hit(stats)


def test_token_ids_of_any_integer_type_are_the_same_key(shared: Server, namespace: str) -> None:
    """A16: np.int64(5) and 5 are one key, and so are arrays of them."""
    fetch(shared, namespace)
    for ids in (
        tuple(PREFIX),
        np.array(PREFIX),
        np.array(PREFIX, dtype=np.uint16),
        mx.array(PREFIX),
        [np.int64(token) for token in PREFIX],
        [token if token % 2 else np.int32(token) for token in PREFIX],
    ):
        with client(shared) as pc:
            assert continue_greedily(MODEL, pc.get_or_prefill(ids, namespace)) == COLD
            assert pc.stats()["hits"] == 1


@pytest.mark.parametrize(
    "ids",
    [
        *("12", b"12", ["1", "2"], [1.0], [True], [None], [[1, 2]], 7, [-1], [61], [2**32]),
        *(np.zeros((1, 3), dtype=int), np.array([0.5]), np.array([True]), mx.array([1.5])),
    ],
)
def test_what_is_no_token_id_of_the_model_is_refused(shared: Server, ids: Any) -> None:
    """A16: strings are rejected, and nothing is asked of the server."""
    with client(shared) as pc, pytest.raises(ValueError):
        pc.get_or_prefill(ids, "ns")


def test_an_empty_prefix_is_a_clean_miss(shared: Server, namespace: str) -> None:
    """A16: an empty token list is an empty cache; nothing is stored under the name."""
    with client(shared) as pc:
        cache = pc.get_or_prefill([], namespace)
        assert continue_greedily(MODEL, cache) == cold_answer(MODEL, [])
        assert missed_for(pc.stats(), "empty")
        assert not pc.lookup(namespace)


@pytest.mark.parametrize("name", ["", "x" * 201, "\udc80", 5, ("a",)])
def test_a_namespace_out_of_bounds_is_refused(shared: Server, name: Any) -> None:
    with client(shared) as pc, pytest.raises(ValueError):
        pc.get_or_prefill(PREFIX, name)


@pytest.mark.parametrize("name", ["x" * 200, "a\r\nb", "nul\x00", "ünïcode", b"\xff\x00raw"])
def test_any_other_namespace_works(shared: Server, name: str | bytes) -> None:
    with client(shared) as pc:
        pc.get_or_prefill(PREFIX, name)
        assert pc.lookup(name)
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, name)) == COLD
        assert pc.stats()["hits"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"vquant": "fp12"},
        {"vquant": "raw"},
        {"vquant": "bf16_rope_fp8_body"},
        {"boundary_protect": 2},
        {"vquant": "fp8", "boundary_protect": -1},
        {"vquant": "fp8", "boundary_protect": 1, "protect_dtype": "int4"},
        {"prefill_step_size": 0},
        {"timeout": 0},
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        PionPromptCache(MODEL, **settings)


def test_an_unknown_cache_class_is_refused_before_anything_is_stored(
    shared: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home_made = type("HomeMadeCache", (KVCache,), {})
    model = tiny_llama()
    with client(shared, model) as pc:
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "make_cache", lambda self: [home_made(), home_made()])
            with pytest.raises(UnsupportedCache) as caught:
                pc.get_or_prefill(PREFIX, namespace)
            with pytest.raises(UnsupportedCache):
                client(shared, model)
        assert "HomeMadeCache" in caught.value.found
        assert "KVCache" in caught.value.known
        assert not pc.lookup(namespace)


def test_progress_counts_tokens_up_to_all_of_them(shared: Server, namespace: str) -> None:
    calls: list[tuple[int, int]] = []
    with client(shared, prefill_step_size=16) as pc:
        answer = continue_greedily(
            MODEL, pc.get_or_prefill(PREFIX, namespace, lambda *call: calls.append(call))
        )
        assert answer == cold_answer(MODEL, PREFIX, step=16)
        assert calls == [(0, 40), (16, 40), (32, 40), (40, 40)]
        pc.get_or_prefill(PREFIX, namespace, lambda *call: calls.append(call))
        assert len(calls) == 4


def test_lookup_says_whether_a_whole_prefix_is_stored(shared: Server, namespace: str) -> None:
    with client(shared) as pc:
        assert not pc.lookup(namespace)
        pc.get_or_prefill(PREFIX, namespace)
        assert pc.lookup(namespace)
        gen = shared.client().call("KV.PREFIX.META", namespace, "BEGIN")
        assert gen > 0
        assert not pc.lookup(namespace)


def test_the_servers_receipt_credits_the_measured_prefill(
    server: Callable[..., Server], namespace: str
) -> None:
    running = server()
    for _ in range(2):
        fetch(running, namespace)
    raw = running.client().call("PION.STATS")
    receipt = dict(zip(raw[::2], raw[1::2], strict=True))
    assert receipt[b"kvprefix_hits"] == receipt[b"kvprefix_hits_measured"] == 1
    assert receipt[b"kvprefix_misses"] == 1
    assert receipt[b"kvprefix_tokens_served"] == 40
    assert receipt[b"kvprefix_bytes_served"] == 40 * 2 * 2 * 32 * 4
    assert receipt[b"prefill_seconds_avoided"] == receipt[b"prefill_seconds_avoided_measured"]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [r.message for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_password_is_needed_and_used(
    server: Callable[..., Server], namespace: str, warnings: Callable[[], list[str]]
) -> None:
    running = server("--requirepass", "opensesame")
    for password in (None, "wrong"):
        answer, stats = fetch(running, namespace, password=password)
        assert answer == COLD
        assert missed_for(stats, "unavailable")
    assert len(warnings()) == 2
    fetch(running, namespace, password="opensesame")
    assert was_hit(fetch(running, namespace, password="opensesame")[1])


def test_a_full_server_costs_nothing_but_the_store(
    server: Callable[..., Server], namespace: str, warnings: Callable[[], list[str]]
) -> None:
    running = server("--maxmemory", "10000")
    for _ in range(2):
        answer, stats = fetch(running, namespace)
        assert answer == COLD
        assert stats["stores_failed"] == 1
    assert all("OOM" in text for text in warnings())


def test_a_killed_server_is_met_cold_and_a_restarted_one_is_used_again(
    server: Callable[..., Server], namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pion_vllm_mlx.transport.endpoint.PAUSE", 0.0)
    running = server()
    with client(running) as pc:
        pc.get_or_prefill(PREFIX, namespace)
        running.kill()
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, namespace)) == COLD
        assert pc.stats()["miss_reasons"] == {"absent": 1, "unavailable": 1}
        running.restart()
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, namespace)) == COLD
        assert pc.stats()["hits"] == 1


def test_an_empty_suffix_is_a_clear_error() -> None:
    """A01: an exact hit leaves nothing to run, and says so instead of answering nothing."""
    assert require_suffix(np.array([1, 2]).tolist()) == [1, 2]
    with pytest.raises(ValueError, match="at least one token"):
        require_suffix([])
