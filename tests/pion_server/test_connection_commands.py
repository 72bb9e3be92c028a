"""PING to SHUTDOWN as real clients send them, with and without a password."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

PASSWORD = "s3cret with spaces"
NOAUTH = "NOAUTH Authentication required."
WRONGPASS = "WRONGPASS invalid username-password pair or user is disabled."
Start = Callable[..., "ServerProcess"]


@pytest.fixture(scope="module")
def running(module_server: Start) -> ServerProcess:
    return module_server()


@pytest.fixture(scope="module")
def locked(module_server: Start) -> ServerProcess:
    return module_server("--requirepass", PASSWORD)


@pytest.fixture
def client(running: ServerProcess) -> RawClient:
    return running.client()


@pytest.fixture
def stranger(locked: ServerProcess) -> RawClient:
    return locked.client()


def test_ping_and_echo(client: RawClient) -> None:
    assert client.call("ping") == "PONG"
    assert client.call("PING", b"\0\r\n") == b"\0\r\n"
    assert client.call("eChO", "") == b""
    client.send(b"PING\r\nping 'a b'\n")
    assert [client.read(), client.read()] == ["PONG", b"a b"]
    assert client.error("PING", 1, 2) == "ERR wrong number of arguments for 'ping' command"


def test_hello_answers_seven_pairs_in_both_protocols(client: RawClient) -> None:
    """H03."""
    flat = client.call("HELLO")
    assert flat[::2] == [b"server", b"version", b"proto", b"id", b"mode", b"role", b"modules"]
    assert flat[1:6:2] == [b"pion", b"7.0.0", 2]
    assert flat[13] == []
    greeting = client.call("HELLO", 3)
    assert list(greeting) == flat[::2]
    assert greeting[b"proto"] == 3
    assert client.call("CLIENT", "GETNAME") is None
    assert isinstance(client.call("CONFIG", "GET", "port"), dict)
    assert client.call("HELLO", 2)[5] == 2
    assert client.call("CONFIG", "GET", "databases") == [b"databases", b"1"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((4,), "NOPROTO unsupported protocol version"),
        ((0,), "NOPROTO unsupported protocol version"),
        (("3x",), "ERR Protocol version is not an integer or out of range"),
        (("9" * 50,), "NOPROTO unsupported protocol version"),
        ((3, "AUTH", "default"), "ERR Syntax error in HELLO option 'AUTH'"),
        ((3, "WHAT"), "ERR Syntax error in HELLO option 'WHAT'"),
        ((3, "SETNAME"), "ERR Syntax error in HELLO option 'SETNAME'"),
        ((3, "AUTH", "default", "x"), "ERR Client sent AUTH, but no password is set"),
        ((3, "SETNAME", "a b"), "ERR Client names cannot contain spaces"),
    ],
)
def test_a_refused_hello_changes_nothing(
    client: RawClient, words: tuple[str | int, ...], text: str
) -> None:
    """H03."""
    client.call("CLIENT", "SETNAME", "before")
    assert client.error("HELLO", *words).startswith(text)
    assert client.call("CLIENT", "GETNAME") == b"before"
    assert client.call("HELLO")[5] == 2


def test_hello_sets_name_and_password_in_any_order(stranger: RawClient) -> None:
    greeting = stranger.call("HELLO", 3, "SETNAME", "me", "AUTH", "default", PASSWORD)
    assert greeting[b"proto"] == 3
    assert stranger.call("CLIENT", "GETNAME") == b"me"


@pytest.mark.parametrize("words", [(), (2,), (3,), (3, "SETNAME", "x")])
def test_hello_without_the_password_is_refused(
    stranger: RawClient, words: tuple[str | int, ...]
) -> None:
    """H03: HELLO before AUTH, and after it."""
    assert stranger.error("HELLO", *words).startswith("NOAUTH HELLO must be called")
    assert stranger.error("PING") == NOAUTH
    assert stranger.call("AUTH", PASSWORD) == "OK"
    assert stranger.call("HELLO", 3)[b"proto"] == 3


def test_hello_with_a_wrong_password_leaves_a_stranger(stranger: RawClient) -> None:
    """H03: HELLO with bad AUTH."""
    assert stranger.error("HELLO", 3, "AUTH", "default", "wrong") == WRONGPASS
    assert stranger.error("PING") == NOAUTH
    assert stranger.error("HELLO", 4, "AUTH", "default", PASSWORD).startswith("NOPROTO")
    assert stranger.error("PING") == NOAUTH


def test_auth_with_and_without_a_user(stranger: RawClient, locked: ServerProcess) -> None:
    assert stranger.error("AUTH", "wrong") == WRONGPASS
    assert stranger.error("AUTH", PASSWORD, "wrong") == WRONGPASS
    assert stranger.error("AUTH", "") == WRONGPASS
    assert stranger.error("AUTH") == "ERR wrong number of arguments for 'auth' command"
    assert stranger.error("AUTH", 1, 2, 3) == "ERR wrong number of arguments for 'auth' command"
    assert stranger.call("AUTH", "anybody", PASSWORD) == "OK"
    assert stranger.call("PING") == "PONG"
    # A failed AUTH changes nothing.
    assert stranger.error("AUTH", "wrong") == WRONGPASS
    assert stranger.call("PING") == "PONG"


def test_auth_where_there_is_no_password_is_never_a_silent_ok(client: RawClient) -> None:
    assert client.error("AUTH", "x") == "ERR Client sent AUTH, but no password is set"
    assert client.error("AUTH", "default", "x") == "ERR Client sent AUTH, but no password is set"
    assert client.call("PING") == "PONG"


def test_strangers_may_only_greet_and_leave(stranger: RawClient) -> None:
    for words in (("PING",), ("COMMAND",), ("NOSUCH",), ("CLIENT", "LIST"), ("SHUTDOWN",)):
        assert stranger.error(*words) == NOAUTH
    assert stranger.call("RESET") == "RESET"
    assert stranger.call("QUIT") == "OK"
    assert stranger.at_end()


def test_strangers_cannot_make_the_server_wait_for_large_requests(stranger: RawClient) -> None:
    stranger.send(b"*2\r\n$4\r\nAUTH\r\n$16385\r\n")
    assert str(stranger.read()) == "ERR Protocol error: unauthenticated bulk length"
    assert stranger.at_end()


def test_a_large_command_may_follow_the_password_in_one_pipeline(stranger: RawClient) -> None:
    stranger.send(stranger.pack("AUTH", PASSWORD) + stranger.pack("ECHO", b"x" * 100_000))
    assert stranger.read() == "OK"
    assert stranger.read() == b"x" * 100_000


def test_reset_forgets_password_protocol_and_name(stranger: RawClient) -> None:
    stranger.call("HELLO", 3, "AUTH", "default", PASSWORD, "SETNAME", "me")
    assert stranger.call("RESET") == "RESET"
    assert stranger.error("PING") == NOAUTH
    stranger.call("AUTH", PASSWORD)
    assert stranger.call("CLIENT", "GETNAME") is None
    assert stranger.call("HELLO")[5] == 2


def test_quit_answers_and_closes(client: RawClient) -> None:
    client.send(client.pack("PING") + client.pack("QUIT") + client.pack("PING"))
    assert [client.read(), client.read()] == ["PONG", "OK"]
    assert client.at_end()


def test_there_is_one_database(client: RawClient) -> None:
    assert client.call("SELECT", 0) == "OK"
    assert client.error("SELECT", 1) == "ERR DB index is out of range"
    assert client.error("SELECT", -1) == "ERR DB index is out of range"
    assert client.error("SELECT", "x") == "ERR invalid DB index"


def test_client_subcommands(client: RawClient, running: ServerProcess) -> None:
    assert client.call("CLIENT", "SETNAME", "worker-1") == "OK"
    assert client.call("client", "getname") == b"worker-1"
    assert client.call("CLIENT", "SETINFO", "LIB-NAME", "lib") == "OK"
    assert client.call("CLIENT", "SETINFO", "lib-ver", "1.2") == "OK"
    number = client.call("CLIENT", "ID")
    info = client.call("CLIENT", "INFO")
    assert info.startswith(b"id=%d addr=127.0.0.1:" % number)
    for part in (b"name=worker-1", b"lib-name=lib", b"lib-ver=1.2", b"resp=2", b"cmd=client"):
        assert part in info.split()
    other = running.client()
    other.call("PING")
    lines = client.call("CLIENT", "LIST").splitlines()
    assert any(line.startswith(b"id=%d " % number) for line in lines)
    assert len(lines) >= 2
    for words in ("NO-EVICT ON", "NO-TOUCH OFF", "REPLY ON", "TRACKING OFF"):
        assert client.call("CLIENT", *words.split()) == "OK"
    moving = "MAINT_NOTIFICATIONS ON moving-endpoint-type internal-ip"
    assert client.call("CLIENT", *moving.split()) == "OK"


def test_client_refusals(client: RawClient) -> None:
    assert "cannot contain spaces" in client.error("CLIENT", "SETNAME", "a b")
    assert "cannot contain spaces" in client.error("CLIENT", "SETINFO", "LIB-NAME", "a\nb")
    assert "Unrecognized option" in client.error("CLIENT", "SETINFO", "LIB-COLOUR", "x")
    for words in ("REPLY OFF", "REPLY SKIP", "TRACKING ON", "NOSUCH", "SETNAME", "NO-EVICT MAYBE"):
        assert client.error("CLIENT", *words.split()).startswith("ERR unknown subcommand")
    # One reply each, and the stream still in step.
    assert client.call("ECHO", "in step") == b"in step"


def test_the_command_table_comes_from_the_registry(client: RawClient) -> None:
    rows = client.call("COMMAND")
    assert client.call("COMMAND", "COUNT") == len(rows) == len(client.call("COMMAND", "LIST"))
    table = {row[0]: row for row in rows}
    assert table[b"ping"][1] == -1
    assert table[b"select"][1] == 2
    assert table[b"kv.prefix.lookup"][1] < 0
    assert client.call("COMMAND", "INFO", "Ping", "nosuch") == [table[b"ping"], None]
    client.call("HELLO", 3)
    docs = client.call("COMMAND", "DOCS")
    assert set(docs) == set(table)
    for name, entry in docs.items():
        assert entry[b"summary"].lower().startswith(name)
        assert {b"summary", b"since", b"group"} <= set(entry)
    assert list(client.call("COMMAND", "DOCS", "PING", "nosuch")) == [b"ping"]


def test_config_tells_what_is_set_but_never_the_password(locked: ServerProcess) -> None:
    client = locked.client()
    client.call("AUTH", PASSWORD)
    client.call("HELLO", 3)
    settings = client.call("CONFIG", "GET", "*")
    assert settings[b"port"] == b"%d" % locked.port
    assert PASSWORD.encode() not in b" ".join([*settings, *settings.values()])
    assert client.call("CONFIG", "GET", "MAXMEM*", "no?") == {
        b"maxmemory": b"0",
        b"maxmemory-policy": b"allkeys-lru",
    }
    assert client.call("CONFIG", "GET", "nosuch") == {}
    assert client.call("CONFIG", "RESETSTAT") == "OK"
    assert "restart" in client.error("CONFIG", "SET", "port", "1")
    assert "unknown subcommand" in client.error("CONFIG", "REWRITE")


def test_config_resetstat_clears_the_counters(client: RawClient) -> None:
    client.call("KV.PREFIX.LOOKUP", "nothing there")
    assert _misses(client) >= 1
    client.call("CONFIG", "RESETSTAT")
    assert _misses(client) == 0


def _misses(client: RawClient) -> int:
    flat = client.call("PION.STATS")
    return int(flat[flat.index(b"kvprefix_misses") + 1])


@pytest.mark.parametrize("protocol", [None, 2, 3])
def test_redis_py_connects_with_its_default_handshake(
    running: ServerProcess, locked: ServerProcess, protocol: int | None
) -> None:
    """H03, for the installed version; tests/interop covers the older ones."""
    options: dict[str, Any] = {} if protocol is None else {"protocol": protocol}
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=running.port, **options) as plain:
        assert plain.ping() is True
        assert plain.echo("é") == "é".encode()
        assert plain.client_id() > 0
        assert plain.config_get("port") == {"port": str(running.port)}
        with plain.pipeline(transaction=False) as pipeline:
            for i in range(1000):
                pipeline.echo(str(i))
            assert pipeline.execute() == [b"%d" % i for i in range(1000)]
    with redis.Redis(
        port=locked.port,
        password=PASSWORD,
        **options,
    ) as known:
        assert known.ping() is True
        known.client_setname("named")
        assert known.client_getname() in ("named", b"named")
    with (
        redis.Redis(port=locked.port, retry=once, **options) as unknown,
        pytest.raises(redis.AuthenticationError),
    ):
        unknown.ping()
    with (
        redis.Redis(port=locked.port, password="no", retry=once, **options) as wrong,
        pytest.raises(redis.AuthenticationError),
    ):
        wrong.ping()
