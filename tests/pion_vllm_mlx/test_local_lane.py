"""The local lane: a prefix as a file of the server's machine, and what keeps it from coming so."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from pion_patches.cache_rebuild import dismantle, rebuild
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.lent import ROOM
from pion_vllm_mlx.transport.local import OFF, is_loopback
from tests.pion_patches.zoo import families
from tests.pion_vllm_mlx.fake_peer import FakePeer, Words, array, bulk, seconds_of
from tests.pion_vllm_mlx.tiny import PREFIX, cold_answer, continue_greedily, tiny_llama

Server = Any
PATIENT = 20.0
MODEL = tiny_llama()
COLD = cold_answer(MODEL, PREFIX)


pytestmark = pytest.mark.usefixtures("no_lane_in_process")


def client(server: Server, model: Any = MODEL, **settings: Any) -> PionPromptCache:
    settings = {"port": server.port, "timeout": PATIENT, "store": "sync"} | settings
    return PionPromptCache(model, **settings)


def lend(pc: PionPromptCache, namespace: str, prefix: list[int] = PREFIX) -> list[Any]:
    """Store a prefix, have its file made, and return the first cache that came from it."""
    ends = time.monotonic() + PATIENT
    while time.monotonic() < ends:
        before = pc.stats()["hits_local"]
        cache = pc.get_or_prefill(prefix, namespace)
        if pc.stats()["hits_local"] > before:
            return cache
        time.sleep(0.05)
    raise AssertionError(f"nothing was lent: {pc.stats()}")


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def descriptors_of(fd: int) -> int:
    """How many descriptors of this process are open on the same file."""
    target = os.fstat(fd)
    count = 0
    for other in range(256):
        with contextlib.suppress(OSError):
            count += os.path.samestat(os.fstat(other), target)
    return count


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_lent_prefix_continues_as_a_cold_run_bit_for_bit(
    shared: Server, namespace: str, dtype: str
) -> None:
    model = tiny_llama(dtype=getattr(mx, dtype))
    with client(shared, model) as pc:
        first = continue_greedily(model, pc.get_or_prefill(PREFIX, namespace))
        assert continue_greedily(model, lend(pc, namespace)) == first == cold_answer(model, PREFIX)
        assert pc.stats()["not_lent"].keys() <= {"unmade", "absent"}


def test_what_is_lent_has_room_for_the_first_tokens_after_it(
    shared: Server, namespace: str
) -> None:
    """The first append then copies nothing, and nothing but what was stored counts."""
    with client(shared) as pc:
        pc.get_or_prefill(PREFIX, namespace)
        cache = lend(pc, namespace)
        before = [leaf.keys.shape[2] for leaf in cache]
        assert before == [len(PREFIX) + ROOM] * len(cache)
        assert [leaf.offset for leaf in cache] == [len(PREFIX)] * len(cache)
        assert not mx.any(cache[0].keys[:, :, len(PREFIX) :]).item()
        again = rebuild(make_prompt_cache(MODEL), dismantle(cache, len(PREFIX)))
        assert continue_greedily(MODEL, cache) == COLD == continue_greedily(MODEL, again)
        assert [leaf.keys.shape[2] for leaf in cache] == before


@pytest.mark.parametrize("vquant", ["int8", "fp8", "mlx4g32", "turbo4", "fp16", "fp32"])
def test_every_format_comes_as_it_does_over_tcp(
    shared: Server, namespace: str, vquant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Wide enough for blocks of 32.
    model = tiny_llama(head_dim=32)
    with client(shared, model, vquant=vquant) as pc:
        pc.get_or_prefill(PREFIX, namespace)
        lent = continue_greedily(model, lend(pc, namespace))
        monkeypatch.setenv(OFF, "1")
        assert continue_greedily(model, pc.get_or_prefill(PREFIX, namespace)) == lent
        assert pc.stats()["not_lent"]["off"] == 1


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64)])
def test_quantised_caches_come_as_their_codes(
    shared: Server, namespace: str, bits: int, group: int
) -> None:
    model = tiny_llama(head_dim=64)
    with client(shared, model, kv_bits=bits, kv_group_size=group) as pc:
        cold = continue_greedily(model, pc.get_or_prefill(PREFIX, namespace))
        cache = lend(pc, namespace)
        assert all(type(leaf) is QuantizedKVCache for leaf in cache)
        assert continue_greedily(model, cache) == cold


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5", "mamba2", "llama4", "gpt_oss"])
def test_windows_chunks_and_recurrent_state_come_too(
    shared: Server, namespace: str, family: str
) -> None:
    model: Any = families[family]()
    prefix = [int(token) for token in np.random.default_rng(1).integers(0, 32, 30)]
    with client(shared, model) as pc:
        cold = continue_on(model, pc.get_or_prefill(prefix, namespace))
        assert continue_on(model, lend(pc, namespace, prefix)) == cold


def continue_on(model: Any, cache: list[Any]) -> bytes:
    bits = b""
    for token in (5, 9, 3):
        bits += np.array(model(mx.array([[token]]), cache=cache).astype(mx.float32)).tobytes()
    return bits


def test_a_cache_from_a_held_file_is_the_callers_own(
    shared: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A10: what one caller trims and appends is not seen by the next, in process or lent."""
    with client(shared) as pc:
        pc.get_or_prefill(PREFIX, namespace)
        lend(pc, namespace)
        monkeypatch.delenv("PION_PROMPT_CACHE_NO_INPROC")
        cache = pc.get_or_prefill(PREFIX, namespace)
        assert pc.stats()["hits_in_process"] == 0
        for leaf in cache:
            leaf.trim(10)
        MODEL(mx.array([[1, 2, 3]]), cache=cache)
        mx.eval([leaf.state for leaf in cache])
        again = pc.get_or_prefill(PREFIX, namespace)
        assert pc.stats()["hits_in_process"] == 1
        assert continue_greedily(MODEL, again) == COLD


