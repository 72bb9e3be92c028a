"""SSM.PREFIX.*: opaque recurrent state (WIRE.md 8, 16)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.pion_server.commands.checks import Word, refuse

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess


def reference_blob(seed: int) -> bytes:
    """The design's reference serialization: version, count, then shape, dtype and bytes of each."""
    random = np.random.default_rng(seed)
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in ((1, 3, 8), (1, 4, 4))]
    parts = [struct.pack("<II", 1, len(arrays))]
    for array in arrays:
        parts.append(struct.pack(f"<I{array.ndim}II", array.ndim, *array.shape, 0))
        parts.append(array.tobytes())
    return b"".join(parts)


def test_blobs_come_back_byte_for_byte(client: RawClient, ns: bytes) -> None:
    blobs = [reference_blob(1), b"\0" * 100, b"$-1\r\n", bytes(range(256)), b"x"]
    for layer, blob in enumerate(blobs):
        assert client.call("SSM.PREFIX.STORE", ns, layer, blob) == "OK"
    for layer, blob in enumerate(blobs):
        assert client.call("ssm.prefix.fetch", ns, layer) == blob
    assert client.call("SSM.PREFIX.FETCH", ns, 99) is None
    assert client.call("SSM.PREFIX.FETCH", ns + b"2", 0) is None


def test_an_empty_blob_is_not_a_missing_one(client: RawClient, ns: bytes) -> None:
    """H14."""
    client.call("SSM.PREFIX.STORE", ns, 0, b"")
    client.send(client.pack("SSM.PREFIX.FETCH", ns, 0) + client.pack("SSM.PREFIX.FETCH", ns, 1))
    assert client.read() == b""
    assert client.read() is None


def test_storing_again_overwrites(client: RawClient, ns: bytes) -> None:
    for blob in (b"long" * 1000, b"short", b"", b"again"):
        client.call("SSM.PREFIX.STORE", ns, 5, blob)
        assert client.call("SSM.PREFIX.FETCH", ns, 5) == blob


@pytest.mark.parametrize("size", [(1 << 18) - 1, 1 << 18, (1 << 18) + 1, 4 << 20])
def test_blobs_to_four_megabytes_in_a_pipeline(client: RawClient, ns: bytes, size: int) -> None:
    blob = np.random.default_rng(size).bytes(size)
    client.send(
        client.pack("SSM.PREFIX.STORE", ns, 0, blob)
        + client.pack("SSM.PREFIX.FETCH", ns, 0)
        + client.pack("PING")
    )
    assert client.read() == "OK"
    assert client.read() == blob
    assert client.read() == "PONG"


def test_layers_reach_to_2_32_minus_2_and_never_collide(client: RawClient, ns: bytes) -> None:
    """No 256 hashed slots: every (sid, layer) is its own."""
    layers = [*range(400), 2**31, 2**32 - 2]
    for layer in layers:
        client.send(client.pack("SSM.PREFIX.STORE", ns, layer, b"%d" % layer))
    assert [client.read() for _ in layers] == ["OK"] * len(layers)
    for layer in layers:
        client.send(client.pack("SSM.PREFIX.FETCH", ns, layer))
    assert [client.read() for _ in layers] == [b"%d" % layer for layer in layers]


def test_drop_takes_one_layer_or_all_and_is_always_ok(client: RawClient, ns: bytes) -> None:
    for layer in range(3):
        client.call("SSM.PREFIX.STORE", ns, layer, b"s")
    client.call("SSM.PREFIX.STORE", ns + b"2", 0, b"other")
    assert client.call("SSM.PREFIX.DROP", ns, 1) == "OK"
    assert client.call("SSM.PREFIX.DROP", ns, 1) == "OK"
    assert [client.call("SSM.PREFIX.FETCH", ns, i) for i in range(3)] == [b"s", None, b"s"]
    assert client.call("SSM.PREFIX.DROP", ns) == "OK"
    assert client.call("SSM.PREFIX.DROP", ns) == "OK"
    assert [client.call("SSM.PREFIX.FETCH", ns, i) for i in range(3)] == [None] * 3
    assert client.call("SSM.PREFIX.FETCH", ns + b"2", 0) == b"other"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("STORE", "s"), "requires"),
        (("STORE", "s", 0), "requires"),
        (("STORE", "s", 0, "b", "GEN", 1, 2), "requires"),
        (("STORE", "s", 0, "b", "GEN"), "GEN"),
        (("STORE", "s", 0, "b", "junk"), "option"),
        (("STORE", "s", 0, "b", "GEN", "x"), "GEN"),
        (("STORE", "s", 0, "b", "GEN", 5), "STALE "),
        (("STORE", "s", -1, "b"), "layer"),
        (("STORE", "s", 2**32 - 1, "b"), "layer"),
        (("STORE", "s", "1e3", "b"), "invalid integer"),
        (("STORE", "s", "", "b"), "invalid integer"),
        (("STORE", "", 0, "b"), "namespace"),
        (("FETCH", "s"), "requires"),
        (("FETCH", "s", -1), "layer"),
        (("FETCH", "s", 0, 0), "requires"),
        (("FETCH", "s", 2**32 - 1), "layer"),
        (("DROP",), "requires"),
        (("DROP", "s", "x"), "invalid integer"),
        (("DROP", "s", 2**32 - 1), "layer"),
    ],
)
def test_refusals(client: RawClient, words: tuple[Word, ...], text: str) -> None:
    refuse(client, "SSM.PREFIX." + str(words[0]), *words[1:], text=text)
    if words[0] == "STORE":
        assert client.call("SSM.PREFIX.FETCH", "s", 0) is None


def test_the_budget_evicts_whole_sids_least_recently_used_first(
    server: Callable[..., ServerProcess], ns: bytes
) -> None:
    running = server("--ssm-budget", "1000")
    client = running.client()
    names = [ns + b"%d" % i for i in range(4)]
    for name in names[:3]:
        client.call("SSM.PREFIX.STORE", name, 0, bytes(150))
        client.call("SSM.PREFIX.STORE", name, 1, bytes(150))
    refuse(client, "SSM.PREFIX.STORE", names[3], 0, bytes(1001), text="OOM ")
    refuse(client, "SSM.PREFIX.STORE", names[0], 2, bytes(701), text="OOM ")
    assert client.call("SSM.PREFIX.FETCH", names[0], 1) is not None
    client.call("SSM.PREFIX.STORE", names[3], 0, bytes(150))
    kept = [name for name in names if client.call("SSM.PREFIX.FETCH", name, 0) is not None]
    assert kept == [names[0], names[2], names[3]]
    gen = client.call("KV.PREFIX.META", names[0], "BEGIN")
    client.call("KV.PREFIX.META", names[0], "SET", gen, "m")
    client.call("KV.PREFIX.PIN", names[0])
    client.call("SSM.PREFIX.STORE", names[3], 0, bytes(650))
    kept = [name for name in names if client.call("SSM.PREFIX.FETCH", name, 0) is not None]
    assert kept == [names[0], names[3]], "a pinned prefix keeps its state"
    refuse(client, "SSM.PREFIX.STORE", names[1], 0, bytes(701), text="OOM ")
    client.call("KV.PREFIX.UNPIN", names[0])
    client.call("SSM.PREFIX.STORE", names[1], 0, bytes(900))
    assert client.call("KV.PREFIX.META", names[0], "GET") is None, "a piece went: no manifest"
    running.kill()
    running.restart()
    client = running.client()
    found = [client.call("SSM.PREFIX.FETCH", name, 0) for name in names]
    assert found == [None, bytes(900), None, None]
