"""Disks that fail: EIO from fsync and from reads, files cut short or removed under the server."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import RawClient
from tests.pion_server.faults import oracle
from tests.pion_server.faults.damage import write_more
from tests.pion_server.faults.forge import Forge, ForgedServer, run_flags
from tests.pion_server.faults.injection import Fault, write_plan
from tests.pion_server.faults.load import Ledger, perform
from tests.pion_server.faults.observer import Refused, ask, observe
from tests.pion_server.faults.oracle import DIM

Servers = Callable[..., ForgedServer]
VALUES = bytes(range(1, 33)) * (4 * DIM // 32)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan"
    write_plan(path)
    return path


def fill(client: RawClient, ns: str, rows: int = 40) -> Ledger:
    """A prefix of one kilobyte and more a layer, and state."""
    ledger = Ledger(ns)
    acts = [oracle.register(ns, "fp32"), oracle.store_state(ns, 0, VALUES)]
    acts += [oracle.set_key(ns, "s0", VALUES), oracle.set_fields(ns, "h0", {b"f": VALUES * rows})]
    acts += [oracle.store(ns, "_pk", "fp32", n, 0, VALUES * rows) for n in range(3)]
    perform(client, ledger, [*acts, oracle.store(ns, "_pv", "fp32", 0, 0, VALUES)])
    return ledger


@pytest.mark.parametrize("log", ["pion.vstore.wal.0", "pion.ssm.wal.0", "pion.wal.0"])
def test_a_failed_fsync_is_an_error_and_final(forged: Servers, plan: Path, log: str) -> None:
    """CASES E09: once. No later COMMIT may succeed by the kernel having forgotten the error."""
    server = forged(faults=plan)
    client = server.client()
    before = fill(client, "before")
    assert client.call("KV.PREFIX.COMMIT") == "OK"
    unsure = fill(client, "unsure")
    write_plan(plan, Fault("fsync", log, times=1, errno=errno.EIO))
    assert client.error("KV.PREFIX.COMMIT").startswith("ERR KV.PREFIX.COMMIT failed: ")
    assert client.error("KV.PREFIX.COMMIT").startswith("ERR KV.PREFIX.COMMIT failed: ")
    act = fill_act(log)
    (reply,) = ask(client, [act.words])
    assert isinstance(reply, Refused)
    assert reply.text.startswith("MISCONF")
    for ledger in (before, unsure):
        assert observe(client, ledger.ns) == ledger.image
    assert b"log_failed:1" in client.call("INFO", "persistence")
    server.kill()
    write_plan(plan)
    server.start()
    client = server.client()
    for ledger in (before, unsure):
        ledger.settle(client)
    assert client.call("KV.PREFIX.COMMIT") == "OK"


def fill_act(log: str) -> oracle.Act:
    """A write that needs this log."""
    if "ssm" in log:
        return oracle.store_state("unsure", 1, b"more")
    if log == "pion.wal.0":
        return oracle.set_key("unsure", "s0", b"more")
    return oracle.store("unsure", "_pk", "fp32", 0, 0, VALUES)


def test_fsync_always_acknowledges_nothing_that_was_not_flushed(
    forged: Servers, plan: Path
) -> None:
    """CASES E09, with `--fsync always`."""
    server = forged("--fsync", "always", faults=plan)
    client = server.client()
    ledger = fill(client, "ns")
    write_plan(plan, Fault("fsync", "pion.vstore.wal.*", times=1, errno=errno.EIO))
    act = oracle.store("ns", "_pk", "fp32", 0, 0, VALUES[::-1])
    ledger.pending = [act]
    assert client.error(*act.words).startswith("MISCONF fsync failed")
    assert client.error(*act.words).startswith("MISCONF")
    server.kill()
    write_plan(plan)
    server.start()
    ledger.settle(server.client())


def test_a_server_whose_log_failed_still_stops_in_order(forged: Servers, plan: Path) -> None:
    server = forged(faults=plan)
    client = server.client()
    fill(client, "ns")
    write_plan(plan, Fault("fsync", "pion.vstore.wal.*", times=1, errno=errno.EIO))
    client.error("KV.PREFIX.COMMIT")
    assert server.stop() != 0
    said = server.errors.read_text()
    assert "fsync" in said
    assert "Traceback" not in said, said


def test_an_unreadable_body_is_an_error_for_its_entry(forged: Servers, plan: Path) -> None:
    """EIO while rows are read; other entries are served, and so is this one when the disk can."""
    server = forged(faults=plan)
    client = server.client()
    one, two = fill(client, "one"), fill(client, "two")
    assert client.call("KV.PREFIX.SAVE") == "OK"
    three = fill(client, "three")
    for op in ("read", "send"):
        write_plan(plan, Fault(op, "pion.vstore.0", errno=errno.EIO))
        if op == "read":
            for ns in ("one_pk", "two_pk"):
                error = client.error("V.FETCH", ns, 0, "RANGE", 0, 1, "FMT", "PACKED")
                assert error.startswith("ERR stored data cannot be read"), error
        assert observe(client, "three") == three.image
    write_plan(plan)
    for ledger in (one, two, three):
        assert observe(client, ledger.ns) == ledger.image


def test_a_save_over_unreadable_rows_keeps_the_rest(forged: Servers, plan: Path) -> None:
    """What cannot be read cannot be copied: the entry stays an error, all others move on."""
    server = forged(faults=plan)
    client = server.client()
    one, two = fill(client, "one", rows=400), fill(client, "two", rows=400)
    # The first read of the copy is of the first layer of `one`.
    write_plan(plan, Fault("read", "pion.vstore.wal.0", times=2, errno=errno.EIO))
    assert client.call("KV.PREFIX.SAVE") == "OK"
    write_plan(plan)
    for _ in range(2):
        found = observe(client, "one")
        damaged = [key for key in one.image if found[key] != one.image[key]]
        assert damaged == [("rows", "_pk", 0)]
        assert all(isinstance(row, Refused) for row in found[damaged[0]])
        assert observe(client, "two") == two.image
        server.kill()
        server.start()
        client = server.client()


def test_pages_the_disk_cannot_read_at_start_cost_what_lies_in_them(
    forged: Servers, plan: Path
) -> None:
    """Reads fail once, at start-up: the log is neither refused nor cut."""
    server = forged(faults=plan)
    ledgers = [fill(server.client(), f"n{n}") for n in range(12)]
    size = (server.directory / "pion.vstore.wal.0").stat().st_size
    server.kill()
    # The first window is read whole, the second fails and so does each of its pages.
    write_plan(plan, Fault("read", "pion.vstore.wal.0", skip=6, times=4, errno=errno.EIO))
    server.start()
    write_plan(plan)
    client = server.client()
    found = [observe(client, ledger.ns) for ledger in ledgers]
    assert found[0] == ledgers[0].image
    assert found[-1] == ledgers[-1].image
    assert sum(a != b.image for a, b in zip(found, ledgers, strict=True)) <= 2
    assert (server.directory / "pion.vstore.wal.0").stat().st_size >= size
    later = write_more(client)
    server.kill()
    server.start()
    client = server.client()
    for ledger in (*ledgers, later):
        ledger.settle(client)


def test_a_disk_that_cannot_be_read_at_all_is_said_with_what_to_do(
    forged: Servers, plan: Path
) -> None:
    server = forged(faults=plan)
    fill(server.client(), "ns")
    before = (server.directory / "pion.vstore.wal.0").read_bytes()
    server.kill()
    write_plan(plan, Fault("read", "pion.vstore.wal.0", errno=errno.EIO))
    with pytest.raises(AssertionError, match="not ready"):
        server.start()
    said = server.errors.read_text()
    assert "pion.vstore.wal.0" in said
    assert "--repair" in said
    assert "Traceback" not in said
    assert (server.directory / "pion.vstore.wal.0").read_bytes() == before


@pytest.mark.parametrize("name", ["pion.vstore.wal.0", "pion.vstore.0"])
@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("lengthened", [False, True])
def test_a_file_cut_short_under_the_server_is_no_zero_and_no_crash(
    forged: Servers, name: str, served: bool, lengthened: bool
) -> None:
    """Also when a later write makes the file long again: then there is a hole full of zeros."""
    server = forged()
    client = server.client()
    one = fill(client, "one")
    if name == "pion.vstore.0":
        assert client.call("KV.PREFIX.SAVE") == "OK"
    two = fill(client, "two")
    if served:
        assert observe(client, "one") == one.image
    length = 41 + 2 * 128 + 4 * DIM * 40
    os.truncate(server.directory / name, length)
    if lengthened:
        write_more(client)
    for _ in range(2):
        found = observe(client, "one")
        for key in one.image:
            if found[key] != one.image[key]:
                assert key[0] == "rows"
                assert all(isinstance(row, Refused) for row in found[key]), key
        assert any(found[key] != one.image[key] for key in one.image)
        if name == "pion.vstore.0":
            assert observe(client, "two") == two.image
        three = write_more(client)
        assert observe(client, three.ns) == three.image
    server.kill()
    server.start()
    client = server.client()
    three.settle(client)
    for key, value in observe(client, "one").items():
        if key[0] != "rows":
            assert value == one.image[key]


def test_a_reply_under_way_from_a_file_cut_short_breaks_off(forged: Servers) -> None:
    """The frame cannot be completed, so the connection ends; nobody else notices."""
    server = forged()
    client = server.client()
    fill(client, "small")
    ledger = Ledger("large")
    rows = VALUES * 8192
    acts = [oracle.store("large", "_pk", "fp32", n, 0, rows) for n in range(24)]
    perform(client, ledger, [oracle.register("large", "fp32"), *acts])
    reader = server.client()
    words = ("V.FETCH", "large_pk", "BATCH", 0, 8192, "FMT", "PACKED")
    assert len(client.call(*words)) == 24
    reader.send(reader.pack(*words))
    assert client.call("PING") == "PONG"
    os.truncate(server.directory / "pion.vstore.wal.0", 60_000)
    with pytest.raises(EOFError):
        reader.read()
    assert client.call("PING") == "PONG"
    error = client.error("V.FETCH", "large_pk", 5, "RANGE", 0, 1, "FMT", "PACKED")
    assert error.startswith("ERR stored data is damaged")


def test_a_removed_log_takes_no_more_writes(forged: Servers) -> None:
    """They would be acknowledged and gone with the process."""
    server = forged()
    client = server.client()
    ledger = fill(client, "ns")
    (server.directory / "pion.vstore.wal.0").unlink()
    act = oracle.store("ns", "_pk", "fp32", 0, 0, VALUES)
    assert "was removed" in client.error(*act.words)
    assert observe(client, "ns") == ledger.image


def test_two_servers_never_share_a_directory(forged: Servers, forge: Forge, tmp_path: Path) -> None:
    server = forged()
    ledger = fill(server.client(), "ns")
    flags = ["--port", "0", "--dir", str(server.directory)]
    for wanted in (flags, ["--check", str(server.directory)], ["--repair", str(server.directory)]):
        status, _, said = run_flags(forge, wanted, tmp_path / "second")
        assert status == 1
        assert f"in use by another pion-server (pid {server.pid})" in said
    server.kill()
    server.start()
    ledger.settle(server.client())
