"""Every command and frame by every user: nobody, a tenant on its own and others' data, the admin.

The cases come from the command table itself: a command without a sample here fails. They are played
one by one over TCP, all together over the Unix socket, and over TLS on both lanes.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import pytest

from pion_server.commands.dispatch import load_commands
from pion_server.commands.frames import FRAMES
from pion_server.commands.registry import COMMANDS, Access, Command
from tests.certificates import Papers, tls_port
from tests.conftest import RawClient
from tests.pion_server.access_samples import DIM, ROW, body_for, words_for
from tests.pion_server.commands.test_lend import UnixClient
from tests.pion_server.wire.binary_client import AUTH, ERROR, MISS, OK, BinaryClient

Server = Any
Client = Any
#: A new connection by one of the ways in.
Connect: TypeAlias = Callable[[], Client]

load_commands()
ALL = sorted(COMMANDS.values(), key=lambda row: row.name)
USERS = ("--requirepass", "root", "--tenant", "ann=apple", "--tenant", "bob=berry")
TENANTS = [row for row in ALL if row.access is Access.TENANT]
SHARED = b"prefix"  # a name of both tenants, each with rows of its own
OTHERS = b"of-bob"
NOBODYS = b"of-who"  # as long as OTHERS
ENDS = {"QUIT", "RESET", "HELLO", "AUTH"}
#: Answers that differ from call to call without anybody else's doing.
OWN_FIGURES = {"PION.STATS", "INFO", "KV.PREFIX.ADMIT", "V.SNAPSHOT", "CLIENT"}


def ids(rows: list[Command]) -> list[str]:
    return [row.name for row in rows]


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def shared(module_server: Callable[..., Server], papers: Papers) -> Server:
    return module_server(*USERS, "--metal-attention", *papers.flags)


ClientT = TypeVar("ClientT", RawClient, BinaryClient)


def over_tls(client: ClientT, context: ssl.SSLContext) -> ClientT:
    """The same client, what it says wrapped."""
    client.socket = context.wrap_socket(client.socket, server_hostname="127.0.0.1")
    return client


@pytest.fixture(params=["unix", "tls"])
def other_way(request: pytest.FixtureRequest, shared: Server, papers: Papers) -> Connect:
    """Connections that are not plain TCP."""
    if request.param == "unix":
        return lambda: UnixClient(bytes(shared.directory / "pion.sock"))
    context = ssl.create_default_context(cafile=str(papers.ca))
    return lambda: over_tls(RawClient(shared.host, tls_port(shared)), context)


def login(way: Server | Connect, *credentials: str) -> Client:
    client = way() if callable(way) else way.client()
    if credentials:
        assert client.call("AUTH", *credentials) == "OK"
    return client


def fill(client: Client, ns: bytes, value: bytes = ROW) -> None:
    """Everything a name can have."""
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp32", "BLOCKS", 1, 1, bytes(8))
    for side in (b"_pk", b"_pv"):
        client.call("V.STOREBATCH", ns + side, 0, 0, 1, value)
    client.call("SSM.PREFIX.STORE", ns, 0, b"state of " + ns)
    gen = client.call("KV.PREFIX.META", ns, "BEGIN")
    client.call("KV.PREFIX.META", ns, "SET", gen, b"manifest of " + ns)
    client.call("ATTEND.PREFIX.STORE", ns + b"_attn", 0, 1, 1, DIM, value, value)
    client.call("SET", ns, b"value of " + ns)
    client.call("HSET", ns + b":h", b"field", value)


def describe(client: Client, ns: bytes) -> list[Any]:
    """All that can be read of a name."""
    return [
        client.call("KV.PREFIX.OWNER", ns),
        client.call("V.FETCH", ns + b"_pk", 0, "RANGE", 0, 1),
        client.call("V.FETCH", ns + b"_pv", 0, "RANGE", 0, 1),
        client.call("SSM.PREFIX.FETCH", ns, 0),
        client.call("KV.PREFIX.META", ns, "GET"),
        client.call("KV.PREFIX.BLOCKS", ns),
        client.call("ATTEND.PREFIX.LOOKUP", ns + b"_attn", 0),
        client.call("GET", ns),
        client.call("HGET", ns + b":h", b"field"),
    ]


def ask(client: Client, words: tuple[bytes, ...]) -> Any:
    client.send(client.pack(*words))
    reply = client.read()
    return str(reply) if isinstance(reply, Exception) else reply


@pytest.fixture(scope="module")
def bob(shared: Server) -> tuple[Client, list[Any]]:
    """Bob, who has filled a name, and what he must go on reading of it."""
    client = login(shared, "bob", "berry")
    fill(client, OTHERS)
    return client, describe(client, OTHERS)


def test_every_command_and_frame_says_who_may_ask_and_has_a_sample() -> None:
    for row in ALL:
        assert words_for(row.name, b"ns")[0].decode() == row.name
    for frame in FRAMES.values():
        body_for(frame.name, b"ns")
    assert {row.name for row in ALL if row.access is Access.ANYONE} == ENDS
    admin = {row.name for row in ALL if row.access is Access.ADMIN}
    assert admin == {"CONFIG", "KV.PREFIX.COMMIT", "KV.PREFIX.SAVE", "SAVE", "SHUTDOWN"}


@pytest.mark.parametrize("row", ALL, ids=ids(ALL))
def test_nobody_is_answered_without_the_password(shared: Server, row: Command) -> None:
    # A wrong password costs a quarter of a second.
    check_strangers(shared.client, row, WRONG if row.name in GUESSED else ())


WRONG = (("root", "wrong"), ("ann", "berry"), ("ann", "root"), ("apple",))
GUESSED = ("GET", "PING", "V.FETCH", "SHUTDOWN")


def check_strangers(connect: Connect, row: Command, guesses: tuple[tuple[str, ...], ...]) -> None:
    """Nobody's request, and those after wrong passwords."""
    for wrong in ((), *guesses):
        client = connect()
        if wrong:
            assert client.error("AUTH", *wrong).startswith("WRONGPASS")
        reply = ask(client, words_for(row.name, SHARED))
        if row.access is Access.ANYONE:
            assert not str(reply).startswith("NOAUTH") or row.name == "HELLO"
        else:
            # Strangers' requests are short, or end the connection.
            assert str(reply).startswith(("NOAUTH", "ERR Protocol error: unauthenticated"))
        client.close()


