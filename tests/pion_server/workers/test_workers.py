"""`-w N` as a whole: one ready line, crashes, ends of every kind, files and limits of workers."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RawClient, ReplyError, ServerProcess

Start = Callable[..., ServerProcess]
DIM = 32
ROW = struct.pack(f"<{DIM}f", *range(DIM))


def at(running: ServerProcess, worker: int, timeout: float = 30.0) -> RawClient:
    """A connection to a worker's own port."""
    return RawClient("127.0.0.1", running.port + 2 + worker, timeout)


def pid_of(client: RawClient) -> int:
    found = re.search(rb"process_id:(\d+)", client.call("INFO", "server"))
    assert found is not None
    return int(found[1])


def put(client: RawClient, name: str) -> None:
    assert client.call("KV.PREFIX.REGISTER", name, DIM, "fp32") == "OK"
    for side in ("pk", "pv"):
        assert client.call("V.STOREBATCH", f"{name}_{side}", 0, 0, 1, ROW) == "OK"


def get(client: RawClient, name: str) -> Any:
    return client.call("V.FETCH", f"{name}_pk", 0, "RANGE", 0, 1)


def wait_until(check: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def shared(module_server: Start) -> ServerProcess:
    """Two workers for all tests that end none of them."""
    return module_server("-w", "2", "--no-attention")


@pytest.fixture
def pair(server: Start) -> ServerProcess:
    return server("-w", "2", "--no-attention")


def test_there_is_one_ready_line_and_the_workers_have_files_of_their_own(
    pair: ServerProcess,
) -> None:
    assert pair.ready_line.count("pion-server ready") == 1
    assert ", 2 workers)" in pair.ready_line
    clients = [at(pair, 0), at(pair, 1)]
    assert len({pair.pid, *map(pid_of, clients)}) == 3
    for number, client in enumerate(clients):
        put(client, f"name{number}")
        assert (pair.directory / f"pion.vstore.wal.{number}").stat().st_size > 0
        assert b"my_worker_id:%d\r\n" % number in client.call("KV.PREFIX.INFO")
    assert b"directory_entries:2\r\n" in clients[0].call("KV.PREFIX.INFO")
    assert pair.stop() == 0


def test_a_single_server_has_no_directory_and_no_ports_above(server: Start) -> None:
    running = server("-w", "1", "--independent-workers")
    assert b"directory_enabled:0\r\n" in running.client().call("KV.PREFIX.INFO")
    assert not (running.directory / "pion.names").exists()
    assert "accepted" not in running.errors.read_text()


def test_a_crashed_worker_comes_back_with_its_prefixes(pair: ServerProcess) -> None:
    zero, one = at(pair, 0), at(pair, 1)
    put(zero, "zeros")
    put(one, "ones")
    crashed = pid_of(one)
    os.kill(crashed, signal.SIGKILL)
    # The others go on meanwhile, and know whose the prefix is.
    assert zero.call("KV.PREFIX.LOOKUP", "zeros") == "HIT"
    assert zero.call("KV.PREFIX.LOOKUP", "ones") == "HIT"
    assert zero.call("KV.PREFIX.OWNER", "ones") == "1"
    # Its own port is never closed: who connects there waits for the next one.
    again = at(pair, 1)
    assert get(again, "ones") == ROW
    assert pid_of(again) != crashed
    assert get(zero, "zeros") == ROW
    text = zero.error("KV.PREFIX.BLOCKS", "ones")
    assert text == "ERR KV.PREFIX.BLOCKS session lives on worker 1"
    log = (pair.directory / f"pion-{pair.port}.crash.log").read_text()
    assert f"worker=1 code={-signal.SIGKILL}" in log


def test_a_worker_that_comes_back_tells_what_it_holds(pair: ServerProcess) -> None:
    """A fill that was open when its worker crashed is no fill any more."""
    zero, one = at(pair, 0), at(pair, 1)
    put(one, "filling")
    assert one.call("KV.PREFIX.META", "filling", "BEGIN") > 0
    assert zero.call("KV.PREFIX.LOOKUP", "filling") == "MISS"
    assert one.call("KV.PREFIX.META", "gone", "BEGIN") > 0
    assert zero.call("KV.PREFIX.OWNER", "gone") == "1"
    os.kill(pid_of(one), signal.SIGKILL)
    again = at(pair, 1)
    assert again.call("KV.PREFIX.LOOKUP", "filling") == "HIT"
    assert zero.call("KV.PREFIX.LOOKUP", "filling") == "HIT"
    assert zero.call("KV.PREFIX.OWNER", "gone") == "-1"


def test_manifests_fills_and_state_make_a_name_known_and_their_end_forgotten(
    shared: ServerProcess,
) -> None:
    zero, one = at(shared, 0), at(shared, 1)
    put(zero, "whole")
    gen = zero.call("KV.PREFIX.META", "whole", "BEGIN")
    assert one.call("KV.PREFIX.LOOKUP", "whole") == "MISS"
    assert zero.call("KV.PREFIX.META", "whole", "SET", gen, b"manifest") == "OK"
    assert one.call("KV.PREFIX.LOOKUP", "whole") == "HIT"
    # A recurrent model's prefix has a manifest and state, and no rows.
    gen = zero.call("KV.PREFIX.META", "pure", "BEGIN")
    assert zero.call("SSM.PREFIX.STORE", "pure", 0, b"state", "GEN", gen) == "OK"
    assert zero.call("KV.PREFIX.META", "pure", "SET", gen, b"manifest") == "OK"
    assert one.call("KV.PREFIX.OWNER", "pure") == zero.call("KV.PREFIX.OWNER", "pure") == "0"
    assert one.call("SSM.PREFIX.STORE", "state alone", 0, b"state") == "OK"
    assert [client.call("KV.PREFIX.OWNER", "state alone") for client in (zero, one)] == ["1", "1"]
    assert one.call("SSM.PREFIX.DROP", "state alone") == "OK"
    assert [client.call("KV.PREFIX.OWNER", "state alone") for client in (zero, one)] == ["-1"] * 2
    assert one.error("SSM.PREFIX.FETCH", "pure", 0).endswith("lives on worker 0")
    assert zero.call("KV.PREFIX.DROP", "pure") == 1
    assert one.call("KV.PREFIX.OWNER", "pure") == "-1"
    # A fill ends with its connection.
    filler = at(shared, 0)
    filler.call("KV.PREFIX.META", "begun", "BEGIN")
    assert one.call("KV.PREFIX.OWNER", "begun") == "0"
    filler.close()
    wait_until(lambda: one.call("KV.PREFIX.OWNER", "begun") == "-1")
    # What failed leaves no trace.
    zero.error("KV.PREFIX.REGISTER", "refused", 31, "mlx4g32")
    assert one.call("KV.PREFIX.OWNER", "refused") == "-1"
    assert one.call("KV.PREFIX.REGISTER", "refused", DIM, "fp32") == "OK"


def test_generations_of_two_workers_are_never_the_same(shared: ServerProcess) -> None:
    found = set()
    for _ in range(3):
        for worker in (0, 1):
            client = at(shared, worker)
            gen = client.call("KV.PREFIX.META", "moving", "BEGIN")
            assert client.call("KV.PREFIX.META", "moving", "ABORT", gen) == "OK"
            assert gen % 256 == worker
            found.add(gen)
    assert len(found) == 6


def test_what_is_evicted_is_forgotten_everywhere(server: Start) -> None:
    running = server("-w", "2", "--no-attention", "--vstore-sessions", "4")
    zero, one = at(running, 0), at(running, 1)
    for name in ("first", "second", "third"):
        put(zero, name)
    answers = [one.call("KV.PREFIX.LOOKUP", name) for name in ("first", "second", "third")]
    assert answers == ["MISS", "HIT", "HIT"]


def test_a_lookup_of_a_remote_prefix_credits_what_was_given(shared: ServerProcess) -> None:
    zero, one = at(shared, 0), at(shared, 1)
    put(zero, "remote")

    def receipt() -> dict[str, int]:
        lines = one.call("INFO", "pion").decode().split("\r\n")
        pairs = (line.split(":") for line in lines if ":" in line and "scope" not in line)
        return {key: int(value) for key, value in pairs if value.isdigit()}

    one.call("CONFIG", "RESETSTAT")
    assert one.call("KV.PREFIX.LOOKUP", "remote") == "HIT"
    assert receipt()["kvprefix_hits"] == 1
    assert receipt()["kvprefix_tokens_served"] == 0
    assert one.call("KV.PREFIX.LOOKUP", "remote", "TOKENS", 7) == "HIT"
    assert receipt()["kvprefix_tokens_served"] == 7


def test_drop_names_the_owner_only_if_nothing_was_dropped_here(shared: ServerProcess) -> None:
    zero, one = at(shared, 0), at(shared, 1)
    put(zero, "here")
    put(one, "there")
    assert zero.call("KV.PREFIX.DROP", "here", "there") == 1
    assert zero.error("KV.PREFIX.DROP", "here", "there").endswith("lives on worker 1")
    assert get(one, "there") == ROW
    assert zero.call("KV.PREFIX.DROP", "nobody") == 0


def test_misses_are_counted_for_all_workers_together(shared: ServerProcess) -> None:
    clients = [at(shared, 0), at(shared, 1), at(shared, 0)]
    assert [client.call("KV.PREFIX.ADMIT", "wanted") for client in clients] == [1, 2, 3]


def test_a_name_that_two_workers_want_at_once_is_one_workers(shared: ServerProcess) -> None:
    clients = [at(shared, 0), at(shared, 1)]
    for round_ in range(50):
        words = RawClient.pack("KV.PREFIX.REGISTER", f"race{round_}", DIM, "fp32")
        for client in clients:
            client.send(words)
        answers = [client.read() for client in clients]
        refused = [str(one) for one in answers if isinstance(one, ReplyError)]
        assert len(refused) == 1, answers
        owner = 1 if isinstance(answers[0], ReplyError) else 0
        assert refused == [f"ERR KV.PREFIX.REGISTER session lives on worker {owner}"]


def test_a_tenants_names_are_its_own_on_every_worker(server: Start) -> None:
    """F-cases: nobody learns of another's names, not by a redirect either."""
    running = server(
        "-w", "2", "--no-attention", "--requirepass", "s", "--tenant", "a=x", "--tenant", "b=y"
    )

    def as_tenant(name: str, word: str, worker: int) -> RawClient:
        client = at(running, worker)
        assert client.call("AUTH", name, word) == "OK"
        return client

    put(as_tenant("a", "x", 0), "shared")
    assert as_tenant("a", "x", 1).call("KV.PREFIX.LOOKUP", "shared") == "HIT"
    other = as_tenant("b", "y", 1)
    assert other.call("KV.PREFIX.LOOKUP", "shared") == "MISS"
    assert other.call("KV.PREFIX.OWNER", "shared") == "-1"
    put(other, "shared")
    assert other.call("KV.PREFIX.OWNER", "shared") == "1"
    assert b"directory_entries:1\r\n" in other.call("KV.PREFIX.INFO")
    admin = at(running, 1)
    admin.call("AUTH", "s")
    assert admin.call("KV.PREFIX.OWNER", "shared") == "-1"


def test_sigterm_ends_all_and_a_restart_has_everything(pair: ServerProcess) -> None:
    clients = [at(pair, 0), at(pair, 1)]
    for number, client in enumerate(clients):
        put(client, f"kept{number}")
    pids = [pid_of(client) for client in clients]
    assert pair.stop() == 0
    assert not any(map(is_running, pids))
    assert not (pair.directory / "pion.names").exists()
    pair.restart()
    for number in (0, 1):
        assert get(at(pair, number), f"kept{number}") == ROW
        assert at(pair, 1 - number).call("KV.PREFIX.OWNER", f"kept{number}") == str(number)


def test_a_killed_parent_takes_its_workers_along(pair: ServerProcess) -> None:
    client = at(pair, 1)
    put(client, "kept")
    pids = [pid_of(at(pair, 0)), pid_of(client)]
    pair.kill()
    wait_until(lambda: not any(map(is_running, pids)))
    pair.restart()
    assert get(at(pair, 1), "kept") == ROW


def test_a_restart_right_after_a_kill_waits_for_the_workers_to_end(pair: ServerProcess) -> None:
    put(at(pair, 0), "kept")
    pair.kill()
    pair.restart()
    assert get(at(pair, 0), "kept") == ROW


def test_shutdown_ends_all_workers(pair: ServerProcess) -> None:
    pids = [pid_of(at(pair, 0)), pid_of(at(pair, 1))]
    at(pair, 1).send(RawClient.pack("SHUTDOWN"))
    assert pair.wait() == 0
    assert not any(map(is_running, pids))


def test_the_directory_of_workers_is_nobody_elses(shared: ServerProcess) -> None:
    launch = [sys.executable, "-m", "pion_server", "--port", "0", "--dir", str(shared.directory)]
    for more in ([], ["-w", "2"]):
        done = subprocess.run([*launch, *more], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert f"in use by another pion-server (pid {shared.pid})" in done.stderr


def test_a_server_whose_worker_cannot_start_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "pion.vstore.wal.1").write_bytes(b"something else entirely, long enough to be seen")
    done = subprocess.run(
        [sys.executable, "-m", "pion_server", "--port", "0", "--dir", str(tmp_path), "-w", "2"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "pion-server: worker 1: " in done.stderr
    assert "pion-server: worker 1 could not start" in done.stderr
    assert "ready" not in done.stdout


def test_a_taken_port_above_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        above = taken.getsockname()[1]
        launch = [sys.executable, "-m", "pion_server", "--dir", str(tmp_path), "-w", "2"]
        done = subprocess.run(
            [*launch, "--port", str(above - 5)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert "is in use by another program" in done.stderr


def test_names_two_workers_hold_are_dropped_by_one_of_them(pair: ServerProcess) -> None:
    """A directory that was served by one worker in between may hold a name twice."""
    put(at(pair, 1), "twice")
    assert pair.stop() == 0
    pair.flags = ("-w", "1", "--no-attention")
    pair.restart()
    put(pair.client(), "twice")
    pair.flags = ("-w", "2", "--no-attention")
    pair.restart()
    owner = int(pair.client().call("KV.PREFIX.OWNER", "twice"))
    assert get(at(pair, owner), "twice") == ROW
    assert at(pair, 1 - owner).error("KV.PREFIX.BLOCKS", "twice").endswith(f"worker {owner}")
    assert "drops 1 names that another worker holds too" in pair.errors.read_text()
    assert at(pair, owner).call("KV.PREFIX.DROP", "twice") == 1
    assert at(pair, 1 - owner).call("KV.PREFIX.LOOKUP", "twice") == "MISS"


def test_fewer_workers_than_before_are_told_of(pair: ServerProcess) -> None:
    put(at(pair, 1), "left")
    pair.stop()
    pair.flags = ("-w", "2", "--no-attention")
    (pair.directory / "pion.vstore.wal.1").rename(pair.directory / "pion.vstore.wal.7")
    pair.restart()
    text = "what workers 7 have stored is not served by 2 workers"
    assert text in pair.errors.read_text()


def test_a_binary_lane_of_its_own_answers_for_each_worker(shared: ServerProcess) -> None:
    ping = struct.pack("<HBI", 0xCA5E, 0xFF, 0)
    for port in (shared.port + 1, shared.port + 4, shared.port + 5):
        with socket.create_connection(("127.0.0.1", port), 20) as sock:
            sock.sendall(ping)
            assert sock.recv(7) == struct.pack("<HBI", 0xCA5E, 0, 0)
