"""Disks without room, and limits: an error with nothing changed, or room made by evicting."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pion_server.store.checking import check_directory
from tests.conftest import RawClient
from tests.pion_server.faults import oracle
from tests.pion_server.faults.damage import write_more
from tests.pion_server.faults.forge import ForgedServer
from tests.pion_server.faults.load import Ledger, perform
from tests.pion_server.faults.observer import Refused, ask, observe
from tests.pion_server.faults.oracle import DIM, Act

Servers = Callable[..., ForgedServer]
MB = 1 << 20
ROWS = MB // (4 * DIM)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small tmpfs here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def values(seed: int, nbytes: int = MB) -> bytes:
    return bytes([seed, 1, seed, 62]) * (nbytes // 4)


def megabyte(ns: str, seed: int, layer: int = 0) -> list[Act]:
    return [oracle.register(ns, "fp32"), oracle.store(ns, "_pk", "fp32", layer, 0, values(seed))]


def put(client: RawClient, ledger: Ledger, acts: list[Act]) -> str:
    """Perform the acts up to the first that is refused; what it was refused with, or OK."""
    for act in acts:
        (reply,) = ask(client, [act.words])
        if isinstance(reply, Refused):
            return reply.text
        ledger.image = act.lead(ledger.image)[-1]
    return "OK"


def complete(client: RawClient, ledger: Ledger) -> None:
    gen = perform(client, ledger, [oracle.begin(ledger.ns)])
    perform(client, ledger, [oracle.complete(ledger.ns, gen, b"whole")])


def on_disk(directory: Path) -> int:
    """What `du` says of the data: all but the heartbeat."""
    files = [path for path in directory.iterdir() if path.suffix not in (".status", ".sock")]
    return sum(path.stat().st_blocks * 512 for path in files)


def free(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def occupy(path: Path, leave: int) -> Path:
    """A file of somebody else that leaves so many bytes free."""
    other = path / "other"
    other.write_bytes(bytes(free(path) - leave))
    return other


def test_a_full_disk_refuses_with_nothing_changed_and_later_all_works(
    small_disk: Path, forged: Servers
) -> None:
    """Everything is pinned, so nothing can go: an error, no loop, no lost manifest."""
    server = forged(directory=small_disk / "data")
    client = server.client()
    ledgers = [Ledger(f"n{n}") for n in range(3)]
    for number, ledger in enumerate(ledgers):
        small = oracle.store(ledger.ns, "_pk", "fp32", 0, 0, values(number, 8192))
        acts = [oracle.register(ledger.ns, "fp32"), small, oracle.store_state(ledger.ns, 0, b"s")]
        acts += [oracle.set_fields(ledger.ns, "h0", {b"f": b"1"})]
        perform(client, ledger, acts)
        assert client.call("EXISTS", f"{ledger.ns}:h0") == 1  # leased: not evicted
        complete(client, ledger)
        assert client.call("KV.PREFIX.PIN", ledger.ns) == 1
    other = occupy(small_disk, 300_000)
    big = oracle.store("n0", "_pk", "fp32", 1, 0, values(9))
    state = oracle.store_state("n1", 0, values(9))
    key = oracle.set_key("n2", "s0", values(9))
    fields = oracle.set_fields("n2", "h0", {b"f": b"2", b"large": values(9)})
    for act in (big, state, key, fields, big):
        (reply,) = ask(client, [act.words])
        assert isinstance(reply, Refused)
        assert reply.text.startswith("MISCONF cannot write to the log: No space left"), reply
        for ledger in ledgers:
            assert observe(client, ledger.ns) == ledger.image
    assert free(small_disk) > 200_000
    server.kill()
    server.start()
    client = server.client()
    for ledger in ledgers:
        ledger.settle(client)
    other.unlink()
    perform(client, ledgers[0], [big])
    perform(client, ledgers[1], [state])
    perform(client, ledgers[2], [key, fields])
    server.kill()
    server.start()
    client = server.client()
    for ledger in ledgers:
        ledger.settle(client)


def test_a_save_without_room_changes_nothing_and_later_works(
    small_disk: Path, forged: Servers
) -> None:
    server = forged(directory=small_disk / "data")
    client = server.client()
    ledgers = [Ledger(f"n{n}") for n in range(3)]
    for number, ledger in enumerate(ledgers):
        assert put(client, ledger, megabyte(ledger.ns, number)) == "OK"
        perform(client, ledger, [oracle.store_state(ledger.ns, 0, values(number, 40_000))])
        complete(client, ledger)
    other = occupy(small_disk, 2 * MB)
    before = {p.name: p.read_bytes() for p in server.directory.glob("pion.[vs]s*")}
    for _ in range(2):
        assert "No space left" in client.error("KV.PREFIX.SAVE")
        assert {p.name: p.read_bytes() for p in server.directory.glob("pion.[vs]s*")} == before
        for ledger in ledgers:
            assert observe(client, ledger.ns) == ledger.image
    perform(client, ledgers[0], [oracle.store("n0", "_pv", "fp32", 0, 0, values(8, 4096))])
    other.unlink()
    assert client.call("KV.PREFIX.SAVE") == "OK"
    for _ in range(2):
        for ledger in ledgers:
            assert observe(client, ledger.ns) == ledger.image
        server.kill()
        server.start()
        client = server.client()


def test_a_disk_full_of_our_own_data_makes_room_for_newer(
    small_disk: Path, forged: Servers
) -> None:
    """CASES F02: 8 MB of disk, a limit of 100 MB, 20 puts of 1 MB: all succeed, old ones go."""
    server = forged("--max-disk", "100mb", directory=small_disk / "data")
    client = server.client()
    ledgers = [Ledger(f"n{n}") for n in range(20)]
    for number, ledger in enumerate(ledgers):
        assert put(client, ledger, megabyte(ledger.ns, number)) == "OK", number
    for _ in range(2):
        held = [ledger for ledger in ledgers if observe(client, ledger.ns)]
        assert 4 <= len(held) <= 8
        assert held == ledgers[-len(held) :]
        for ledger in held:
            assert observe(client, ledger.ns) == ledger.image
        server.kill()
        assert check_directory(server.directory).problems == []
        server.start()
        client = server.client()
    assert put(client, ledgers[0], megabyte("n0", 77)) == "OK"
    assert observe(client, "n0") == ledgers[0].image
    print(f"\n8 MB of disk, 20 puts of 1 MB: {len(held)} held, {on_disk(server.directory)} bytes")


@pytest.mark.parametrize("what", ["keys", "states"])
def test_a_disk_full_of_other_data_makes_room_for_newer(
    small_disk: Path, forged: Servers, what: str
) -> None:
    """CASES F02: values of 1 MB, which lie in the log and nowhere else; so does recurrent state."""
    server = forged("--max-disk", "100mb", directory=small_disk / "data")
    client = server.client()
    ledgers = [Ledger(f"n{n}") for n in range(20)]
    for number, ledger in enumerate(ledgers):
        key = oracle.set_key(ledger.ns, "s0", values(number))
        state = oracle.store_state(ledger.ns, 0, values(number))
        assert put(client, ledger, [key if what == "keys" else state]) == "OK"
    for _ in range(2):
        held = [ledger for ledger in ledgers if observe(client, ledger.ns)]
        assert 4 <= len(held) <= 8
        assert held == ledgers[-len(held) :]
        for ledger in held:
            assert observe(client, ledger.ns) == ledger.image
        server.kill()
        assert check_directory(server.directory).problems == []
        server.start()
        client = server.client()
    # A value that no disk of this size holds evicts nothing (F04).
    huge = ("SET", "huge") if what == "keys" else ("SSM.PREFIX.STORE", "huge", 0)
    assert client.error(*huge, bytes(9 * MB)).startswith("MISCONF")
    assert [ledger for ledger in ledgers if observe(client, ledger.ns)] == held


def test_a_blob_too_large_for_the_disk_evicts_nothing(small_disk: Path, forged: Servers) -> None:
    """CASES F04."""
    server = forged(directory=small_disk / "data")
    client = server.client()
    ledgers = [Ledger(f"n{n}") for n in range(3)]
    for number, ledger in enumerate(ledgers):
        assert put(client, ledger, megabyte(ledger.ns, number)) == "OK"
    assert client.error("SSM.PREFIX.STORE", "huge", 0, bytes(9 * MB)).startswith("MISCONF")
    for ledger in ledgers:
        assert observe(client, ledger.ns) == ledger.image


def test_prefixes_too_small_to_make_room_are_not_evicted_for_nothing(
    forged: Servers, memory_path: Path
) -> None:
    """Records of a few rows share their pages with others: only a SAVE gives them back."""
    server = forged("--max-disk", "1mb", directory=memory_path / "data")
    client = server.client()
    ledgers = [Ledger(f"n{n}") for n in range(40)]
    for number, ledger in enumerate(ledgers):
        rows = oracle.store(ledger.ns, "_pk", "fp32", 0, 0, values(number, 12_288))
        assert put(client, ledger, [oracle.register(ledger.ns, "fp32"), rows]) == "OK"
    for _ in range(3):
        assert put(client, Ledger("big"), megabyte("big", 1)).startswith("MISCONF --max-disk")
    for ledger in ledgers:
        assert observe(client, ledger.ns) == ledger.image


@pytest.mark.parametrize("what", ["prefixes", "keys"])
def test_a_disk_limit_holds_at_every_step(forged: Servers, memory_path: Path, what: str) -> None:
    """CASES F01: 8 MB for one model, 8 MB for another, a restart; `du` stays below the limit."""
    limit = 10 * MB
    server = forged("--max-disk", str(limit), directory=memory_path / "data")
    client = server.client()
    ledgers = [Ledger(f"{model}{n}") for model in "ab" for n in range(8)]
    for number, ledger in enumerate(ledgers):
        key = [oracle.set_key(ledger.ns, "s0", values(number))]
        acts = key if what == "keys" else megabyte(ledger.ns, number)
        assert put(client, ledger, acts) == "OK"
        assert on_disk(server.directory) <= limit
    for _ in range(2):
        held = [ledger for ledger in ledgers if observe(client, ledger.ns)]
        assert 8 <= len(held) <= 9
        assert held == ledgers[-len(held) :]
        for ledger in held:
            assert observe(client, ledger.ns) == ledger.image
        assert "--max-disk" in client.error("KV.PREFIX.SAVE")
        assert on_disk(server.directory) <= limit
        server.kill()
        assert check_directory(server.directory).problems == []
        server.start()
        client = server.client()
    info = dict(line.split(b":") for line in client.call("KV.PREFIX.INFO").splitlines())
    counted = client.call("DBSIZE") if what == "keys" else int(info[b"registered_prefixes"])
    assert counted == len(held)


def test_a_log_full_of_what_was_overwritten_is_no_dead_end(
    forged: Servers, memory_path: Path
) -> None:
    """CASES F02: small values, whose bytes only a compaction gives back, many times the limit."""
    server = forged("--max-disk", "1mb", directory=memory_path / "data")
    client = server.client()
    ledger, written, ends = Ledger("n"), 0, time.monotonic() + 60
    while written < 3 * MB:
        assert time.monotonic() < ends
        if put(client, ledger, [oracle.set_key("n", "s0", values(written % 256, 8192))]) == "OK":
            written += 8192
        else:
            time.sleep(0.05)
        assert on_disk(server.directory) <= MB
    assert observe(client, "n") == ledger.image
    server.kill()
    server.start()
    ledger.settle(server.client())


def test_a_disk_limit_without_anything_to_evict_is_an_error(
    forged: Servers, memory_path: Path
) -> None:
    server = forged("--max-disk", "2mb", directory=memory_path / "data")
    client = server.client()
    ledger = Ledger("n")
    assert put(client, ledger, megabyte("n", 1)) == "OK"
    # Room reserved for rows that replace what a manifest vouches for is not counted twice.
    complete(client, ledger)
    acts = [oracle.store("n", "_pk", "fp32", 1, 0, values(3, 700_000 // 128 * 128))]
    assert put(client, ledger, acts) == "OK"
    client.call("KV.PREFIX.PIN", "n")
    assert put(client, Ledger("m"), megabyte("m", 2)).startswith("MISCONF --max-disk 2097152: ")
    assert observe(client, "n") == ledger.image
    client.call("KV.PREFIX.UNPIN", "n")
    assert put(client, Ledger("m"), megabyte("m", 2)) == "OK"


def test_overwritten_rows_make_room_without_evicting(forged: Servers, memory_path: Path) -> None:
    server = forged("--max-disk", "6mb", directory=memory_path / "data")
    client = server.client()
    ledger = Ledger("n")
    for number in range(12):
        assert put(client, ledger, megabyte("n", number, layer=number % 3)) == "OK"
    assert observe(client, "n") == ledger.image
    server.kill()
    server.start()
    ledger.settle(server.client())


@pytest.mark.parametrize("where", ["memory_path", "tmp_path"])
def test_rows_on_their_way_to_a_client_outlive_their_eviction(
    forged: Servers, request: pytest.FixtureRequest, where: str
) -> None:
    """A reader that is slow gets every byte, though the disk got them back meanwhile."""
    directory: Path = request.getfixturevalue(where) / "data"
    server = forged("--max-disk", "40mb", directory=directory)
    client, reader = server.client(), server.client()
    blocks = [values(n) for n in range(24)]
    client.call("KV.PREFIX.REGISTER", "old", DIM, "fp32")
    for layer, block in enumerate(blocks):
        client.call("V.STOREBATCH", "old_pk", layer, 0, ROWS, block)
    client.call("SSM.PREFIX.STORE", "old", 0, values(99, 8 * MB))
    reader.send(reader.pack("V.FETCH", "old_pk", "BATCH", 0, ROWS, "FMT", "PACKED"))
    reader.send(reader.pack("SSM.PREFIX.FETCH", "old", 0))
    assert client.call("PING") == "PONG"
    for number in range(36):
        assert put(client, Ledger("x"), megabyte(f"new{number}", number)) == "OK"
    assert client.call("KV.PREFIX.LOOKUP", "old") == "MISS"
    assert reader.read() == blocks
    assert reader.read() == values(99, 8 * MB)
    reader.close()
    for number in range(36, 60):
        assert put(client, Ledger("x"), megabyte(f"new{number}", number)) == "OK"
    assert on_disk(server.directory) <= 40 * MB


def test_a_file_size_limit_is_an_error_and_not_the_end(forged: Servers, memory_path: Path) -> None:
    """`ulimit -f`, which needs no root: a write is cut short and must be taken back."""
    server = forged(directory=memory_path / "data", file_size=3 * MB + MB // 2)
    client = server.client()
    ledgers = [Ledger(f"n{n}") for n in range(3)]
    for number, ledger in enumerate(ledgers):
        assert put(client, ledger, megabyte(ledger.ns, number)) == "OK"
    length = (server.directory / "pion.vstore.wal.0").stat().st_size
    refused = Ledger("refused")
    assert put(client, refused, megabyte("refused", 9)).startswith("MISCONF cannot write")
    assert observe(client, "refused") == refused.image
    assert (server.directory / "pion.vstore.wal.0").stat().st_size < length + 1000
    client.call("KV.PREFIX.DROP", "n0")
    ledgers[0].image = {}
    assert client.call("KV.PREFIX.SAVE") == "OK"
    assert put(client, refused, megabyte("refused", 9)) == "OK"
    more = write_more(client)
    server.kill()
    server.start()
    client = server.client()
    for ledger in (*ledgers, refused, more):
        ledger.settle(client)
