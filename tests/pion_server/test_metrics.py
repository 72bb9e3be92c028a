"""`--metrics-port`: scraped by a real client, by rude ones, and by those who may not."""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pion_server.config import parse
from pion_server.flag_values import ConfigError
from pion_server.metrics_door import MetricsDoor
from tests.pion_server.access_samples import DIM, ROW

Server = Any
USERS = ("--requirepass", "root", "--tenant", "ann=apple")
# A client that is not on this machine, as far as its Host header tells.
ELSEWHERE = {"Host": "pion.example"}


def port_of(server: Server) -> int:
    return int(server.ready_line.rpartition("metrics on 127.0.0.1:")[2].split(",")[0].rstrip(")\n"))


def get(
    server: Server, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[int, str]:
    client = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=30)
    client.request(method, path, headers=headers)
    response = client.getresponse()
    text = response.read().decode()
    client.close()
    return response.status, text


def samples(text: str) -> dict[str, float]:
    """`name{label=value}` without `pion_`, to its value; a metric given twice fails."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items() if value)
            name = f"{sample.name.removeprefix('pion_')}{{{labels}}}"
            assert name not in found
            found[name] = sample.value
    return found


def basic(user: str, password: str) -> dict[str, str]:
    word = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {**ELSEWHERE, "Authorization": f"Basic {word}"}


@pytest.fixture(scope="module")
def shared(module_server: Callable[..., Server]) -> Server:
    return module_server(*USERS, "--metrics-port", "0")


def test_every_series_is_there_from_the_start_and_counts(server: Callable[..., Server]) -> None:
    running = server(*USERS, "--metrics-port", "0")
    status, text = get(running)
    assert status == 200
    before = samples(text)
    ann = running.client()
    ann.call("AUTH", "ann", "apple")
    ann.call("KV.PREFIX.REGISTER", "a secret name", DIM, "fp32")
    for side in ("_pk", "_pv"):
        ann.call("V.STOREBATCH", f"a secret name{side}", 0, 0, 1, ROW)
    ann.call("KV.PREFIX.LOOKUP", "a secret name")
    ann.call("KV.PREFIX.LOOKUP", "nobody's")
    text = get(running)[1]
    after = samples(text)
    assert before.keys() == after.keys()
    assert "secret" not in text
    for name, value in {"prefix_hits_total": 1, "prefix_misses_total": 1, "sessions": 2}.items():
        assert before[f"{name}{{tenant=ann}}"] == before[f"{name}{{}}"] == after[f"{name}{{}}"] == 0
        assert after[f"{name}{{tenant=ann}}"] == value
    assert after["commands_total{tenant=ann}"] == 5  # AUTH was nobody's yet
    assert after["stored_bytes{tenant=ann}"] > 0
    assert after["clients{}"] == 1
    assert after["resident_bytes{}"] > 1e6


def test_strangers_need_the_admins_password(shared: Server) -> None:
    assert get(shared, **ELSEWHERE)[0] == 401
    assert get(shared, **basic("prometheus", "root"))[0] == 200
    for user, password in (("prometheus", "wrong"), ("ann", "apple"), ("ann", "root"), ("", "")):
        started = time.monotonic()
        assert get(shared, **basic(user, password))[0] == 401
        assert time.monotonic() - started > 0.2
    for word in ("Basic ?", "Bearer root", "Basic", "Basic " + "é"):
        assert get(shared, **ELSEWHERE, Authorization=word)[0] == 401


def test_loopback_is_what_counts_as_this_machine(server: Callable[..., Server]) -> None:
    running = server(*USERS, "--metrics-port", "0", "--bind", "0.0.0.0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has only its loopback")
        own = probe.getsockname()[0]
    port = int(running.ready_line.rpartition("metrics on 0.0.0.0:")[2].rstrip(")\n"))
    statuses = []
    for host, headers in ((own, {}), (own, basic("any", "root")), ("127.0.0.1", {})):
        client = http.client.HTTPConnection(host, port, timeout=30)
        client.request("GET", "/metrics", headers={**headers, "Host": host})
        statuses.append(client.getresponse().status)
        client.close()
    assert statuses == [401, 200, 200]


def test_without_a_password_other_sites_pages_get_nothing(server: Callable[..., Server]) -> None:
    running = server("--metrics-port", "0")
    assert get(running)[0] == 200
    assert get(running, Host="localhost:9")[0] == get(running, Host="[::1]:9")[0] == 200
    assert get(running, **ELSEWHERE)[0] == get(running, **basic("any", "word"))[0] == 401


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/../x HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 99999\r\n\r\n" + b"x" * 99_999, 405),
        (b"HEAD /metrics HTTP/1.0\r\n\r\n", 405),
        (b"PING\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", 400),
        (b"\xff\x00\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000, 431),
        (b"GET /metrics HTTP/1.1\r\nHost: [\r\n\r\n", 401),
        (b"GET /metrics HTTP/1.0\r\n\r\nGET /metrics HTTP/1.0\r\n\r\n", 200),
    ],
    ids=lambda value: value[:24].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_one_request_one_answer(shared: Server, request_: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", port_of(shared)), timeout=30) as client:
        client.sendall(request_)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := client.recv(1 << 16):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert "Traceback" not in shared.errors.read_text()


def test_clients_that_stall_are_given_up_and_hold_up_nobody(shared: Server) -> None:
    """Slow loris: a byte now and then does not win more time."""
    stalled = [socket.create_connection(("127.0.0.1", port_of(shared)), 30) for _ in range(20)]
    started = time.monotonic()
    for number, client in enumerate(stalled):
        client.sendall(b"GET /metrics HTTP/1.1\r\n"[:number])
    assert get(shared)[0] == 200
    with pytest.raises(OSError):  # noqa: PT012 - the pipe breaks somewhere in the loop
        while time.monotonic() < started + 20:
            stalled[-1].sendall(b"X")
            time.sleep(0.2)
    for client in stalled[:-1]:
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
        client.close()
    stalled[-1].close()


def test_a_crowd_is_told_to_come_again(shared: Server) -> None:
    crowd = [socket.create_connection(("127.0.0.1", port_of(shared)), 30) for _ in range(64)]
    try:
        deadline = time.monotonic() + 4
        while get(shared)[0] != 503:  # the server may have accepted some of them only
            assert time.monotonic() < deadline
    finally:
        for client in crowd:
            client.close()
    while get(shared)[0] != 200:
        assert time.monotonic() < deadline + 20


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--metrics-port: cannot listen on .*:{port}"):
            MetricsDoor(parse(["--dir", str(tmp_path)], {}), port)
