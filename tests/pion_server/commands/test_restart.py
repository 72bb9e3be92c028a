"""What SIGKILL leaves: all that was acknowledged, bit for bit, nothing dropped (WIRE.md 11, 15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pion_server.formats import format_names, make_format
from tests.pion_server.commands.checks import Word, info, store, values

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

DIM = 64
ROPE = {"bf16_rope_fp8_body": 32}
Start = Callable[..., "ServerProcess"]


def kill(running: ServerProcess) -> RawClient:
    """Kill the server, start it again, and connect."""
    running.kill()
    running.restart()
    return running.client()


def fill_every_format(client: RawClient) -> dict[bytes, Any]:
    """Two batches, an overwrite and a gap in a session of each format; how they read."""
    formats = [make_format(name, DIM, ROPE.get(name, 0)) for name in format_names()]
    specs = [f"fmt={f.name},dim={DIM}" + (f",rope={f.rope}" if f.rope else "") for f in formats]
    client.call("V.CREATE", b"all", 0, "SCHEMA", len(specs), *specs)
    for layer, form in enumerate(formats):
        for start, count, seed in ((0, 5, 1), (5, 4, 2), (3, 3, 3), (20, 2, 4)):
            if form.name == "raw":
                blob = np.random.default_rng(seed).bytes(count * DIM)
                client.call("V.STOREBATCH", b"all", layer, start, count, blob, "FMT", "PACKED")
            else:
                store(client, b"all", layer, start, seed * values(seed, count, DIM))
    return every_format(client)


def every_format(client: RawClient) -> dict[bytes, Any]:
    batch = client.pack("V.FETCH", b"all", "BATCH", 0, 9, "FMT", "PACKED")
    tail = client.pack("V.FETCH", b"all", "BATCH", 20, 22, "FMT", "PACKED")
    gap = client.pack("V.FETCH", b"all", "BATCH", 8, 12, "FMT", "PACKED")
    client.send(batch + tail + gap + client.pack("V.INFO", b"all"))
    found = {name: client.read() for name in (b"batch", b"tail", b"gap", b"info")}
    # Its index is the running server's own.
    found[b"info"] = found[b"info"].partition(b"\r\n")[2]
    return found


def test_every_kind_of_write_survives_sigkill_before_and_after_save(server: Start) -> None:
    running = server()
    client = running.client()
    rows = fill_every_format(client)
    assert None not in rows[b"batch"] + rows[b"tail"]
    assert rows[b"gap"] == [None] * len(format_names())
    client.call("KV.PREFIX.REGISTER", "kept", DIM, "fp16", "BLOCKS", 4, 1, b"12345678")
    client.call("KV.PREFIX.PIN", "kept")
    client.call("KV.PREFIX.EXPIRE", "kept", 100_000)
    for side in ("kept_pk", "kept_pv"):
        store(client, side.encode(), 0, 0, values(1, 6, DIM))
    client.call("V.CREATE", "cut", DIM, "VQUANT", "int8")
    store(client, b"cut", 0, 0, values(1, 3, DIM))
    number = client.call("V.SNAPSHOT", "cut")
    store(client, b"cut", 0, 3, 99 * values(1, 3, DIM))
    client.call("V.RESTORE", "cut", number)
    for name in ("gone", "half", "again"):
        client.call("KV.PREFIX.REGISTER", name, DIM, "fp16")
        store(client, name.encode() + b"_pk", 0, 0, values(1, 2, DIM))
    client.call("KV.PREFIX.DROP", "gone")
    client.call("V.DROP", "half_pv")
    client.call("KV.PREFIX.REGISTER", "again", DIM, "int8")
    client.call("SSM.PREFIX.STORE", "kept", 3, b"state" * 100)
    client.call("SSM.PREFIX.STORE", "kept", 4, b"")
    client.call("SSM.PREFIX.STORE", "kept", 5, b"dropped")
    client.call("SSM.PREFIX.DROP", "kept", 5)
    looks: tuple[tuple[Word, ...], ...] = (
        *(("KV.PREFIX.LOOKUP", name) for name in ("kept", "gone", "half", "again")),
        ("V.FETCH", "kept_pk", "BATCH", 0, 6),
        ("V.FETCH", "cut", 0, "RANGE", 0, 3),
        ("V.FETCH", "cut", 0, "RANGE", 0, 4),
        ("V.FETCH", "again_pk", 0, "RANGE", 0, 1),
        ("KV.PREFIX.BLOCKS", "kept"),
        *(("SSM.PREFIX.FETCH", "kept", layer) for layer in (3, 4, 5)),
    )
    expected = [client.call(*look) for look in looks]
    assert expected[:4] == ["HIT", "MISS", "MISS", "HIT"]
    figures = info(client)
    for _ in range(2):
        client = kill(running)
        assert every_format(client) == rows
        assert [client.call(*look) for look in looks] == expected
        now = info(client)
        for field in ("vstore_bytes", "vstore_sessions", "registered_prefixes"):
            assert now[field] == figures[field], field
        assert (now["wal_replayed"] > 0) == (now["wal_bytes"] > 0)
        assert client.call("KV.PREFIX.SAVE") == "OK"
    # SIGTERM ends it in order, with nothing lost either; a snapshot of a snapshot is the same.
    assert running.stop() == 0
    running.restart()
    client = running.client()
    assert every_format(client) == rows
    assert client.call("KV.PREFIX.UNPIN", "kept") == 1


def test_a_kill_after_each_command_of_a_cold_store(server: Start, ns: bytes) -> None:
    """E01, 15.11: what was acknowledged is there, and nothing of the rest."""
    running = server()
    client = running.client()
    blob = values(1, 3, DIM).tobytes()
    sides = (ns + b"_pk", ns + b"_pv")
    steps: list[tuple[tuple[Word, ...], str]] = [
        (("KV.PREFIX.LOOKUP", ns), "MISS"),
        (("KV.PREFIX.REGISTER", ns, DIM, "fp32", "PREFILL_MS", 7), "OK"),
        (("V.STOREBATCH", sides[0], 0, 0, 3, blob), "OK"),
        (("V.STOREBATCH", sides[1], 0, 0, 3, blob), "OK"),
        (("SSM.PREFIX.STORE", ns, 1, "state"), "OK"),
        (("KV.PREFIX.DROP", ns), "1"),
    ]
    for done, (words, reply) in enumerate(steps):
        assert str(client.call(*words)) == reply
        if done in (0, 3):
            continue
        client = kill(running)
        registered = 1 <= done < 5
        assert client.call("KV.PREFIX.LOOKUP", ns) == ("HIT" if registered else "MISS")
        for side, stored in zip(sides, (2 <= done < 5, 3 <= done < 5), strict=True):
            if registered:
                found = client.call("V.FETCH", side, 0, "RANGE", 0, 3)
                assert found == (blob if stored else None)
        assert client.call("SSM.PREFIX.FETCH", ns, 1) == (b"state" if done >= 4 else None)
