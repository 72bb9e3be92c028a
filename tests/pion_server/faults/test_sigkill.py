"""SIGKILL at random moments under load, against an oracle of everything acknowledged."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pion_server.store.checking import check_directory
from tests.conftest import RawClient
from tests.pion_server.faults.forge import ForgedServer
from tests.pion_server.faults.load import Ledger, Writer

WRITERS, NAMESPACES = 3, 3
LONGEST_RUN = 0.15


class Saver(threading.Thread):
    """KV.PREFIX.SAVE over and over until the server is gone."""

    def __init__(self, client: RawClient) -> None:
        super().__init__(daemon=True)
        self.saved = 0
        self.inside = False
        self._client = client

    def run(self) -> None:
        try:
            while True:
                self.inside = True
                assert self._client.call("KV.PREFIX.SAVE") == "OK"
                self.inside = False
                self.saved += 1
        except (EOFError, OSError):
            pass


def run_rounds(server: ForgedServer, rounds: int, seed: int, saving: bool) -> Counter[str]:
    """Load, kill, restart, compare; as often as asked. The counts of what happened."""
    draw = random.Random(seed)
    ledgers = [[Ledger(f"w{w}n{n}") for n in range(NAMESPACES)] for w in range(WRITERS)]
    counts: Counter[str] = Counter()
    for number in range(rounds):
        writers = [Writer(server.client(), mine, seed=draw.getrandbits(32)) for mine in ledgers]
        saver = Saver(server.client())
        for thread in [*writers, *([saver] if saving else [])]:
            thread.start()
        time.sleep(draw.uniform(0.01, LONGEST_RUN))
        server.kill()
        for thread in [*writers, *([saver] if saving else [])]:
            thread.join(30)
            assert not thread.is_alive()
        for writer in writers:
            assert writer.failure is None, writer.failure
            assert not writer.refusals
            counts["acknowledged"] += writer.acknowledged
        counts["in flight"] += sum(len(each.pending) for mine in ledgers for each in mine)
        counts["saves"] += saver.saved
        counts["killed inside a save"] += saver.inside
        counts["left a .tmp"] += bool(list(server.directory.glob("pion.*.tmp")))
        server.start()
        assert not list(server.directory.glob("pion.*.tmp"))
        client = server.client()
        for mine in ledgers:
            for ledger in mine:
                before = ledger.image
                ledger.settle(client)
                counts["in flight, yet there"] += ledger.image != before
        client.close()
        counts["rounds"] = number + 1
    text = server.errors.read_text()
    counts["torn tails cut"] = text.count("cut off")
    assert "damaged" not in text, text
    return counts


def kill_and_compare(
    forged: Callable[..., ForgedServer], directory: Path, rounds: int, seed: int, saving: bool
) -> None:
    server = forged(directory=directory)
    counts = run_rounds(server, rounds, seed, saving)
    assert server.stop() == 0
    assert check_directory(server.directory).problems == []
    print(f"\nSIGKILL{' with SAVE' if saving else ''}, seed {seed}:", dict(counts))
    assert counts["acknowledged"] > rounds


@pytest.mark.parametrize("saving", [False, True])
def test_acknowledged_writes_survive_sigkill(
    forged: Callable[..., ForgedServer], memory_path: Path, saving: bool
) -> None:
    """CASES E01, WIRE.md 15.11."""
    kill_and_compare(forged, memory_path / "data", 15, seed=1974, saving=saving)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("saving", [False, True])
def test_hundreds_of_kills(
    forged: Callable[..., ForgedServer], memory_path: Path, saving: bool, seed: int
) -> None:
    kill_and_compare(forged, memory_path / "data", 150, seed=seed, saving=saving)


def test_a_start_says_what_it_replayed(forged: Callable[..., ForgedServer]) -> None:
    server = forged()
    assert "WAL replayed 0 records, 0 sessions" in server.said
    client = server.client()
    client.call("KV.PREFIX.REGISTER", "ns", 32, "fp32")
    client.call("V.STOREBATCH", "ns_pk", 0, 0, 1, bytes(128))
    client.call("SSM.PREFIX.STORE", "ns", 0, b"state")
    for records in (3, 0):
        server.kill()
        server.start()
        assert f"WAL replayed {records} records, 2 sessions" in server.said
        assert server.client().call("KV.PREFIX.SAVE") == "OK"