def test_no_descriptor_is_left_open(shared: Server, namespace: str) -> None:
    with client(shared) as pc:
        lend(pc, namespace)
        before = open_files()
        for _ in range(5):
            pc.get_or_prefill(PREFIX, namespace)
        assert open_files() == before


def test_a_wrong_prefix_or_model_is_a_miss_as_over_tcp(shared: Server, namespace: str) -> None:
    with client(shared) as pc, client(shared, tiny_llama(seed=5), store="off") as other:
        lend(pc, namespace)
        assert pc.restore(namespace, len(PREFIX) - 1) is None
        other.get_or_prefill(PREFIX, namespace)
        assert pc.stats()["miss_reasons"]["length"] == 1
        assert other.stats()["miss_reasons"] == {"model": 1}


def test_a_password_opens_the_local_lane_too(server: Callable[..., Server], namespace: str) -> None:
    running = server("--requirepass", "secret")
    with client(running, password="secret") as pc:
        assert continue_greedily(MODEL, lend(pc, namespace)) == COLD


def test_a_server_that_dies_is_a_cold_answer_and_a_restart_is_found_again(
    server: Callable[..., Server], namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = server()
    with client(running) as pc:
        lend(pc, namespace)
        running.kill()
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, namespace)) == COLD
        running.restart()
        with client(running) as fresh:
            assert continue_greedily(MODEL, lend(fresh, namespace)) == COLD
            assert fresh.stats()["misses"] == 0


def test_a_server_that_falls_silent_costs_one_deadline_on_both_lanes(
    server: Callable[..., Server], namespace: str
) -> None:
    running = server()
    with client(running, timeout=1.0) as pc:
        lend(pc, namespace)
        over_tcp: Any = pc._lane
        connects = over_tcp.connects
        os.kill(running.pid, signal.SIGSTOP)
        try:
            assert pc.restore(namespace, len(PREFIX)) is None
            assert not over_tcp.available, "the other lane does not wait as well"
            assert pc.restore(namespace, len(PREFIX)) is None
        finally:
            os.kill(running.pid, signal.SIGCONT)
        assert over_tcp.connects == connects
        assert pc.stats()["miss_reasons"]["unavailable"] == 2


def test_a_server_without_a_socket_serves_over_tcp_and_is_asked_once(
    server: Callable[..., Server], namespace: str
) -> None:
    running = server("--unixsocket", "none")
    with client(running) as pc:
        for _ in range(3):
            pc.get_or_prefill(PREFIX, namespace)
        stats = pc.stats()
    assert stats["hits"] == 2
    assert stats["not_lent"] == {"socketless": 3}


def test_a_socket_nobody_may_open_means_tcp(server: Callable[..., Server], namespace: str) -> None:
    running = server()
    with client(running) as pc:
        pc.get_or_prefill(PREFIX, namespace)
        pc._local.close()
        (running.directory / "pion.sock").unlink()
        pc.get_or_prefill(PREFIX, namespace)
        stats = pc.stats()
    assert stats["hits"] == 1
    assert stats["not_lent"]["unreachable"] == 1


@pytest.mark.parametrize(
    ("host", "here"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("10.0.0.9", False), ("box", False)],
)
def test_only_a_loopback_address_is_this_machine(host: str, here: bool) -> None:
    assert is_loopback(host) is here


class Impostor:
    """Listens at a Unix socket and sends what it is told to, with what descriptors it is told."""

    def __init__(self, path: Path, answers: list[tuple[bytes, list[int]]]) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._answers = answers
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        connection.recv(65536)
        for data, files in self._answers:
            socket.send_fds(connection, [data], files)
        connection.recv(65536)
        connection.close()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def impostor(tmp_path: Path) -> Iterator[Callable[..., tuple[PionPromptCache, FakePeer]]]:
    """A server whose Unix socket gives these answers; its TCP port knows of nothing."""
    made: list[Any] = []

    def start(*answers: tuple[bytes, list[int]]) -> tuple[PionPromptCache, FakePeer]:
        door = Impostor(tmp_path / "s", list(answers))

        def answer(words: Words) -> bytes:
            if words[0] == b"PION.SOCKET":
                return array(bulk(os.fsencode(door.path)), bulk(b"run"))
            return bulk(None) if words[0] != b"KV.PREFIX.LOOKUP" else b"+MISS\r\n"

        peer = FakePeer(answer)
        pc = PionPromptCache(MODEL, port=peer.port, timeout=0.5, store="off")
        made.extend((pc, peer, door))
        return pc, peer

    yield start
    for each in made:
        each.stop() if isinstance(each, FakePeer) else each.close()


