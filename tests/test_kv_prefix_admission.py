"""Two-hit admission: a prefix is stored at its second miss, whoever counted the first.

python tests/test_kv_prefix_admission.py      # as pytest runs it
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.test_kv_prefix_lru import owned, put

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess


def ask(client: RawClient, number: int, threshold: int) -> bool:
    """One request of a client that admits at `threshold` misses; whether it hit."""
    ns = f"prefix{number}"
    if client.call("KV.PREFIX.LOOKUP", ns) == "HIT":
        return True
    if client.call("KV.PREFIX.ADMIT", ns) >= threshold:
        put(client, number)
    return False


def test_the_second_miss_stores_even_from_another_connection(
    server: Callable[..., ServerProcess],
) -> None:
    running = server("--kvcache", "-w", "1")
    one, other = running.client(), running.client()
    assert not ask(one, 1, threshold=2)
    assert owned(one, range(3)) == []
    assert not ask(other, 1, threshold=2)
    assert owned(one, range(3)) == [1]
    assert ask(one, 1, threshold=2)
    assert ask(other, 1, threshold=2)
    assert owned(one, range(3)) == [1]


def test_one_off_prefixes_do_not_push_out_what_is_used(
    server: Callable[..., ServerProcess],
) -> None:
    """Eight prefixes fit; six are asked for again and again between hundreds asked for once."""
    hits = {}
    for threshold in (1, 2):
        client = server("--vstore-sessions", "16").client()
        random = np.random.default_rng(3)
        hits[threshold] = 0
        for turn in range(400):
            often = random.random() < 0.4
            number = int(random.integers(0, 6)) if often else 1000 + turn
            hits[threshold] += ask(client, number, threshold)
    assert hits[2] > 0.85 * 0.4 * 400
    assert hits[2] > 1.3 * hits[1]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
