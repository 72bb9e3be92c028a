"""A prefix is dropped and registered again while others read it: old, new or nothing, never a mix.

python tests/test_dropindex_grace.py [--seconds 30] [--readers 8]

Expected: every read is of one generation, whole; the server's figures are what is held at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.conftest import RawClient, ReplyError, ServerProcess

if TYPE_CHECKING:
    from numpy.typing import NDArray

DIM, ROWS, LAYERS = 128, 64, 3
NAMES = ("a", "b")


def rows_of(generation: int) -> bytes:
    """Rows that all say which generation they are of."""
    rows: NDArray[np.float32] = np.full((ROWS, DIM), generation, np.float32)
    return rows.tobytes()


@dataclass
class Tally:
    """What readers saw: whole reads, misses, reads that mixed generations."""

    whole: int = 0
    gone: int = 0
    generations: set[int] = field(default_factory=set)
    mixed: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)


def rebuild(client: RawClient, generation: int) -> None:
    """Drop both prefixes and put the next generation in their place."""
    for name in NAMES:
        client.call("KV.PREFIX.DROP", name)
        client.call("KV.PREFIX.REGISTER", name, DIM, "fp32")
        for side in ("pk", "pv"):
            for layer in range(LAYERS):
                words = f"{name}_{side}", layer, 0, ROWS, rows_of(generation)
                client.call("V.STOREBATCH", *words)


def read_once(client: RawClient, name: str, tally: Tally) -> None:
    client.call("KV.PREFIX.LOOKUP", name)
    for side in ("pk", "pv"):
        for layer in range(LAYERS):
            try:
                data = client.call("V.FETCH", f"{name}_{side}", layer, "RANGE", 0, ROWS)
            except ReplyError:
                data = None
            if data is None:
                tally.gone += 1
                continue
            seen = np.unique(np.frombuffer(data, np.float32))
            if len(data) != 4 * DIM * ROWS or len(seen) != 1:
                tally.mixed.append(f"{name}_{side} layer {layer}: {seen[:4]} of {len(data)} bytes")
            tally.whole += 1
            tally.generations.update(int(value) for value in seen)


def stress(running: ServerProcess, seconds: float, readers: int, least: int) -> tuple[Tally, int]:
    """Rebuild for `seconds` and at least `least` times while `readers` read; what they saw."""
    tallies = [Tally() for _ in range(readers)]
    stop = threading.Event()

    def read(tally: Tally, client: RawClient) -> None:
        try:
            while not stop.is_set():
                for name in NAMES:
                    read_once(client, name, tally)
        except BaseException as error:
            tally.errors.append(error)

    threads = [threading.Thread(target=read, args=(t, running.client())) for t in tallies]
    for thread in threads:
        thread.start()
    client, generation, deadline = running.client(), 0, time.monotonic() + seconds
    while time.monotonic() < deadline or generation < least:
        generation += 1
        rebuild(client, generation)
    stop.set()
    for thread in threads:
        thread.join(30)
    total = Tally()
    for tally in tallies:
        total.whole += tally.whole
        total.gone += tally.gone
        total.generations |= tally.generations
        total.mixed += tally.mixed
        total.errors += tally.errors
    return total, generation


def check_figures(client: RawClient, generation: int) -> None:
    """What is held is the last generation, once."""
    info = dict(
        line.split(":", 1) for line in client.call("KV.PREFIX.INFO").decode().split("\r\n") if line
    )
    assert int(info["registered_prefixes"]) == len(NAMES)
    assert int(info["vstore_sessions"]) == 2 * len(NAMES)
    held = 2 * len(NAMES) * LAYERS * ROWS * DIM * 4
    assert held <= int(info["vstore_bytes"]) < 1.1 * held
    for name in NAMES:
        for side in ("pk", "pv"):
            data = client.call("V.FETCH", f"{name}_{side}", LAYERS - 1, "RANGE", 0, ROWS)
            assert data == rows_of(generation)


def test_readers_see_one_generation_or_none_while_prefixes_are_rebuilt(
    server: Callable[..., ServerProcess],
) -> None:
    running = server("--kvcache", "-w", "1")
    seen, generation = stress(running, seconds=1.0, readers=4, least=40)
    assert seen.errors == []
    assert seen.mixed == []
    assert len(seen.generations) > 5
    assert max(seen.generations) <= generation
    check_figures(running.client(), generation)


def test_a_kill_between_drop_and_rebuild_leaves_no_old_rows(
    server: Callable[..., ServerProcess],
) -> None:
    running = server("--kvcache", "-w", "1")
    client = running.client()
    rebuild(client, 1)
    client.call("KV.PREFIX.DROP", "a")
    running.kill()
    running.restart()
    client = running.client()
    assert client.call("KV.PREFIX.LOOKUP", "a") == "MISS"
    assert client.call("KV.PREFIX.LOOKUP", "b") == "HIT"
    rebuild(client, 2)
    running.kill()
    running.restart()
    check_figures(running.client(), 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--readers", type=int, default=os.cpu_count() or 4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pion-grace-") as folder:
        running = ServerProcess(Path(folder) / "data", ("--kvcache", "-w", "1"), None)
        try:
            seen, generation = stress(running, options.seconds, options.readers, 1)
            check_figures(running.client(), generation)
        finally:
            running.close()
    print(f"{generation} generations; {seen.whole} reads whole, {seen.gone} found nothing,")
    print(f"{len(seen.mixed)} mixed; errors: {seen.errors or 'none'}")
    return 1 if seen.mixed or seen.errors else 0


if __name__ == "__main__":
    sys.exit(main())
