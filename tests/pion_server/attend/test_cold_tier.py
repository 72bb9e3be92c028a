"""Warm, cold, missing on a real server: demotion, WARM from stored rows, memory limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from pion_server.attend import reference
from tests.attention_client import (
    F32,
    AttentionClient,
    auto_fused_words,
    auto_words,
    fused_words,
    normal,
    query_words,
    sparse_words,
    store_words,
)

if TYPE_CHECKING:
    from tests.conftest import ServerProcess

Start = Callable[..., "ServerProcess"]

COLD = "COLDMISS session evicted to cold tier (call KV.PREFIX.WARM)"


def rows_of(kv: F32) -> F32:
    """`[H][N][D]` as the V-store keeps it: `[N][H*D]`."""
    heads, tokens, dim = kv.shape
    return np.ascontiguousarray(kv.transpose(1, 0, 2)).reshape(tokens, heads * dim)


def register(client: AttentionClient, ns: str, layers: list[tuple[F32, F32]], fmt: str) -> None:
    """Store whole layers, K and V `[H][N][D]`, as a client's cold path does."""
    width = layers[0][0].shape[0] * layers[0][0].shape[2]
    assert client.raw.call("KV.PREFIX.REGISTER", ns, width, fmt) == "OK"
    for layer, sides in enumerate(layers):
        for side, kv in zip(("pk", "pv"), sides, strict=True):
            rows = rows_of(kv)
            words = f"{ns}_{side}", layer, 0, len(rows), rows.tobytes()
            assert client.raw.call("V.STOREBATCH", *words) == "OK"


def sdpa(client: AttentionClient) -> list[int]:
    info = client.info()
    return [info[f"sdpa_{name}"] for name in ("warm", "cold", "demotions", "rehydrates")]


HELD_UP = """
import pathlib, time
from pion_server.attend import service
plain, gate = service.read_rows, pathlib.Path({gate!r})
def read_rows(rows, target):
    plain(rows, target)
    gate.with_name("loading").touch()
    deadline = time.monotonic() + 60
    while not gate.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
service.read_rows = read_rows
"""


@pytest.mark.parametrize("manifest", [True, False])
def test_what_was_replaced_while_it_was_read_becomes_no_slot(
    server: Start, tmp_path: Path, manifest: bool
) -> None:
    gate = tmp_path / "gate"
    extra = tmp_path / "extra.py"
    extra.write_text(HELD_UP.format(gate=str(gate)))
    running = server(extra=extra)
    client, other = AttentionClient(running), AttentionClient(running)
    register(client, "ns", [(normal(1, 1, 3, 32), normal(2, 1, 3, 32))], "fp32")
    if manifest:
        fill = client.raw.call("KV.PREFIX.META", "ns", "BEGIN")
        client.raw.call("KV.PREFIX.META", "ns", "SET", fill, b"whole")
    client.raw.send(client.raw.pack("KV.PREFIX.WARM", "ns", 1, 32, "ns_attn"))
    deadline = time.monotonic() + 60
    while not gate.with_name("loading").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert other.raw.call("KV.PREFIX.META", "ns", "BEGIN") > 0
    gate.touch()
    assert str(client.raw.read()) == "ERR KV.PREFIX.WARM: the namespace was replaced meanwhile"
    assert other.lookup("ns_attn") == "MISS"


