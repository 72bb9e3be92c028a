"""`--ns-prefix` enforced on every command and lane, and what is a tenant's stays a tenant's.

python tests/test_multitenant.py       # as pytest runs it
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from pion_server.commands.dispatch import load_commands
from pion_server.commands.frames import FRAMES
from pion_server.commands.registry import COMMANDS, Command
from pion_server.config import parse
from pion_server.flag_values import ConfigError
from tests.pion_server.access_samples import DIM, ROW, body_for, words_for
from tests.pion_server.wire.binary_client import AUTH, ERROR, OK, BinaryClient

Server = Any
MB = 1 << 20

load_commands()
NAMED = [row for row in COMMANDS.values() if row.names or row.sids]
UNNAMED = [row for row in COMMANDS.values() if row.dotted and not (row.names or row.sids)]


def ids(rows: list[Command]) -> list[str]:
    return [row.name for row in rows]


@pytest.fixture(scope="module")
def prefixed(module_server: Callable[..., Server]) -> Server:
    return module_server("--ns-prefix", "team/")


@pytest.mark.parametrize("row", NAMED, ids=ids(NAMED))
def test_every_name_begins_with_the_prefix_or_nothing_happens(
    prefixed: Server, row: Command
) -> None:
    client = prefixed.client()
    for name in (b"other", b"Team/x", b"team", b"team\0/", b"ateam/x"):
        assert "required prefix 'team/'" in client.error(*words_for(row.name, name))
    client.send(client.pack(*words_for(row.name, b"team/a")))
    reply = client.read()
    assert not (isinstance(reply, Exception) and "required prefix" in str(reply))


def test_commands_without_names_need_no_prefix(prefixed: Server) -> None:
    client = prefixed.client()
    for row in UNNAMED:
        if row.name not in ("KV.PREFIX.SAVE", "ATTEND.QUERYBATCH"):
            client.call(*words_for(row.name, b"unused"))


def test_all_names_of_a_command_are_checked_before_any_effect(prefixed: Server) -> None:
    client = prefixed.client()
    client.call("KV.PREFIX.REGISTER", b"team/kept", DIM, "fp32")
    assert "required prefix" in client.error("KV.PREFIX.DROP", b"team/kept", b"other")
    assert client.call("KV.PREFIX.LOOKUP", b"team/kept") == "HIT"
    assert "required prefix" in client.error("KV.PREFIX.WARM", b"team/kept", 1, DIM, b"other")
    # An error is one line, whatever the bytes.
    assert client.error("KV.PREFIX.LOOKUP", b"a\r\nb").count("\n") == 0


@pytest.mark.parametrize("code", sorted(FRAMES), ids=lambda code: FRAMES[code].name)
def test_the_binary_lane_enforces_the_prefix(prefixed: Server, code: int) -> None:
    if FRAMES[code].sid is not None:
        lane = BinaryClient(prefixed.host, prefixed.port + 1)
        assert lane.call(code, body_for(FRAMES[code].name, b"other"))[0] == ERROR


def store(client: Any, ns: bytes, rows: int) -> str:
    """A prefix with `rows` rows on each side; the last reply."""
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp32")
    for side in (b"_pk", b"_pv"):
        client.send(client.pack("V.STOREBATCH", ns + side, 0, 0, rows, rows * ROW))
        reply = str(client.read())
    return reply


def user(server: Server, *credentials: str) -> Any:
    client = server.client()
    client.call("AUTH", *credentials)
    return client


def test_a_tenant_evicts_its_own_and_nobody_elses(server: Callable[..., Server]) -> None:
    """F07: ten times too much from one of two tenants."""
    s = server(
        *("--requirepass", "root", "--tenant", "ann=a", "--tenant", "bob=b"),
        *("--tenant-quota", "ann=1mb,8", "--tenant-quota", "bob=1mb"),
    )
    root, ann, bob = user(s, "root"), user(s, "ann", "a"), user(s, "bob", "b")
    for client in (root, bob):
        for number in range(4):
            store(client, b"kept-%d" % number, 100)
    for number in range(40):
        assert store(ann, b"ann-%d" % number, 1000) == "OK"
    figures = dict(line.split(":") for line in ann.call("KV.PREFIX.INFO").decode().split())
    assert int(figures["vstore_bytes"]) <= MB
    assert int(figures["vstore_sessions"]) <= 8
    assert int(figures["vstore_evictions"]) > 0
    assert ann.call("KV.PREFIX.LOOKUP", b"ann-39") == "HIT"
    for client in (root, bob):
        held = [client.call("KV.PREFIX.LOOKUP", b"kept-%d" % number) for number in range(4)]
        assert held == ["HIT"] * 4
    assert "no free slots" in fill_with_pins(ann)
    assert store(bob, b"another", 100) == "OK"


def fill_with_pins(client: Any) -> str:
    """Pin whatever is held until a new prefix finds no place; the refusal."""
    for number in range(20):
        client.send(client.pack("KV.PREFIX.REGISTER", b"pinned-%d" % number, DIM, "fp32"))
        reply = client.read()
        if isinstance(reply, Exception):
            return str(reply)
        client.call("KV.PREFIX.PIN", b"pinned-%d" % number)
    return "never refused"


def test_beyond_the_quota_of_one_prefix_the_answer_is_oom(server: Callable[..., Server]) -> None:
    s = server("--requirepass", "root", "--tenant", "ann=a", "--tenant-quota", "ann=100k")
    ann = user(s, "ann", "a")
    assert store(ann, b"small", 100) == "OK"
    assert store(ann, b"huge", 1000).startswith("OOM")
    assert ann.call("KV.PREFIX.LOOKUP", b"small") == "HIT"  # F04: it evicted nothing


def test_tenants_share_what_maxmemory_leaves(server: Callable[..., Server]) -> None:
    s = server(
        *("--requirepass", "root", "--maxmemory", "3mb", "--tenant", "ann=a", "--tenant", "bob=b"),
    )
    ann, bob = user(s, "ann", "a"), user(s, "bob", "b")
    store(bob, b"kept", 3000)
    for number in range(10):
        store(ann, b"ann-%d" % number, 2000)
    assert bob.call("KV.PREFIX.LOOKUP", b"kept") == "HIT"
    figures = dict(line.split(":") for line in ann.call("KV.PREFIX.INFO").decode().split())
    assert int(figures["vstore_bytes"]) <= MB


def test_a_tenants_connections_keep_nobody_out(server: Callable[..., Server]) -> None:
    """An equal part of --max-clients; the admin's stays free, and so does what is given back."""
    s = server(
        *("--requirepass", "root", "--tenant", "ann=a", "--tenant", "bob=b", "--max-clients", "9")
    )
    held = [user(s, "ann", "a") for _ in range(2)]
    held[0].call("AUTH", "ann", "a")  # once more, and no more than one
    lane = BinaryClient(s.host, s.port + 1)
    assert lane.call(AUTH, b"ann\0a")[0] == OK
    late = s.client()
    for words in (("AUTH", "ann", "a"), ("HELLO", "3", "AUTH", "ann", "a")):
        assert late.error(*words) == "ERR max number of clients of this tenant reached"
    assert late.error("DBSIZE").startswith("NOAUTH")
    other = BinaryClient(s.host, s.port + 1)
    assert other.call(AUTH, b"ann\0a")[0] == ERROR
    other.close()
    for name, word in (("bob", "b"), ("root", "root")):
        assert user(s, name, word).call("DBSIZE") == 0
    held[0].call("RESET")
    assert late.call("AUTH", "ann", "a") == "OK"
    assert late.call("AUTH", "bob", "b") == "OK"
    assert user(s, "ann", "a").call("DBSIZE") == 0
    held[1].close()  # noticed a moment later
    again, ends = s.client(), time.monotonic() + 20
    again.send(again.pack("AUTH", "ann", "a"))
    while again.read() != "OK":
        assert time.monotonic() < ends
        again.send(again.pack("AUTH", "ann", "a"))


