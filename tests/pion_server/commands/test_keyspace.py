"""The keyspace as a store: durable, bounded, evictable, apart from rows (WIRE.md 11, 13, 14)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.pion_server.commands.checks import lines

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

    Start = Callable[..., ServerProcess]

LARGE = 1 << 14


def blob(size: int, seed: int = 0) -> bytes:
    """Bytes of every value, the same for the same seed."""
    return random.Random(seed).randbytes(size)


def everything(client: RawClient) -> dict[bytes, Any]:
    """What each key holds, and whether it expires."""
    found: dict[bytes, Any] = {}
    for key in client.call("KEYS", "*"):
        match client.call("TYPE", key):
            case "string":
                value: Any = client.call("GET", key)
            case "hash":
                flat = client.call("HGETALL", key)
                value = dict(zip(flat[::2], flat[1::2], strict=True))
            case _:
                value = client.call("ZRANGE", key, 0, -1, "WITHSCORES")
        found[key] = value, client.call("TTL", key) > 0
    return found


def write_at_random(client: RawClient, seed: int, count: int) -> None:
    """Writes of all kinds on a few keys, values of all sizes."""
    dice = random.Random(seed)
    for step in range(count):
        name, field = f"k{dice.randrange(8)}", f"f{dice.randrange(30)}\xff".encode("latin-1")
        size = dice.choice([0, 1, 40, LARGE - 1, LARGE, 300_000])
        value = blob(size, step)
        commands: list[tuple[str | bytes | int, ...]] = [
            ("SET", name, value),
            ("SET", name, value, "EX", 1000),
            ("MSET", name, value, name + "b", b"small"),
            ("HSET", "h" + name, field, value, b"other", b"x"),
            ("HDEL", "h" + name, field),
            ("ZADD", "z" + name, str(dice.random() * 1e9), field, "1712345678.123456", b"m"),
            ("ZREM", "z" + name, field),
            ("EXPIRE", "h" + name, 500),
            ("PERSIST", "h" + name),
            ("DEL", name),
            ("INCR", "counter"),
        ]
        client.call(*dice.choice(commands))


@pytest.mark.parametrize("seed", [1, 2])
def test_acknowledged_writes_survive_sigkill_and_saves(server: Start, seed: int) -> None:
    running = server()
    client = running.client()
    for leg in range(3):
        write_at_random(client, 10 * seed + leg, 120)
        if leg:
            assert client.call("KV.PREFIX.SAVE") == "OK"
            write_at_random(client, 100 * seed + leg, 40)
        before = everything(client)
        running.kill()
        running.restart()
        client = running.client()
        assert everything(client) == before
    assert len(before) > 8


def test_a_save_empties_the_log_and_leaves_every_key_readable(server: Start) -> None:
    running = server()
    client = running.client()
    for _ in range(3):
        client.call("SET", "large", blob(1 << 20))
        client.call("HSET", "h", "large", blob(LARGE), "small", "s")
    before = everything(client)
    assert client.call("KV.PREFIX.SAVE") == "OK"
    assert (running.directory / "pion.wal.0").stat().st_size == 0
    assert (running.directory / "pion.snapshot.0").stat().st_size < 1.1 * (1 << 20)
    assert everything(client) == before
    client.call("SET", "large", b"new")
    assert client.call("KV.PREFIX.SAVE") == "OK"
    assert (running.directory / "pion.snapshot.0").stat().st_size < 2 * LARGE
    assert client.call("GET", "large") == b"new"


def test_a_copy_holds_the_keys_of_its_moment(server: Start, tmp_path: Path) -> None:
    running = server()
    client = running.client()
    write_at_random(client, 7, 60)
    before = everything(client)
    assert client.call("KV.PREFIX.SAVE", "copy") == "OK"
    client.call("FLUSHALL")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (running.directory / "copy.keys").rename(elsewhere / "pion.snapshot.0")
    assert everything(server(directory=elsewhere).client()) == before


def test_a_hash_that_expired_is_not_mixed_with_the_next_of_its_name(server: Start) -> None:
    running = server()
    client = running.client()
    client.call("HSET", "h", "old", "1")
    client.call("ZADD", "z", 1, "old")
    client.call("PEXPIRE", "h", 20)
    client.call("PEXPIRE", "z", 20)
    time.sleep(0.05)
    assert client.call("GET", "h") is None
    client.call("HSET", "h", "new", "2")
    client.call("ZADD", "z", 2, "new")
    running.kill()
    running.restart()
    client = running.client()
    assert client.call("HGETALL", "h") == [b"new", b"2"]
    assert client.call("ZRANGE", "z", 0, -1) == [b"new"]
    assert client.call("TTL", "h") == -1


def test_what_expired_while_the_server_was_down_is_gone(server: Start) -> None:
    running = server()
    client = running.client()
    client.call("SET", "k", "v", "PX", 300)
    client.call("SET", "kept", "v", "EX", 100)
    running.kill()
    time.sleep(0.35)
    running.restart()
    client = running.client()
    assert client.call("KEYS", "*") == [b"kept"]
    assert client.call("DBSIZE") == 1


def test_expired_keys_are_let_go_without_being_asked_for(server: Start) -> None:
    client = server().client()
    client.call("SET", "k", "v", "PX", 10)
    deadline = time.monotonic() + 20
    while client.call("DBSIZE") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert client.call("DBSIZE") == 0
    assert lines(client.call("INFO", "stats").split(b"\r\n", 1)[1])["expired_keys"] == "1"


def test_large_values_go_out_as_they_came_in(server: Start) -> None:
    """H12: every size around the thresholds, in a pipeline, beside small ones."""
    client = server().client()
    sizes = [0, 1, LARGE - 1, LARGE, (1 << 16) + 1, (1 << 18) + 1, 8 << 20]
    for size in sizes:
        assert client.call("SET", f"k{size}", blob(size, size)) == "OK"
        client.call("HSET", "h", f"f{size}", blob(size, size + 1))
    client.send(b"".join(client.pack("GET", f"k{size}") + client.pack("PING") for size in sizes))
    for size in sizes:
        assert client.read() == blob(size, size)
        assert client.read() == "PONG"
    values = client.call("MGET", *(f"k{size}" for size in sizes), "none")
    assert values == [*(blob(size, size) for size in sizes), None]
    fields = client.call("HMGET", "h", *(f"f{size}" for size in sizes), "none")
    assert fields == [*(blob(size, size + 1) for size in sizes), None]


def test_the_middle_key_of_a_batch_may_be_gone(server: Start) -> None:
    """H09: no payload takes the place of another."""
    client = server().client()
    for index in range(5):
        client.call("SET", f"k{index}", blob(LARGE + index, index))
    client.call("DEL", "k2")
    expected = [None if index == 2 else blob(LARGE + index, index) for index in range(5)]
    assert client.call("MGET", *(f"k{index}" for index in range(5))) == expected


def test_a_damaged_value_is_an_error_of_its_key_alone(server: Start) -> None:
    running = server()
    client = running.client()
    client.call("SET", "large", b"L" * 100_000)
    client.call("SET", "small", b"S" * 1000)
    client.call("SET", "sound", b"T" * 1000)
    running.kill()
    log = running.directory / "pion.wal.0"
    data = log.read_bytes()
    for mark in (b"L" * 1000, b"S" * 1000):
        data = data.replace(mark, mark[:500] + b"!" + mark[501:], 1)
    log.write_bytes(data)
    running.restart()
    client = running.client()
    for key in ("large", "small"):
        assert "damaged" in client.error("GET", key)
        assert "damaged" in client.error("MGET", "sound", key)
    assert client.call("GET", "sound") == b"T" * 1000
    assert client.call("KV.PREFIX.SAVE") == "OK"
    running.kill()
    running.restart()
    client = running.client()
    for key in ("large", "small"):
        assert "damaged" in client.error("GET", key)
        assert client.call("SET", key, b"again") == "OK"
        assert client.call("GET", key) == b"again"
    assert client.call("GET", "sound") == b"T" * 1000


def test_no_wal_turns_off_this_log_only(server: Start) -> None:
    running = server("--no-wal")
    client = running.client()
    client.call("SET", "k", blob(LARGE))
    assert client.call("GET", "k") == blob(LARGE)
    client.call("SSM.PREFIX.STORE", "ns", 0, b"state")
    assert not (running.directory / "pion.wal.0").exists()
    assert "--no-wal" in client.error("KV.PREFIX.COMMIT")
    running.kill()
    running.restart()
    client = running.client()
    assert client.call("GET", "k") is None
    assert client.call("SSM.PREFIX.FETCH", "ns", 0) == b"state"


def test_flushall_leaves_rows_and_recurrent_state_alone(server: Start) -> None:
    running = server()
    client = running.client()
    client.call("KV.PREFIX.REGISTER", "ns", 32, "fp32")
    client.call("SSM.PREFIX.STORE", "ns", 0, b"state")
    client.call("MSET", "a", "1", "b", "2")
    client.call("EXPIRE", "a", 100)
    info = client.call("INFO", "keyspace")
    assert info == b"# Keyspace\r\ndb0:keys=2,expires=1,avg_ttl=0\r\n"
    assert client.call("FLUSHALL") == "OK"
    assert client.call("INFO", "keyspace") == b"# Keyspace\r\n"
    assert client.call("KV.PREFIX.LOOKUP", "ns") == "HIT"
    running.kill()
    running.restart()
    client = running.client()
    assert client.call("DBSIZE") == 0
    assert client.call("SSM.PREFIX.FETCH", "ns", 0) == b"state"


def test_the_least_recently_used_key_makes_room(server: Start) -> None:
    running = server("--maxmemory", "1mb")
    client = running.client()
    for index in range(5):
        client.call("SET", f"k{index}", blob(200_000, index))
    client.call("GET", "k0")
    client.call("SET", "new", blob(200_000))
    assert client.call("MGET", "k1", "k0") == [None, blob(200_000, 0)]
    reply = client.error("SET", "huge", blob(2 << 20))
    assert reply.startswith("OOM ")
    assert client.call("DBSIZE") == 5
    before = everything(client)
    running.kill()
    running.restart()
    assert everything(running.client()) == before


def test_what_exists_is_still_there_to_get(server: Start) -> None:
    client = server("--maxmemory", "1mb").client()
    for index in range(5):
        client.call("SET", f"k{index}", blob(200_000, index))
    assert client.call("EXISTS", "k0", "k1", "none") == 2
    for index in range(12):
        client.call("SET", f"new{index}", blob(200_000))
    assert client.call("MGET", "k0", "k1") == [blob(200_000, 0), blob(200_000, 1)]


def test_keys_make_room_for_themselves_before_prefixes_do(server: Start) -> None:
    client = server("--maxmemory", "1mb").client()
    client.call("KV.PREFIX.REGISTER", "ns", 32, "fp32")
    for side in ("ns_pk", "ns_pv"):
        client.call("V.STOREBATCH", side, 0, 0, 1000, bytes(128_000))
    for index in range(20):
        client.call("SET", f"k{index}", blob(200_000))
    assert client.call("KV.PREFIX.LOOKUP", "ns") == "HIT"
    assert client.call("SET", "large", blob(900_000)) == "OK"
    assert client.call("KV.PREFIX.LOOKUP", "ns") == "MISS"


def test_a_command_is_seen_as_a_whole_or_not_at_all(server: Start) -> None:
    """Large writes leave the loop; readers meanwhile see what was before, saves do not matter."""
    running = server()
    writer, saver, reader = (running.client() for _ in range(3))
    writer.call("MSET", "a", "start", "b", "start")
    writer.call("HSET", "h", "x", "start", "y", "start")
    stop = threading.Event()

    def write() -> None:
        for turn in range(30):
            value = bytes([turn]) * (300_000 if turn % 2 else 100)
            writer.call("MSET", "a", value, "b", value)
            writer.call("HSET", "h", "x", value, "y", value)
        stop.set()

    def save() -> None:
        while not stop.is_set():
            saver.call("KV.PREFIX.SAVE")

    threads = [threading.Thread(target=work) for work in (write, save)]
    for thread in threads:
        thread.start()
    x = b""
    while x[:1] != bytes([29]):
        a, b = reader.call("MGET", "a", "b")
        x, y = reader.call("HMGET", "h", "x", "y")
        assert a == b
        assert x == y
    for thread in threads:
        thread.join()


def test_replies_nobody_reads_evict_nothing(server: Start) -> None:
    """F07: a queued reply is a place in a file, and counts for nothing."""
    running = server("--maxmemory", "8mb")
    client = running.client()
    client.call("SET", "large", blob(4 << 20))
    client.call("MSET", "a", "1", "b", "2")
    slow = [running.client() for _ in range(8)]
    for one in slow:
        one.send(one.pack("GET", "large") * 20)
    assert client.call("SET", "c", blob(1 << 20)) == "OK"
    assert client.call("DBSIZE") == 4
    assert client.call("GET", "large") == blob(4 << 20)
    assert slow[0].read() == blob(4 << 20)


def test_a_full_disk_is_an_error_with_nothing_changed(server: Start) -> None:
    """F09: --max-disk, with nothing to evict."""
    client = server("--max-disk", "1mb", "--no-auto-save").client()
    client.call("SET", "k", blob(LARGE))
    client.call("EXISTS", "k")
    assert client.error("SET", "k", blob(2 << 20)).startswith("MISCONF ")
    assert client.call("GET", "k") == blob(LARGE)


def test_a_name_that_is_too_long_is_refused(server: Start) -> None:
    client = server().client()
    for words in (("SET", b"k" * 65_537, "v"), ("HSET", "h", b"f" * 65_537, "v")):
        assert "65536 bytes" in client.error(*words)
    assert client.call("DBSIZE") == 0


def test_scan_finds_a_key_that_stays_exactly_once(server: Start) -> None:
    client = server().client()
    for index in range(300):
        client.call("SET", f"stays{index}", "v")
        client.call("SET", f"goes{index}", "v")
    found: list[bytes] = []
    cursor, turn = b"0", 0
    while True:
        cursor, keys = client.call("SCAN", cursor, "COUNT", 7)
        found += keys
        client.call("DEL", f"goes{turn}")
        client.call("SET", f"comes{turn}", "v")
        client.call("SET", f"stays{turn}", "changed")
        turn += 1
        if cursor == b"0":
            break
    stays = [key for key in found if key.startswith(b"stays")]
    assert sorted(stays) == sorted(b"stays%d" % index for index in range(300))


def test_check_reads_the_keyspace_too(server: Start, tmp_path: Path) -> None:
    from pion_server.store.checking import check_directory

    running = server()
    client = running.client()
    client.call("SET", "k", b"K" * 1000)
    client.call("KV.PREFIX.SAVE")
    client.call("SET", "l", b"L" * 1000)
    running.kill()
    assert check_directory(running.directory).problems == []
    for name, letter in (("pion.snapshot.0", b"K"), ("pion.wal.0", b"L")):
        path = running.directory / name
        path.write_bytes(path.read_bytes().replace(letter * 9, letter * 8 + b"!", 1))
    problems = check_directory(running.directory).problems
    assert [text.split(":")[0] for text in problems] == ["pion.snapshot.0", "pion.wal.0"]
    assert "KEYS 'k'" in problems[0]
    assert "KEYS 'l'" in problems[1]
