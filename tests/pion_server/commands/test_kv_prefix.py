"""KV.PREFIX.REGISTER, LOOKUP, DROP, OWNER, INFO, SAVE and COMMIT (WIRE.md 6.1-6.4, 6.7-6.9)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pion_server.formats import format_names, make_format
from tests.pion_server.commands.checks import (
    Word,
    fetch,
    info,
    lines,
    receipt,
    refuse,
    store,
    values,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import RawClient, ServerProcess

DIM = 32
UNIFORM = [name for name in format_names() if name != "bf16_rope_fp8_body"]
INFO_FIELDS = [
    "registered_prefixes",
    "total_prefix_tokens",
    "vstore_sessions",
    "vstore_total_fetches",
    "vstore_evictions",
    "vstore_max_sessions",
    "vstore_bytes",
    "wal_enabled",
    "wal_bytes",
    "wal_appended",
    "wal_replayed",
    "directory_enabled",
    "my_worker_id",
    "directory_entries",
    "sdpa_warm",
    "sdpa_cold",
    "sdpa_demotions",
    "sdpa_rehydrates",
    "vstore_short_fetches",
    "decode_sessions",
    "decode_bytes",
    "decode_evictions",
    "directory_workers",
]


def register(client: RawClient, ns: bytes, *options: Word, fmt: str = "fp32") -> None:
    assert client.call("KV.PREFIX.REGISTER", ns, DIM, fmt, *options) == "OK"


def shape(client: RawClient, sid: bytes) -> tuple[str, str]:
    shown = lines(client.call("V.INFO", sid))
    return shown["v_format"], shown["value_dim"]


@pytest.mark.parametrize("fmt", UNIFORM)
def test_register_creates_both_sides(client: RawClient, ns: bytes, fmt: str) -> None:
    before = info(client)
    assert client.call("kv.prefix.register", ns, 64, fmt.upper()) == "OK"
    assert shape(client, ns + b"_pk") == shape(client, ns + b"_pv") == (fmt, "64")
    after = info(client)
    assert after["vstore_sessions"] - before["vstore_sessions"] == 2
    assert after["registered_prefixes"] - before["registered_prefixes"] == 1
    assert after["wal_appended"] - before["wal_appended"] == 1


def test_an_empty_prefix_is_a_hit(client: RawClient, ns: bytes) -> None:
    assert client.call("KV.PREFIX.LOOKUP", ns) == "MISS"
    register(client, ns)
    assert client.call("kv.prefix.lookup", ns) == "HIT"


def test_registering_again_keeps_the_rows(client: RawClient, ns: bytes) -> None:
    register(client, ns)
    for side in (b"_pk", b"_pv"):
        store(client, ns + side, 0, 0, values(1, 3, DIM))
    before = info(client)
    register(client, ns)
    register(client, ns, "PREFILL_MS", 5)
    assert info(client) == before
    found = fetch(client, ns + b"_pv", 0, 0, 3, DIM)
    assert found is not None
    assert (found == values(1, 3, DIM)).all()


def test_registering_otherwise_recreates_both_sides_empty(client: RawClient, ns: bytes) -> None:
    """D03: another format or width is a clean start, never old rows read as new ones."""
    register(client, ns)
    for side in (b"_pk", b"_pv"):
        store(client, ns + side, 0, 0, values(1, 3, DIM))
    before = info(client)["vstore_bytes"]
    register(client, ns, fmt="int8")
    assert info(client)["vstore_bytes"] == before - 2 * 3 * DIM * 4
    for side in (b"_pk", b"_pv"):
        assert shape(client, ns + side) == ("int8", "32")
        assert client.call("V.FETCH", ns + side, 0, "RANGE", 0, 1) is None


def test_one_side_with_rows_of_another_shape_recreates_both(client: RawClient, ns: bytes) -> None:
    client.call("V.CREATE", ns + b"_pv", DIM, "VQUANT", "int8")
    register(client, ns)
    store(client, ns + b"_pk", 0, 0, values(1, 3, DIM))
    client.call("V.DROP", ns + b"_pv")
    client.call("V.CREATE", ns + b"_pv", DIM, "VQUANT", "int8")
    register(client, ns)
    assert fetch(client, ns + b"_pk", 0, 0, 3, DIM) is not None, "an empty side is adopted"
    client.call("V.DROP", ns + b"_pv")
    client.call("V.CREATE", ns + b"_pv", DIM, "VQUANT", "int8")
    store(client, ns + b"_pv", 0, 0, values(1, 3, DIM))
    register(client, ns)
    for side in (b"_pk", b"_pv"):
        assert shape(client, ns + side) == ("fp32", "32")
        assert client.call("V.FETCH", ns + side, 0, "RANGE", 0, 1) is None


def test_unknown_trailing_words_are_ignored(client: RawClient, ns: bytes) -> None:
    register(client, ns, "SOMETHING", "else", "PREFILL_MS", 7, b"\0\r\n")
    assert client.call("KV.PREFIX.LOOKUP", ns) == "HIT"


def test_neighbours_in_a_pipeline_are_never_taken_for_options(client: RawClient, ns: bytes) -> None:
    client.send(
        client.pack("KV.PREFIX.REGISTER", ns, DIM, "fp16")
        + client.pack("PING", "PREFILL_MS")
        + client.pack("KV.PREFIX.LOOKUP", ns)
        + client.pack("PION.STATS", "TOKENS", 5)
        + client.pack("KV.PREFIX.LOOKUP", ns, "TOKENS")
        + client.pack("PING", 5)
    )
    assert [client.read(), client.read(), client.read()] == ["OK", b"PREFILL_MS", "HIT"]
    assert len(client.read()) == 32
    assert "TOKENS" in str(client.read())
    assert client.read() == b"5"


def test_a_refusal_in_a_pipeline_takes_one_place(client: RawClient, ns: bytes) -> None:
    """H13: a wrong arity and 100 commands behind it are 101 replies in order."""
    register(client, ns)
    client.send(client.pack("KV.PREFIX.REGISTER", ns))
    client.send(b"".join(client.pack("PING", i) for i in range(100)))
    assert "requires" in str(client.read())
    assert [client.read() for _ in range(100)] == [b"%d" % i for i in range(100)]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "requires: <ns> <kv_dim> <vquant>"),
        ((32,), "requires: <ns> <kv_dim> <vquant>"),
        ((0, "fp16"), "value_dim"),
        ((8193, "fp16"), "value_dim"),
        (("32a", "fp16"), "invalid integer"),
        ((32, "fp99"), "turbo4, fp16, turbo3"),
        ((32, "bf16_rope_fp8_body"), "SCHEMA"),
        ((48, "mlx4g32"), "multiple of 32"),
        ((32, "fp16", "BLOCKS"), "BLOCKS requires"),
        ((32, "fp16", "BLOCKS", 16), "BLOCKS requires"),
        ((32, "fp16", "BLOCKS", 16, 1), "BLOCKS requires"),
        ((32, "fp16", "BLOCKS", 0, 1, bytes(8)), "block_size"),
        ((32, "fp16", "BLOCKS", 8193, 1, bytes(8)), "block_size"),
        ((32, "fp16", "BLOCKS", 16, -1, b""), "hash_count"),
        ((32, "fp16", "BLOCKS", 16, 1_048_577, b""), "hash_count"),
        ((32, "fp16", "BLOCKS", 16, 2, bytes(15)), "hash_blob"),
        ((32, "fp16", "BLOCKS", 16, 2, bytes(24)), "hash_blob"),
        ((32, "fp16", "BLOCKS", 16, 0, bytes(8)), "hash_blob"),
        ((32, "fp16", "PREFILL_MS"), "PREFILL_MS"),
        ((32, "fp16", "PREFILL_MS", -1), "PREFILL_MS"),
        ((32, "fp16", "PREFILL_MS", 86_400_001), "PREFILL_MS"),
        ((32, "fp16", "PREFILL_MS", "1.5"), "PREFILL_MS"),
        ((32, "fp16", "BLOCKS", 16, 1, bytes(8), "PREFILL_MS", "x"), "PREFILL_MS"),
    ],
)
@pytest.mark.parametrize("existing", [False, True])
def test_a_refused_register_is_a_no_op(
    client: RawClient, ns: bytes, words: tuple[Word, ...], text: str, existing: bool
) -> None:
    if existing:
        register(client, ns, "PREFILL_MS", 40, "BLOCKS", 4, 1, b"12345678")
    refuse(client, "KV.PREFIX.REGISTER", ns, *words, text=text)
    if existing:
        assert client.call("KV.PREFIX.BLOCKS", ns)[8:] == b"12345678"
        before = receipt(client)["kvprefix_prefill_us_measured"]
        assert client.call("KV.PREFIX.LOOKUP", ns) == "HIT"
        assert receipt(client)["kvprefix_prefill_us_measured"] - before == 40_000
    else:
        assert client.call("KV.PREFIX.LOOKUP", ns) == "MISS"


@pytest.mark.parametrize("command", ["REGISTER", "LOOKUP", "DROP", "OWNER", "BLOCKS", "PIN"])
@pytest.mark.parametrize("size", [0, 201])
def test_a_namespace_has_1_to_200_bytes(client: RawClient, command: str, size: int) -> None:
    rest: tuple[Word, ...] = (DIM, "fp16") if command == "REGISTER" else ()
    refuse(client, f"KV.PREFIX.{command}", b"n" * size, *rest, text="namespace")


def test_a_namespace_of_200_bytes_of_any_kind(client: RawClient) -> None:
    """I06."""
    for name in (b"\xff" * 200, b"../" * 60, b"a\0b\r\nc"):
        register(client, name)
        assert client.call("KV.PREFIX.LOOKUP", name) == "HIT"
        assert client.call("KV.PREFIX.DROP", name) == 1


def test_drop_counts_namespaces_of_which_anything_was_held(client: RawClient, ns: bytes) -> None:
    for name in (b"a", b"b"):
        register(client, ns + name)
        store(client, ns + name + b"_pk", 0, 0, values(1, 2, DIM))
    client.call("V.CREATE", ns + b"c_pv", DIM)
    gen = client.call("KV.PREFIX.META", ns + b"d", "BEGIN")
    client.call("KV.PREFIX.META", ns + b"d", "SET", gen, "blob")
    before = info(client)
    names = [ns + name for name in (b"a", b"b", b"c", b"d", b"e", b"a")]
    refuse(client, "KV.PREFIX.DROP", *names, b"", text="namespace")
    refuse(client, "KV.PREFIX.DROP", text="requires")
    assert client.call("KV.PREFIX.DROP", *names) == 4
    assert client.call("KV.PREFIX.DROP", *names) == 0
    after = info(client)
    assert before["vstore_sessions"] - after["vstore_sessions"] == 5
    assert before["vstore_bytes"] - after["vstore_bytes"] == 2 * 2 * DIM * 4
    assert before["registered_prefixes"] - after["registered_prefixes"] == 2
    assert client.call("KV.PREFIX.META", ns + b"d", "GET") is None
    assert client.call("KV.PREFIX.LOOKUP", ns + b"a") == "MISS"


def test_owner_names_the_worker_and_the_schema(client: RawClient, ns: bytes) -> None:
    assert client.call("KV.PREFIX.OWNER", ns) == "-1"
    register(client, ns)
    before = receipt(client)
    assert client.call("KV.PREFIX.OWNER", ns) == "0"
    specs = [("fp16", 32, 0), ("bf16_rope_fp8_body", 96, 32), ("turbo4", 64, 0)]
    words = [f"fmt={f},dim={d}" + (f",rope={r}" if r else "") for f, d, r in specs]
    client.call("KV.PREFIX.REGISTER.SCHEMA", ns + b"s", 3, *words, *words)
    digest = 2166136261
    for fmt, dim, rope in specs:
        for byte in struct.pack("<IBI", dim, make_format(fmt, dim, rope).tag, rope):
            digest = (digest ^ byte) * 16777619 % 2**32
    assert client.call("KV.PREFIX.OWNER", ns + b"s") == f"0 {digest}"
    assert receipt(client) == before
    refuse(client, "KV.PREFIX.OWNER", text="requires")


def test_register_schema_takes_both_sides_and_the_options(client: RawClient, ns: bytes) -> None:
    k, v = ["fmt=fp16,dim=32", "fmt=fp16,dim=64"], ["fmt=fp16,dim=32", "fmt=turbo4,dim=64"]
    hashes = bytes(range(16))
    words: tuple[Word, ...] = (*k, *v, "PREFILL_MS", 9, "BLOCKS", 8, 2, hashes)
    assert client.call("KV.PREFIX.REGISTER.SCHEMA", ns, 2, *words) == "OK"
    assert client.call("KV.PREFIX.LOOKUP", ns) == "HIT"
    assert lines(client.call("V.INFO", ns + b"_pk"))["layer_1_fmt"] == "fp16"
    assert lines(client.call("V.INFO", ns + b"_pv"))["layer_1_fmt"] == "turbo4"
    assert client.call("KV.PREFIX.BLOCKS", ns) == struct.pack("<II", 8, 2) + hashes
    store(client, ns + b"_pv", 1, 0, values(1, 2, 64))
    client.call("KV.PREFIX.REGISTER.SCHEMA", ns, 2, *k, *v)
    assert client.call("V.FETCH", ns + b"_pv", 1, "RANGE", 0, 2) is not None
    client.call("KV.PREFIX.REGISTER.SCHEMA", ns, 2, *k, *k)
    assert client.call("V.FETCH", ns + b"_pv", 1, "RANGE", 0, 2) is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((1, "dim=32"), "requires"),
        ((0, "dim=32", "dim=32"), "SCHEMA layer count"),
        ((257, *["dim=32"] * 514), "exceeds"),
        ((2, "dim=32", "dim=32"), "too few"),
        ((1, "dim=32", "dim=32", "dim=32"), "too many"),
        ((1, "dim=32", "fmt=fp16"), "dim missing"),
        ((1, "dim=32", "dim=32", "PREFILL_MS"), "PREFILL_MS"),
        ((1, "dim=32", "fmt=turbo4,dim=48"), "multiple of 32"),
    ],
)
def test_a_refused_schema_is_a_no_op(
    client: RawClient, ns: bytes, words: tuple[Word, ...], text: str
) -> None:
    refuse(client, "KV.PREFIX.REGISTER.SCHEMA", ns, *words, text=text)
    assert client.call("KV.PREFIX.OWNER", ns) == "-1"


def test_a_lookup_with_a_wrong_option_records_nothing(client: RawClient, ns: bytes) -> None:
    register(client, ns)
    for words in (
        ("TOKENS",),
        ("TOKENS", -1),
        ("TOKENS", 100_000_001),
        ("TOKENS", "x"),
        ("PREFILL_MS", 86_400_001),
        ("PREFILL_MS", -1),
        ("TOKENS", 5, "PREFILL_MS"),
        ("UNKNOWN", 5),
        ("UNKNOWN",),
        ("TOKENS", 5, "junk"),
    ):
        refuse(client, "KV.PREFIX.LOOKUP", ns, *words)
        refuse(client, "KV.PREFIX.LOOKUP", ns + b"none", *words)
    refuse(client, "KV.PREFIX.LOOKUP", text="requires")


def test_info_names_its_fields_in_order(client: RawClient) -> None:
    shown = lines(client.call("KV.PREFIX.INFO"))
    assert list(shown) == INFO_FIELDS
    assert all(value.isdigit() for value in shown.values())
    figures = info(client)
    assert figures["wal_enabled"] == 1
    assert figures["vstore_max_sessions"] == 256
    assert (figures["directory_enabled"], figures["my_worker_id"]) == (0, 0)
    refuse(client, "KV.PREFIX.INFO", "x", text="requires")


def test_info_counts_live_rows_in_stored_format(client: RawClient, ns: bytes) -> None:
    before = info(client)
    for fmt in ("fp16", "mlx4g32"):
        client.call("KV.PREFIX.REGISTER", ns + fmt.encode(), DIM, fmt)
        for side in (b"_pk", b"_pv"):
            store(client, ns + fmt.encode() + side, 0, 0, values(1, 7, DIM))
            store(client, ns + fmt.encode() + side, 0, 2, values(1, 3, DIM))
            store(client, ns + fmt.encode() + side, 1, 90, values(1, 1, DIM))
    after = info(client)
    assert after["vstore_bytes"] - before["vstore_bytes"] == 2 * 8 * (2 * DIM + 5 * DIM // 8)
    assert after["total_prefix_tokens"] - before["total_prefix_tokens"] == 14


def test_save_empties_the_log_and_answers_in_order(running: ServerProcess, ns: bytes) -> None:
    client = running.client()
    register(client, ns)
    store(client, ns + b"_pk", 0, 0, values(1, 3, DIM))
    client.send(client.pack("KV.PREFIX.SAVE") + client.pack("PING") + client.pack("SAVE"))
    assert [client.read() for _ in range(3)] == ["OK", "PONG", "OK"]
    figures = info(client)
    assert (figures["wal_bytes"], figures["wal_appended"]) == (0, 0)
    files = {path.name: path for path in running.directory.iterdir()}
    assert files["pion.vstore.wal.0"].stat().st_size == 0
    assert files["pion.vstore.0"].stat().st_size > 3 * DIM * 4
    assert not [name for name in files if name.endswith(".tmp")]
    found = fetch(client, ns + b"_pk", 0, 0, 3, DIM)
    assert found is not None
    assert (found == values(1, 3, DIM)).all()
    assert client.call("KV.PREFIX.SAVE", "") == "OK"
    assert client.call("KV.PREFIX.SAVE", "pion.vstore.0") == "OK"


def test_save_to_another_path_is_a_copy_and_leaves_the_log(
    running: ServerProcess, ns: bytes
) -> None:
    client = running.client()
    register(client, ns)
    before = info(client)
    assert client.call("KV.PREFIX.SAVE", "copy.snapshot") == "OK"
    assert info(client) == before
    assert (running.directory / "copy.snapshot").stat().st_mode & 0o777 == 0o600
    assert client.error("KV.PREFIX.SAVE", "no-such-folder/copy").startswith("ERR ")


def test_a_copy_is_a_whole_data_directory(
    server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    """Rows, manifest, block table and recurrent state of one moment, as another server's start."""
    running = server()
    client = running.client()
    hashes = np.arange(5, dtype="<u8").tobytes()
    client.call("KV.PREFIX.REGISTER", "ns", DIM, "fp32", "BLOCKS", 16, 5, hashes)
    gen = client.call("KV.PREFIX.META", "ns", "BEGIN")
    store(client, b"ns_pk", 0, 0, values(1, 3, DIM))
    client.call("SSM.PREFIX.STORE", "ns", 2, b"state", "GEN", gen)
    client.call("KV.PREFIX.META", "ns", "SET", gen, b"manifest")
    assert client.call("KV.PREFIX.SAVE", "copy") == "OK"
    client.call("KV.PREFIX.DROP", "ns")
    client.call("KV.PREFIX.REGISTER", "later", DIM, "fp32")
    home = tmp_path / "restored"
    home.mkdir(mode=0o700)
    for name, target in (("copy", "pion.vstore.0"), ("copy.ssm", "pion.ssm.0")):
        (running.directory / name).rename(home / target)
    client = server(directory=home).client()
    assert client.call("KV.PREFIX.LOOKUP", "ns") == "HIT"
    assert client.call("KV.PREFIX.LOOKUP", "later") == "MISS"
    assert client.call("KV.PREFIX.META", "ns", "GET") == [gen, b"manifest"]
    assert client.call("SSM.PREFIX.FETCH", "ns", 2) == b"state"
    found = fetch(client, b"ns_pk", 0, 0, 3, DIM)
    assert found is not None
    assert (found == values(1, 3, DIM)).all()
    assert client.call("KV.PREFIX.BLOCKS", "ns").endswith(hashes)
    # A server that goes on from a copy saves and restarts like any other.
    client.call("SSM.PREFIX.STORE", "more", 0, b"new")
    assert client.call("KV.PREFIX.SAVE") == "OK"


