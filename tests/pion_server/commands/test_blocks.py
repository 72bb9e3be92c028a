"""KV.PREFIX.BLOCKS and MEMBERSHIP (WIRE.md 6.1, 6.5, 6.6, 16)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.pion_server.commands.checks import Word, refuse, store, values

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess


def pack(hashes: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def register(client: RawClient, ns: bytes, hashes: Sequence[int], size: int = 16) -> None:
    words = ("BLOCKS", size, len(hashes), pack(hashes))
    assert client.call("KV.PREFIX.REGISTER", ns, 32, "fp16", *words) == "OK"


def member(client: RawClient, ns: bytes, probes: Sequence[int]) -> list[bool]:
    bitmap = client.call("KV.PREFIX.MEMBERSHIP", ns, len(probes), pack(probes))
    assert len(bitmap) == (len(probes) + 7) // 8
    return [bool(bitmap[i >> 3] & (1 << (i & 7))) for i in range(len(probes))]


def test_the_table_comes_back_in_token_order(client: RawClient, ns: bytes) -> None:
    hashes = [9, 2**64 - 1, 0, 9, 5]
    register(client, ns, hashes, size=64)
    assert client.call("KV.PREFIX.BLOCKS", ns) == struct.pack("<II", 64, 5) + pack(hashes)


def test_no_table_and_no_prefix_are_unknown(client: RawClient, ns: bytes) -> None:
    assert client.call("KV.PREFIX.BLOCKS", ns) == "UNKNOWN"
    assert client.call("KV.PREFIX.MEMBERSHIP", ns, 1, bytes(8)) == "UNKNOWN"
    client.call("KV.PREFIX.REGISTER", ns, 32, "fp16")
    assert client.call("KV.PREFIX.BLOCKS", ns) == "UNKNOWN"
    assert client.call("KV.PREFIX.MEMBERSHIP", ns, 0, b"") == "UNKNOWN"


def test_a_new_table_replaces_the_old_one_and_none_clears_it(client: RawClient, ns: bytes) -> None:
    register(client, ns, [1, 2, 3])
    client.call("KV.PREFIX.REGISTER", ns, 32, "fp16")
    assert member(client, ns, [3, 4]) == [True, False]
    register(client, ns, [4])
    assert member(client, ns, [3, 4]) == [False, True]
    register(client, ns, [])
    assert client.call("KV.PREFIX.BLOCKS", ns) == "UNKNOWN"


def test_the_table_goes_with_the_prefix(client: RawClient, ns: bytes) -> None:
    register(client, ns, [1, 2, 3])
    client.call("KV.PREFIX.DROP", ns)
    client.call("KV.PREFIX.REGISTER", ns, 32, "fp16")
    assert client.call("KV.PREFIX.BLOCKS", ns) == "UNKNOWN"
    register(client, ns, [1, 2, 3])
    store(client, ns + b"_pk", 0, 0, values(1, 1, 32))
    client.call("KV.PREFIX.REGISTER", ns, 32, "int8")
    assert client.call("KV.PREFIX.BLOCKS", ns) == "UNKNOWN"


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1562])
def test_bit_i_tells_of_probe_i(client: RawClient, ns: bytes, count: int) -> None:
    random = np.random.default_rng(count)
    table = random.integers(0, 2**64, 1562, dtype=np.uint64).tolist()
    register(client, ns, table)
    probes = [*random.choice(table, count // 2), *random.integers(0, 2**64, count, dtype="u8")]
    probes = [int(probe) for probe in random.permutation(np.array(probes, dtype="u8"))][:count]
    assert member(client, ns, probes) == [probe in set(table) for probe in probes]


def test_duplicates_and_extremes(client: RawClient, ns: bytes) -> None:
    register(client, ns, [7, 7, 2**64 - 1, 0])
    probes = [7, 0, 8, 7, 2**64 - 1, 2**63, 6, 1, 0]
    assert member(client, ns, probes) == [p in (7, 0, 2**64 - 1) for p in probes]


def test_an_empty_probe_is_an_empty_bulk(client: RawClient, ns: bytes) -> None:
    register(client, ns, [1])
    assert client.call("KV.PREFIX.MEMBERSHIP", ns, 0, b"") == b""


def test_large_tables_and_probes(client: RawClient, ns: bytes) -> None:
    """Beyond a quarter megabyte the search leaves the event loop; the answer is the same."""
    table = list(range(0, 200_000, 2))
    register(client, ns, table)
    probes = list(range(100_000))
    client.send(
        client.pack("KV.PREFIX.MEMBERSHIP", ns, len(probes), pack(probes)) + client.pack("PING")
    )
    assert client.read() == b"\x55" * 12_500
    assert client.read() == "PONG"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "requires"),
        ((1,), "requires"),
        ((1, bytes(8), "x"), "requires"),
        ((-1, b""), "hash_count"),
        ((1_048_577, b""), "hash_count"),
        (("x", b""), "invalid integer"),
        ((1, bytes(7)), "hash_blob"),
        ((1, bytes(9)), "hash_blob"),
        ((2, bytes(8)), "hash_blob"),
        ((0, bytes(8)), "hash_blob"),
    ],
)
def test_refused_probes(client: RawClient, ns: bytes, words: tuple[Word, ...], text: str) -> None:
    register(client, ns, [1])
    refuse(client, "KV.PREFIX.MEMBERSHIP", ns, *words, text=text)
    refuse(client, "KV.PREFIX.BLOCKS", text="requires")


def test_tables_survive_log_and_snapshot(running: ServerProcess, ns: bytes) -> None:
    client = running.client()
    tables = {ns + b"%d" % i: list(range(i, 50 * i, i)) for i in (1, 2, 3)}
    for name, table in tables.items():
        register(client, name, table, size=table[0])
    register(client, ns + b"cleared", [1, 2])
    register(client, ns + b"cleared", [])
    # A table given to a prefix that exists is a record of its own.
    register(client, ns + b"3", tables[ns + b"3"][::-1], size=3)
    tables[ns + b"3"].reverse()
    for save in (False, True):
        if save:
            assert running.client().call("KV.PREFIX.SAVE") == "OK"
        running.kill()
        running.restart()
        client = running.client()
        for name, table in tables.items():
            head = struct.pack("<II", min(table), len(table))
            assert client.call("KV.PREFIX.BLOCKS", name) == head + pack(table)
            assert member(client, name, [table[-1], 2**40]) == [True, False]
        assert client.call("KV.PREFIX.BLOCKS", ns + b"cleared") == "UNKNOWN"
