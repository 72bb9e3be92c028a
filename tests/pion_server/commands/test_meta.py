"""KV.PREFIX.META: manifests and fills (WIRE.md 6.11)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pion_server.commands.checks import Word, info, refuse, store, values

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

DIM = 32
ROW = values(1, 1, DIM)
ROW_BYTES = ROW.tobytes()
Start = Callable[..., "ServerProcess"]


def begin(client: RawClient, ns: bytes) -> int:
    return int(client.call("KV.PREFIX.META", ns, "BEGIN"))


def manifest(client: RawClient, ns: bytes) -> list[object] | None:
    found = client.call("KV.PREFIX.META", ns, "GET")
    assert found is None or (isinstance(found, list) and len(found) == 2)
    return found if found is None else [found[0], found[1]]


def fill(client: RawClient, ns: bytes, blob: bytes = b"manifest", state: bool = True) -> int:
    """A complete prefix: both sides, a state, a manifest."""
    gen = begin(client, ns)
    assert gen > 0
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp32")
    for side in (b"_pk", b"_pv"):
        client.call("V.STOREBATCH", ns + side, 0, 0, 1, ROW_BYTES, "GEN", gen)
    if state:
        client.call("SSM.PREFIX.STORE", ns, 1, b"state", "GEN", gen)
    assert client.call("KV.PREFIX.META", ns, "SET", gen, blob) == "OK"
    return gen


def test_a_manifest_is_written_last_and_read_back(client: RawClient, ns: bytes) -> None:
    assert manifest(client, ns) is None
    gen = fill(client, ns, b"\0\r\n" + bytes(range(256)))
    assert manifest(client, ns) == [gen, b"\0\r\n" + bytes(range(256))]
    assert client.call("kv.prefix.meta", ns, "get")[0] == gen
    assert client.call("KV.PREFIX.LOOKUP", ns) == "HIT"


def test_an_empty_manifest_is_a_manifest(client: RawClient, ns: bytes) -> None:
    """H14: empty is not missing."""
    gen = fill(client, ns, b"")
    assert manifest(client, ns) == [gen, b""]


def test_manifests_up_to_four_mebibytes(client: RawClient, ns: bytes) -> None:
    gen = begin(client, ns)
    blob = bytes(range(256)) * (1 << 14)
    refuse(client, "KV.PREFIX.META", ns, "SET", gen, blob + b"x", text="exceeds")
    assert client.call("KV.PREFIX.META", ns, "SET", gen, blob) == "OK"
    assert manifest(client, ns) == [gen, blob]


def test_begin_removes_the_manifest_and_gives_a_higher_generation(
    client: RawClient, ns: bytes
) -> None:
    first = fill(client, ns)
    second = begin(client, ns)
    assert second > first
    assert manifest(client, ns) is None
    assert begin(client, ns) > second, "the same connection may begin anew"
    assert client.error("KV.PREFIX.META", ns, "SET", second, "x").startswith("STALE ")


def test_another_connection_waits_for_an_open_fill(
    running: ServerProcess, client: RawClient, ns: bytes
) -> None:
    other = running.client()
    gen = begin(client, ns)
    before = info(client)
    assert begin(other, ns) == 0
    assert info(client) == before
    assert begin(other, ns + b"2") > gen
    assert client.call("KV.PREFIX.META", ns, "ABORT", gen) == "OK"
    assert begin(other, ns) > gen


def test_lookup_is_a_miss_while_a_fill_is_open(
    running: ServerProcess, client: RawClient, ns: bytes
) -> None:
    other = running.client()
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp32")
    gen = begin(client, ns)
    assert client.call("KV.PREFIX.LOOKUP", ns) == other.call("KV.PREFIX.LOOKUP", ns) == "MISS"
    client.call("KV.PREFIX.META", ns, "SET", gen, "x")
    assert client.call("KV.PREFIX.LOOKUP", ns) == other.call("KV.PREFIX.LOOKUP", ns) == "HIT"


def test_abort_ends_only_its_own_fill(client: RawClient, ns: bytes) -> None:
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp32")
    gen = begin(client, ns)
    assert client.call("KV.PREFIX.META", ns, "ABORT", gen + 1) == "OK"
    assert client.call("KV.PREFIX.LOOKUP", ns) == "MISS"
    assert client.call("KV.PREFIX.META", ns, "ABORT", gen) == "OK"
    assert client.call("KV.PREFIX.LOOKUP", ns) == "HIT"
    assert client.call("KV.PREFIX.META", ns, "ABORT", gen) == "OK"
    assert client.error("KV.PREFIX.META", ns, "SET", gen, "x").startswith("STALE ")
    assert manifest(client, ns) is None


def test_a_fill_ends_with_its_connection(
    running: ServerProcess, client: RawClient, ns: bytes
) -> None:
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp32")
    writer = running.client()
    gen = begin(writer, ns)
    assert client.call("KV.PREFIX.LOOKUP", ns) == "MISS"
    writer.close()
    deadline = time.monotonic() + 10
    while client.call("KV.PREFIX.LOOKUP", ns) == "MISS":
        assert time.monotonic() < deadline
    assert client.error("KV.PREFIX.META", ns, "SET", gen, "x").startswith("STALE ")
    assert begin(client, ns) > gen


@pytest.fixture(scope="module")
def hasty(module_server: Start, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    """A server whose fills expire after a quarter second without a write."""
    code = "import pion_server.store.manifests as m\nm.LEASE_SECONDS = 0.25\n"
    path: Path = tmp_path_factory.mktemp("extra") / "hasty.py"
    path.write_text(code)
    return module_server(extra=path)


def test_a_fill_expires_without_writes(hasty: ServerProcess, ns: bytes) -> None:
    client, other = hasty.client(), hasty.client()
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp32")
    gen = begin(client, ns)
    deadline = time.monotonic() + 10
    while other.call("KV.PREFIX.LOOKUP", ns) == "MISS":
        assert time.monotonic() < deadline
    for words in (
        ("KV.PREFIX.META", ns, "SET", gen, "x"),
        ("V.STOREBATCH", ns + b"_pk", 0, 0, 1, ROW_BYTES, "GEN", gen),
    ):
        refuse(client, *words, text="STALE ")
    assert begin(other, ns) > gen


def test_each_write_of_a_fill_renews_it(hasty: ServerProcess, ns: bytes) -> None:
    client = hasty.client()
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp32")
    gen = begin(client, ns)
    end = time.monotonic() + 0.8
    while time.monotonic() < end:
        client.call("V.STOREBATCH", ns + b"_pk", 0, 0, 1, ROW_BYTES, "GEN", gen)
        client.call("SSM.PREFIX.STORE", ns, 0, b"s", "GEN", gen)
        time.sleep(0.02)
    assert client.call("KV.PREFIX.META", ns, "SET", gen, "x") == "OK"


@pytest.mark.parametrize(
    "write",
    [
        ("V.STOREBATCH", "PK", 0, 0, 1, ROW_BYTES),
        ("V.STOREBATCH", "PV", 5, 0, 1, ROW_BYTES),
        ("SSM.PREFIX.STORE", "NS", 0, "other"),
        ("SSM.PREFIX.DROP", "NS"),
        ("SSM.PREFIX.DROP", "NS", 1),
        ("V.DROP", "PV"),
        ("V.RESTORE", "PK", "SNAPSHOT"),
        ("KV.PREFIX.REGISTER", "NS", DIM, "int8"),
        ("KV.PREFIX.DROP", "NS"),
    ],
)
def test_a_write_from_outside_removes_the_manifest(
    running: ServerProcess, client: RawClient, ns: bytes, write: tuple[Word, ...]
) -> None:
    names: dict[Word, Word] = {"NS": ns, "PK": ns + b"_pk", "PV": ns + b"_pv"}
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp32")
    names["SNAPSHOT"] = client.call("V.SNAPSHOT", ns + b"_pk")
    fill(client, ns)
    running.client().call(*(names.get(word, word) for word in write))
    assert manifest(client, ns) is None


@pytest.mark.parametrize(
    "harmless",
    [
        ("KV.PREFIX.REGISTER", "NS", DIM, "fp32"),
        ("KV.PREFIX.REGISTER", "NS", DIM, "fp32", "BLOCKS", 1, 1, bytes(8)),
        ("V.CREATE", "PK", DIM, "VQUANT", "fp32"),
        ("V.CREATE", "2_pk", DIM),
        ("V.SNAPSHOT", "PK"),
        ("SSM.PREFIX.DROP", "NS", 77),
        ("KV.PREFIX.LOOKUP", "NS"),
        ("V.FETCH", "PK", "BATCH", 0, 1),
        ("KV.PREFIX.PIN", "NS"),
    ],
)
def test_what_changes_no_piece_keeps_the_manifest(
    running: ServerProcess, client: RawClient, ns: bytes, harmless: tuple[Word, ...]
) -> None:
    names: dict[Word, Word] = {"NS": ns, "PK": ns + b"_pk"}
    gen = fill(client, ns)
    running.client().call(*(names.get(word, word) for word in harmless))
    assert manifest(client, ns) == [gen, b"manifest"]
    client.call("KV.PREFIX.UNPIN", ns)


def test_a_refused_write_keeps_manifest_and_fill(
    running: ServerProcess, client: RawClient, ns: bytes
) -> None:
    gen = fill(client, ns)
    other = running.client()
    refuse(other, "V.STOREBATCH", ns + b"_pk", 0, 0, 1, ROW_BYTES[:-1], text="blob size")
    refuse(other, "V.STOREBATCH", ns + b"_pk", 0, 0, 1, ROW_BYTES, "GEN", gen, text="STALE ")
    refuse(other, "SSM.PREFIX.STORE", ns, 1, "x", "GEN", gen, text="STALE ")
    assert manifest(client, ns) == [gen, b"manifest"]
    new = begin(client, ns)
    refuse(other, "V.STOREBATCH", ns + b"_pk", 0, 0, 1, ROW_BYTES, "GEN", gen, text="STALE ")
    refuse(other, "V.STOREBATCH", ns + b"_pk", 0, 0, 1, ROW_BYTES[:-1], text="blob size")
    assert client.call("KV.PREFIX.META", ns, "SET", new, "again") == "OK"


def test_another_connections_write_ends_a_fill_its_own_does_not(
    running: ServerProcess, client: RawClient, ns: bytes
) -> None:
    other = running.client()
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp32")
    gen = begin(client, ns)
    store(client, ns + b"_pk", 0, 0, ROW)
    client.call("SSM.PREFIX.STORE", ns, 0, "s")
    assert client.call("KV.PREFIX.META", ns, "SET", gen, "own") == "OK"
    gen = begin(client, ns)
    other.call("V.STOREBATCH", ns + b"_pk", 0, 0, 1, ROW_BYTES, "GEN", gen)
    assert client.call("KV.PREFIX.META", ns, "SET", gen, "shared") == "OK"
    gen = begin(client, ns)
    store(other, ns + b"_pk", 0, 0, ROW)
    assert client.error("KV.PREFIX.META", ns, "SET", gen, "x").startswith("STALE ")
    assert client.call("KV.PREFIX.LOOKUP", ns) == "HIT"


def test_making_a_missing_side_is_no_write(
    running: ServerProcess, client: RawClient, ns: bytes
) -> None:
    gen = begin(client, ns)
    other = running.client()
    other.call("V.CREATE", ns + b"_pk", DIM, "VQUANT", "fp32")
    other.call("KV.PREFIX.REGISTER", ns, DIM, "fp32")
    assert client.call("KV.PREFIX.META", ns, "SET", gen, "m") == "OK"
    other.call("V.CREATE", ns + b"_pk", DIM, "VQUANT", "int8")
    assert manifest(client, ns) is None


def test_generations_belong_to_a_namespace_or_its_sides(client: RawClient, ns: bytes) -> None:
    gen = begin(client, ns)
    for name in (ns + b"2_pk", ns, ns + b"_attn", b"_pk"):
        client.call("V.CREATE", name, DIM, "VQUANT", "fp32")
        refuse(client, "V.STOREBATCH", name, 0, 0, 1, ROW_BYTES, "GEN", gen, text="STALE ")
        client.call("V.DROP", name)
    refuse(client, "SSM.PREFIX.STORE", ns + b"2", 0, "s", "GEN", gen, text="STALE ")


def test_a_pure_recurrent_prefix_has_a_manifest_and_state_only(
    client: RawClient, ns: bytes
) -> None:
    gen = begin(client, ns)
    client.call("SSM.PREFIX.STORE", ns, 0, "s", "GEN", gen)
    client.call("KV.PREFIX.META", ns, "SET", gen, "m")
    assert client.call("KV.PREFIX.LOOKUP", ns) == "MISS"
    assert client.call("KV.PREFIX.OWNER", ns) == "0"
    assert client.call("KV.PREFIX.PIN", ns) == 1
    assert client.call("KV.PREFIX.DROP", ns) == 1
    assert client.call("SSM.PREFIX.FETCH", ns, 0) is None


def test_dropping_a_prefix_drops_its_state_if_it_had_a_manifest(
    client: RawClient, ns: bytes
) -> None:
    fill(client, ns)
    client.call("KV.PREFIX.REGISTER", ns + b"2", DIM, "fp32")
    client.call("SSM.PREFIX.STORE", ns + b"2", 0, "s")
    assert client.call("KV.PREFIX.DROP", ns, ns + b"2") == 2
    assert client.call("SSM.PREFIX.FETCH", ns, 1) is None
    assert client.call("SSM.PREFIX.FETCH", ns + b"2", 0) == b"s"


def test_readers_pipeline_get_fetches_get(client: RawClient, ns: bytes) -> None:
    gen = fill(client, ns)
    get = client.pack("KV.PREFIX.META", ns, "GET")
    client.send(get + client.pack("V.FETCH", ns + b"_pk", "BATCH", 0, 1) + get)
    assert client.read() == [gen, b"manifest"]
    assert client.read() == [ROW_BYTES]
    assert client.read() == [gen, b"manifest"]


def test_manifests_and_generations_survive_but_fills_do_not(
    running: ServerProcess, ns: bytes
) -> None:
    client = running.client()
    gens = [fill(client, ns + b"%d" % i, b"m%d" % i) for i in range(3)]
    last = begin(client, ns + b"1")
    store(running.client(), ns + b"2_pk", 0, 0, ROW)
    for save in (False, True):
        if save:
            assert client.call("KV.PREFIX.SAVE") == "OK"
        running.kill()
        running.restart()
        client = running.client()
        assert manifest(client, ns + b"0") == [gens[0], b"m0"]
        assert manifest(client, ns + b"1") is None
        assert manifest(client, ns + b"2") is None
        assert client.call("KV.PREFIX.LOOKUP", ns + b"1") == "HIT"
        assert begin(client, ns + b"1") > last
        last += 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "requires: <ns> BEGIN"),
        (("NEXT",), "unknown subcommand"),
        (("BEGIN", 1), "wrong number"),
        (("GET", 1), "wrong number"),
        (("SET", 1), "wrong number"),
        (("ABORT",), "wrong number"),
        (("SET", "x", "blob"), "GEN"),
        (("SET", 0, "blob"), "GEN"),
        (("SET", -1, "blob"), "GEN"),
        (("ABORT", "1.0"), "GEN"),
        (("SET", 1, "blob", "more"), "requires"),
        (("SET", 2**62, "blob"), "STALE "),
    ],
)
def test_refused_metas(client: RawClient, ns: bytes, words: tuple[Word, ...], text: str) -> None:
    gen = fill(client, ns)
    refuse(client, "KV.PREFIX.META", ns, *words, text=text)
    assert manifest(client, ns) == [gen, b"manifest"]
    refuse(client, "KV.PREFIX.META", b"x" * 201, "GET", text="namespace")


HOLD_THE_WRITER_LOCK = """
import asyncio
from pion_server.commands.registry import Access, Flag, command

gate = asyncio.Event()


@command("T.HOLD", access=Access.TENANT, min_args=0, flags=Flag.WRITE)
async def hold(ctx, args):
    "T.HOLD"
    await gate.wait()
    return "OK"


@command("T.FREE", access=Access.TENANT, min_args=0)
def free(ctx, args):
    "T.FREE"
    gate.set()
    return "OK"
"""


def test_reading_a_manifest_waits_for_no_writer(server: Start, tmp_path: Path) -> None:
    """A restore begins with it and waits 0.25 s for a first byte; a large store takes longer."""
    extra = tmp_path / "extra.py"
    extra.write_text(HOLD_THE_WRITER_LOCK)
    running = server(extra=extra)
    writer, reader, other = (running.client() for _ in range(3))
    gen = fill(reader, b"n", b"manifest")
    writer.send(writer.pack("T.HOLD"))
    other.call("PING")
    assert manifest(reader, b"n") == [gen, b"manifest"]
    assert reader.call("KV.PREFIX.LOOKUP", b"n") == "HIT"
    other.send(other.pack("KV.PREFIX.META", b"n", "BEGIN"))
    reader.call("T.FREE")
    assert writer.read() == "OK"
    assert other.read() > gen
