"""Who is evicted and who is not: the session cap, PIN, EXPIRE, --maxmemory (WIRE.md 3, 6.13)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.pion_server.commands.checks import Word, info, refuse, store, values

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

DIM = 32
Start = Callable[..., "ServerProcess"]


def register(client: RawClient, ns: bytes, *options: Word) -> None:
    assert client.call("KV.PREFIX.REGISTER", ns, DIM, "fp16", *options) == "OK"


def held(client: RawClient, *names: bytes) -> list[bytes]:
    """Which of the prefixes are held, touching none of them."""
    return [name for name in names if client.call("KV.PREFIX.OWNER", name) != "-1"]


def empty(client: RawClient) -> None:
    """Drop what earlier tests left (their names are known: one letter)."""
    names = [bytes([letter]) for letter in range(97, 123)]
    for name in names:
        client.call("KV.PREFIX.UNPIN", name)
    client.call("KV.PREFIX.DROP", *names)
    client.call("V.DROP", *(name + side for name in names for side in (b"", b"_pk", b"_pv")))


@pytest.fixture(scope="module")
def small(module_server: Start) -> ServerProcess:
    """Room for three prefixes."""
    return module_server("--vstore-sessions", "6")


@pytest.fixture
def three(small: ServerProcess) -> RawClient:
    """A full store: prefixes a, b and c, registered in this order."""
    client = small.client()
    empty(client)
    for name in (b"a", b"b", b"c"):
        register(client, name, "BLOCKS", 16, 1, b"12345678")
        store(client, name + b"_pk", 0, 0, values(1, 1, DIM))
    return client


@pytest.mark.parametrize(
    "touch",
    [
        ("KV.PREFIX.REGISTER", "a", DIM, "fp16"),
        ("V.CREATE", "a_pk", DIM, "VQUANT", "fp16"),
        ("KV.PREFIX.LOOKUP", "a"),
        ("V.STOREBATCH", "a_pv", 3, 0, 1, bytes(4 * DIM)),
        ("V.FETCH", "a_pk", 0, "RANGE", 0, 1),
        ("V.FETCH", "a_pk", 0, 0),
        ("V.FETCH", "a_pk", "BATCH", 0, 1),
        ("V.FETCH", "a_pv", 0, "RANGE", 0, 1),
        ("KV.PREFIX.BLOCKS", "a"),
        ("KV.PREFIX.MEMBERSHIP", "a", 1, bytes(8)),
    ],
)
def test_these_commands_protect_a_prefix(three: RawClient, touch: tuple[Word, ...]) -> None:
    three.call(*touch)
    register(three, b"d")
    assert held(three, b"a", b"b", b"c", b"d") == [b"a", b"c", b"d"]


@pytest.mark.parametrize(
    "look",
    [
        ("V.INFO", "a_pk"),
        ("V.INFO",),
        ("KV.PREFIX.OWNER", "a"),
        ("KV.PREFIX.INFO",),
        ("V.SNAPSHOT", "a_pk"),
        ("KV.PREFIX.META", "a", "GET"),
        ("KV.PREFIX.LOOKUP", "z"),
    ],
)
def test_looking_protects_nothing(three: RawClient, look: tuple[Word, ...]) -> None:
    three.call(*look)
    register(three, b"d")
    assert held(three, b"a", b"b", b"c", b"d") == [b"b", b"c", b"d"]


def test_a_pair_goes_as_a_whole_and_is_as_young_as_its_newer_side(three: RawClient) -> None:
    three.call("V.FETCH", "a_pv", 0, "RANGE", 0, 1)
    before = info(three)
    three.call("V.CREATE", "d_pk", DIM)
    assert three.error("V.INFO", "b_pk") == three.error("V.INFO", "b_pv")
    after = info(three)
    assert after["vstore_evictions"] - before["vstore_evictions"] == 2
    assert after["vstore_sessions"] == 5
    three.call("V.CREATE", "d_pv", DIM)
    assert held(three, b"a", b"c", b"d") == [b"a", b"c", b"d"]


def test_sessions_that_are_no_side_go_alone(three: RawClient) -> None:
    empty(three)
    for name in (b"p", b"q"):
        three.call("V.CREATE", name, DIM)
    register(three, b"a")
    register(three, b"b")
    before = info(three)["vstore_evictions"]
    three.call("V.CREATE", "r", DIM)
    assert three.error("V.INFO", "p") == "ERR session not found"
    assert info(three)["vstore_evictions"] - before == 1


def test_replacing_a_prefix_at_the_cap_evicts_nobody(three: RawClient) -> None:
    before = info(three)["vstore_evictions"]
    three.call("KV.PREFIX.REGISTER", "b", DIM, "int8")
    three.call("V.CREATE", "a_pv", DIM, "VQUANT", "int8")
    assert info(three)["vstore_evictions"] == before
    assert held(three, b"a", b"b", b"c") == [b"a", b"b", b"c"]


def test_pinned_prefixes_are_never_evicted(three: RawClient) -> None:
    for name in (b"a", b"b"):
        assert three.call("KV.PREFIX.PIN", name) == 1
        assert three.call("KV.PREFIX.PIN", name) == 1
    register(three, b"d")
    assert held(three, b"a", b"b", b"c", b"d") == [b"a", b"b", b"d"]
    three.call("KV.PREFIX.PIN", "d")
    refuse(three, "KV.PREFIX.REGISTER", "e", DIM, "fp16", text="no free slots")
    refuse(three, "V.CREATE", "e", DIM, text="no free slots")
    assert three.call("KV.PREFIX.UNPIN", "b") == 1
    register(three, b"e")
    assert held(three, b"a", b"b", b"d", b"e") == [b"a", b"d", b"e"]


def test_pins_of_nothing_are_0_and_go_with_the_prefix(three: RawClient) -> None:
    assert three.call("KV.PREFIX.PIN", "z") == 0
    assert three.call("KV.PREFIX.UNPIN", "z") == 0
    assert three.call("KV.PREFIX.EXPIRE", "z", 5) == 0
    three.call("KV.PREFIX.PIN", "a")
    three.call("KV.PREFIX.DROP", "a")
    register(three, b"a")
    for name in (b"b", b"c"):
        three.call("KV.PREFIX.LOOKUP", name)
    register(three, b"d")
    assert held(three, b"a", b"b", b"c", b"d") == [b"b", b"c", b"d"]


def test_an_evicted_prefix_takes_manifest_and_state_along(three: RawClient) -> None:
    gen = three.call("KV.PREFIX.META", "a", "BEGIN")
    three.call("SSM.PREFIX.STORE", "a", 0, "state", "GEN", gen)
    three.call("KV.PREFIX.META", "a", "SET", gen, "m")
    three.call("SSM.PREFIX.STORE", "b", 0, "loose")
    register(three, b"d")
    register(three, b"e")
    assert held(three, b"a", b"b", b"c") == [b"c"]
    assert three.call("KV.PREFIX.META", "a", "GET") is None
    assert three.call("SSM.PREFIX.FETCH", "a", 0) is None
    assert three.call("SSM.PREFIX.FETCH", "b", 0) == b"loose"
    three.call("SSM.PREFIX.DROP", "b")


def test_an_eviction_ends_the_fill_it_takes_a_piece_from(three: RawClient) -> None:
    gen = three.call("KV.PREFIX.META", "a", "BEGIN")
    register(three, b"d")
    assert three.error("KV.PREFIX.META", "a", "SET", gen, "m").startswith("STALE ")


def test_a_prefix_expires(three: RawClient) -> None:
    assert three.call("KV.PREFIX.EXPIRE", "a", 1) == 1
    assert three.call("KV.PREFIX.EXPIRE", "b", 1) == 1
    assert three.call("KV.PREFIX.EXPIRE", "b", 1000) == 1
    three.call("KV.PREFIX.PIN", "a")
    deadline = time.monotonic() + 20
    while held(three, b"a"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert held(three, b"b", b"c") == [b"b", b"c"]
    for words in (("b",), ("b", 0), ("b", -1), ("b", "x"), ("b", 10**12), ("b", 1, 2)):
        refuse(three, "KV.PREFIX.EXPIRE", *words)


def test_ages_survive_a_restart(server: Start) -> None:
    """As far as the log tells: stores; what was only read counts from the last SAVE on."""
    running = server("--vstore-sessions", "6")
    client = running.client()
    for name in (b"a", b"b", b"c"):
        register(client, name)
    store(client, b"a_pv", 0, 0, values(1, 1, DIM))
    running.kill()
    running.restart()
    client = running.client()
    register(client, b"d")
    assert held(client, b"a", b"b", b"c", b"d") == [b"a", b"c", b"d"]
    client.call("KV.PREFIX.LOOKUP", b"c")
    client.call("KV.PREFIX.LOOKUP", b"a")
    client.call("KV.PREFIX.SAVE")
    running.kill()
    running.restart()
    client = running.client()
    assert held(client, b"a", b"b", b"c", b"d") == [b"a", b"c", b"d"], "the evicted stay away"
    assert info(client)["vstore_evictions"] == 0
    register(client, b"e")
    assert held(client, b"a", b"b", b"c", b"d", b"e") == [b"a", b"c", b"e"]


def test_admission_counters_are_shared_by_all_clients(small: ServerProcess, ns: bytes) -> None:
    one, two = small.client(), small.client()
    assert [one.call("KV.PREFIX.ADMIT", ns) for _ in range(2)] == [1, 2]
    assert two.call("KV.PREFIX.ADMIT", ns) == 3
    assert two.call("KV.PREFIX.ADMIT", ns + b"2") == 1
    for command in ("PIN", "UNPIN", "ADMIT"):
        refuse(one, f"KV.PREFIX.{command}", text="requires")
        refuse(one, f"KV.PREFIX.{command}", b"", text="namespace")


def test_128_prefixes_fit_and_four_more_evict_eight_sessions(client: RawClient, ns: bytes) -> None:
    assert info(client)["vstore_max_sessions"] == 256
    names = [ns + b"%03d" % i for i in range(132)]
    for name in names[:128]:
        client.send(client.pack("KV.PREFIX.REGISTER", name, DIM, "fp16"))
        client.send(client.pack("V.STOREBATCH", name + b"_pk", 0, 0, 1, bytes(4 * DIM)))
    assert [client.read() for _ in range(256)] == ["OK"] * 256
    full = info(client)
    assert (full["registered_prefixes"], full["vstore_sessions"]) == (128, 256)
    assert full["vstore_evictions"] == 0
    assert client.call("KV.PREFIX.LOOKUP", names[0]) == "HIT"
    assert client.call("V.FETCH", names[1] + b"_pk", 0, "RANGE", 0, 1) is not None
    for name in names[128:]:
        register(client, name)
    assert info(client)["vstore_evictions"] == 8
    assert info(client)["vstore_sessions"] == 256
    assert held(client, *names[:7]) == [names[0], names[1], names[6]]


def test_memory_limit_evicts_the_oldest_and_refuses_what_never_fits(
    server: Start, ns: bytes
) -> None:
    """F04: a batch larger than the limit is refused and nobody goes for it."""
    row = 4 * DIM
    running = server("--maxmemory", str(100 * row))
    client = running.client()
    names = [ns + b"%d" % i for i in range(4)]
    for name in names[:3]:
        client.call("KV.PREFIX.REGISTER", name, DIM, "fp32")
        for side in (b"_pk", b"_pv"):
            store(client, name + side, 0, 0, values(1, 15, DIM))
    client.call("SSM.PREFIX.STORE", ns + b"state", 0, bytes(10 * row))
    refuse(client, "V.STOREBATCH", names[2] + b"_pk", 1, 0, 101, bytes(101 * row), text="OOM ")
    refuse(client, "SSM.PREFIX.STORE", ns, 0, bytes(100 * row + 1), text="OOM ")
    assert held(client, *names[:3]) == names[:3]
    client.call("KV.PREFIX.PIN", names[0])
    client.call("KV.PREFIX.REGISTER", names[3], DIM, "fp32")
    store(client, names[3] + b"_pk", 0, 0, values(1, 15, DIM))
    assert held(client, *names) == [names[0], names[2], names[3]]
    assert info(client)["vstore_evictions"] == 2
    refuse(client, "V.STOREBATCH", names[3] + b"_pk", 0, 0, 71, bytes(71 * row), text="OOM ")
    assert held(client, *names) == [names[0], names[2], names[3]]
    store(client, names[3] + b"_pk", 0, 0, values(1, 70, DIM))
    assert held(client, *names) == [names[0], names[3]]
    assert client.call("SSM.PREFIX.FETCH", ns + b"state", 0) is None
    assert info(client)["vstore_bytes"] == 100 * row
    store(client, names[3] + b"_pk", 0, 0, values(2, 70, DIM))
    running.kill()
    running.restart()
    client = running.client()
    assert info(client)["vstore_bytes"] == 100 * row
    assert held(client, *names) == [names[0], names[3]]
    refuse(client, "V.STOREBATCH", names[3] + b"_pv", 0, 0, 1, bytes(row), text="OOM ")


def test_admission_counters_live_in_memory(server: Start, ns: bytes) -> None:
    running = server()
    assert [running.client().call("KV.PREFIX.ADMIT", ns) for _ in range(3)] == [1, 2, 3]
    running.kill()
    running.restart()
    assert running.client().call("KV.PREFIX.ADMIT", ns) == 1
