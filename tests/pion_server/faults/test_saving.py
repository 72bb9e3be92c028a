"""SAVE, compaction and COMMIT of a running server: nobody waits, nothing is lost or made up."""

from __future__ import annotations

import errno
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pion_server.store.checking import check_directory
from tests.conftest import RawClient
from tests.pion_server.faults import oracle
from tests.pion_server.faults.forge import ForgedServer
from tests.pion_server.faults.injection import Fault, write_plan
from tests.pion_server.faults.load import Ledger, Writer, perform
from tests.pion_server.faults.observer import Refused, ask, observe
from tests.pion_server.faults.oracle import DIM

Servers = Callable[..., ForgedServer]
MB = 1 << 20
GENEROUS = 2.0


def rows(seed: int, nbytes: int) -> bytes:
    count = nbytes // (4 * DIM)
    return bytes([seed, 3, 7, 61]) * (DIM * count)


@contextmanager
def in_background(work: Callable[[], object]) -> Iterator[list[object]]:
    """Run `work` beside the block; its result or exception is in the list afterwards."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield outcome
    thread.join(60)
    assert not thread.is_alive()


def quantile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def test_a_save_of_200_mb_stalls_neither_pings_nor_writes(forged: Servers) -> None:
    """The bound is generous: shared machines; the printed p99 is the figure to look at."""
    server = forged()
    client, saver, writer = server.client(), server.client(), server.client()
    client.call("KV.PREFIX.REGISTER", "big", DIM, "fp32")
    block = rows(1, 8 * MB)
    count = len(block) // (4 * DIM)
    for layer in range(25):
        client.call("V.STOREBATCH", "big_pk", layer, 0, count, block)
    small = Ledger("small")
    perform(writer, small, [oracle.register("small", "fp32")])
    idle = [timed(client) for _ in range(200)]
    pings: list[float] = []
    stores: list[float] = []
    with in_background(lambda: saver.call("KV.PREFIX.SAVE")) as saved:
        while not saved:
            pings.append(timed(client))
            started = time.perf_counter()
            act = oracle.store("small", "_pk", "fp32", 0, 0, rows(len(stores) % 200, 4096))
            perform(writer, small, [act])
            stores.append(time.perf_counter() - started)
    assert saved == ["OK"]
    p99, at_rest, storing = (quantile(times, 0.99) * 1e3 for times in (pings, idle, stores))
    print(
        f"\nwhile 200 MB are saved: {len(pings)} PINGs, p99 {p99:.2f} ms,"
        f" at rest {at_rest:.2f} ms; V.STOREBATCH p99 {storing:.2f} ms"
    )
    assert len(pings) > 20
    assert max(pings) < GENEROUS
    assert max(stores) < GENEROUS
    assert observe(client, "small") == small.image
    assert (server.directory / "pion.vstore.0").stat().st_size > 200 * MB
    server.kill()
    server.start()
    client = server.client()
    small.settle(client)
    for layer in range(25):
        words = ("V.FETCH", "big_pk", layer, "RANGE", 0, count, "FMT", "PACKED")
        assert client.call(*words) == block


def timed(client: RawClient) -> float:
    started = time.perf_counter()
    assert client.call("PING") == "PONG"
    return time.perf_counter() - started


def test_sigterm_during_a_save_ends_it_first(forged: Servers, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    write_plan(plan)
    server = forged(faults=plan)
    client, saver = server.client(), server.client()
    ledger = Ledger("ns")
    acts = [oracle.register("ns", "fp32"), oracle.store("ns", "_pk", "fp32", 0, 0, rows(1, MB))]
    perform(client, ledger, acts)
    write_plan(plan, Fault("fsync", "pion.vstore.0.tmp", sleep=0.3))
    with in_background(lambda: saver.call("KV.PREFIX.SAVE")) as saved:
        wait_for(server.directory / "pion.vstore.0.tmp")
        server._process.send_signal(signal.SIGTERM)
    assert saved == ["OK"]
    assert server.wait() == 0
    assert not list(server.directory.glob("pion.*.tmp"))
    assert check_directory(server.directory).problems == []
    server.start()
    ledger.settle(server.client())


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.002)


def test_compaction_in_the_background_gives_space_back_under_load(
    forged: Servers, memory_path: Path
) -> None:
    server = forged(directory=memory_path / "data", compact_bytes=200_000)
    ledgers = [[Ledger(f"w{w}n{n}") for n in range(2)] for w in range(2)]
    writers = [Writer(server.client(), mine, seed=n) for n, mine in enumerate(ledgers)]
    for writer in writers:
        writer.start()
    snapshot, log = (server.directory / name for name in ("pion.vstore.0", "pion.vstore.wal.0"))
    wait_for(snapshot)
    first = snapshot.stat().st_ino
    deadline = time.monotonic() + 30
    while snapshot.stat().st_ino == first and time.monotonic() < deadline:
        time.sleep(0.05)
    assert snapshot.stat().st_ino != first, "compacted once only"
    server.kill()
    for writer in writers:
        writer.join(30)
        assert writer.failure is None
        assert not writer.refusals
    print(f"\nlog of {log.stat().st_size} bytes, {sum(w.acknowledged for w in writers)} acts")
    server.start()
    client = server.client()
    for ledger in (each for mine in ledgers for each in mine):
        ledger.settle(client)


def test_a_save_makes_no_damage_good(forged: Servers) -> None:
    """A bit flips in rows that were served, so verified, before: SAVE compares again."""
    server = forged()
    client = server.client()
    ledger = Ledger("ns")
    acts = [oracle.store("ns", "_pk", "fp32", n, 0, rows(n, 4096)) for n in range(3)]
    acts += [oracle.store_state("ns", n, rows(90 + n, 4096)) for n in range(2)]
    perform(client, ledger, [oracle.register("ns", "fp32"), *acts])
    assert observe(client, "ns") == ledger.image
    for name, body in (("pion.vstore.wal.0", rows(1, 4096)), ("pion.ssm.wal.0", rows(90, 4096))):
        path = server.directory / name
        with path.open("r+b") as file:
            file.seek(path.read_bytes().index(body) + 1000)
            file.write(b"\x55")
    assert client.call("KV.PREFIX.SAVE") == "OK"
    for _ in range(2):
        found = observe(client, "ns")
        damaged = {key: found[key] for key in ledger.image if found[key] != ledger.image[key]}
        assert damaged.keys() == {("rows", "_pk", 1), ("state", 0)}
        assert damaged[("state", 0)] == Refused("")
        assert set(damaged[("rows", "_pk", 1)]) == {Refused("")}
        server.kill()
        server.start()
        client = server.client()
    perform(client, ledger, [acts[1], acts[3]])
    assert observe(client, "ns") == ledger.image


def test_commit_waits_for_its_own_flush(forged: Servers, tmp_path: Path) -> None:
    """While another client's flush is under way and fails, nobody is told OK."""
    plan = tmp_path / "plan"
    write_plan(plan)
    server = forged(faults=plan)
    one, two = server.client(), server.client()
    perform(one, Ledger("ns"), [oracle.register("ns", "fp32")])
    write_plan(plan, Fault("fsync", "pion.vstore.wal.0", sleep=0.3, errno=errno.EIO))
    with in_background(lambda: ask(one, [("KV.PREFIX.COMMIT",)])[0]) as first:
        time.sleep(0.1)
        (second,) = ask(two, [("KV.PREFIX.COMMIT",)])
    assert isinstance(first[0], Refused)
    assert isinstance(second, Refused)


