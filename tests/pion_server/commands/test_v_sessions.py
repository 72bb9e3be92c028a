"""V.INFO, V.DROP, V.SNAPSHOT, V.RESTORE and V.COMMIT (WIRE.md 4.4, 4.5, 4.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.pion_server.commands.checks import Word, fetch, info, lines, refuse, store, values

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

DIM = 32


def create(client: RawClient, sid: bytes, fmt: str = "fp32") -> None:
    client.call("V.CREATE", sid, DIM, "VQUANT", fmt)


def counts(client: RawClient, sid: bytes) -> list[int]:
    shown = lines(client.call("V.INFO", sid))
    return [int(shown[f"layer_{i}_tokens"]) for i in range(int(shown["num_layers"]))]


def test_info_of_everything_counts_sessions_tokens_and_fetches(
    client: RawClient, ns: bytes
) -> None:
    before = lines(client.call("V.INFO"))
    assert list(before) == ["enabled", "sessions", "total_tokens", "total_fetches"]
    assert before["enabled"] == "1"
    create(client, ns)
    store(client, ns, 0, 0, values(1, 3, DIM))
    store(client, ns, 4, 0, values(1, 5, DIM))
    fetch(client, ns, 0, 0, 2, DIM)
    after = lines(client.call("v.info"))
    grown = {key: int(after[key]) - int(before[key]) for key in after}
    assert grown == {"enabled": 0, "sessions": 1, "total_tokens": 8, "total_fetches": 2}


def test_info_of_a_session_lists_every_layer_below_the_highest(
    client: RawClient, ns: bytes
) -> None:
    """A half-written segment must show a layer of 0 rows: clients take the minimum."""
    create(client, ns)
    store(client, ns, 0, 0, values(1, 3, DIM))
    store(client, ns, 2, 4, values(1, 1, DIM))
    text = client.call("V.INFO", ns).decode()
    assert text.split("\r\n")[1:] == [
        "value_dim:32",
        "v_format:fp32",
        "num_layers:3",
        "schema:uniform",
        "layer_0_tokens:3",
        "layer_1_tokens:0",
        "layer_2_tokens:5",
        "total_tokens:8",
        "",
    ]
    assert text.startswith("session_idx:")
    found = [
        line for line in text.split("\r\n") if line.startswith("layer_") and "_tokens:" in line
    ]
    assert min(int(line.split(":")[1]) for line in found) == 0


def test_info_of_an_unknown_session_is_one_plain_error(client: RawClient, ns: bytes) -> None:
    assert refuse(client, "V.INFO", ns) == "ERR session not found"
    refuse(client, "V.INFO", ns, ns, text="requires")


def test_drop_takes_raw_sids_and_counts_what_was_held(client: RawClient, ns: bytes) -> None:
    create(client, ns)
    client.call("KV.PREFIX.REGISTER", ns + b"p", DIM, "fp16")
    before = info(client)["vstore_sessions"]
    names = (ns, ns + b"p_pk", ns, ns + b"unknown", ns + b"p")
    assert client.call("V.DROP", *names) == 2
    assert client.call("V.DROP", *names) == 0
    assert info(client)["vstore_sessions"] == before - 2
    assert client.call("KV.PREFIX.LOOKUP", ns + b"p") == "MISS"
    assert client.call("KV.PREFIX.DROP", ns + b"p") == 1
    refuse(client, "V.DROP", text="requires")
    refuse(client, "V.DROP", ns, b"", text="sid")


def test_dropping_both_sides_takes_pin_and_expiry_along(client: RawClient, ns: bytes) -> None:
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp16")
    assert client.call("KV.PREFIX.PIN", ns) == 1
    assert client.call("V.DROP", ns + b"_pk") == 1
    assert client.call("KV.PREFIX.UNPIN", ns) == 1
    assert client.call("V.DROP", ns + b"_pv") == 1
    assert client.call("KV.PREFIX.UNPIN", ns) == 0


def test_there_is_no_v_free_and_it_is_answered_once(client: RawClient, ns: bytes) -> None:
    for name in ("V.FREE", "V.STORE", "V.NOTHING"):
        client.send(client.pack(name, ns) + client.pack("PING"))
        assert str(client.read()) == f"ERR unknown command '{name}'"
        assert client.read() == "PONG"


@pytest.mark.parametrize("fmt", ["int8", "fp16", "mlx4g32"])
def test_restore_truncates_to_the_snapshot(client: RawClient, ns: bytes, fmt: str) -> None:
    create(client, ns, fmt)
    store(client, ns, 0, 0, values(1, 6, DIM))
    before = client.call("V.FETCH", ns, 0, "RANGE", 0, 6)
    number = client.call("V.SNAPSHOT", ns)
    store(client, ns, 0, 6, 50 * values(2, 4, DIM))
    store(client, ns, 1, 0, values(3, 2, DIM))
    assert counts(client, ns) == [10, 2]
    assert client.call("V.RESTORE", ns, number) == "OK"
    assert counts(client, ns) == [6]
    assert client.call("V.FETCH", ns, 0, "RANGE", 0, 6) == before
    assert client.call("V.FETCH", ns, 0, "RANGE", 0, 7) is None
    assert client.call("V.FETCH", ns, 1, "RANGE", 0, 1) is None


def test_a_snapshot_stays_valid_and_never_grows_a_count(client: RawClient, ns: bytes) -> None:
    create(client, ns)
    store(client, ns, 0, 0, values(1, 8, DIM))
    late = client.call("V.SNAPSHOT", ns)
    early = client.call("V.SNAPSHOT", ns)
    assert early == late + 1
    store(client, ns, 0, 8, values(2, 1, DIM))
    for _ in range(2):
        assert client.call("V.RESTORE", ns, late) == "OK"
        assert counts(client, ns) == [8]
    create(client, ns + b"2")
    store(client, ns + b"2", 0, 0, values(1, 2, DIM))
    small = client.call("V.SNAPSHOT", ns + b"2")
    store(client, ns + b"2", 0, 0, values(1, 9, DIM))
    large = client.call("V.SNAPSHOT", ns + b"2")
    client.call("V.RESTORE", ns + b"2", small)
    client.call("V.RESTORE", ns + b"2", large)
    assert counts(client, ns + b"2") == [2]


def test_rows_stored_after_a_restore_take_the_place_of_the_old_ones(
    client: RawClient, ns: bytes
) -> None:
    create(client, ns)
    store(client, ns, 0, 0, values(1, 4, DIM))
    number = client.call("V.SNAPSHOT", ns)
    store(client, ns, 0, 4, values(2, 4, DIM))
    client.call("V.RESTORE", ns, number)
    store(client, ns, 0, 4, values(3, 2, DIM))
    found = fetch(client, ns, 0, 0, 6, DIM)
    assert found is not None
    assert (found == np.concatenate([values(1, 4, DIM), values(3, 2, DIM)])).all()
    assert client.call("V.FETCH", ns, 0, "RANGE", 4, 8) is None


def test_sixteen_snapshots_a_session(client: RawClient, ns: bytes) -> None:
    create(client, ns)
    create(client, ns + b"other")
    numbers = [client.call("V.SNAPSHOT", ns) for _ in range(16)]
    assert numbers == list(range(numbers[0], numbers[0] + 16))
    refuse(client, "V.SNAPSHOT", ns, text="no free snapshot slot")
    assert client.call("V.SNAPSHOT", ns + b"other") == numbers[-1] + 1
    assert client.call("V.COMMIT", ns, numbers[3]) == 1
    assert client.call("V.COMMIT", ns, numbers[3]) == 0
    assert client.call("V.SNAPSHOT", ns) == numbers[-1] + 2
    refuse(client, "V.RESTORE", ns, numbers[3], text="unknown snap_id")
    assert client.call("V.COMMIT", ns + b"other", numbers[0]) == 0


def test_snapshots_go_with_their_session(client: RawClient, ns: bytes) -> None:
    create(client, ns)
    number = client.call("V.SNAPSHOT", ns)
    client.call("V.DROP", ns)
    create(client, ns)
    refuse(client, "V.RESTORE", ns, number, text="unknown snap_id")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("V.SNAPSHOT",), "requires"),
        (("V.SNAPSHOT", "NS", 1), "requires"),
        (("V.SNAPSHOT", "no"), "session not found"),
        (("V.RESTORE", "NS"), "requires"),
        (("V.RESTORE", "no", 1), "session not found"),
        (("V.RESTORE", "NS", 0), "positive"),
        (("V.RESTORE", "NS", -3), "positive"),
        (("V.RESTORE", "NS", "x"), "invalid integer"),
        (("V.RESTORE", "NS", 999_999), "unknown snap_id"),
        (("V.COMMIT", "NS"), "requires"),
        (("V.COMMIT", "no", 1), "session not found"),
        (("V.COMMIT", "NS", 0), "positive"),
        (("V.COMMIT", "NS", "1.5"), "invalid integer"),
    ],
)
def test_refused_rewinds(client: RawClient, ns: bytes, words: tuple[Word, ...], text: str) -> None:
    create(client, ns)
    refuse(client, *(ns if word == "NS" else word for word in words), text=text)


def test_ids_are_the_workers_own_and_are_gone_with_it(running: ServerProcess, ns: bytes) -> None:
    client = running.client()
    create(client, ns)
    number = client.call("V.SNAPSHOT", ns)
    running.kill()
    running.restart()
    client = running.client()
    refuse(client, "V.RESTORE", ns, number, text="unknown snap_id")
    assert client.call("V.SNAPSHOT", ns) == 1
