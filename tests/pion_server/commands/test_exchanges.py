"""The exchanges existing clients perform, byte for byte (WIRE.md 15, 16)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.pion_server.commands.checks import info, lines, refuse, values

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

DIM, LAYERS, ROWS = 64, 3, 5


@pytest.fixture(scope="module")
def running(module_server: Callable[..., ServerProcess]) -> ServerProcess:
    """Started as compatible programs start theirs."""
    started = module_server(
        *("-w", "1", "--kvcache", "--metal-attention", "--no-auto-detect", "--no-auto-embed"),
        *("--no-crash-log", "--no-wal", "--profile", "kv"),
    )
    cold = info(started.client())
    assert (cold["registered_prefixes"], cold["vstore_bytes"], cold["vstore_sessions"]) == (0, 0, 0)
    # A store without anything in it saves as well as any other.
    assert started.client().call("KV.PREFIX.SAVE") == "OK"
    return started


def raw(client: RawClient, data: bytes, size: int) -> bytes:
    """Exactly `size` bytes of replies to `data`, unparsed."""
    client.send(data)
    return client._exactly(size)


def half(seed: int) -> Any:
    return values(seed, ROWS, DIM).astype(np.float16)


def test_a_cold_store_and_a_remote_hit(client: RawClient, ns: bytes) -> None:
    """15.1, 15.3, 15.4: single replies, then one BATCH a side, then the layers one by one."""
    pack = client.pack
    assert raw(client, pack("KV.PREFIX.LOOKUP", ns), 7) == b"+MISS\r\n"
    words = ("KV.PREFIX.REGISTER", ns, DIM, "fp16", "PREFILL_MS", "12")
    assert raw(client, pack(*words), 5) == b"+OK\r\n"
    for layer in range(LAYERS):
        for side in (b"_pk", b"_pv"):
            blob = half(layer).astype(np.float32).tobytes()
            words = ("V.STOREBATCH", ns + side, layer, 0, ROWS, blob)  # type: ignore[assignment]
            assert raw(client, pack(*words), 5) == b"+OK\r\n"
    assert raw(client, pack("KV.PREFIX.LOOKUP", ns), 6) == b"+HIT\r\n"
    for side in (b"_pk", b"_pv"):
        found = client.call("V.FETCH", ns + side, "BATCH", 0, ROWS, LAYERS, "FMT", "NATIVE")
        assert found == [half(layer).tobytes() for layer in range(LAYERS)]
        for layer in range(LAYERS):
            one = client.call("V.FETCH", ns + side, layer, "RANGE", 0, ROWS, "FMT", "NATIVE")
            assert one == half(layer).tobytes()


def test_a_missing_layer_is_seen_before_anything_is_decoded(client: RawClient, ns: bytes) -> None:
    """H09: the element keeps its place; a session short of layers shows in the count."""
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp16")
    for layer in (0, 2):
        client.call(
            "V.STOREBATCH", ns + b"_pk", layer, 0, ROWS, half(layer).tobytes(), "FMT", "F16"
        )
    found = client.call("V.FETCH", ns + b"_pk", "BATCH", 0, ROWS, 3, "FMT", "NATIVE")
    assert found == [half(0).tobytes(), None, half(2).tobytes()]
    assert len(client.call("V.FETCH", ns + b"_pk", "BATCH", 0, ROWS, 9, "FMT", "NATIVE")) == 3
    size = ROWS * DIM * 2
    head = b"*3\r\n$%d\r\n" % size
    data = client.pack("V.FETCH", ns + b"_pk", "BATCH", 0, ROWS, 3, "FMT", "NATIVE")
    reply = raw(client, data, len(head) + size + 2 + 5)
    assert reply == head + half(0).tobytes() + b"\r\n$-1\r\n"
    client._exactly(len(b"$%d\r\n" % size) + size + 2)


def test_boundary_protection_by_two_schemas(client: RawClient, ns: bytes) -> None:
    """15.5: V.CREATE twice, no REGISTER, and LOOKUP is a hit."""
    fmts = ["fp16", "fp8", "fp16"]
    for side, chosen in ((b"_pk", ["fp16"] * 3), (b"_pv", fmts)):
        specs = [f"fmt={fmt},dim={DIM}" for fmt in chosen]
        client.send(client.pack("V.CREATE", ns + side, 0, "SCHEMA", 3, *specs))
        assert isinstance(client.read(), int)
        for layer in range(LAYERS):
            blob = half(layer).astype(np.float32).tobytes()
            client.call("V.STOREBATCH", ns + side, layer, 0, ROWS, blob)
    assert client.call("KV.PREFIX.LOOKUP", ns) == "HIT"
    found = client.call("V.FETCH", ns + b"_pv", "BATCH", 0, ROWS, 3, "FMT", "NATIVE")
    # Clients tell halves from floats by length alone.
    assert [len(part) for part in found] == [ROWS * DIM * 2, ROWS * DIM * 4, ROWS * DIM * 2]
    assert found[2] == half(2).tobytes()
    decoded = np.frombuffer(found[1], np.float32).reshape(ROWS, DIM)
    assert np.abs(decoded - half(1)).mean() < 0.05


def test_a_mixed_hybrid(client: RawClient, ns: bytes) -> None:
    """15.6: rows by softmax rank, recurrent state by cache slot."""
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp16")
    for side in (b"_pk", b"_pv"):
        blob = half(0).astype(np.float32).tobytes()
        client.call("V.STOREBATCH", ns + side, 0, 0, ROWS, blob)
    state = struct.pack("<II", 1, 0) + b"opaque"
    assert client.call("SSM.PREFIX.STORE", ns, 2, state) == "OK"
    found = client.call("V.FETCH", ns + b"_pk", 0, "RANGE", 0, ROWS)
    assert found == half(0).astype(np.float32).tobytes()
    assert client.call("SSM.PREFIX.FETCH", ns, 2) == state
    assert client.call("SSM.PREFIX.FETCH", ns, 1) is None


def test_serve_restores_a_chain_of_segments_in_pipelines(client: RawClient, ns: bytes) -> None:
    """15.8, 15.9: bf16 bits as F16 into fp16; all V.INFO, all V.FETCH, the leaf's LOOKUP."""
    segments = [ns + b"-seg%d" % i for i in range(4)]
    bits = np.random.default_rng(1).integers(0, 2**16, (4, LAYERS, ROWS, DIM), dtype=np.uint16)
    for at, name in enumerate(segments):
        stores = [client.pack("KV.PREFIX.REGISTER", name, DIM, "fp16")]
        for layer in range(LAYERS):
            for side in (b"_pk", b"_pv"):
                blob = bits[at, layer].tobytes()
                words = (name + side, layer, 0, ROWS, blob, "FMT", "F16")
                stores.append(client.pack("V.STOREBATCH", *words))
        client.send(b"".join(stores))
        assert [client.read() for _ in stores] == ["OK"] * len(stores)
    names = [name + side for name in segments for side in (b"_pk", b"_pv")]
    client.send(b"".join(client.pack("V.INFO", name) for name in names))
    for _ in names:
        shown = lines(client.read())
        assert min(int(v) for k, v in shown.items() if k.startswith("layer_")) == ROWS
    fetches = [
        client.pack("V.FETCH", name, "BATCH", 0, ROWS, LAYERS, "FMT", "NATIVE") for name in names
    ]
    client.send(b"".join(fetches))
    for at in range(len(segments)):
        expected = [bits[at, layer].tobytes() for layer in range(LAYERS)]
        assert client.read() == expected
        assert client.read() == expected
    total = ROWS * len(segments)
    assert client.call("KV.PREFIX.LOOKUP", segments[-1], "TOKENS", total) == "HIT"
    client.send(client.pack("V.INFO", ns + b"-none_pk") + client.pack("PING"))
    assert str(client.read()) == "ERR session not found"
    assert client.read() == "PONG"


def test_a_whole_pipeline_is_read_before_its_replies_are(client: RawClient, ns: bytes) -> None:
    """64 batches of 1 MB and as many fetches are written before the first reply is read."""
    rows = values(1, 1024, 256)
    client.call("KV.PREFIX.REGISTER", ns, 256, "fp32")
    words = [(ns + b"_pk", i % 8, 0, 1024, rows.tobytes()) for i in range(32)]
    client.send(b"".join(client.pack("V.STOREBATCH", *word) for word in words))
    client.send(client.pack("V.FETCH", ns + b"_pk", "BATCH", 0, 1024, 8) * 4)
    assert [client.read() for _ in words] == ["OK"] * 32
    for _ in range(4):
        assert client.read() == [rows.tobytes()] * 8


def test_durable_commit_is_refused_when_the_log_is_off(client: RawClient) -> None:
    refuse(client, "KV.PREFIX.COMMIT", text="--no-wal")
