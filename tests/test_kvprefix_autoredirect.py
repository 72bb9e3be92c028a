"""PionStore.auto_redirect: a call about a prefix on another worker is repeated there.

python tests/test_kvprefix_autoredirect.py       # as pytest runs it
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pion_lmcache import PionStore
from pion_vllm_mlx.transport import ServerError

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
    """A worker that cannot be reached is asked for by the shared port again, not for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        asked = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    asked.append(client)
                    client.recv(65536)
                    client.sendall(b"-ERR session lives on worker 60000; reconnect for V.FETCH\r\n")

        threading.Thread(target=serve, daemon=True).start()
        with PionStore(port=port) as store, pytest.raises(ServerError, match="worker 60000"):
            store.fetch_layer("x", "K", 0, 0, 1)
        assert len(asked) == 17
        for client in asked:
            client.close()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