@pytest.mark.parametrize("row", ALL, ids=ids(ALL))
def test_a_tenant_uses_its_own_and_administers_nothing(shared: Server, row: Command) -> None:
    check_own(shared.client, row)


def check_own(connect: Connect, row: Command) -> None:
    """A tenant about what is its own."""
    ann = login(connect, "ann", "apple")
    fill(ann, SHARED)
    reply = ask(ann, words_for(row.name, SHARED))
    if row.access is Access.ADMIN:
        assert reply == "NOPERM this command is not allowed for tenant connections"
    elif row.name not in ENDS:
        assert not str(reply).startswith(("NOPERM", "NOAUTH")), reply
    ann.close()


@pytest.mark.parametrize("row", TENANTS, ids=ids(TENANTS))
def test_what_another_tenant_holds_looks_absent_and_stays_as_it_is(
    shared: Server, bob: tuple[Client, list[Any]], row: Command
) -> None:
    check_others(shared.client, bob, row)


def check_others(connect: Connect, bob: tuple[Client, list[Any]], row: Command) -> None:
    """A tenant about what is Bob's, and about what is nobody's."""
    ann = login(connect, "ann", "apple")
    others, nobodys = (ask(ann, words_for(row.name, ns)) for ns in (OTHERS, NOBODYS))
    if row.name not in OWN_FIGURES:
        assert hide(others, OTHERS) == hide(nobodys, NOBODYS)
    client, before = bob
    assert describe(client, OTHERS) == before
    for ns in (OTHERS, NOBODYS):  # what creating commands left behind is Ann's own
        ann.call("KV.PREFIX.DROP", ns)
        ann.call("SSM.PREFIX.DROP", ns)
    assert describe(client, OTHERS) == before
    ann.close()


