"""The client against a server of several workers: redirects followed, prefixes shared."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.attention import pion_attention_patch
from pion_patches.remote import RemoteKVCache
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.mlx_lm_patch import make_pion_prompt_cache
from pion_vllm_mlx.transport import Command, Patience, ServerError
from pion_vllm_mlx.transport.binary import (
    ERROR,
    FIND_HOME,
    OK,
    PING,
    QUERY_FUSED,
    BinaryLane,
    Declined,
)
from pion_vllm_mlx.transport.endpoint import Endpoint
from pion_vllm_mlx.transport.homes import Homes
from pion_vllm_mlx.transport.resp import RespConnection
from tests.conftest import RawClient
from tests.pion_patches.shipping import largest_difference
from tests.pion_patches.zoo import build
from tests.pion_vllm_mlx.conversation import Cold, ids_of, logits_of
from tests.pion_vllm_mlx.fake_peer import Answer, FakePeer, Words, bulk
from tests.pion_vllm_mlx.tiny import PREFIX, cold_answer, continue_greedily, tiny_llama

Server = Any
MODEL = tiny_llama(head_dim=32)
COLD = cold_answer(MODEL, PREFIX)
SLOW = Patience(first_byte=20, stall=20, total=60)


pytestmark = pytest.mark.usefixtures("no_lane_in_process")


@pytest.fixture(scope="module")
def four(module_server: Callable[..., Server]) -> Server:
    return module_server("-w", "4", "--independent-workers")


def cache(server: Server, **settings: Any) -> PionPromptCache:
    chosen: dict[str, Any] = {"timeout": 20, "store": "sync", "held_bytes": 0} | settings
    return PionPromptCache(MODEL, port=server.port, **chosen)


def owner_of(server: Server, name: str) -> int:
    return int(server.client().call("KV.PREFIX.OWNER", name).split()[0])


def place(server: Server, name: str, worker: int) -> None:
    """Let a worker have a name before anybody stores under it."""
    at = RawClient("127.0.0.1", server.port + 2 + worker)
    at.call("V.CREATE", f"{name}_pk", 64, "VQUANT", "fp32")
    assert owner_of(server, name) == worker


@pytest.mark.parametrize("worker", range(4))
def test_a_prefix_is_stored_and_restored_wherever_it_lives(four: Server, worker: int) -> None:
    name = f"round/{worker}"
    place(four, name, worker)
    with cache(four) as first:
        assert continue_greedily(MODEL, first.get_or_prefill(PREFIX, name)) == COLD
        assert (first.stats()["stores"], first.stats()["stores_failed"]) == (1, 0)
    assert owner_of(four, name) == worker
    with cache(four) as second:
        assert continue_greedily(MODEL, second.get_or_prefill(PREFIX, name)) == COLD
        assert second.stats()["hits"] == 1


class AtWorker(Endpoint):
    """A client whose connections to the shared port one worker happens to accept."""

    worker = 0

    def _open(self, port: int) -> RespConnection:
        return super()._open(port + 2 + self.worker if port == self.port else port)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_conversation_whose_turns_were_stored_by_several_workers_goes_on(
    four: Server, family: str
) -> None:
    """Each turn by a client of another worker: what is new is stored there, the rest found."""
    model = build(family, seed=3)
    ids = ids_of(11, 320)
    cold = Cold(model)
    reused = []
    for turn, end in enumerate((130, 200, 320, 320)):
        lane = AtWorker(port=four.port, connect_timeout=20)
        lane.worker = turn
        settings: dict[str, Any] = {"lane": lane, "timeout": 20, "store": "sync"}
        with PionPromptCache(model, prefill_step_size=64, **settings) as pc:
            restored = pc.get_or_prefill(ids[:end])
            stats = pc.stats()
        reused.append(stats["tokens_restored"])
        assert stats["stores_failed"] == 0
        pauses = [] if family == "llama" else [end - end % 64]
        ends = [pause for pause in (*pauses, end) if pause > reused[-1]]
        whole = cold.run(ids[:end], reused[-1], ends, 64)
        assert largest_difference(logits_of(model, restored), logits_of(model, whole)) == 0.0
    assert reused == ([0, 130, 200, 320] if family == "llama" else [0, 128, 192, 320])


def test_clients_at_once_share_prefixes(four: Server) -> None:
    errors: list[BaseException] = []
    caches = [cache(four) for _ in range(4)]

    def use(pc: PionPromptCache, first: int) -> None:
        try:
            for turn in range(4):
                name = f"many/{(first + turn) % 4}"
                assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, name)) == COLD
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(pc, n)) for n, pc in enumerate(caches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    with cache(four) as pc:
        for number in range(4):
            pc.get_or_prefill(PREFIX, f"many/{number}")
        assert pc.stats()["hits"] == 4
    for pc in caches:
        pc.close()


def test_stage2_answers_wherever_the_prefix_lives(four: Server) -> None:
    place(four, "stage2", 2)
    with cache(four) as pc:
        pc.get_or_prefill(PREFIX, "stage2")
    ordinary: list[Any] = make_prompt_cache(MODEL)
    MODEL(mx.array([PREFIX]), cache=ordinary)
    with pion_attention_patch(), cache(four, stage2=True) as pc:
        remote = make_pion_prompt_cache(MODEL, "stage2", pc, len(PREFIX))
        assert all(isinstance(one, RemoteKVCache) for one in remote)
        for token in (5, 17, 60):
            step = mx.array([[token]])
            found, expected = (np.array(MODEL(step, cache=one)) for one in (remote, ordinary))
            assert float(np.abs(found - expected).max()) < 1e-5
        assert pc.stats()["wire_losses"] == 0
        # A refused frame asks where the prefix lives: none had to go by RESP.
        assert (pc.stats()["attend_binary"], pc.stats()["attend_resp"]) == (2 * 3, 0)


@pytest.mark.parametrize("worker", range(4))
def test_the_binary_lane_goes_to_the_worker_that_holds_the_session(
    four: Server, worker: int
) -> None:
    name = f"binary/{worker}"
    place(four, name, worker)
    keys = np.random.default_rng(worker).standard_normal((1, 3, 32), np.float32)
    sid = f"{name}_attn".encode()
    home = RawClient("127.0.0.1", four.port + 2 + worker)
    home.call("ATTEND.PREFIX.STORE", sid, 0, 1, 3, 32, keys.tobytes(), keys.tobytes())
    queries, none = keys[:, :1].copy(), np.empty((1, 0, 32), np.float32)
    expected = home.call(
        "ATTEND.PREFIX.QUERY_FUSED", sid, 0, 1, 32, 0, 1, queries.tobytes(), b"", b"", b"\0"
    )
    homes = Homes()
    lane = BinaryLane("127.0.0.1", four.port + 1, connect_timeout=20, homes=homes)
    for _ in range(2):
        found = lane.query_fused(sid, 0, queries, none, none, b"\0", None, SLOW)
        assert found.tobytes() == expected
    assert homes.of_name(name.encode()) in (None, worker)  # None: the shared port led to it
    with pytest.raises(Declined):
        lane.query_fused(b"nobody_attn", 0, queries, none, none, b"\0", None, SLOW)
    lane.close()


def test_a_worker_whose_binary_port_is_out_of_reach_is_left_to_resp() -> None:
    """Only the shared ports are forwarded: declined at once, and the lane stays usable."""
    found = []

    def answer(command: int) -> bytes:
        found.append(command)
        if command == PING:
            return frame(OK)
        return frame(OK, struct.pack("<3H", 3, 0, 4)) if command == FIND_HOME else frame(ERROR)

    keys = np.zeros((1, 1, 32), np.float32)
    with frame_peer(answer) as port:
        lane = BinaryLane("127.0.0.1", port, connect_timeout=5)
        for _ in range(3):
            with pytest.raises(Declined, match="worker 3"):
                lane.query_fused(b"a_attn", 0, keys, keys, keys, b"\0", None, SLOW)
            assert lane.usable
        lane.close()
    assert found == [PING, QUERY_FUSED, FIND_HOME]


def frame(status: int, body: bytes = b"") -> bytes:
    return b"\x5e\xca" + struct.pack("<BI", status, len(body)) + body


@contextlib.contextmanager
def frame_peer(answer: Callable[[int], bytes]) -> Iterator[int]:
    """A binary lane that answers each frame's command; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                with sock, sock.makefile("rb") as stream:
                    while len(header := stream.read(7)) == 7:
                        _, command, length = struct.unpack("<HBI", header)
                        stream.read(length)
                        sock.sendall(answer(command))

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


