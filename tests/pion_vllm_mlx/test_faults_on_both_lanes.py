"""Every fault of a server or its machine, on both lanes and both kinds of call.

The result is the cold one, bit for bit, in bounded time and without an exception, whatever came of
the restore; the next client is served as ever. The server is a real one, with proxies before its
TCP port and its Unix socket, or itself in trouble.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.transport import Patience
from pion_vllm_mlx.transport import local as local_module
from pion_vllm_mlx.transport.local import OFF, Loan, LocalLane
from tests.pion_vllm_mlx.fake_peer import seconds_of
from tests.pion_vllm_mlx.faulty_doors import Doors, Fault, half, silent, trickle, wrong_length
from tests.pion_vllm_mlx.tiny import PREFIX, cold_answer, continue_greedily, tiny_llama

Server = Any
PATIENT = 20.0
MODEL = tiny_llama()
LONG = PREFIX * 4
OTHER = LONG[::-1]
COLD = {"ns": cold_answer(MODEL, LONG), "other": cold_answer(MODEL, OTHER)}
LANES = ("tcp", "local")
#: By namespace, and by its tokens alone.
CALLS = (True, False)


@pytest.fixture(autouse=True)
def no_lane_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tcp":
        monkeypatch.setenv(OFF, "1")
    return str(request.param)


@pytest.fixture(params=CALLS, ids=["named", "by its tokens"])
def named(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def client(port: int, **settings: Any) -> PionPromptCache:
    defaults: dict[str, Any] = {"timeout": PATIENT, "store": "off"}
    return PionPromptCache(MODEL, port=port, **(defaults | settings))


def ask(pc: PionPromptCache, named: bool, name: str = "ns") -> tuple[list[int], bytes]:
    ids = LONG if name == "ns" else OTHER
    return continue_greedily(MODEL, pc.get_or_prefill(ids, name if named else None))


def fill(port: int) -> None:
    """Store two prefixes, by name and by their tokens, and have their files made."""
    with pytest.MonkeyPatch.context() as patch, client(port, store="sync") as pc:
        patch.delenv(OFF, raising=False)
        for name, named in itertools.product(COLD, CALLS):
            assert ask(pc, named, name) == COLD[name]
        ends = time.monotonic() + PATIENT
        while pc.stats()["hits_local"] < 4:
            assert time.monotonic() < ends, pc.stats()
            before = pc.stats()["hits_local"]
            for name, named in itertools.product(COLD, CALLS):
                assert ask(pc, named, name) == COLD[name]
            if pc.stats()["hits_local"] < before + 4:
                time.sleep(0.1)


@pytest.fixture(scope="module")
def filled(
    module_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Doors]:
    """Shared by all tests that leave the server well."""
    path = tmp_path_factory.mktemp("door") / "s"
    running = module_server("--unixsocket", str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
        fill(running.port)
    with Doors(running, path) as doors:
        yield doors


@pytest.fixture
def doors(filled: Doors) -> Iterator[Doors]:
    """The shared ones, with nothing before them at the beginning and the end."""
    filled.fault, filled.met = None, {"tcp": 0, "local": 0}
    yield filled
    filled.fault = None


def assert_well(port: int, lane: str, named: bool) -> None:
    """A new client hits on this lane."""
    with client(port) as pc:
        assert ask(pc, named) == COLD["ns"]
        assert pc.stats()["hits"] == 1
        assert pc.stats()["hits_local"] == (lane == "local")


def test_without_a_fault_every_call_is_a_hit_on_its_lane(
    doors: Doors, lane: str, named: bool
) -> None:
    """The control: else nothing below would show anything."""
    assert_well(doors.port, lane, named)


def behind(lane: str, doors: Doors, fault: Fault) -> Fault:
    """The fault once the greetings are over: where rows, or descriptors, would come."""
    begun = threading.Event()

    def later(data: bytes) -> Sequence[bytes | float | None]:
        # The client asks over TCP where the socket is; a manifest begins with an array.
        if begun.is_set() or lane == "tcp" or b"pion-" in data:
            begun.set()
            return fault(data)
        return [data]

    return later


@pytest.mark.parametrize("fault", [half, trickle, silent, wrong_length])
def test_a_server_that_answers_badly_costs_a_bounded_time_and_no_answer(
    doors: Doors, lane: str, named: bool, fault: Fault
) -> None:
    """Half a reply, one kilobyte a second, silence, another length than announced."""
    doors.fault = behind(lane, doors, fault)
    with client(doors.port, timeout=1.0) as pc:
        assert seconds_of(lambda: ask(pc, named)) < 20
        assert doors.met["tcp"] + doors.met["local"] > 0
        # Again at once: what failed is left alone, or answers as badly.
        assert seconds_of(lambda: ask(pc, named)) < 20
        assert ask(pc, named) == COLD["ns"]
    doors.fault = None
    assert_well(doors.port, lane, named)


@pytest.mark.parametrize("after", [1, 2])
def test_a_server_killed_in_mid_transfer_is_a_cold_answer(
    server: Callable[..., Server], tmp_path: Path, lane: str, named: bool, after: int
) -> None:
    """Killed half way through what it sends second, or third; restarted, it has everything."""
    running = server("--unixsocket", str(tmp_path / "s"))
    fill(running.port)
    with Doors(running, tmp_path / "s") as doors:
        pieces = itertools.count()

        def die(data: bytes) -> Sequence[bytes | float | None]:
            if next(pieces) < after:
                return [data]
            running.kill()
            return [data[: len(data) // 2], None]

        doors.fault = die
        with client(doors.port) as pc:
            assert seconds_of(lambda: ask(pc, named)) < 20
            assert ask(pc, named) == COLD["ns"]
    (tmp_path / "s").unlink()
    running.restart()
    with client(running.port) as pc:
        assert ask(pc, named) == COLD["ns"]
        assert pc.stats()["hits"] == 1


def cut(loan: Loan | None, folder: Path) -> Loan | None:
    """The same file, of which the second half goes once it is open and was looked at."""
    if loan is None:
        return None
    data = os.pread(loan.fd, loan.nbytes, 0)
    os.close(loan.fd)
    path = folder / f"cut{loan.fd}"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    os.truncate(path, len(data) // 2)
    return Loan(fd, loan.nbytes, loan.gen, loan.digest)


def test_a_file_truncated_while_it_is_open_is_an_error_and_no_signal(
    doors: Doors, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Really cut, really read by MLX or by us: rows come over TCP, and nobody dies of SIGBUS."""
    borrow, borrow_each = LocalLane.borrow, LocalLane.borrow_each

    def one(self: LocalLane, *args: Any) -> Any:
        reply, loan = borrow(self, *args)
        return reply, cut(loan, tmp_path)

    monkeypatch.setattr(LocalLane, "borrow", one)
    monkeypatch.setattr(
        LocalLane,
        "borrow_each",
        lambda self, *args: [cut(loan, tmp_path) for loan in borrow_each(self, *args)],
    )
    with client(doors.port) as pc:
        assert ask(pc, named) == COLD["ns"]
        assert pc.stats()["not_lent"] == {"unreadable": 1}
        assert pc.stats()["hits_local"] == 0