def hide(reply: Any, ns: bytes) -> Any:
    """A reply with the name it is about left out, and numbers that count up."""
    if isinstance(reply, int) or reply is None:
        return type(reply)
    if isinstance(reply, list):
        return [hide(one, ns) for one in reply]
    text = reply if isinstance(reply, bytes) else str(reply).encode()
    return text.replace(ns, b"<name>")


@pytest.mark.parametrize("row", TENANTS, ids=ids(TENANTS))
def test_the_admin_does_not_meet_a_tenants_names_by_accident(
    shared: Server, bob: tuple[Client, list[Any]], row: Command
) -> None:
    check_admin(shared.client, bob, row)


def check_admin(connect: Connect, bob: tuple[Client, list[Any]], row: Command) -> None:
    """The admin about a name of Bob's, and about one that is nobody's."""
    admin = login(connect, "root")
    others, nobodys = (ask(admin, words_for(row.name, ns)) for ns in (OTHERS, NOBODYS))
    if row.name not in OWN_FIGURES:
        assert hide(others, OTHERS) == hide(nobodys, NOBODYS)
    client, before = bob
    assert describe(client, OTHERS) == before
    admin.close()


def test_other_ways_in_have_the_same_walls_for_every_command(
    other_way: Connect, bob: tuple[Client, list[Any]]
) -> None:
    for row in ALL:
        check_strangers(other_way, row, WRONG if row.name == "V.FETCH" else ())
        check_own(other_way, row)
    for row in TENANTS:
        check_others(other_way, bob, row)
        check_admin(other_way, bob, row)


@pytest.mark.parametrize("code", sorted(FRAMES), ids=lambda code: FRAMES[code].name)
@pytest.mark.parametrize("way", ["tcp", "tls"])
def test_the_binary_lane_has_the_same_walls(
    shared: Server, papers: Papers, bob: tuple[Client, list[Any]], code: int, way: str
) -> None:
    name = FRAMES[code].name
    context = ssl.create_default_context(cafile=str(papers.ca))

    def connect() -> BinaryClient:
        if way == "tcp":
            return BinaryClient(shared.host, shared.port + 1)
        return over_tls(BinaryClient(shared.host, tls_port(shared) + 1), context)

    stranger = connect()
    assert stranger.call(code, body_for(name, SHARED))[0] == ERROR
    ann = connect()
    assert ann.call(AUTH, b"ann\0berry")[0] == ERROR
    assert ann.call(AUTH, b"ann\0root")[0] == ERROR
    assert ann.call(AUTH, b"ann\0apple")[0] == OK
    fill(login(shared, "ann", "apple"), SHARED)
    if name != "AUTH":
        assert ann.call(code, body_for(name, SHARED))[0] == OK
    assert ann.call(code, body_for(name, OTHERS)) == ann.call(code, body_for(name, NOBODYS))
    client, before = bob
    assert describe(client, OTHERS) == before


def test_figures_are_the_tenants_own(shared: Server) -> None:
    """I06: no count of anybody else's."""
    root, ann, bob = (
        login(shared, "root"),
        login(shared, "ann", "apple"),
        login(shared, "bob", "berry"),
    )
    fill(bob, b"counted")
    for client in (ann, bob):
        client.call("PION.STATS", "RESET")
    before = [ann.call(*words) for words in FIGURES]
    for number in range(5):
        fill(bob, b"more-%d" % number)
        bob.call("KV.PREFIX.LOOKUP", b"more-%d" % number)
        bob.call("KV.PREFIX.LOOKUP", b"nothing")
        fill(root, b"root-%d" % number)
    assert [ann.call(*words) for words in FIGURES] == before
    info = ann.call("INFO").decode()
    assert "bob" not in info
    assert "berry" not in info
    stats = dict(zip(*[iter(bob.call("PION.STATS"))] * 2, strict=True))
    assert (stats[b"kvprefix_hits"], stats[b"kvprefix_misses"]) == (5, 5)
    listed = root.call("INFO", "Tenants").decode()
    assert "bob:sessions=" in listed
    assert "hits=5,misses=5" in listed


