"""PionStore.auto_redirect: a call about a prefix on another worker is repeated there.

python tests/test_kvprefix_autoredirect.py       # as pytest runs it
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pion_lmcache import PionStore
from pion_vllm_mlx.transport import ServerError, TransportError
from tests.conftest import RawClient

Server = Any

DIM = 64


def rows(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).uniform(-1, 1, (count, DIM)).astype(np.float32)


WORKER = 1


class OtherWorker:
    """A worker that owns nothing, in front of the real server as worker 1 behind port + 3.

    It answers the commands that only an owner can with the redirect, and passes others on.
    """

    def __init__(self, real: int) -> None:
        self.redirects = 0
        self._real = real
        self._listener = socket.create_server(("127.0.0.1", real - 2 - WORKER))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._speak, args=(client,), daemon=True).start()

    def _speak(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._real)) as real:
            while data := client.recv(1 << 20):
                name = data.split(b"\r\n", 3)[2]
                if name in (b"V.STOREBATCH", b"V.FETCH"):
                    self.redirects += 1
                    client.sendall(
                        b"-ERR session lives on worker 1 (this is worker 0); reconnect for %b\r\n"
                        % name
                    )
                else:
                    real.sendall(data)
                    client.sendall(real.recv(1 << 20))

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def other(server: Callable[..., Server]) -> Iterator[OtherWorker]:
    for _ in range(20):
        # The port three below may be somebody's.
        with contextlib.suppress(OSError):
            worker = OtherWorker(server().port)
            break
    else:
        pytest.skip("no two free ports three apart")
    yield worker
    worker.close()


def test_a_call_about_a_prefix_elsewhere_is_repeated_there(other: OtherWorker) -> None:
    with PionStore(port=other.port, vquant="fp32") as store:
        store.register("elsewhere", kv_dim=DIM)
        for layer in range(3):
            store.store_layer("elsewhere", "K", layer, 0, rows(4, layer))
        found = store.fetch_layer("elsewhere", "K", 2, 0, 4)
    assert found is not None
    assert np.array_equal(found, rows(4, 2))
    # Once is enough to know where it lives.
    assert other.redirects == 1


def test_without_auto_redirect_the_caller_is_told(other: OtherWorker) -> None:
    with PionStore(port=other.port, auto_redirect=False) as store:
        store.register("elsewhere", kv_dim=DIM)
        with pytest.raises(ServerError, match="lives on worker 1"):
            store.store_layer("elsewhere", "K", 0, 0, rows(4))


def test_redirects_in_a_circle_end() -> None:
    """A worker that cannot be reached is knocked for at the shared port, 16 times at most."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        asked = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    asked.append(client)
                    threading.Thread(target=redirect, args=(client,), daemon=True).start()

        def redirect(client: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while client.recv(65536):
                    client.sendall(b"-ERR session lives on worker 250; reconnect for V.FETCH\r\n")

        threading.Thread(target=serve, daemon=True).start()
        with PionStore(port=port) as store, pytest.raises(ServerError, match="worker 250"):
            store.fetch_layer("x", "K", 0, 0, 1)
        assert 17 <= len(asked) <= 20
        for client in asked:
            client.close()


# --- workers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four(module_server: Callable[..., Server]) -> Server:
    return module_server("-w", "4", "--independent-workers", "--no-attention")


def at(server: Server, worker: int) -> RawClient:
    """A connection to a worker's own port."""
    return RawClient("127.0.0.1", server.port + 2 + worker)


def pid_of(server: Server, worker: int) -> int:
    found = re.search(rb"process_id:(\d+)", at(server, worker).call("INFO", "server"))
    assert found is not None
    return int(found[1])


def test_prefixes_of_every_worker_are_stored_and_read_by_one_client(four: Server) -> None:
    names = [f"worker|{number}" for number in range(4)]
    for number, name in enumerate(names):
        assert at(four, number).call("KV.PREFIX.REGISTER", name, DIM, "fp32") == "OK"
    with PionStore(port=four.port, vquant="fp32") as store:
        for number, name in enumerate(names):
            store.register(name, kv_dim=DIM, prefill_ms=7)
            store.store_layer(name, "K", 0, 0, rows(4, number))
            assert store.owner(name) == number
    with PionStore(port=four.port) as store:
        for number, name in enumerate(names):
            found = store.fetch_layer(name, "K", 0, 0, 4)
            assert found is not None
            assert np.array_equal(found, rows(4, number))
            assert store.drop(name)
            assert store.owner(name) is None


def test_a_commit_reaches_every_worker(four: Server) -> None:
    def asked() -> list[int]:
        infos = [at(four, number).call("INFO", "stats").decode() for number in range(4)]
        return [int(info.split("total_commands_processed:")[1].split()[0]) for info in infos]

    before, alone = asked(), asked()
    with PionStore(port=four.port) as store:
        store.commit()
    # Looking is a command itself; a commit is two, and the first of them asked who there is.
    own = [late - early for early, late in zip(before, alone, strict=True)]
    more = [late - early for early, late in zip(alone, asked(), strict=True)]
    assert own == [1] * 4
    assert sorted(more) == [3, 3, 3, 4]


def test_without_auto_redirect_a_real_worker_names_the_owner(four: Server) -> None:
    names = [f"named|{number}" for number in range(4)]
    for number, name in enumerate(names):
        at(four, number).call("KV.PREFIX.REGISTER", name, DIM, "fp32")
    with PionStore(port=four.port, vquant="fp32", auto_redirect=False) as store:
        here = store.info()["my_worker_id"]
        for number, name in enumerate(names):
            if number == here:
                store.store_layer(name, "K", 0, 0, rows(1))
            else:
                with pytest.raises(ServerError, match=f"lives on worker {number} "):
                    store.store_layer(name, "K", 0, 0, rows(1))


def test_a_killed_worker_is_found_again_with_what_it_had(server: Callable[..., Server]) -> None:
    """The directory outlives the crash: others know meanwhile where the prefixes live."""
    pair = server("-w", "2", "--no-attention")
    names = ["kept|0", "kept|1"]
    for number, name in enumerate(names):
        assert at(pair, number).call("KV.PREFIX.REGISTER", name, DIM, "fp32") == "OK"
    with PionStore(port=pair.port, vquant="fp32", timeout=30) as store:
        for number, name in enumerate(names):
            store.store_layer(name, "K", 0, 0, rows(4, number))
        for killed in (1, 0, 1):
            os.kill(pid_of(pair, killed), signal.SIGKILL)
            assert at(pair, 1 - killed).call("KV.PREFIX.OWNER", names[killed]) == str(killed)
            assert at(pair, 1 - killed).call("KV.PREFIX.LOOKUP", names[killed]) == "HIT"
            for number, name in enumerate(names):
                found = fetched(store, name)
                assert np.array_equal(found, rows(4, number))
                assert store.owner(name) == number
        store.store_layer(names[1], "K", 1, 0, rows(2, 9))
    assert pair.stop() == 0


def fetched(store: PionStore, name: str) -> Any:
    """The rows; a client may be told once that its connection broke."""
    for _ in range(3):
        with contextlib.suppress(TransportError):
            return store.fetch_layer(name, "K", 0, 0, 4)
    raise AssertionError(f"{name} did not come back")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