def test_each_worker_lends_what_it_holds_at_its_own_socket(four: Server) -> None:
    """The local lane of one client goes to every worker that has one of its prefixes."""
    names = [f"lent/{worker}" for worker in range(4)]
    for worker, name in enumerate(names):
        place(four, name, worker)
    with cache(four) as pc:
        for name in names:
            pc.get_or_prefill(PREFIX, name)
        ends = time.monotonic() + 60
        lent: set[str] = set()
        while len(lent) < len(names):
            assert time.monotonic() < ends, pc.stats()
            for name in set(names) - lent:
                before = pc.stats()["hits_local"]
                assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, name)) == COLD
                if pc.stats()["hits_local"] > before:
                    lent.add(name)
        assert pc.stats()["not_lent"].keys() <= {"unmade", "absent"}


def test_a_socket_of_a_killed_worker_is_found_again(server: Callable[..., Server]) -> None:
    running = server("-w", "2", "--no-attention")
    place(running, "lent", 1)
    with cache(running) as pc:
        pc.get_or_prefill(PREFIX, "lent")
        wait_for_loan(pc, "lent")
        os.kill(pid_at(running, 1), signal.SIGKILL)
        RawClient("127.0.0.1", running.port + 3).call("PING")
        wait_for_loan(pc, "lent")
        assert pc.stats()["misses"] == 1