FULL = """
import os
real = os.fstatvfs
os.fstatvfs = lambda fd: os.statvfs_result([*real(fd)[:4], 0, *real(fd)[5:]])
"""
DENIED = """
import os
real = os.open
def refuse(path, *args, **kwargs):
    if "lent-" in str(path):
        raise PermissionError(13, "Permission denied")
    return real(path, *args, **kwargs)
os.open = refuse
"""


@pytest.mark.parametrize("trouble", [FULL, DENIED], ids=["disk full", "permission denied"])
def test_a_server_that_cannot_make_files_serves_over_tcp_and_says_why(
    server: Callable[..., Server], tmp_path: Path, named: bool, trouble: str
) -> None:
    """During export: nothing is written, nothing half made is lent, the reason is counted."""
    (tmp_path / "trouble.py").write_text(trouble)
    running = server(extra=tmp_path / "trouble.py")
    with client(running.port, store="sync") as pc:
        ends = time.monotonic() + PATIENT
        while not pc.stats()["not_lent"].get("refused"):
            assert time.monotonic() < ends, pc.stats()
            assert ask(pc, named) == COLD["ns"]
        assert ask(pc, named) == COLD["ns"]
        assert pc.stats()["hits_local"] == 0
        assert pc.stats()["misses"] == 1