def greeting(path: Path, run: bytes = b"run") -> bytes:
    return array(bulk(os.fsencode(path / "s")), bulk(run))


LENT = array(b":1\r\n", b":%d\r\n", bulk(b"d" * 16))


def test_another_server_behind_the_path_is_never_believed(
    impostor: Any, tmp_path: Path, namespace: str
) -> None:
    """A forwarded port: the path names a socket of this machine, and of another server."""
    pc, _ = impostor((greeting(tmp_path, b"another") + bulk(None) + bulk(None), []))
    assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, namespace)) == COLD
    pc.get_or_prefill(PREFIX, namespace)
    assert pc.stats()["not_lent"] == {"remote": 2}


def _writable(folder: Path) -> int:
    fd = os.open(folder / "w", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * 100)
    os.unlink(folder / "w")
    return fd


def _named(folder: Path) -> int:
    (folder / "n").write_bytes(b"x" * 100)
    return os.open(folder / "n", os.O_RDONLY)


def _short(folder: Path) -> int:
    """F: a file cut short after it was announced."""
    (folder / "t").write_bytes(b"x" * 99)
    fd = os.open(folder / "t", os.O_RDONLY)
    os.unlink(folder / "t")
    return fd


def _pipe(folder: Path) -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


@pytest.mark.parametrize("make", [_writable, _named, _short, _pipe])
def test_a_file_others_may_change_or_of_another_length_is_not_used(
    impostor: Any, tmp_path: Path, namespace: str, make: Callable[[Path], int]
) -> None:
    fd = make(tmp_path)
    pc, _ = impostor((greeting(tmp_path) + bulk(None) + LENT % 100, [fd]))
    assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, namespace)) == COLD
    assert pc.stats()["not_lent"] == {"unsound": 1}
    assert descriptors_of(fd) == 1, "the one that came is closed"
    os.close(fd)


@pytest.mark.parametrize(
    "reply",
    [LENT % 100, b":5\r\n", b"+OK\r\n", b"*0\r\n"],
    ids=["no descriptor", "integer", "status", "empty"],
)
def test_a_reply_that_is_no_loan_is_not_used(
    impostor: Any, tmp_path: Path, namespace: str, reply: bytes
) -> None:
    pc, _ = impostor((greeting(tmp_path) + bulk(None) + reply, []))
    assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, namespace)) == COLD
    assert pc.stats()["not_lent"] == {"unsound": 1}


@pytest.mark.parametrize("sent", [b"", b"*2\r\n$1", b"?\r\n"], ids=["silence", "half", "noise"])
def test_a_socket_that_stalls_or_talks_nonsense_costs_a_bounded_time(
    impostor: Any, tmp_path: Path, namespace: str, sent: bytes
) -> None:
    """Half a reply, silence: TCP is asked next, once; the socket then gets a rest."""
    pc, _ = impostor((sent or b"\r", [])) if sent else impostor()
    assert seconds_of(lambda: pc.get_or_prefill(PREFIX, namespace)) < 10
    pc.get_or_prefill(PREFIX, namespace)
    assert pc.stats()["not_lent"] == {"unreachable": 1, "paused": 1}
    assert pc.stats()["miss_reasons"] == {"absent": 2}


def test_a_file_that_is_no_prefix_is_left_and_the_rows_are_fetched(
    server: Callable[..., Server], namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncated or foreign file is an error of the reader's, never a signal."""
    with client(server()) as pc:
        lend(pc, namespace)

        def cut_short(path: str, **_: Any) -> Any:
            raise RuntimeError("[read] Unable to read from file.")

        monkeypatch.setattr(mx, "load", cut_short)
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, namespace)) == COLD
        assert pc.stats()["not_lent"]["unreadable"] == 1
        monkeypatch.setattr(mx, "load", lambda path, **_: {"k.0.0": mx.zeros((1,))})
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, namespace)) == COLD
        assert pc.stats()["not_lent"]["unsound"] == 1
        assert pc.stats()["miss_reasons"] == {"absent": 1}


def test_four_bit_rows_take_less_than_a_third_of_the_bytes_of_fp16(
    shared: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OFF, "1")
    model = tiny_llama(head_dim=32)
    fetched = {}
    for vquant in ("mlx4g32", "fp16"):
        with client(shared, model, vquant=vquant) as pc:
            for _ in range(2):
                pc.get_or_prefill(PREFIX, namespace + vquant)
            fetched[vquant] = pc.stats()["bytes_fetched"]
    assert fetched["mlx4g32"] <= 0.32 * fetched["fp16"]