FIGURES = (
    ("KV.PREFIX.INFO",),
    ("V.INFO",),
    ("INFO", "Pion"),
    ("INFO", "Memory"),
    ("INFO", "Persistence"),
    ("INFO", "Keyspace"),
    ("DBSIZE",),
    ("KEYS", "*"),
    ("SCAN", "0", "COUNT", "1000"),
)


def test_clients_of_others_are_not_listed(shared: Server) -> None:
    ann, _bob = login(shared, "ann", "apple"), login(shared, "bob", "berry")
    lines = ann.call("CLIENT", "LIST").decode().splitlines()
    assert lines
    assert all(" user=ann " in line for line in lines)
    assert " user=bob " in login(shared, "root").call("CLIENT", "LIST").decode()


def test_a_failed_or_later_authentication_binds_as_it_says(shared: Server) -> None:
    ann = login(shared, "ann", "apple")
    fill(ann, b"mine")
    assert ann.error("AUTH", "ann", "wrong").startswith("WRONGPASS")
    assert ann.call("KV.PREFIX.LOOKUP", b"mine") == "HIT"  # nothing changed
    assert ann.call("AUTH", "root") == "OK"
    assert ann.call("KV.PREFIX.LOOKUP", b"mine") == "MISS"
    assert ann.call("HELLO", "3", "AUTH", "ann", "apple")[b"proto"] == 3
    assert ann.call("KV.PREFIX.LOOKUP", b"mine") == "HIT"
    assert ann.call("RESET") == "RESET"
    assert ann.error("PING").startswith("NOAUTH")
    # Of a user who is no tenant only the password counts.
    assert ann.call("AUTH", "anybody", "root") == "OK"


def test_names_cannot_reach_over_the_wall(shared: Server, bob: tuple[Client, list[Any]]) -> None:
    """I03, I06: no spelling of a name is somebody else's."""
    ann = login(shared, "ann", "apple")
    client, before = bob
    for name in (b"bob\0" + OTHERS, b"../bob/" + OTHERS, b"bob:" + OTHERS, b"\0bob\0" + OTHERS):
        assert ann.call("KV.PREFIX.LOOKUP", name) == "MISS"
        fill(ann, name, bytes(4 * DIM))
        ann.call("KV.PREFIX.DROP", name)
    assert describe(client, OTHERS) == before


def test_strict_tenants_keep_rediss_commands_only(server: Callable[..., Server]) -> None:
    strict = server(*USERS, "--tenant-strict")
    ann = login(strict, "ann", "apple")
    for row in TENANTS:
        reply = str(ask(ann, words_for(row.name, SHARED)))
        assert reply.startswith("NOPERM") == row.dotted, (row.name, reply)
    lane = BinaryClient(strict.host, strict.port + 1)
    assert lane.call(AUTH, b"ann\0apple")[0] == OK
    for code, frame in FRAMES.items():
        assert frame.name == "AUTH" or lane.call(code, body_for(frame.name, SHARED))[0] == ERROR
    assert login(strict, "root").call("KV.PREFIX.LOOKUP", SHARED) == "MISS"


def test_exports_of_tenants_lie_apart(shared: Server) -> None:
    """I06: a path names its tenant's directory, and only its own can be asked for."""
    paths = {}
    for user, word in (("ann", "apple"), ("bob", "berry")):
        client = login(shared, user, word)
        fill(client, b"exported", ROW if user == "ann" else bytes(4 * DIM))
        words = words_for("V.EXPORT", b"exported")
        paths[user] = client.call(*words)
    assert b"/tenants/ann/" in paths["ann"]
    assert b"/tenants/bob/" in paths["bob"]


def test_a_binary_ping_of_an_unknown_user_is_an_error(shared: Server) -> None:
    lane = BinaryClient(shared.host, shared.port + 1)
    assert lane.call(AUTH, b"root")[0] == OK
    assert lane.call(0xFF)[0] == OK
    assert lane.call(0x24, b"\xff")[0] == MISS
