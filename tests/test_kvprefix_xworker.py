"""A prefix registered on one connection is found on every other, whichever worker answers.

python tests/test_kvprefix_xworker.py [--port 1974]     # a server that runs with -w 4, or its own

Expected: 12 fresh connections all answer HIT; the owner serves, every other worker names the owner.
"""

from __future__ import annotations

import argparse
import os
import re
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.conftest import RawClient, ServerProcess

Words: TypeAlias = "tuple[str | bytes | int, ...]"

WORKERS, CONNECTIONS = 4, 12
FLAGS = ("--kvcache", "-w", str(WORKERS), "--independent-workers")
DIM = 32
ROW = struct.pack(f"<{DIM}f", *range(DIM))
LIVES_ON = re.compile(r"lives on worker (\d+)")


def worker_of(client: RawClient) -> int:
    info = client.call("KV.PREFIX.INFO").decode()
    assert "directory_enabled:1\r\n" in info
    return int(re.search(r"my_worker_id:(\d+)", info)[1])  # type: ignore[index]


def worker_clients(port: int, workers: int = WORKERS) -> list[RawClient]:
    """A connection to each worker's own port."""
    return [RawClient("127.0.0.1", port + 2 + number) for number in range(workers)]


def check_fresh_lookups(port: int, name: str) -> None:
    """REGISTER on one connection; LOOKUP on 12 others."""
    first = RawClient("127.0.0.1", port)
    first.call("KV.PREFIX.DROP", name)
    assert RawClient("127.0.0.1", port).call("KV.PREFIX.LOOKUP", name) == "MISS"
    assert first.call("KV.PREFIX.REGISTER", name, DIM, "fp32") == "OK"
    answers = []
    for _ in range(CONNECTIONS):
        client = RawClient("127.0.0.1", port)
        answers.append(client.call("KV.PREFIX.LOOKUP", name))
        client.close()
    assert answers == ["HIT"] * CONNECTIONS


def check_contract(port: int, name: str) -> None:
    """What owner and others answer, command by command."""
    shared = RawClient("127.0.0.1", port)
    owner = int(shared.call("KV.PREFIX.OWNER", name).split()[0])
    clients = worker_clients(port)
    assert [worker_of(client) for client in clients] == list(range(WORKERS))
    home = clients[owner]
    for side in ("pk", "pv"):
        assert home.call("V.STOREBATCH", f"{name}_{side}", 0, 0, 1, ROW) == "OK"
    hashes = struct.pack("<2Q", 5, 7)
    home.call("KV.PREFIX.REGISTER", name, DIM, "fp32", "BLOCKS", 16, 2, hashes)
    assert home.call("KV.PREFIX.BLOCKS", name) == struct.pack("<II", 16, 2) + hashes
    for number, client in enumerate(clients):
        assert client.call("KV.PREFIX.LOOKUP", name) == "HIT"
        assert client.call("KV.PREFIX.OWNER", name) == str(owner)
        if number == owner:
            continue
        k_side, v_side = f"{name}_pk", f"{name}_pv"
        about_sids: list[tuple[str, Words]] = [
            ("V.STOREBATCH", (k_side, 0, 0, 1, ROW)),
            ("V.FETCH", (k_side, 0, "RANGE", 0, 1)),
            ("V.FETCH", (k_side, "BATCH", 0, 1)),
            ("V.EXPORT", (k_side, v_side, 0, 1, 1, 1, DIM)),
        ]
        for command, words in about_sids:
            assert client.error(command, *words) == (
                f"ERR session lives on worker {owner} (this is worker {number}); "
                f"reconnect for {command}"
            )
        about_names: list[tuple[str, Words]] = [
            ("KV.PREFIX.BLOCKS", ()),
            ("KV.PREFIX.MEMBERSHIP", (2, hashes)),
            ("KV.PREFIX.META", ("GET",)),
            ("KV.PREFIX.META", ("BEGIN",)),
            ("KV.PREFIX.REGISTER", (DIM, "fp32")),
            ("KV.PREFIX.LEND", ()),
            ("KV.PREFIX.PIN", ()),
            ("KV.PREFIX.DROP", ()),
            ("SSM.PREFIX.FETCH", (0,)),
        ]
        for command, words in about_names:
            text = client.error(command, name, *words)
            assert text == f"ERR {command} session lives on worker {owner}"
    assert home.call("V.FETCH", f"{name}_pk", 0, "RANGE", 0, 1) == ROW
    assert home.call("KV.PREFIX.DROP", name) == 1
    assert [client.call("KV.PREFIX.LOOKUP", name) for client in clients] == ["MISS"] * WORKERS
    assert [client.call("KV.PREFIX.OWNER", name) for client in clients] == ["-1"] * WORKERS


@pytest.fixture(scope="module")
def port(module_server: Callable[..., ServerProcess]) -> int:
    return int(module_server(*FLAGS).port)


def test_every_fresh_connection_finds_a_registered_prefix(port: int) -> None:
    check_fresh_lookups(port, "xworker|fresh")


def test_others_than_the_owner_name_it(port: int) -> None:
    check_fresh_lookups(port, "xworker|contract")
    check_contract(port, "xworker|contract")


def test_warm_and_attention_are_the_owners_too(port: int) -> None:
    pytest.importorskip("mlx.core")
    zero, two, *_ = worker_clients(port)
    assert zero.call("KV.PREFIX.REGISTER", "warmed", DIM, "fp32") == "OK"
    text = two.error("KV.PREFIX.WARM", "warmed", 1, DIM, "warmed_attn")
    assert text == "ERR KV.PREFIX.WARM session lives on worker 0"
    text = two.error("ATTEND.PREFIX.LOOKUP", "warmed_attn", 0)
    assert text == "ERR ATTEND.PREFIX.LOOKUP session lives on worker 0"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, help="of a running server with 4 workers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pion-xworker-") as folder:
        running = None if options.port else ServerProcess(Path(folder) / "data", FLAGS, None)
        found = options.port or running.port  # type: ignore[union-attr]
        try:
            name = f"xworker|script|{os.getpid()}"
            check_fresh_lookups(found, name)
            check_contract(found, name)
        finally:
            if running is not None:
                running.close()
    print(f"{CONNECTIONS} fresh connections HIT; {WORKERS - 1} workers name the owner")
    return 0


if __name__ == "__main__":
    sys.exit(main())
