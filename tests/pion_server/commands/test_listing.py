"""KV.PREFIX.LIST: names, bytes, generations and ages of what is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.pion_server.commands.test_meta import ROW_BYTES, begin, fill

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

Start = Callable[..., "ServerProcess"]


def listed(client: RawClient, start: bytes) -> list[list[Any]]:
    found: list[list[Any]] = client.call("KV.PREFIX.LIST", start)
    return found


def test_every_namespace_that_begins_so_is_listed_with_its_bytes(
    client: RawClient, ns: bytes
) -> None:
    gen = fill(client, ns + b"-one")
    client.call("KV.PREFIX.REGISTER", ns + b"-two", 32, "fp16")
    client.call("SSM.PREFIX.STORE", ns + b"-state", 0, b"12345")
    found = {row[0]: row[1:4] for row in listed(client, ns)}
    assert found == {
        ns + b"-one": [2 * len(ROW_BYTES), len(b"state"), gen],
        ns + b"-two": [0, 0, 0],
        ns + b"-state": [0, 5, 0],
    }
    assert listed(client, ns + b"-nothing") == []


def test_a_manifest_alone_is_listed(client: RawClient, ns: bytes) -> None:
    gen = begin(client, ns)
    client.call("KV.PREFIX.META", ns, "SET", gen, b"ids")
    assert listed(client, ns) == [[ns, 0, 0, gen, 0]]


def test_an_open_fill_is_told_apart_from_what_a_crash_left(client: RawClient, ns: bytes) -> None:
    gen = begin(client, ns)
    client.call("KV.PREFIX.REGISTER", ns, 32, "fp32")
    client.call("V.STOREBATCH", ns + b"_pk", 0, 0, 1, ROW_BYTES, "GEN", gen)
    assert listed(client, ns)[0][:4] == [ns, len(ROW_BYTES), 0, -1]
    client.call("KV.PREFIX.META", ns, "ABORT", gen)
    assert listed(client, ns)[0][:4] == [ns, len(ROW_BYTES), 0, 0]


def test_what_was_read_last_comes_last(client: RawClient, ns: bytes) -> None:
    """Rows and state share one order; LIST itself touches nothing."""
    names = [ns + b"-a", ns + b"-b", ns + b"-c"]
    fill(client, names[0])
    client.call("SSM.PREFIX.STORE", names[1], 0, b"blob")
    fill(client, names[2])
    assert [row[0] for row in listed(client, ns)] == names
    client.call("V.FETCH", names[0] + b"_pk", 0, "RANGE", 0, 1)
    client.call("SSM.PREFIX.FETCH", names[1], 0)
    found = listed(client, ns)
    assert [row[0] for row in found] == [names[2], names[0], names[1]]
    assert [row[4] for row in found] == sorted((row[4] for row in found), reverse=True)
    assert [row[0] for row in listed(client, ns)] == [names[2], names[0], names[1]]


def test_dropped_is_not_listed_and_a_restart_keeps_the_rest(server: Start) -> None:
    running = server()
    client = running.client()
    gen = fill(client, b"x-kept")
    fill(client, b"x-gone")
    client.call("KV.PREFIX.DROP", "x-gone")
    running.kill()
    running.restart()
    rows = listed(running.client(), b"x-")
    assert [row[:4] for row in rows] == [[b"x-kept", 2 * len(ROW_BYTES), len(b"state"), gen]]