def test_commit_flushes_what_a_killed_server_wrote(forged: Servers, tmp_path: Path) -> None:
    """It is acknowledged, and in the kernel only: the next server's first COMMIT must flush it."""
    plan = tmp_path / "plan"
    write_plan(plan)
    server = forged(faults=plan)
    perform(server.client(), Ledger("ns"), [oracle.register("ns", "fp32")])
    server.kill()
    server.start()
    write_plan(plan, Fault("fsync", "pion.vstore.wal.0", errno=errno.EIO))
    assert server.client().error("KV.PREFIX.COMMIT").startswith("ERR KV.PREFIX.COMMIT failed")


@pytest.mark.parametrize(("mode", "flushes"), [("no", False), ("everysec", True)])
def test_fsync_everysec_flushes_by_itself_and_no_does_not(
    forged: Servers, tmp_path: Path, mode: str, flushes: bool
) -> None:
    """Seen by making each flush fail: the log then takes no more writes."""
    plan = tmp_path / "plan"
    write_plan(plan)
    server = forged("--fsync", mode, faults=plan)
    client = server.client()
    write_plan(plan, Fault("fsync", "pion.vstore.wal.0", errno=errno.EIO))
    perform(client, Ledger("ns"), [oracle.register("ns", "fp32")])
    deadline = time.monotonic() + (20 if flushes else 1.5)
    while b"log_failed:1" not in client.call("INFO", "persistence"):
        if time.monotonic() > deadline:
            assert not flushes
            return
        time.sleep(0.05)
    assert flushes
    assert client.error("KV.PREFIX.REGISTER", "more", DIM, "fp32").startswith("MISCONF")


def test_without_a_log_an_earlier_one_is_read_and_never_replayed_over_a_newer_snapshot(
    forged: Servers, memory_path: Path
) -> None:
    directory = memory_path / "data"
    server = forged(directory=directory)
    ledger = Ledger("ns")
    old = [oracle.store("ns", "_pk", "fp32", n, 0, rows(n, 4096)) for n in range(3)]
    perform(server.client(), ledger, [oracle.register("ns", "fp32"), *old])
    assert server.stop() == 0
    server = forged("--no-vstore-wal", directory=directory)
    client = server.client()
    assert observe(client, "ns") == ledger.image
    kept = dict(ledger.image)
    perform(client, ledger, [oracle.store("ns", "_pk", "fp32", 1, 0, rows(50, 4096))])
    assert observe(client, "ns") == ledger.image
    server.kill()
    server.start()
    client = server.client()
    assert observe(client, "ns") == kept
    ledger.image = kept
    perform(client, ledger, [oracle.store("ns", "_pk", "fp32", 1, 0, rows(60, 4096))])
    assert client.call("KV.PREFIX.SAVE") == "OK"
    assert server.stop() == 0
    server = forged(directory=directory)
    assert observe(server.client(), "ns") == ledger.image