def test_257_stores_demote_one_and_warm_brings_it_back(server: Start) -> None:
    """WIRE.md section 16, cold tier."""
    client = AttentionClient(server())
    k, v, q = normal(1, 1, 3, 32), normal(2, 1, 3, 32), normal(3, 1, 1, 32)
    register(client, "ns0", [(k, v)], "fp16")
    words = [client.raw.pack(*store_words(f"ns{i}", 0, k, v)) for i in range(257)]
    client.raw.send(b"".join(words))
    assert [client.raw.read() for _ in range(257)] == ["OK"] * 257
    assert sdpa(client) == [256, 1, 1, 0]
    assert [client.lookup(f"ns{i}") for i in (0, 1, 256)] == ["COLD", "HIT", "HIT"]
    assert client.raw.error(*query_words("ns0", 0, q)) == COLD
    assert client.raw.call("KV.PREFIX.WARM", "ns0", 1, 32) == "1"
    assert client.lookup("ns0") == "HIT"
    assert sdpa(client) == [256, 1, 2, 1]
    # The restored one is the newest: the next to go are ns2 and ns3, ns1 made room for it.
    assert [client.lookup(f"ns{i}") for i in (1, 2)] == ["COLD", "HIT"]
    out, _ = client.query("ns0", 0, q)
    # fp16 rows read as rounded numbers.
    wanted, _ = reference.query(q, k.astype(np.float16), v.astype(np.float16))
    np.testing.assert_allclose(out, wanted, atol=1e-6)
    assert "namespace not registered" in client.raw.error("KV.PREFIX.WARM", "never", 1, 32)
    assert sdpa(client) == [256, 1, 2, 1]


@pytest.fixture(scope="module")
def single(module_server: Start) -> ServerProcess:
    """A server with one slot: every other store demotes."""
    return module_server("--sdpa-slots", "1")


def chill(client: AttentionClient, sid: str, layer: int, k: F32, v: F32) -> None:
    """Make (sid, layer) cold: store it, then something else."""
    client.store(sid, layer, k, v)
    client.store("chill", 0, k, v)
    assert client.lookup(sid, layer) == "COLD"


def test_every_query_of_a_cold_layer_says_coldmiss(single: ServerProcess) -> None:
    client = AttentionClient(single)
    k, v, q = normal(1, 2, 9, 32), normal(2, 2, 9, 32), normal(3, 2, 1, 32)
    none = normal(0, 2, 0, 32)
    chill(client, "cold", 7, k, v)
    for words in (
        query_words("cold", 7, q),
        fused_words("cold", 7, q, none, none, b"\0\1"),
        sparse_words("cold", 7, q[:, 0], np.zeros((2, 1), np.int32), [1, 1]),
        auto_words("cold", 7, q[:, 0], 2, (4, 1)),
        auto_fused_words("cold", 7, q[:, 0], none, none, (4, 1)),
    ):
        assert client.raw.error(*words) == COLD
    assert "not 1 of 32" in client.raw.error(*query_words("cold", 7, q[:1]))
    assert client.raw.call("ATTEND.PREFIX.DROP", "cold", 7) == 1
    assert "session not found" in client.raw.error(*query_words("cold", 7, q))


def test_storing_a_cold_layer_makes_it_warm(single: ServerProcess) -> None:
    client = AttentionClient(single)
    k, v = normal(1, 2, 9, 32), normal(2, 2, 9, 32)
    chill(client, "again", 0, k, v)
    before = client.info()["sdpa_rehydrates"]
    client.store("again", 0, k, v)
    assert client.lookup("again") == "HIT"
    assert client.info()["sdpa_rehydrates"] == before + 1


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16", "int8", "mlx4g32", "turbo4", "fp8"])
def test_warm_answers_as_the_stored_rows_read(shared: ServerProcess, fmt: str) -> None:
    client = AttentionClient(shared)
    ns = f"warm-{fmt}"
    layers = [(normal(i, 3, 40, 64), normal(i + 9, 3, 40, 64)) for i in range(2)]
    register(client, ns, layers, fmt)
    assert client.raw.call("KV.PREFIX.WARM", ns, 3, 64, f"{ns}_attn") == "2"
    assert [client.lookup(ns), client.lookup(f"{ns}_attn", 1)] == ["MISS", "HIT"]
    q = normal(5, 3, 2, 64)
    for layer in range(2):
        sides = []
        for side in ("pk", "pv"):
            blob = client.raw.call("V.FETCH", f"{ns}_{side}", layer, "RANGE", 0, 40)
            read = np.frombuffer(blob, np.float32).reshape(40, 3, 64)
            sides.append(read.transpose(1, 0, 2))
        out, lse = client.query(f"{ns}_attn", layer, q)
        wanted, wanted_lse = reference.query(q, sides[0], sides[1])
        np.testing.assert_allclose(out, wanted, atol=1e-5)
        np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)


