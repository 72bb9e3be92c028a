"""TLS on both lanes: the same answers, nothing in the clear, nobody in without the right papers."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from pion_lmcache import LMCacheRemoteBackend, PionStore
from pion_server.config import parse
from pion_server.flag_values import ConfigError
from pion_vllm_mlx import PionPromptCache, cli
from pion_vllm_mlx.transport import Command, Patience, Unavailable
from pion_vllm_mlx.transport.binary import AUTH, PING, BinaryLane, Declined
from pion_vllm_mlx.transport.endpoint import Endpoint
from pion_vllm_mlx.transport.resp import RespConnection
from pion_vllm_mlx.transport.tls import client_context
from tests.certificates import Papers, tls_port
from tests.pion_vllm_mlx.tiny import PREFIX, cold_answer, continue_greedily, tiny_llama

Server = Any
PATIENT = Patience(first_byte=20, stall=20)


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def secure(module_server: Callable[..., Server], papers: Papers) -> Server:
    return module_server(*papers.flags, "--requirepass", "root", "--tenant", "ann=apple")


def connection(server: Server, papers: Papers, **settings: Any) -> RespConnection:
    context = client_context(papers.ca)
    port, soon = tls_port(server), time.monotonic() + 20
    return RespConnection("127.0.0.1", port, deadline=soon, tls=context, **settings)


def test_a_stock_client_connects(secure: Server, papers: Papers) -> None:
    client: Any = redis.Redis(
        port=tls_port(secure), password="root", ssl=True, ssl_ca_certs=str(papers.ca)
    )
    assert client.ping()
    assert b"kvprefix_hits" in client.execute_command("PION.STATS")


def test_large_requests_and_replies_pass_whole(secure: Server, papers: Papers) -> None:
    """Sizes around a TLS record, the bridge's buffer and beyond; pipelined, both ways at once."""
    tls = connection(secure, papers, password="root")
    for size in (0, 1, 16_383, 16_384, 16_385, 262_143, 262_145, 9_000_001):
        blob = os.urandom(size)
        commands = [Command.of("SSM.PREFIX.STORE", "large", size, blob)]
        commands += [Command.of("SSM.PREFIX.FETCH", "large", size)] * 3
        stored, *fetched = tls.exchange(commands, PATIENT)
        assert stored == "OK"
        assert all(bytes(one) == blob for one in fetched)  # type: ignore[arg-type]


def test_a_pipeline_that_is_not_read_yet_is_taken_in(secure: Server, papers: Papers) -> None:
    """The other side of a bridge fills; neither may wait for the other."""
    tls = connection(secure, papers, password="root")
    blob = os.urandom(1 << 20)
    tls.exchange([Command.of("SSM.PREFIX.STORE", "pipeline", 0, blob)], PATIENT)
    pairs = [
        Command.of("SSM.PREFIX.FETCH", "pipeline", 0),
        Command.of("SSM.PREFIX.STORE", "pipeline", 1, blob),
    ]
    replies = tls.exchange(pairs * 24, PATIENT)
    assert len(replies) == 48
    assert all(bytes(one) == blob for one in replies[::2])  # type: ignore[arg-type]


def test_both_lanes_serve_a_tenant(secure: Server, papers: Papers) -> None:
    tls = connection(secure, papers, username="ann", password="apple")
    (listed,) = tls.exchange([Command.of("CLIENT", "LIST")], PATIENT)
    assert b" user=ann " in bytes(listed)  # type: ignore[arg-type]
    assert b"addr=127.0.0.1:" in bytes(listed)  # type: ignore[arg-type]
    lane = BinaryLane(
        "127.0.0.1",
        tls_port(secure) + 1,
        username="ann",
        password="apple",
        connect_timeout=20,
        tls=client_context(papers.ca),
    )
    lane.ask(PING, [], 0, PATIENT)
    assert lane.usable
    with pytest.raises(Unavailable):
        BinaryLane("127.0.0.1", tls_port(secure) + 1, connect_timeout=2).ask(AUTH, [], 0, PATIENT)