def test_everything_of_a_tenant_survives_a_kill_and_a_save(server: Callable[..., Server]) -> None:
    s = server("--requirepass", "root", "--tenant", "ann=a", "--tenant", "bob=b")
    for name, word in (("ann", "a"), ("bob", "b")):
        client = user(s, name, word)
        store(client, b"same name", 3)
        client.call("SSM.PREFIX.STORE", b"same name", 0, name.encode())
    s.kill()
    s.restart()
    assert user(s, "root").call("KV.PREFIX.SAVE") == "OK"
    assert user(s, "root").call("KV.PREFIX.COMMIT") == "OK"
    store(user(s, "ann", "a"), b"later", 2)
    s.kill()
    s.restart()
    for name, word in (("ann", "a"), ("bob", "b")):
        client = user(s, name, word)
        assert client.call("V.FETCH", b"same name_pk", 0, "RANGE", 0, 3) == 3 * ROW
        assert client.call("SSM.PREFIX.FETCH", b"same name", 0) == name.encode()
        assert client.call("KV.PREFIX.LOOKUP", b"later") == ("HIT" if name == "ann" else "MISS")
    assert user(s, "root").call("KV.PREFIX.LOOKUP", b"same name") == "MISS"


def test_a_tenants_files_are_checked_with_the_servers(server: Callable[..., Server]) -> None:
    from pion_server.store.checking import check_directory

    s = server("--requirepass", "root", "--tenant", "ann=a")
    store(user(s, "ann", "a"), b"prefix", 2)
    s.stop()
    whole = check_directory(s.directory)
    assert whole.problems == []
    log = s.directory / "tenants" / "ann" / "pion.vstore.wal.0"
    data = bytearray(log.read_bytes())
    data[-10] ^= 1
    log.write_bytes(data)
    assert any("tenants/ann" in problem for problem in check_directory(s.directory).problems)
    assert (log.parent.stat().st_mode & 0o777, log.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize(("flags", "says"), [
    ("--tenant ann", "NAME=PASSWORD"),
    ("--tenant =x", "NAME=PASSWORD"),
    ("--tenant ann=", "password"),
    ("--tenant a/b=x", "letters"),
    ("--tenant ../x=x", "letters"),
    (f"--tenant {'a' * 65}=x", "letters"),
    (f"--tenant ann={'x' * 129}", "128 bytes"),
    ("--tenant ann=x", "--requirepass-file"),
    ("--requirepass r --tenant ann=x --tenant ann=y", "twice"),
    ("--requirepass r --tenant ann=x --tenant-quota bob=1mb", "no such"),
    ("--requirepass r --tenant ann=x --tenant-quota ann=lots", "size"),
    ("--requirepass r --tenant ann=x --tenant-quota ann=1mb,1", "2 sessions"),
    ("--requirepass r --tenant ann=x --tenant-quota ann=1mb,x", "acme=4gb,512"),
    ("--requirepass r --tenant a=x --tenant-quota a=2mb --maxmemory 1mb", "promises"),
    ("--ns-prefix=", "1 to 128"),
    (" ".join(["--requirepass r", *(f"--tenant t{n}=x" for n in range(65))]), "64 times"),
])  # fmt: skip
def test_flags_that_mean_nothing_are_refused(flags: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse(flags.split(), {})
    assert "\n" not in str(caught.value)


def test_passwords_are_shown_nowhere(server: Callable[..., Server]) -> None:
    config = parse(["--requirepass", "rootword", "--tenant", "ann=annword"], {})
    assert "word" not in repr(config)
    s = server("--requirepass", "rootword", "--tenant", "ann=annword")
    root = user(s, "rootword")
    for words in (("CONFIG", "GET", "*"), ("INFO",), ("CLIENT", "LIST")):
        assert b"annword" not in str(root.call(*words)).encode()
    assert "annword" not in s.errors.read_text()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
