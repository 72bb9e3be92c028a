"""Workers killed under load: what was acknowledged comes back, and all know where it lives."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pion_server.store.checking import check_directory
from tests.conftest import RawClient, ServerProcess
from tests.pion_server.faults.load import Ledger, Writer
from tests.pion_server.workers.test_workers import at, pid_of, wait_until

WORKERS, NAMESPACES = 2, 3
LONGEST_RUN = 0.15


def kill_under_load(server: ServerProcess, rounds: int, seed: int) -> Counter[str]:
    """Load on all workers, one of them killed, all compared; what happened."""
    draw = random.Random(seed)
    ledgers = [[Ledger(f"w{w}n{n}") for n in range(NAMESPACES)] for w in range(WORKERS)]
    counts: Counter[str] = Counter()
    for _ in range(rounds):
        killed = draw.randrange(WORKERS)
        pid = pid_of(at(server, killed))
        writers = [
            Writer(at(server, worker), mine, seed=draw.getrandbits(32))
            for worker, mine in enumerate(ledgers)
        ]
        for writer in writers:
            writer.start()
        time.sleep(draw.uniform(0.01, LONGEST_RUN))
        os.kill(pid, signal.SIGKILL)
        for writer in writers:
            writer.stop()
        for worker, writer in enumerate(writers):
            writer.join(30)
            assert not writer.is_alive()
            assert writer.failure is None, writer.failure
            assert not writer.refusals, (worker, writer.refusals)
            counts["acknowledged"] += writer.acknowledged
            writer.client.close()
        compare(server, ledgers, killed)
        counts["rounds"] += 1
    return counts


def compare(server: ServerProcess, ledgers: list[list[Ledger]], killed: int) -> None:
    """The killed one's successor has what it had, the others go on, and every worker agrees."""
    clients = [at(server, worker) for worker in range(WORKERS)]
    for client, mine in zip(clients, ledgers, strict=True):
        # A fill ends with its connection, which is noticed a moment later.
        wait_until(lambda here=client: b"connected_clients:1\r" in here.call("INFO", "clients"))  # type: ignore[misc]
        for ledger in mine:
            ledger.settle(client)
    for home, mine in enumerate(ledgers):
        for ledger in mine:
            told = [told_of(client, ledger.ns) for client in clients]
            assert told == [told[0]] * WORKERS, (killed, ledger.ns, told)
            held = any(key[0] != "key" for key in ledger.image)
            assert told[0][0] == (home if held else -1), (killed, ledger.ns, told)
    for client in clients:
        client.close()


def told_of(client: RawClient, ns: str) -> tuple[int, str]:
    owner = client.call("KV.PREFIX.OWNER", ns)
    return int(owner.split()[0]), client.call("KV.PREFIX.LOOKUP", ns)


def check(server: Callable[..., ServerProcess], directory: Path, rounds: int, seed: int) -> None:
    directory.mkdir(mode=0o700)
    running = server("-w", str(WORKERS), "--no-attention", directory=directory)
    counts = kill_under_load(running, rounds, seed)
    assert running.stop() == 0
    assert check_directory(directory).problems == []
    print(f"\nworkers killed, seed {seed}:", dict(counts))
    assert counts["acknowledged"] > rounds


def test_a_worker_killed_under_load_loses_nothing_and_misleads_nobody(
    server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    check(server, tmp_path / "data", 3, seed=1974)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_workers_killed_a_hundred_times(
    server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    check(server, tmp_path / "data", 100, seed=12)