def test_a_prefix_comes_back_bit_for_bit(secure: Server, papers: Papers) -> None:
    model = tiny_llama()
    url = f"pions://ann:apple@localhost:{tls_port(secure)}"
    settings: dict[str, Any] = {"timeout": 20, "store": "sync", "held_bytes": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PION_URL", url)
        patch.setenv("SSL_CERT_FILE", str(papers.ca))
        for hits in (0, 1):
            with PionPromptCache(model, **settings) as pc:
                assert pc.port == tls_port(secure)
                cache = pc.get_or_prefill(PREFIX, "secure")
                assert continue_greedily(model, cache) == cold_answer(model, PREFIX)
                assert pc.stats()["hits"] == hits
        assert cli.main(["ls", "--json"]) == 0


def test_rows_and_chunks_of_other_engines_pass_whole(secure: Server, papers: Papers) -> None:
    where: dict[str, Any] = {
        "port": tls_port(secure),
        "tls": papers.ca,
        "user": "ann",
        "password": "apple",
    }
    rows = np.arange(4096, dtype=np.float32).reshape(64, 64)
    with PionStore(vquant="fp32", **where) as store:
        store.register("rows", kv_dim=64)
        store.store_layer("rows", "K", 0, 0, rows)
        assert np.array_equal(store.fetch_layer("rows", "K", 0, 0, 64), rows)  # type: ignore[arg-type]
    backend, blob = LMCacheRemoteBackend(**where), os.urandom(3_000_001)
    assert backend.put("chunk", blob)
    assert backend.get("chunk") == blob
    backend.close()
    untrusting = LMCacheRemoteBackend(**{**where, "tls": True})
    assert untrusting.get("chunk") is None


def test_what_passes_is_not_in_the_clear(secure: Server, papers: Papers) -> None:
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def overhear() -> None:
            client, _ = listener.accept()
            with client, socket.create_connection(("127.0.0.1", tls_port(secure))) as onward:
                ways = [(client, onward), (onward, client)]
                threads = [threading.Thread(target=pass_on, args=(*way, heard)) for way in ways]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

        thread = threading.Thread(target=overhear)
        thread.start()
        tls = RespConnection(
            "127.0.0.1",
            listener.getsockname()[1],
            deadline=time.monotonic() + 20,
            password="root",
            tls=client_context(papers.ca),
        )
        tls.exchange([Command.of("SSM.PREFIX.STORE", "private-name", 0, b"secret " * 99)], PATIENT)
        tls.close()
        thread.join(20)
    assert len(heard) > 1000
    for word in (b"secret", b"private-name", b"root", b"AUTH", b"SSM.PREFIX"):
        assert word not in heard


def pass_on(source: socket.socket, target: socket.socket, heard: bytearray) -> None:
    while piece := source.recv(65536):
        heard += piece
        target.sendall(piece)
    target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("lacking", ["authority", "system's trust", "name"])
def test_a_server_that_cannot_prove_itself_is_a_cold_run(
    server: Callable[..., Server], papers: Papers, tmp_path: Path, lacking: str
) -> None:
    shown, trusted = papers, papers.ca
    if lacking == "authority":
        trusted = Papers(tmp_path).ca
    elif lacking == "name":
        shown = Papers(tmp_path, "elsewhere.example")
        trusted = shown.ca
    tls: Any = True if lacking == "system's trust" else trusted
    unproven = server(*shown.flags)
    model = tiny_llama()
    with PionPromptCache(model, port=tls_port(unproven), tls=tls, timeout=5, store="sync") as pc:
        cache = pc.get_or_prefill(PREFIX, "unproven")
        assert continue_greedily(model, cache) == cold_answer(model, PREFIX)
        assert pc.stats()["miss_reasons"] == {"unavailable": 1}
    assert unproven.client().call("KV.PREFIX.LOOKUP", "unproven") == "MISS"


def test_trouble_with_certificates_is_one_line_in_a_shell(
    secure: Server, papers: Papers, tmp_path: Path
) -> None:
    port, other = str(tls_port(secure)), Papers(tmp_path)
    tries = {
        ("--tls", "--port", port): "certificate",
        ("--tls-ca", str(other.ca), "--port", port): "certificate",
        ("--tls-ca", str(tmp_path / "absent"), "--port", port): "tls: cannot use",
        ("--tls-ca", str(papers.ca), "--port", str(secure.port)): "no TLS connection",
        ("--port", port): "no answer from",
    }
    for words, says in tries.items():
        with pytest.raises(SystemExit) as caught:
            cli.main(["ls", *words])
        text = str(caught.value)
        assert says in text
        assert "\n" not in text
        assert text.startswith("pion-vllm-mlx ls: ")


def test_plain_talk_to_the_tls_port_ends_the_connection(secure: Server) -> None:
    with socket.create_connection(("127.0.0.1", tls_port(secure)), 20) as plain:
        plain.sendall(b"*1\r\n$4\r\nPING\r\n")
        assert b"PONG" not in plain.recv(1000)
    assert secure.client().error("PING").startswith("NOAUTH")  # the server goes on


def test_certificates_of_clients_are_demanded(
    server: Callable[..., Server], papers: Papers, tmp_path: Path
) -> None:
    demanding = server(*papers.flags, "--tls-ca", str(papers.ca))
    context = ssl.create_default_context(cafile=str(papers.ca))
    with pytest.raises(Unavailable):
        connection(demanding, papers).exchange([Command.of("PING")], PATIENT)
    context.load_cert_chain(papers.client)
    known = RespConnection(
        "127.0.0.1", tls_port(demanding), deadline=time.monotonic() + 20, tls=context
    )
    assert known.exchange([Command.of("PING")], PATIENT) == ["PONG"]
    stranger = ssl.create_default_context(cafile=str(papers.ca))
    stranger.load_cert_chain(Papers(tmp_path).client)
    with pytest.raises(Unavailable):
        RespConnection(
            "127.0.0.1", tls_port(demanding), deadline=time.monotonic() + 20, tls=stranger
        ).exchange([Command.of("PING")], PATIENT)


def test_clients_of_one_port_and_the_other_share_the_limit_and_the_end(
    server: Callable[..., Server], papers: Papers
) -> None:
    small = server(*papers.flags, "--max-clients", "2")
    first, second = connection(small, papers), connection(small, papers)
    assert first.exchange([Command.of("PING")], PATIENT) == ["PONG"]
    with pytest.raises(Unavailable):
        connection(small, papers).exchange([Command.of("PING")], PATIENT)
    second.close()
    assert small.stop() == 0
    with pytest.raises(Unavailable):
        first.exchange([Command.of("PING")], PATIENT)


def test_a_silent_handshake_is_not_waited_for_by_others(secure: Server, papers: Papers) -> None:
    with socket.create_connection(("127.0.0.1", tls_port(secure))) as mute:
        mute.sendall(b"\x16\x03\x01")
        tls = connection(secure, papers, password="root")
        assert tls.exchange([Command.of("PING")], PATIENT) == ["PONG"]


@pytest.mark.parametrize(("flags", "says"), [
    ("--tls-port 1", "--tls-cert and --tls-key"),
    ("--tls-cert x --tls-key y", "go with --tls-port"),
    ("--tls-only", "go with --tls-port"),
])  # fmt: skip
def test_flags_that_do_not_add_up_are_refused(flags: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(flags.split(), {})


def test_files_that_are_no_certificates_end_the_start_in_one_line(
    papers: Papers, tmp_path: Path
) -> None:
    import subprocess
    import sys

    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate\n")
    for cert, key in ((junk, papers.key), (papers.cert, junk), (tmp_path / "absent", papers.key)):
        flags = ["-p", "0", "--dir", str(tmp_path / "data"), "--tls-port", "0"]
        done = subprocess.run(
            [sys.executable, "-m", "pion_server", *flags, "--tls-cert", cert, "--tls-key", key],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1, done.stderr
        assert "certificate" in done.stderr


def test_a_bad_file_of_authorities_is_told_at_once(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate\n")
    for path in (junk, tmp_path / "absent"):
        with pytest.raises(ValueError, match="tls: cannot use"):
            PionPromptCache(tiny_llama(), tls=path)


def test_workers_have_tls_ports_of_their_own(server: Callable[..., Server], papers: Papers) -> None:
    running = server(*papers.flags, "-w", "2", "--no-attention")
    plain = running.client()
    owner_port = running.port + 2 + 1
    with socket.create_connection(("127.0.0.1", owner_port), 20) as sock:
        sock.sendall(b"KV.PREFIX.REGISTER there 32 fp32\r\n")
        assert sock.recv(64) == b"+OK\r\n"
    assert plain.call("KV.PREFIX.OWNER", "there") == "1"
    context = client_context(papers.ca)
    endpoint = Endpoint(port=tls_port(running), tls=context, connect_timeout=20)
    commands = [Command.of("KV.PREFIX.PIN", "there"), Command.of("KV.PREFIX.OWNER", "there")]
    assert endpoint.exchange(commands, PATIENT) == [1, "1"]
    assert endpoint.exchange(commands, PATIENT) == [1, "1"]
    assert endpoint.workers(PATIENT) == [0, 1]
    for worker in (0, 1):
        commands = [Command.of("KV.PREFIX.REGISTER", f"on {worker}", 32, "fp32")]
        assert endpoint.exchange_at(worker, commands, PATIENT) == ["OK"]
    endpoint.close()
    # Whichever worker the shared port leads to, one of the two lives on the other.
    lane = BinaryLane("127.0.0.1", tls_port(running) + 1, connect_timeout=20, tls=context)
    one = np.zeros((1, 1, 32), np.float32)
    for worker in (0, 1, 0, 1):
        with pytest.raises(Declined, match="answered 2"):  # there is no engine
            lane.query_fused(b"on %d_attn" % worker, 0, one, one, one, b"\0", None, PATIENT)
    assert len(lane._sockets) == 2
    lane.close()
