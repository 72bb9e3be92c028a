"""Who may come in, and what the endpoints beside the conversations tell."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from pion_vllm_mlx.serve.guard import Guard
from tests.pion_vllm_mlx.serve.endpoint import Endpoint, endpoint

pytestmark = pytest.mark.model
QUESTION: Any = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Endpoint]:
    """A page of https://good.example may use it, and a client may call it box.lan."""
    with endpoint(guard=Guard(["box.lan"], ["https://good.example"])) as served:
        served.say("Hello.")
        yield served


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8080", 200),
        ("localhost", 200),
        ("[::1]:8080", 200),
        ("192.168.1.5:80", 200),
        ("box.lan:8080", 200),
        ("BOX.lan.", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8080", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_only_our_own_names_are_answered_to(guarded: Endpoint, host: str, status: int) -> None:
    """A page whose name was made to point here still says its own name."""
    assert guarded.ask("/v1/models", headers={"Host": host})[0] == status
    assert guarded.ask(CHAT, QUESTION, {"Host": host})[0] == status


def test_a_page_is_answered_if_it_was_allowed_to_ask(guarded: Endpoint) -> None:
    allowed = {"Origin": "https://good.example"}
    status, headers, _ = guarded.ask(CHAT, QUESTION, allowed)
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, "https://good.example")
    guarded.settle()
    before = guarded.service.figures.totals["requests"]
    status, headers, _ = guarded.ask(CHAT, QUESTION, {"Origin": "https://evil.example"})
    assert (status, headers["Access-Control-Allow-Origin"]) == (403, None)
    assert guarded.service.figures.totals["requests"] == before
    own = {"Origin": f"http://127.0.0.1:{guarded.door.port}"}
    assert guarded.ask("/v1/models", headers=own)[0] == 200
    assert guarded.ask(CHAT, QUESTION)[1]["Access-Control-Allow-Origin"] is None


def test_a_body_has_a_length_a_limit_and_is_json(guarded: Endpoint) -> None:
    def status(request: bytes) -> int:
        with socket.create_connection(("127.0.0.1", guarded.door.port), 20) as connection:
            connection.sendall(request)
            return int(connection.recv(100).split()[1])

    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode()
    assert status(head + b"\r\n") == 411
    assert status(head + b"Content-Length: -5\r\n\r\n") == 411
    assert status(head + b"Content-Length: 99999999999\r\n\r\n") == 413
    assert status(head + b"Content-Length: 3\r\n\r\n{]}") == 400
    assert status(head + b"Content-Length: 2\r\n\r\n[]") == 400
    deep = b"[" * 100_000
    assert status(head + b"Content-Length: %d\r\n\r\n" % len(deep) + deep) == 400
    assert guarded.ask(CHAT, QUESTION)[0] == 200


def test_what_is_not_there_is_said_not_to_be(guarded: Endpoint) -> None:
    assert guarded.ask("/v1/nothing")[0] == 404
    assert guarded.ask("/v1/models", QUESTION)[0] == 404
    assert guarded.ask(CHAT)[0] == 404


@pytest.mark.parametrize("path", ["/", "/v1/models", "/health", "/metrics"])
def test_head_is_get_without_a_body(guarded: Endpoint, path: str) -> None:
    """Claude Code asks HEAD / before anything else."""
    found = []
    for method in ("HEAD", "GET"):
        connection = http.client.HTTPConnection("127.0.0.1", guarded.door.port, timeout=20)
        connection.request(method, path)
        response = connection.getresponse()
        kind = response.headers["Content-Type"]
        found.append((response.status, kind, response.read()))
        connection.close()
    assert found[0] == (200, found[1][1], b"")
    assert found[1][2]


def test_a_connection_serves_one_request_after_another(guarded: Endpoint) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", guarded.door.port, timeout=20)
    for _ in range(3):
        connection.request("POST", CHAT, json.dumps(QUESTION))
        response = connection.getresponse()
        assert response.status == 200
        assert json.loads(response.read())["choices"]
    connection.close()


def test_the_model_is_listed(guarded: Endpoint) -> None:
    _, _, models = guarded.ask("/v1/models")
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert guarded.ask("/v1/models/any/name")[2]["id"] == "tiny"


def test_health_is_the_generation_threads_own(guarded: Endpoint) -> None:
    """G05: a thread that lives and does nothing is not well."""
    assert guarded.ask("/health")[0] == 200
    generator = guarded.service.generator
    patience, generator.patience = generator.patience, -1.0
    try:
        status, _, body = guarded.ask("/health")
        assert (status, body["status"]) == (503, "unavailable")
    finally:
        generator.patience = patience
    assert guarded.ask("/health")[2]["seconds_since_heartbeat"] < 5


def _series(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_every_series_is_there_from_the_start() -> None:
    """M08: and none of them says what was asked."""
    with endpoint() as fresh:
        fresh.say("Counted.")
        before = _series(fresh.ask("/metrics")[2])
        secret = {"messages": [{"role": "user", "content": "the secret words"}]}
        assert [fresh.ask(CHAT, secret)[0] for _ in range(2)] == [200, 200]
        assert fresh.ask(CHAT, {})[0] == 400
        fresh.settle()
        text = fresh.ask("/metrics")[2]
        stats = fresh.ask("/v1/pion/stats")[2]
    after = _series(text)
    known = {name for name in after if not name.endswith("_created") and "_created{" not in name}
    assert known == {n for n in before if not n.endswith("_created") and "_created{" not in n}
    assert 'pion_serve_tier_events_total{event="stores_failed"}' in before
    assert 'pion_serve_memory_events_total{event="errors"}' in before
    for outcome, count in (("ok", 2), ("refused", 1), ("failed", 0), ("cancelled", 0)):
        name = f'pion_serve_requests_total{{api="chat",outcome="{outcome}"}}'
        assert (before[name], after[name]) == (0, count)
    assert after["pion_serve_cached_tokens_total"] == stats["requests"]["cached_tokens"] > 0
    assert after["pion_serve_memory_bytes"] > before["pion_serve_memory_bytes"] == 0
    assert not re.search("secret|words|counted|tiny", text, re.I)
