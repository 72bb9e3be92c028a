"""The value receipt: PION.STATS, INFO, and what a LOOKUP credits (WIRE.md 6.2, 9, 16)."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pion_server.formats import make_format
from tests.pion_server.commands.checks import Word, lines, receipt, refuse, store, values

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

DIM = 32
FIELDS = [
    "worker_id",
    "uptime_in_seconds",
    "kvprefix_hits",
    "kvprefix_misses",
    "kvprefix_hits_measured",
    "kvprefix_tokens_served",
    "kvprefix_bytes_served",
    "kvprefix_prefill_us_saved",
    "kvprefix_prefill_us_measured",
    "prefill_seconds_avoided",
    "prefill_seconds_avoided_measured",
    "semantic_hits",
    "semantic_misses",
    "moe_hits",
    "moe_misses",
    "vector_queries",
]
SECTIONS = [
    "Server",
    "Clients",
    "Memory",
    "Persistence",
    "Stats",
    "Replication",
    "CPU",
    "Cluster",
    "Pion",
    "Keyspace",
]


@pytest.fixture(autouse=True)
def _fresh(client: RawClient) -> None:
    assert client.call("PION.STATS", "RESET") == "OK"


def register(client: RawClient, ns: bytes, *options: Word, rows: int = 0) -> None:
    assert client.call("KV.PREFIX.REGISTER", ns, DIM, "fp16", *options) == "OK"
    if rows:
        store(client, ns + b"_pk", 0, 0, values(1, rows, DIM))


def sections(text: bytes) -> dict[str, dict[str, str]]:
    found = {}
    for block in text.decode().split("\r\n\r\n"):
        title, _, rest = block.partition("\r\n")
        assert title.startswith("# ")
        found[title[2:]] = dict(line.split(":", 1) for line in rest.split("\r\n") if line)
    return found


def test_sixteen_fields_in_order(client: RawClient) -> None:
    flat = client.call("PION.STATS")
    assert [name.decode() for name in flat[::2]] == FIELDS
    types = [type(value) for value in flat[1::2]]
    assert types == [int] * 9 + [bytes] * 2 + [int] * 5
    assert flat[1::2][9:11] == [b"0.000", b"0.000"]
    assert client.call("HELLO", 3)[b"proto"] == 3
    mapped = client.call("PION.STATS")
    assert isinstance(mapped, dict)
    assert [name.decode() for name in mapped] == FIELDS


def test_junk_behind_pion_stats_is_tolerated(client: RawClient, ns: bytes) -> None:
    register(client, ns)
    client.call("KV.PREFIX.LOOKUP", ns)
    for words in (("junk",), ("GET", "x"), (b"\0",), ("RESETS",)):
        assert len(client.call("PION.STATS", *words)) == 32
    assert receipt(client)["kvprefix_hits"] == 1


@pytest.mark.parametrize("reset", [("PION.STATS", "reset"), ("CONFIG", "RESETSTAT")])
def test_reset_zeroes_all_counters(client: RawClient, ns: bytes, reset: tuple[str, ...]) -> None:
    register(client, ns, "PREFILL_MS", 5, rows=4)
    client.call("KV.PREFIX.LOOKUP", ns)
    client.call("KV.PREFIX.LOOKUP", ns + b"none")
    client.call("V.FETCH", ns + b"_pk", 0, "RANGE", 0, 4)
    assert 0 not in list(receipt(client).values())[1:8]
    assert client.call(*reset) == "OK"
    assert set(receipt(client).values()) == {0, b"0.000"}


def test_300_credited_tokens_are_0_166_seconds(client: RawClient, ns: bytes) -> None:
    register(client, ns, rows=3)
    assert client.call("KV.PREFIX.LOOKUP", ns, "TOKENS", 300) == "HIT"
    found = receipt(client)
    assert found["kvprefix_tokens_served"] == 300
    assert found["kvprefix_prefill_us_saved"] == 300 * 555
    assert found["prefill_seconds_avoided"] == b"0.166"
    assert found["prefill_seconds_avoided_measured"] == b"0.000"
    assert found["kvprefix_hits_measured"] == 0


# LOOKUP's options, whether REGISTER said 70 ms; then the tokens and microseconds credited and
# whether they count as measured. K has 5 rows.
CREDITS: list[tuple[tuple[Word, ...], bool, int, int, bool]] = [
    ((), True, 5, 70_000, True),
    ((), False, 5, 5 * 555, False),
    (("TOKENS", 9), True, 9, 9 * 555, False),
    (("tokens", 9), False, 9, 9 * 555, False),
    (("PREFILL_MS", 12), True, 5, 12_000, True),
    (("prefill_ms", 12), False, 5, 12_000, True),
    (("TOKENS", 9, "PREFILL_MS", 12), True, 9, 12_000, True),
    (("PREFILL_MS", 12, "TOKENS", 9), False, 9, 12_000, True),
    (("TOKENS", 0), True, 0, 0, False),
    (("PREFILL_MS", 0), True, 5, 0, True),
    (("TOKENS", 100_000_000), True, 100_000_000, 55_500_000_000, False),
    (("PREFILL_MS", 86_400_000), True, 5, 86_400_000_000, True),
]


@pytest.mark.parametrize(("options", "timed", "tokens", "saved", "measured"), CREDITS)
def test_what_a_hit_credits(
    client: RawClient,
    ns: bytes,
    options: tuple[Word, ...],
    timed: bool,
    tokens: int,
    saved: int,
    measured: bool,
) -> None:
    register(client, ns, *(("PREFILL_MS", 70) if timed else ()), rows=5)
    assert client.call("KV.PREFIX.LOOKUP", ns, *options) == "HIT"
    found = receipt(client)
    assert found["kvprefix_hits"] == 1
    assert found["kvprefix_misses"] == 0
    assert found["kvprefix_hits_measured"] == int(measured)
    assert found["kvprefix_tokens_served"] == tokens
    assert found["kvprefix_prefill_us_saved"] == saved
    assert found["kvprefix_prefill_us_measured"] == (saved if measured else 0)
    assert found["prefill_seconds_avoided"] == b"%d.%03d" % (saved // 10**6, saved // 1000 % 1000)
    assert found["kvprefix_bytes_served"] == 0


def test_seconds_are_truncated_to_milliseconds(client: RawClient, ns: bytes) -> None:
    register(client, ns, "PREFILL_MS", 3655)
    client.call("KV.PREFIX.LOOKUP", ns)
    client.call("KV.PREFIX.LOOKUP", ns, "TOKENS", 1)
    found = receipt(client)
    assert found["prefill_seconds_avoided_measured"] == b"3.655"
    assert found["prefill_seconds_avoided"] == b"3.655"
    assert found["kvprefix_prefill_us_saved"] == 3_655_555


def test_a_later_register_replaces_or_clears_the_time(client: RawClient, ns: bytes) -> None:
    for options, measured in (
        (("PREFILL_MS", 10), 10_000),
        (("PREFILL_MS", 20), 30_000),
        ((), 30_000),
    ):
        register(client, ns, *options)
        client.call("KV.PREFIX.LOOKUP", ns)
        assert receipt(client)["kvprefix_prefill_us_measured"] == measured


def test_misses_credit_nothing(client: RawClient, ns: bytes) -> None:
    for options in ((), ("TOKENS", 500), ("PREFILL_MS", 500)):
        assert client.call("KV.PREFIX.LOOKUP", ns, *options) == "MISS"
    found = receipt(client)
    assert found.pop("kvprefix_misses") == 3
    assert set(found.values()) == {0, b"0.000"}


def test_only_lookups_count_hits_and_only_fetches_count_bytes(client: RawClient, ns: bytes) -> None:
    register(client, ns, rows=4)
    for words in (
        ("KV.PREFIX.OWNER", ns),
        ("KV.PREFIX.BLOCKS", ns),
        ("V.INFO", ns + b"_pk"),
        ("V.FETCH", ns + b"_pk", 0, "RANGE", 0, 2, "FMT", "NATIVE"),
        ("SSM.PREFIX.STORE", ns, 0, "state"),
        ("SSM.PREFIX.FETCH", ns, 0),
    ):
        client.call(*words)
    found = receipt(client)
    assert found.pop("kvprefix_bytes_served") == 2 * DIM * 2
    assert set(found.values()) == {0, b"0.000"}
    refuse(client, "V.FETCH", ns + b"_pk", 0, "RANGE", 2, 2)


def test_info_has_its_sections_in_order(running: ServerProcess, client: RawClient) -> None:
    found = sections(client.call("INFO"))
    assert list(found) == SECTIONS
    server = found["Server"]
    assert server["redis_version"] == "7.0.0"
    assert re.fullmatch(r"\d+\.\d+\.\d+\+\S+", server["pion_version"])
    assert int(server["tcp_port"]) == running.port
    assert int(server["process_id"]) == running.pid
    assert re.fullmatch(r"[0-9a-f]{40}", server["run_id"])
    assert int(server["uptime_in_seconds"]) >= 0
    memory = found["Memory"]
    assert int(memory["used_memory_peak"]) >= int(memory["used_memory"]) > 4 << 20
    if os.path.exists("/proc"):
        with open(f"/proc/{running.pid}/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert abs(resident - int(memory["used_memory"])) < 64 << 20
    assert "db0" not in found["Keyspace"]


def test_info_pion_repeats_the_receipt(client: RawClient, ns: bytes) -> None:
    register(client, ns, "PREFILL_MS", 1234)
    client.call("KV.PREFIX.LOOKUP", ns)
    shown = sections(client.call("INFO", "pion"))["Pion"]
    kept = [name for name in FIELDS[2:] if "prefill_us" not in name]
    assert list(shown) == ["stats_scope", "worker_id", *kept]
    assert (shown["stats_scope"], shown["worker_id"]) == ("worker", "0")
    assert shown["kvprefix_hits"] == "1"
    assert shown["prefill_seconds_avoided"] == "1.234"


def test_info_takes_sections_in_any_case_and_resp3(client: RawClient) -> None:
    assert list(sections(client.call("INFO", "SERVER", "clients"))) == ["Server", "Clients"]
    assert list(sections(client.call("INFO", "everything"))) == SECTIONS
    assert client.call("INFO", "nothing") == b""
    client.call("HELLO", 3)
    client.send(client.pack("INFO", "cpu"))
    verbatim = client.read()
    assert verbatim.startswith(b"txt:# CPU\r\n")


def test_the_receipt_and_the_register_time_are_not_kept(running: ServerProcess, ns: bytes) -> None:
    """After a restart a hit is credited by the estimate: the reported time lives in memory."""
    client = running.client()
    register(client, ns, "PREFILL_MS", 70, rows=5)
    client.call("KV.PREFIX.LOOKUP", ns)
    running.kill()
    running.restart()
    client = running.client()
    assert set(receipt(client).values()) == {0, b"0.000"}
    client.call("KV.PREFIX.LOOKUP", ns)
    found = receipt(client)
    assert found["kvprefix_prefill_us_measured"] == 0
    assert found["kvprefix_prefill_us_saved"] == 5 * 555
    assert lines(client.call("V.INFO", ns + b"_pk"))["layer_0_tokens"] == "5"


def test_numbers_that_a_format_cannot_hold_are_counted(client: RawClient, ns: bytes) -> None:
    """D13: NaN, infinities and what overflows; not what is refused, nor rows nobody looks at."""
    client.call("V.CREATE", ns, 32, "VQUANT", "mlx4g32")
    before = saturated(client)
    rows = values(3, 4, 32)
    store(client, ns, 0, 0, rows)
    assert saturated(client) == before
    rows[0, 1], rows[3, 31] = np.nan, -np.inf
    store(client, ns, 0, 0, rows)
    assert saturated(client) == before + 2
    blob = rows.tobytes()
    refuse(client, "V.STOREBATCH", ns, 0, 0, 3, blob, text="blob size")
    row_bytes = make_format("mlx4g32", 32).packed_row_bytes
    packed = b"\xff" * (4 * row_bytes)
    assert client.call("V.STOREBATCH", ns, 0, 0, 4, packed, "FMT", "PACKED") == "OK"
    assert saturated(client) == before + 2


def saturated(client: RawClient) -> int:
    return int(lines(client.call("INFO", "stats").partition(b"\r\n")[2])["saturated_values"])