def test_warm_counts_what_it_skips(shared: ServerProcess) -> None:
    client = AttentionClient(shared)
    specs = ["fmt=fp16,dim=64", "fmt=fp16,dim=96", "fmt=raw,dim=64", "fmt=fp16,dim=64"]
    for side in ("mixed_pk", "mixed_pv"):
        client.raw.call("V.CREATE", side, 0, "SCHEMA", 4, *specs)
        for layer, width in ((0, 64), (1, 96)):
            rows = np.ones((5, width), np.float32).tobytes()
            client.raw.call("V.STOREBATCH", side, layer, 0, 5, rows)
        client.raw.call("V.STOREBATCH", side, 2, 0, 5, bytes(5 * 64), "FMT", "PACKED")
    # Layer 3 has rows on one side only: ignored, neither made nor skipped.
    client.raw.call("V.STOREBATCH", "mixed_pk", 3, 0, 5, np.ones((5, 64), np.float32).tobytes())
    assert client.raw.call("KV.PREFIX.WARM", "mixed", 2, 32) == "1 skipped_dim=2"
    assert client.raw.call("KV.PREFIX.WARM", "mixed", 3, 32) == "1 skipped_dim=2"
    assert client.raw.call("KV.PREFIX.WARM", "mixed", 1, 32) == "0 skipped_dim=3"
    assert [client.lookup("mixed", layer) for layer in range(4)] == ["HIT", "HIT", "MISS", "MISS"]


def test_warm_takes_the_rows_both_sides_have(shared: ServerProcess) -> None:
    client = AttentionClient(shared)
    k, v, q = normal(1, 1, 9, 32), normal(2, 1, 9, 32), normal(3, 1, 1, 32)
    register(client, "uneven", [(k, v)], "fp32")
    more = normal(4, 3, 32)
    client.raw.call("V.STOREBATCH", "uneven_pk", 0, 9, 3, more.tobytes())
    assert client.raw.call("KV.PREFIX.WARM", "uneven", 1, 32) == "1"
    np.testing.assert_allclose(
        client.query("uneven", 0, q)[0], reference.query(q, k, v)[0], atol=1e-6
    )


def test_warm_of_rows_never_written_is_refused_whole(shared: ServerProcess) -> None:
    client = AttentionClient(shared)
    whole = normal(1, 1, 5, 32), normal(2, 1, 5, 32)
    register(client, "gap", [whole, whole], "fp32")
    row = normal(3, 1, 32).tobytes()
    for side in ("gap_pk", "gap_pv"):
        client.raw.call("V.STOREBATCH", side, 1, 8, 1, row)
    said = client.raw.error("KV.PREFIX.WARM", "gap", 1, 32)
    assert "layer 1 has rows never written below 9" in said
    assert [client.lookup("gap", layer) for layer in range(2)] == ["MISS", "MISS"]


def test_warm_of_a_prefix_being_filled_is_refused(shared: ServerProcess) -> None:
    client = AttentionClient(shared)
    whole = normal(1, 1, 5, 32), normal(2, 1, 5, 32)
    register(client, "filling", [whole], "fp32")
    gen = client.raw.call("KV.PREFIX.META", "filling", "BEGIN")
    assert "being filled" in client.raw.error("KV.PREFIX.WARM", "filling", 1, 32)
    client.raw.call("KV.PREFIX.META", "filling", "SET", gen, b"complete")
    assert client.raw.call("KV.PREFIX.WARM", "filling", 1, 32) == "1"


