"""The least recently used prefix goes when the slots are full: whole, and only that one.

python tests/test_kv_prefix_lru.py      # as pytest runs it
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.conftest import ReplyError

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

DIM, ROWS = 64, 16


def rows_of(number: int, side: str) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    seed = [number, ord(side[-1])]
    return np.random.default_rng(seed).standard_normal((ROWS, DIM)).astype(np.float32)


def put(client: RawClient, number: int) -> None:
    ns = f"prefix{number}"
    assert client.call("KV.PREFIX.REGISTER", ns, DIM, "fp32") == "OK"
    for side in ("pk", "pv"):
        blob = rows_of(number, side).tobytes()
        assert client.call("V.STOREBATCH", f"{ns}_{side}", 0, 0, ROWS, blob) == "OK"


def is_whole(client: RawClient, number: int) -> bool:
    """Both sides are held and read as stored; False if both are gone, and nothing between."""
    read = []
    for side in ("pk", "pv"):
        sid = f"prefix{number}_{side}"
        try:
            data = client.call("V.FETCH", sid, 0, "RANGE", 0, ROWS)
        except ReplyError:
            data = None
        read.append(data == rows_of(number, side).tobytes() if data is not None else None)
    assert read in ([True, True], [None, None])
    return read == [True, True]


def owned(client: RawClient, numbers: range) -> list[int]:
    """The prefixes that are held, asked without touching them."""
    return [n for n in numbers if client.call("KV.PREFIX.OWNER", f"prefix{n}") != "-1"]


def test_256_slots_hold_128_prefixes_and_the_oldest_goes(
    server: Callable[..., ServerProcess],
) -> None:
    """The design's number of session slots is the default."""
    client = server("--kvcache", "-w", "1").client()
    for number in range(128):
        put(client, number)
    assert owned(client, range(128)) == list(range(128))
    assert client.call("KV.PREFIX.LOOKUP", "prefix0") == "HIT"
    put(client, 128)
    assert owned(client, range(129)) == [0, *range(2, 129)]
    assert client.call("KV.PREFIX.LOOKUP", "prefix1") == "MISS"
    assert not is_whole(client, 1)
    assert all(is_whole(client, number) for number in (0, 2, 127, 128))


def test_a_model_of_lru_agrees_over_a_random_workload(server: Callable[..., ServerProcess]) -> None:
    running = server("--vstore-sessions", "16")
    client = running.client()
    random = np.random.default_rng(7)
    recent: list[int] = []
    for step in range(300):
        number = int(random.zipf(1.4)) % 24
        hit = client.call("KV.PREFIX.LOOKUP", f"prefix{number}") == "HIT"
        assert hit == (number in recent), step
        if hit:
            recent.remove(number)
        else:
            put(client, number)
        recent.append(number)
        del recent[:-8]
    assert owned(client, range(24)) == sorted(recent)
    running.kill()
    running.restart()
    client = running.client()
    assert owned(client, range(24)) == sorted(recent)
    assert all(is_whole(client, number) for number in recent)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