def wait_for_loan(pc: PionPromptCache, name: str) -> None:
    ends = time.monotonic() + 30
    before = pc.stats()["hits_local"]
    while pc.stats()["hits_local"] == before:
        assert time.monotonic() < ends, pc.stats()
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, name)) == COLD
        time.sleep(0.1)


def pid_at(server: Server, worker: int) -> int:
    info = RawClient("127.0.0.1", server.port + 2 + worker).call("INFO", "server")
    found = re.search(rb"process_id:(\d+)", info)
    assert found is not None
    return int(found[1])


def test_a_worker_that_was_restarted_serves_its_prefixes_again(
    server: Callable[..., Server],
) -> None:
    running = server("-w", "2", "--no-attention")
    place(running, "kept", 1)
    with cache(running) as pc:
        pc.get_or_prefill(PREFIX, "kept")
        os.kill(pid_at(running, 1), signal.SIGKILL)
        RawClient("127.0.0.1", running.port + 3).call("PING")
        assert continue_greedily(MODEL, pc.get_or_prefill(PREFIX, "kept")) == COLD
        assert pc.stats()["hits"] == 1


def test_an_exchange_may_go_to_several_workers(four: Server) -> None:
    place(four, "e/one", 1)
    place(four, "e/three", 3)
    endpoint = Endpoint(port=four.port, connect_timeout=5)
    commands = [
        Command.of("KV.PREFIX.PIN", "e/three"),
        Command.of("KV.PREFIX.OWNER", "e/nobody"),
        Command.of("V.INFO", "e/one_pk"),
        Command.of("KV.PREFIX.PIN", "e/one"),
    ]
    for _ in range(2):
        three, nobody, info, one = endpoint.exchange(commands, SLOW)
        assert (three, nobody, one) == (1, "-1", 1)
        assert bytes(info).startswith(b"session_idx:")  # type: ignore[arg-type]
    assert endpoint.connects <= 3
    endpoint.close()


def test_where_one_port_is_forwarded_the_shared_one_is_tried_until_it_fits() -> None:
    """Only the shared port can be reached; connections there alternate between workers 0 and 1."""
    workers: dict[int, int] = {}

    def answer(words: Words) -> Answer:
        number = workers.setdefault(threading.get_ident(), len(workers) % 2)
        if words[0] == b"KV.PREFIX.INFO":
            return bulk(b"directory_enabled:1\r\nmy_worker_id:%d\r\n" % number)
        if number != 1:
            return b"-ERR KV.PREFIX.PIN session lives on worker 1\r\n"
        return b":1\r\n"

    with FakePeer(answer) as peer:
        endpoint = Endpoint(port=peer.port, connect_timeout=5)
        assert endpoint.exchange([Command.of("KV.PREFIX.PIN", "a")], SLOW) == [1]
        endpoint.close()


def test_redirects_in_a_circle_end() -> None:
    def answer(words: Words) -> Answer:
        if words[0] == b"KV.PREFIX.INFO":
            return bulk(b"directory_enabled:0\r\nmy_worker_id:0\r\n")
        return b"-ERR KV.PREFIX.PIN session lives on worker 1\r\n"

    with FakePeer(answer) as peer:
        endpoint = Endpoint(port=peer.port, connect_timeout=5)
        (reply,) = endpoint.exchange([Command.of("KV.PREFIX.PIN", "a")], SLOW)
        assert isinstance(reply, ServerError)
        endpoint.close()