def test_warm_finds_the_kv_heads_of_a_cold_grouped_layer(single: ServerProcess) -> None:
    """WIRE.md 6.10: from fused and sparse paths the client passes its query heads as H."""
    client = AttentionClient(single)
    k, v = normal(1, 2, 9, 32), normal(2, 2, 9, 32)
    register(client, "gqa", [(k, v)], "fp32")
    assert client.raw.call("KV.PREFIX.WARM", "gqa", 8, 32, "gqa_attn") == "0 skipped_dim=1"
    chill(client, "gqa_attn", 0, k, v)
    assert client.raw.call("KV.PREFIX.WARM", "gqa", 8, 64, "gqa_attn") == "0 skipped_dim=1"
    assert client.raw.call("KV.PREFIX.WARM", "gqa", 8, 32, "gqa_attn") == "1"
    q, sk, sv = normal(3, 8, 1, 32), normal(4, 2, 3, 32), normal(5, 2, 3, 32)
    head_map = bytes(h // 4 for h in range(8))
    found = client.ask(fused_words("gqa_attn", 0, q, sk, sv, head_map), *q.shape)
    wanted = reference.query_fused(q, k, v, sk, sv, list(head_map))
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_auto_warm_answers_where_rows_are_stored(server: Start) -> None:
    client = AttentionClient(server("--sdpa-slots", "1", "--sdpa-auto-warm"))
    k, v, q = normal(1, 2, 9, 32), normal(2, 2, 9, 32), normal(3, 2, 1, 32)
    register(client, "kept", [(k, v), (k, v)], "fp32")
    for sid in ("kept_attn", "kept"):
        chill(client, sid, 1, k, v)
        rehydrates = client.info()["sdpa_rehydrates"]
        found = client.query(sid, 1, q)[0]
        np.testing.assert_allclose(found, reference.query(q, k, v)[0], atol=1e-6)
        assert client.info()["sdpa_rehydrates"] == rehydrates + 1
        assert client.lookup(sid, 0) == "MISS"
    chill(client, "unstored_attn", 0, k, v)
    assert client.raw.error(*query_words("unstored_attn", 0, q)) == COLD
    chill(client, "kept_attn", 5, k, v)
    assert client.raw.error(*query_words("kept_attn", 5, q)) == COLD
    # The rows have grown since: what came back would answer for more tokens than were stored.
    chill(client, "kept_attn", 1, k, v)
    for side in ("kept_pk", "kept_pv"):
        client.raw.call("V.STOREBATCH", side, 1, 9, 1, np.ones((1, 64), np.float32).tobytes())
    assert client.raw.error(*query_words("kept_attn", 1, q)) == COLD
    assert client.raw.call("KV.PREFIX.WARM", "kept", 2, 32, "kept_attn") == "2"


def test_nothing_is_held_after_a_restart(server: Start) -> None:
    process = server()
    client = AttentionClient(process)
    k, v, q = normal(1, 1, 9, 32), normal(2, 1, 9, 32), normal(3, 1, 2, 32)
    register(client, "ns", [(k, v)], "fp32")
    client.store("ns_attn", 0, k, v)
    before = client.ask(query_words("ns_attn", 0, q)).tobytes()
    process.kill()
    process.restart()
    client = AttentionClient(process)
    assert client.lookup("ns_attn") == "MISS"
    assert client.raw.call("KV.PREFIX.WARM", "ns", 1, 32, "ns_attn") == "1"
    assert client.ask(query_words("ns_attn", 0, q)).tobytes() == before
    assert sdpa(client) == [1, 0, 0, 0]


def test_an_expired_prefix_takes_its_slots_along(server: Start) -> None:
    client = AttentionClient(server())
    k = normal(1, 1, 9, 32)
    register(client, "brief", [(k, k)], "fp32")
    client.store("brief_attn", 0, k, k)
    assert client.raw.call("KV.PREFIX.EXPIRE", "brief", 1) == 1
    deadline = time.monotonic() + 30
    while client.lookup("brief_attn") == "HIT" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert client.lookup("brief_attn") == "MISS"


def half_of(kilobytes: int) -> F32:
    """K, or V, of a float32 slot of about that size (of 1024 bytes)."""
    return normal(1, 1, kilobytes * 4, 32)


def test_slots_count_in_the_memory_limit(server: Start) -> None:
    """`--maxmemory`: stored pairs go first, then slots turn cold, then -OOM; never the own ones."""
    client = AttentionClient(server("--maxmemory", "1mb"))
    kv, big = half_of(600), half_of(1200)
    rows = np.zeros((75_000, 1), np.float32)
    client.raw.call("V.CREATE", "old_pk", 1, "VQUANT", "fp32")
    client.raw.call("V.STOREBATCH", "old_pk", 0, 0, len(rows), rows.tobytes())
    client.store("a", 0, kv, kv)
    assert client.info()["vstore_bytes"] == 300_000
    client.store("b", 0, kv, kv)  # 300 + 614 + 614 kB: the pair does not make up for it alone
    assert client.info()["vstore_bytes"] == 0
    assert [client.lookup("a"), client.lookup("b")] == ["COLD", "HIT"]
    client.store("b", 0, kv, kv)  # replaced, not added
    assert client.raw.error(*store_words("c", 0, big, big)).startswith("OOM ")
    assert client.raw.error(*store_words("b", 1, kv, kv)).startswith("OOM ")
    assert [client.lookup("b"), client.lookup("c"), client.lookup("b", 1)] == [
        "HIT",
        "MISS",
        "MISS",
    ]
    client.raw.call("V.CREATE", "new_pk", 1, "VQUANT", "fp32")
    rows = np.zeros((150_000, 1), np.float32)
    assert client.raw.call("V.STOREBATCH", "new_pk", 0, 0, len(rows), rows.tobytes()) == "OK"
    assert client.lookup("b") == "COLD"
    assert sdpa(client) == [0, 2, 2, 0]


def test_warm_over_the_memory_limit_changes_nothing(server: Start) -> None:
    client = AttentionClient(server("--maxmemory", "1mb"))
    kv = normal(1, 1, 900, 64)
    register(client, "ns", [(kv, kv)] * 4, "mlx4g32")  # 144 kB stored, 1.8 MB as float32
    client.store("other", 0, kv, kv)
    assert client.raw.error("KV.PREFIX.WARM", "ns", 1, 64).startswith("OOM ")
    assert [client.lookup("ns", layer) for layer in range(4)] == ["MISS"] * 4
    assert client.lookup("other") == "HIT"
    assert client.info()["registered_prefixes"] == 1


def test_half_precision_slots_are_half_as_large_and_refuse_what_overflows(server: Start) -> None:
    client = AttentionClient(server("--metal-attention-fp16", "--maxmemory", "1mb"))
    kv, q = half_of(1500), normal(2, 1, 2, 32)
    client.store("s", 0, kv, kv)  # 1.5 MB of float32
    out, _ = client.query("s", 0, q)
    assert reference.cosine(out, reference.query(q, kv, kv)[0]) >= 0.99999
    for value, fits in ((65504.0, True), (65520.0, False), (np.inf, True)):
        other = normal(3, 1, 2, 32)
        other[0, 1, 4] = value
        if fits:
            client.store("limit", 0, other, kv[:, :2])
        else:
            said = client.raw.error(*store_words("limit", 0, kv[:, :2], other))
            assert "beyond float16" in said


def test_warm_protects_a_prefix_and_eviction_leaves_slots(server: Start) -> None:
    """WIRE.md 3: WARM touches both sides; attention slots stay when their rows are evicted."""
    client = AttentionClient(server("--vstore-sessions", "4"))
    k, v, q = normal(1, 1, 3, 32), normal(2, 1, 3, 32), normal(3, 1, 1, 32)
    for name in ("old", "older"):
        register(client, name, [(k, v)], "fp32")
        client.store(f"{name}_attn", 0, k, v)
    before = client.query("older_attn", 0, q)[0]
    assert client.raw.call("KV.PREFIX.WARM", "old", 1, 32, "old_attn") == "1"
    assert client.raw.call("KV.PREFIX.REGISTER", "new", 32, "fp32") == "OK"
    owners = [client.raw.call("KV.PREFIX.OWNER", name) for name in ("old", "older", "new")]
    assert owners == ["0", "-1", "0"]
    assert client.lookup("older_attn") == "HIT"
    assert client.query("older_attn", 0, q)[0].tobytes() == before.tobytes()