@pytest.mark.parametrize(
    "path",
    [
        "/tmp/x",
        "../x",
        "a/../../x",
        "~/x",
        "~",
        "a\nb",
        b"a\0b",
        b"a\x7fb",
        b"\xff",
        "pion.vstore.wal.0",
        "pion.lock",
        "pion-1974.status",
        "x" * 300,
        ".",
    ],
)
def test_save_paths_stay_inside_the_data_directory(
    running: ServerProcess, path: str | bytes
) -> None:
    """I06."""
    before = sorted(running.directory.iterdir())
    refuse(running.client(), "KV.PREFIX.SAVE", path, text="path must be relative")
    assert sorted(running.directory.iterdir()) == before
    assert not (running.directory.parent / "x").exists()


def test_commit_is_ok(client: RawClient) -> None:
    assert client.call("KV.PREFIX.COMMIT") == "OK"
    refuse(client, "KV.PREFIX.COMMIT", "x", text="requires")


def test_without_a_vstore_log_rows_live_as_long_as_the_process(
    server: Callable[..., ServerProcess], ns: bytes
) -> None:
    running = server("--no-vstore-wal")
    client = running.client()
    register(client, ns)
    store(client, ns + b"_pk", 0, 0, values(1, 3, DIM))
    figures = info(client)
    assert (figures["wal_enabled"], figures["wal_bytes"]) == (0, 0)
    assert client.call("V.FETCH", ns + b"_pk", 0, "RANGE", 0, 3) == values(1, 3, DIM).tobytes()
    assert client.call("KV.PREFIX.SAVE") == "OK"
    assert not list(running.directory.glob("pion.vstore.wal*"))