def test_a_socket_this_user_may_not_open_means_tcp_once(
    doors: Doors, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Denied(local_module.socket.socket):  # type: ignore[name-defined,misc]
        def connect(self, address: Any) -> None:
            if isinstance(address, str):
                raise PermissionError(13, "Permission denied")
            super().connect(address)

    monkeypatch.setattr(local_module.socket, "socket", Denied)  # type: ignore[attr-defined]
    with client(doors.port) as pc:
        for _ in range(3):
            assert ask(pc, named) == COLD["ns"]
        stats = pc.stats()
    assert stats["hits"] == 3
    assert stats["not_lent"] == {"unreachable": 1, "paused": 2}


def test_a_clock_set_back_and_forth_changes_nothing(
    doors: Doors, lane: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = itertools.cycle((-1e9, 1e9))
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    assert_well(doors.port, lane, named)


def test_threads_that_share_one_object_get_the_cold_answer(
    doors: Doors, lane: str, named: bool
) -> None:
    """Restores at once; computing on the caches one after another, in a thread of its own each."""
    wrong: list[Any] = []
    computing = threading.Lock()
    with client(doors.port) as pc:

        def work(name: str) -> None:
            ids = LONG if name == "ns" else OTHER
            for _ in range(3):
                try:
                    cache = pc.get_or_prefill(ids, name if named else None)
                    with computing:
                        wrong.extend([name] * (continue_greedily(MODEL, cache) != COLD[name]))
                except BaseException as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(name,)) for name in (*COLD, *COLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert wrong == []
        assert pc.stats()["hits"] == 12
        assert pc.stats()["hits_local"] == (12 if lane == "local" else 0)


class Cancelled(BaseException):
    """What ends a call from outside: Ctrl-C, a timeout of a framework's."""


def slow(data: bytes) -> Sequence[bytes | float | None]:
    return [0.3, data]


def test_a_cancelled_call_hands_its_reply_to_nobody(doors: Doors, lane: str, named: bool) -> None:
    """H01: cancelled between request and reply; the next call gets its own prefix."""
    with client(doors.port) as pc:
        assert ask(pc, named) == COLD["ns"]

        def alarm(signum: int, frame: object) -> None:
            raise Cancelled

        doors.fault = slow
        previous = signal.signal(signal.SIGALRM, alarm)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Cancelled):
                ask(pc, named, "other")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        doors.fault = None
        time.sleep(0.5)
        assert ask(pc, named) == COLD["ns"]
        assert ask(pc, named, "other") == COLD["other"]
        assert pc.stats()["miss_reasons"].get("ids", 0) == 0


def test_an_awaited_call_that_is_cancelled_hands_its_reply_to_nobody(
    doors: Doors, lane: str, named: bool
) -> None:
    """H01: cancelled at 50 ms, while each reply takes 300 ms."""

    async def cancel_then_ask(pc: PionPromptCache) -> list[Any]:
        first = asyncio.ensure_future(pc.aget_or_prefill(OTHER, "other" if named else None))
        await asyncio.sleep(0.05)
        first.cancel()
        cache = await pc.aget_or_prefill(LONG, "ns" if named else None)
        assert first.cancelled()
        return cache

    doors.fault = slow
    with client(doors.port) as pc:
        assert continue_greedily(MODEL, asyncio.run(cancel_then_ask(pc))) == COLD["ns"]
        assert pc.stats()["misses"] == 0
        assert ask(pc, named, "other") == COLD["other"]


def test_a_forked_child_borrows_over_a_connection_of_its_own(doors: Doors) -> None:
    """Neither takes a reply or a descriptor of the other's."""
    with client(doors.port) as pc:
        assert ask(pc, True) == COLD["ns"]
        mx.synchronize()
        pid = os.fork()
        if pid == 0:
            good = False
            try:
                _, loan = pc._local.borrow(b"other", Patience(first_byte=PATIENT))
                good = loan is not None and os.fstat(loan.fd).st_size == loan.nbytes
            finally:
                os._exit(0 if good else 1)
        deadline = time.monotonic() + 2 * PATIENT
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert ended == (pid, 0)
        assert ask(pc, True) == COLD["ns"]
        assert pc.stats()["hits_local"] == 2
