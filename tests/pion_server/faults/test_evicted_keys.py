"""SIGKILL while keys make room for each other: it holds what was acknowledged last or nothing."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pion_server.store.checking import check_directory
from pion_server.store.key_values import LARGE
from tests.conftest import RawClient, ReplyError
from tests.pion_server.faults.forge import ForgedServer

KEYS = 24
SIZES = (0, 40, LARGE - 1, LARGE, 5 * LARGE, 20 * LARGE)
LIMITS = {"disk": ("--max-disk", "2mb"), "memory": ("--maxmemory", "1mb")}


class Setter(threading.Thread):
    """SET and DEL at random until the connection breaks; what each key may hold then."""

    def __init__(self, client: RawClient, held: dict[str, list[bytes | None]], seed: int) -> None:
        super().__init__(daemon=True)
        self.acknowledged = 0
        self.refusals: Counter[str] = Counter()
        self._client, self._held, self._random = client, held, random.Random(seed)

    def run(self) -> None:
        try:
            while True:
                self._one()
        except (EOFError, OSError):
            pass

    def _one(self) -> None:
        draw = self._random
        key = f"k{draw.randrange(KEYS)}"
        value = None if draw.random() < 0.1 else draw.randbytes(draw.choice(SIZES))
        may = self._held[key]
        may.append(value)
        words = ("DEL", key) if value is None else ("SET", key, value)
        self._client.send(RawClient.pack(*words))
        reply = self._client.read()
        if isinstance(reply, ReplyError):
            self.refusals[str(reply).split()[0]] += 1
            may.pop()
        else:
            may[:] = [value]
            self.acknowledged += 1


def kill_rounds(server: ForgedServer, rounds: int, seed: int) -> Counter[str]:
    draw = random.Random(seed)
    held: dict[str, list[bytes | None]] = {f"k{number}": [None] for number in range(KEYS)}
    counts: Counter[str] = Counter()
    for _ in range(rounds):
        setter = Setter(server.client(), held, draw.getrandbits(32))
        setter.start()
        time.sleep(draw.uniform(0.02, 0.2))
        if draw.random() < 0.3:
            server.client().send(RawClient.pack("KV.PREFIX.SAVE"))
            time.sleep(draw.uniform(0, 0.03))
        counts["evicted"] += evictions(server)
        server.kill()
        setter.join(30)
        assert not setter.is_alive()
        counts["acknowledged"] += setter.acknowledged
        counts.update(setter.refusals)
        server.start()
        client = server.client()
        for key, may in held.items():
            found = client.call("GET", key)
            assert found is None or found in may, (key, len(found))
            held[key] = [found]
            counts["held"] += found is not None
        client.close()
    return counts


def evictions(server: ForgedServer) -> int:
    text = server.client().call("INFO", "stats").decode()
    return int(text.split("evicted_keys:")[1].split()[0])


def check(server: ForgedServer, rounds: int, seed: int) -> None:
    counts = kill_rounds(server, rounds, seed)
    assert server.stop() == 0
    assert check_directory(server.directory).problems == []
    print(f"\nSIGKILL among evictions, seed {seed}:", dict(counts))
    assert counts["acknowledged"] > rounds
    assert counts["evicted"] > 0
    assert counts["held"] > rounds


@pytest.mark.parametrize("limit", LIMITS)
def test_a_key_is_what_was_acknowledged_or_gone(
    forged: Callable[..., ForgedServer], memory_path: Path, limit: str
) -> None:
    """CASES E01, F02: whatever went to make room, nothing older or half comes back."""
    check(forged(*LIMITS[limit], directory=memory_path / "data"), 8, seed=7)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("limit", LIMITS)
def test_keys_survive_hundreds_of_kills_among_evictions(
    forged: Callable[..., ForgedServer], memory_path: Path, limit: str
) -> None:
    check(forged(*LIMITS[limit], directory=memory_path / "data"), 200, seed=8)
