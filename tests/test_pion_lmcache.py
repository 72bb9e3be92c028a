"""PionStore and LMCacheRemoteBackend against a running server.

python tests/test_pion_lmcache.py       # as pytest runs it
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest

from pion_lmcache import LMCacheRemoteBackend, PionStore
from pion_vllm_mlx.transport import Refused, ServerError, TransportError

Server = Any

DIM = 64
SIDES: list[tuple[Literal["K", "V"], int]] = [("K", 0), ("V", 10)]


def rows(count: int, seed: int = 0, dim: int = DIM) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).uniform(-1, 1, (count, dim)).astype(np.float32)


@pytest.fixture
def store(shared: Server) -> Iterator[PionStore]:
    with PionStore(port=shared.port, vquant="fp32") as opened:
        yield opened


def test_rows_come_back_as_they_were_stored(store: PionStore) -> None:
    """The design's calls."""
    store.register("my_app|prompt_a", kv_dim=DIM)
    for layer in range(2):
        for side, first in SIDES:
            values = rows(20, first + layer)
            store.store_layer(
                "my_app|prompt_a", side, layer=layer, token_offset=0, tensor_fp32=values
            )
    store.store_layer("my_app|prompt_a", "V", layer=1, token_offset=20, tensor_fp32=rows(5, 99))
    assert store.lookup("my_app|prompt_a", tokens=20)
    for layer in range(2):
        found = store.fetch_layer("my_app|prompt_a", "K", layer, 0, 20)
        assert found is not None
        assert np.array_equal(found, rows(20, layer))
    whole = store.fetch_layer("my_app|prompt_a", "V", 1, 10, 25)
    assert whole is not None
    assert np.array_equal(whole, np.concatenate([rows(20, 11)[10:], rows(5, 99)]))
    assert store.fetch_layer("my_app|prompt_a", "K", 0, 0, 21) is None
    assert store.owner("my_app|prompt_a") == 0
    assert store.drop("my_app|prompt_a")
    assert not store.drop("my_app|prompt_a")
    assert not store.lookup("my_app|prompt_a")


def test_a_prefix_of_mixed_formats_has_an_owner(shared: Server, store: PionStore) -> None:
    specs = ("fmt=fp16,dim=32", "fmt=fp32,dim=32") * 2
    shared.client().call("KV.PREFIX.REGISTER.SCHEMA", "mixed", 2, *specs)
    assert " " in shared.client().call("KV.PREFIX.OWNER", "mixed")
    assert store.owner("mixed") == 0
    assert store.owner("nobody's") is None


def test_heads_and_lossy_formats(shared: Server) -> None:
    """[tokens, H, D] is one row of H·D values a token; the format is the store's."""
    with PionStore(port=shared.port, vquant="int8") as store:
        store.register("heads", kv_dim=DIM)
        keys = rows(7).reshape(7, 4, DIM // 4)
        store.store_layer("heads", "K", 0, 0, keys)
        found = store.fetch_layer("heads", "K", 0, 0, 7)
        assert found is not None
        assert np.abs(found - rows(7)).max() < 0.05
        store.register("other", kv_dim=DIM, vquant="fp32")
        assert store.info()["vstore_sessions"] >= 4


def test_what_a_server_refuses_is_an_error(store: PionStore) -> None:
    with pytest.raises(ServerError, match="session not found"):
        store.store_layer("never registered", "K", 0, 0, rows(1))
    with pytest.raises(ValueError, match="'K' or 'V'"):
        store.fetch_layer("x", "Q", 0, 0, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows of shape"):
        store.store_layer("x", "K", 0, 0, np.float32(1))


def test_a_restarted_server_is_found_again(server: Callable[..., Server]) -> None:
    running = server("--requirepass", "s3cret")
    with PionStore(port=running.port, password="s3cret") as store:
        store.register("kept", kv_dim=DIM)
        store.commit()
        running.kill()
        with pytest.raises(TransportError):
            store.lookup("kept")
        running.restart()
        assert store.lookup("kept")
    with PionStore(port=running.port, password="wrong") as store, pytest.raises(Refused):
        store.lookup("kept")
    with PionStore(port=running.port) as store, pytest.raises(Refused):
        store.lookup("kept")


# --- chunks --------------------------------------------------------------------------------------


def chunk(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def backend(shared: Server) -> Iterator[LMCacheRemoteBackend]:
    opened = LMCacheRemoteBackend(port=shared.port)
    yield opened
    opened.close()


def room(memory: bytearray) -> Callable[[bytes, int], memoryview]:
    return lambda description, nbytes: memoryview(memory)


@pytest.mark.parametrize("size", [0, 1, 40_000, 3 << 20])
def test_chunks_come_back_whole(backend: LMCacheRemoteBackend, size: int) -> None:
    key = f"model@8@0@{size:x}@half"
    assert not backend.contains(key)
    assert backend.get(key) is None
    assert backend.put(key, chunk(size), b"described")
    assert backend.contains(key)
    assert backend.get(key) == chunk(size)
    assert key in backend.keys("model@*")
    assert backend.remove_many([key, "none"]) == [True, False]


def test_a_missing_chunk_in_the_middle_takes_nobodys_place(backend: LMCacheRemoteBackend) -> None:
    """H09."""
    keys = [f"batch{index}" for index in range(150)]
    assert all(backend.put_many([(key, chunk(20_000, at), b"") for at, key in enumerate(keys)]))
    backend.remove_many([keys[70]])
    memory = [bytearray(20_000) for _ in keys]
    whole = backend.get_into(keys, [room(one) for one in memory])
    assert whole == [index != 70 for index in range(150)]
    assert all(memory[at] == chunk(20_000, at) for at in range(150) if at != 70)
    assert backend.contains_many(keys).index(False) == 70


def test_a_chunk_of_another_size_than_expected_is_a_miss(backend: LMCacheRemoteBackend) -> None:
    backend.put("sized", chunk(30_000))

    def raising(description: bytes, nbytes: int) -> memoryview:
        raise ValueError("not a description of ours")

    rooms = [room(bytearray(20_000)), lambda d, n: None, raising, room(bytearray(30_000))]
    assert backend.get_into(["sized"] * 4, rooms) == [False, False, False, True]
    assert backend.get("sized") == chunk(30_000)


def test_a_dead_server_is_a_miss_and_costs_little(server: Callable[..., Server]) -> None:
    running = server()
    backend = LMCacheRemoteBackend(port=running.port, timeout=5)
    assert backend.put("kept", chunk(50_000))
    running.kill()
    assert backend.get("kept") is None
    assert not backend.put("more", b"x")
    assert backend.contains_many(["kept"] * 3) == [False] * 3
    assert backend.keys() == []
    assert not backend.ping()
    running.restart()
    again = LMCacheRemoteBackend(port=running.port)
    assert again.get("kept") == chunk(50_000)
    assert again.ping()


def test_threads_share_a_backend(backend: LMCacheRemoteBackend) -> None:
    failures: list[int] = []

    def work(seed: int) -> None:
        for turn in range(10):
            key = f"thread{seed}.{turn}"
            if not backend.put(key, chunk(30_000, seed)) or backend.get(key) != chunk(30_000, seed):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_package_does_not_import_mlx() -> None:
    code = "import sys, pion_lmcache; print(sorted(m for m in sys.modules if m.startswith('mlx')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
