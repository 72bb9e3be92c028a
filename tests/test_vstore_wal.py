"""The log is replayed after SIGKILL: V.FETCH gives the same bits, and no acknowledged row is gone.

python tests/test_vstore_wal.py      # as pytest runs it
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

DIM, LAYERS, ROWS = 128, 4, 50
#: What KV.PREFIX.REGISTER names; every one of them reads the same before and after.
VQUANTS = ("int8", "turbo4", "turbo3", "turbo2", "fp16", "fp8", "mlx4g32")


def batch(seed: int, rows: int = ROWS) -> bytes:
    return np.random.default_rng(seed).standard_normal((rows, DIM)).astype(np.float32).tobytes()


def read_all(client: RawClient, sid: str) -> list[bytes]:
    words = [("V.FETCH", sid, layer, "RANGE", 0, ROWS) for layer in range(LAYERS)]
    return [client.call(*one) for one in words]


def test_every_format_reads_bit_for_bit_after_sigkill(server: Callable[..., ServerProcess]) -> None:
    running = server("--kvcache", "-w", "1")
    client = running.client()
    before: dict[str, list[bytes]] = {}
    for number, vquant in enumerate(VQUANTS):
        assert client.call("KV.PREFIX.REGISTER", vquant, DIM, vquant) == "OK"
        for side in ("pk", "pv"):
            sid = f"{vquant}_{side}"
            for layer in range(LAYERS):
                client.call("V.STOREBATCH", sid, layer, 0, ROWS, batch(number * 10 + layer))
            client.call("V.STOREBATCH", sid, 0, 7, 3, batch(99, 3))  # over rows that are there
            before[sid] = read_all(client, sid)
    running.kill()
    running.restart()
    client = running.client()
    assert {sid: read_all(client, sid) for sid in before} == before
    # A snapshot in between, and writes behind it.
    assert client.call("KV.PREFIX.SAVE") == "OK"
    client.call("V.STOREBATCH", "fp16_pk", 1, 0, ROWS, batch(500))
    before["fp16_pk"] = read_all(client, "fp16_pk")
    client.call("KV.PREFIX.DROP", "int8")
    running.kill()
    running.restart()
    client = running.client()
    assert client.call("KV.PREFIX.LOOKUP", "int8") == "MISS"
    for sid in before:
        if not sid.startswith("int8"):
            assert read_all(client, sid) == before[sid]


def test_no_acknowledged_row_is_lost_when_the_kill_comes_in_the_middle(
    server: Callable[..., ServerProcess],
) -> None:
    running = server("--kvcache", "-w", "1")
    client = running.client()
    client.call("V.CREATE", "stream", DIM, "VQUANT", "fp32")
    acknowledged = 0

    def write() -> None:
        nonlocal acknowledged
        try:
            while True:
                start = acknowledged
                client.call("V.STOREBATCH", "stream", 0, start * 4, 4, batch(start, 4))
                acknowledged += 1
        except (OSError, EOFError):
            pass

    writer = threading.Thread(target=write)
    writer.start()
    deadline = time.monotonic() + 20
    while acknowledged < 200 and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(running.pid, signal.SIGKILL)
    writer.join(20)
    running.kill()
    running.restart()
    assert acknowledged >= 200
    client = running.client()
    data = client.call("V.FETCH", "stream", 0, "RANGE", 0, acknowledged * 4)
    assert data == b"".join(batch(number, 4) for number in range(acknowledged))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
