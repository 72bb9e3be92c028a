"""The collector: paused while much is made, and never twice over what stays."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pion_server import collector
from pion_server.collector import collector_paused, look_once

if TYPE_CHECKING:
    from tests.conftest import ServerProcess


@pytest.fixture
def as_before() -> Iterator[None]:
    yield
    gc.callbacks.remove(collector._set_survivors_aside)
    gc.unfreeze()


def test_pauses_may_overlap() -> None:
    """Two tenants' SAVEs: the collector is on again when the last has ended."""
    first, second = collector_paused(), collector_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()
    gc.enable()


@pytest.mark.usefixtures("as_before")
def test_survivors_of_a_full_pass_are_not_looked_at_again() -> None:
    """200,000 records cost a quarter of a second at each, on the thread that serves clients."""
    gc.unfreeze()
    look_once()
    kept = [[] for _ in range(10_000)]  # type: ignore[var-annotated]
    gc.collect(1)
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert gc.get_freeze_count() > len(kept)
    assert len(gc.get_objects()) < len(kept)


LISTEN = """
import gc
from collections import Counter
from pion_server.commands.registry import Access, command


@command("T.OBJECTS", min_args=0, access=Access.TENANT)
def objects(ctx, args):
    "T.OBJECTS"
    gc.disable()
    gc.unfreeze()
    names = [type(each).__name__ for each in gc.get_objects()]
    wanted = ("Channel", "Connection", "Context", "Outbox", "CommandError", "frame", "coroutine")
    found = Counter(name for name in names if name in wanted or "Transport" in name)
    return str(sum(found.values())) + " " + repr(dict(found))
"""

REQUESTS = (
    b"PING\r\nNOPE\r\nV.FETCH no 0 0\r\nV.CREATE s 32\r\n",
    b"*6\r\n$12\r\nV.STOREBATCH\r\n$1\r\ns\r\n$1\r\n0\r\n$1\r\n0\r\n$4\r\n2048\r\n"
    b"$262144\r\n" + bytes(262_144) + b"\r\nV.FETCH s 0 RANGE 0 2048\r\n",
    b"KV.PREFIX.META n BEGIN\r\nKV.PREFIX.SAVE\r\nKV.PREFIX.SAVE /no\r\n",
    b"*x\r\n",
    b"*1\r\n$9999\r\nhalf a frame",
)


def test_connections_and_requests_leave_nothing_that_only_a_pass_would_find(
    server: type[ServerProcess], tmp_path: Path
) -> None:
    """What survives a pass is set aside for good, so a broken cycle would stay for ever."""
    extra = tmp_path / "extra.py"
    extra.write_text(LISTEN)
    running = server(extra=extra)  # type: ignore[call-arg]
    probe = running.client()

    def objects() -> str:
        return str(probe.call("T.OBJECTS"))

    def talk() -> None:
        for request in REQUESTS:
            with socket.create_connection(("127.0.0.1", running.port)) as peer:
                peer.sendall(request)
                peer.settimeout(0.05)
                try:
                    while peer.recv(1 << 16):
                        pass
                except TimeoutError:
                    pass

    talk()
    before, deadline = objects(), time.monotonic() + 20
    for _ in range(12):
        talk()
    while int(objects().split()[0]) > int(before.split()[0]) + 12:
        assert time.monotonic() < deadline, (before, objects())
        time.sleep(0.05)
