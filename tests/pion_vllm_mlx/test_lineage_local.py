"""Conversations restored from lent files: the bits that come over TCP, and what keeps them away."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pion_patches.cache_rebuild import dismantle
from pion_patches.pieces import array_bytes
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.kv_bits import KvBits
from pion_vllm_mlx.lineage import Lineage
from pion_vllm_mlx.lineage import borrowing as borrowing_module
from pion_vllm_mlx.lineage.preparing import worth_files
from pion_vllm_mlx.lineage.tree import Kind, Node
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import Patience
from pion_vllm_mlx.transport.endpoint import Endpoint
from pion_vllm_mlx.transport.local import OFF, Loan, LocalLane, NotLent
from tests.pion_patches.zoo import build
from tests.pion_vllm_mlx.conversation import PATIENT, ids_of, logits_of, take_turn
from tests.pion_vllm_mlx.fake_peer import seconds_of

Server = Any
LLAMA = build("llama", seed=41)
FIRST = ids_of(1, 150)
SECOND = [*FIRST, *ids_of(2, 150)]
THIRD = [*SECOND, *ids_of(3, 90)]


@pytest.fixture(scope="module")
def shared(module_server: Callable[..., Server]) -> Server:
    return module_server("--vstore-sessions", "4096")


@pytest.fixture
def tenant(request: pytest.FixtureRequest) -> str:
    """Prefixes of this test alone on a shared server."""
    return str(request.node.nodeid)


def index_of(server: Any, model: Any = LLAMA, **settings: Any) -> Lineage:
    """A client of its own on the server's machine, as another process would have one."""
    login = {name: settings.pop(name) for name in ("username", "password") if name in settings}
    lane = Endpoint("127.0.0.1", server.port, connect_timeout=PATIENT, **login)
    settings = {"timeout": PATIENT, "min_gain": 1} | settings
    return Lineage(model, lane, local=LocalLane.beside(lane, PATIENT), **settings)


def talk(server: Any, model: Any = LLAMA, **settings: Any) -> None:
    """Store a conversation of three turns."""
    index = index_of(server, model, **settings)
    for ids in (FIRST, SECOND, THIRD):
        take_turn(index, model, ids)
    index.close()


def lend(index: Lineage, ids: list[int]) -> list[Any]:
    """The first cache that came from files, once they are made."""
    ends = time.monotonic() + PATIENT
    while time.monotonic() < ends:
        before = index.stats()["hits_local"]
        cache = index.restore(index.find(ids))
        if index.stats()["hits_local"] > before:
            assert cache is not None
            return cache
        time.sleep(0.05)
    raise AssertionError(f"nothing was lent: {index.stats()}")


def over_tcp(index: Lineage, ids: list[int]) -> list[Any]:
    before = index.stats()["hits_local"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OFF, "1")
        cache = index.restore(index.find(ids))
    assert index.stats()["hits_local"] == before
    assert cache is not None
    return cache


def bits_of(cache: list[Any], tokens: int = len(THIRD)) -> list[bytes]:
    """Everything in a cache of so many tokens: rows and arrays."""
    image = dismantle(cache, tokens)
    rows = [piece for leaf in image.leaves for piece in (leaf.keys, leaf.values)]
    arrays = [array for leaf in image.leaves for array in leaf.arrays if array is not None]
    return [piece.to_bytes().tobytes() for piece in rows if piece is not None] + [
        array_bytes(array).tobytes() for array in arrays
    ]


def assert_lent_as_over_tcp(index: Lineage, model: Any, ids: list[int]) -> None:
    lent, fetched, tokens = lend(index, ids), over_tcp(index, ids), index.find(ids).tokens
    assert bits_of(lent, tokens) == bits_of(fetched, tokens) != []
    assert np.array_equal(logits_of(model, lent), logits_of(model, fetched))


@pytest.mark.parametrize(
    "family",
    ["llama", "deepseek_v3", "qwen3_5", "gemma3_text", "mamba2", "gpt_oss", "llama4", "gemma3n"],
)
def test_a_chain_of_segments_comes_from_files_bit_for_bit(
    shared: Server, tenant: str, family: str
) -> None:
    """Rows of several segments in one array; windows, chunks and recurrent state of the last."""
    model = build(family, seed=7)
    talk(shared, model, tenant=tenant)
    index = index_of(shared, model, tenant=tenant)
    assert len(index.find(THIRD).links) > 1
    assert_lent_as_over_tcp(index, model, THIRD)
    stats = index.stats()
    assert stats["misses"] == 0
    assert stats["not_lent"].keys() <= {"unmade", "off"}
    index.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_half_precision_comes_bit_for_bit(
    shared: Server, tenant: str, family: str, dtype: str
) -> None:
    model = build(family, seed=8, dtype=getattr(mx, dtype))
    talk(shared, model, tenant=tenant)
    assert_lent_as_over_tcp(index_of(shared, model, tenant=tenant), model, THIRD)


@pytest.mark.parametrize("vquant", ["int8", "fp8", "mlx4g32", "turbo4", "fp16", "fp32"])
def test_every_format_comes_as_it_does_over_tcp(shared: Server, tenant: str, vquant: str) -> None:
    model = build("llama", seed=9, head_dim=32, dtype=mx.bfloat16)
    settings = {"tenant": tenant, "tier": Tier(vquant)}
    talk(shared, model, **settings)
    assert_lent_as_over_tcp(index_of(shared, model, **settings), model, THIRD)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64)])
def test_quantised_caches_come_as_their_codes(
    shared: Server, tenant: str, bits: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    model = build("llama", seed=10, head_dim=64)
    settings: dict[str, Any] = {"kv_bits": bits, "kv_group_size": group, "store": "sync"}
    with PionPromptCache(model, port=shared.port, timeout=PATIENT, **settings) as pc:
        for ids in (FIRST, THIRD):
            pc.get_or_prefill(ids)
    index = index_of(shared, model, kv_bits=KvBits(bits, group, 0))
    assert_lent_as_over_tcp(index, model, THIRD)


def test_any_beginning_is_cut_out_of_the_files(shared: Server, tenant: str) -> None:
    talk(shared, tenant=tenant)
    index = index_of(shared, tenant=tenant)
    lend(index, THIRD)
    for tokens in (64, 149, 150, 200, 299, 330):
        cache, fetched = lend(index, THIRD[:tokens]), over_tcp(index, THIRD[:tokens])
        assert all(leaf.offset == tokens for leaf in cache)
        assert np.array_equal(logits_of(LLAMA, cache), logits_of(LLAMA, fetched))


def test_a_client_without_a_namespace_takes_the_local_lane(
    shared: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    model = build("llama", seed=43)
    with PionPromptCache(model, port=shared.port, timeout=PATIENT, store="sync") as pc:
        cold = logits_of(model, pc.get_or_prefill(THIRD))
        ends = time.monotonic() + PATIENT
        while not pc.stats()["hits_local"] and time.monotonic() < ends:
            assert np.array_equal(logits_of(model, pc.get_or_prefill(THIRD)), cold)
        assert pc.stats()["hits_local"] == 1
        assert pc.stats()["not_lent"].keys() == {"unmade"}


def test_the_switch_turns_it_off_and_says_so(
    shared: Server, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(shared, tenant=tenant)
    index = index_of(shared, tenant=tenant)
    lend(index, THIRD)
    monkeypatch.setenv(OFF, "1")
    lent = index.stats()["hits_local"]
    assert index.restore(index.find(THIRD)) is not None
    assert index.stats()["hits_local"] == lent
    assert index.stats()["not_lent"]["off"] == 1


def test_no_descriptor_is_left_open(shared: Server, tenant: str) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("nothing lists this process's descriptors")
    talk(shared, tenant=tenant)
    index = index_of(shared, tenant=tenant)
    lend(index, THIRD)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        lend(index, THIRD)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_part_that_is_not_made_yet_means_tcp_for_all_of_it(shared: Server, tenant: str) -> None:
    """Never a mixture; the missing file is there for the next one."""
    talk(shared, tenant=tenant)
    index = index_of(shared, tenant=tenant)
    lend(index, SECOND)
    unmade = index.stats()["not_lent"]["unmade"]
    one = index.restore(index.find(THIRD))
    assert one is not None
    assert index.stats()["not_lent"]["unmade"] == unmade + 1
    assert bits_of(lend(index, THIRD)) == bits_of(one)


@contextlib.contextmanager
def at_the_first_read(act: Callable[[], object]) -> Iterator[None]:
    """`act` once the descriptors are here and before a row was read."""
    real = os.preadv
    done: list[object] = []

    def read(*args: Any) -> int:
        if not done:
            done.append(act())
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", read)
        yield
    assert done


def test_eviction_and_save_take_nothing_from_who_has_the_files(
    server: Callable[..., Server], tenant: str
) -> None:
    running = server()
    talk(running, tenant=tenant)
    index = index_of(running, tenant=tenant)
    expected = bits_of(lend(index, THIRD))
    names = [link.name for link in index.find(THIRD).links]
    admin = running.client()

    def evict() -> None:
        assert admin.call("KV.PREFIX.DROP", *names) > 0
        assert admin.call("KV.PREFIX.SAVE") == "OK"

    with at_the_first_read(evict):
        assert bits_of(lend(index, THIRD)) == expected
    assert index.find(THIRD).tokens == 0


def test_what_was_evicted_since_it_was_found_is_a_miss(
    server: Callable[..., Server], tenant: str
) -> None:
    running = server()
    talk(running, tenant=tenant)
    index = index_of(running, tenant=tenant)
    lend(index, THIRD)
    match = index.find(THIRD)
    running.client().call("KV.PREFIX.DROP", match.links[1].name)
    assert index.restore(match) is None
    assert index.stats()["miss_reasons"] == {"rows": 1}


def test_what_was_stored_anew_since_it_was_found_is_not_taken_for_it(
    server: Callable[..., Server], tenant: str
) -> None:
    """The same names, another run's rows: files are asked for by the checksums that were found."""
    running = server()
    talk(running, tenant=tenant)
    index = index_of(running, tenant=tenant)
    lend(index, THIRD)
    match = index.find(THIRD)
    running.client().call("KV.PREFIX.DROP", *[link.name for link in match.links])
    other = index_of(running, tenant=tenant)
    take_turn(other, LLAMA, THIRD, step=75)
    lend(other, THIRD)
    lent = index.stats()["hits_local"]
    assert index.restore(match) is None
    assert index.stats()["hits_local"] == lent


def test_a_killed_server_is_a_miss_and_a_restarted_one_is_found_again(
    server: Callable[..., Server], tenant: str
) -> None:
    running = server()
    talk(running, tenant=tenant)
    index = index_of(running, tenant=tenant)
    expected = bits_of(lend(index, THIRD))
    match = index.find(THIRD)
    running.kill()
    assert index.restore(match) is None
    assert index.stats()["miss_reasons"] == {"unavailable": 1}
    running.restart()
    again = index_of(running, tenant=tenant)
    assert bits_of(lend(again, THIRD)) == expected
    assert again.stats()["misses"] == 0


def test_a_server_killed_while_its_files_are_read_costs_nothing(
    server: Callable[..., Server], tenant: str
) -> None:
    running = server()
    talk(running, tenant=tenant)
    index = index_of(running, tenant=tenant)
    expected = bits_of(lend(index, THIRD))
    with at_the_first_read(running.kill):
        assert bits_of(lend(index, THIRD)) == expected


def test_a_server_that_falls_silent_costs_one_deadline_on_both_lanes(
    server: Callable[..., Server], tenant: str
) -> None:
    running = server()
    talk(running, tenant=tenant)
    index = index_of(running, tenant=tenant, timeout=1.0)
    lend(index, THIRD)
    match = index.find(THIRD)
    os.kill(running.pid, signal.SIGSTOP)
    try:
        assert seconds_of(lambda: index.restore(match)) < 10
        assert seconds_of(lambda: index.restore(match)) < 1.0
    finally:
        os.kill(running.pid, signal.SIGCONT)
    assert index.stats()["miss_reasons"] == {"unavailable": 2}


def cut_short(*_: Any) -> int:
    return 0


def broken(*_: Any) -> int:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("read", [cut_short, broken])
def test_a_file_that_ends_early_or_cannot_be_read_is_an_error_and_tcp_serves(
    shared: Server, tenant: str, read: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read, not mapped: never SIGBUS."""
    talk(shared, tenant=tenant)
    index = index_of(shared, tenant=tenant)
    expected = bits_of(lend(index, THIRD))
    lent = index.stats()["hits_local"]
    monkeypatch.setattr(os, "preadv", read)
    cache = index.restore(index.find(THIRD))
    assert cache is not None
    assert bits_of(cache) == expected
    assert index.stats()["hits_local"] == lent
    assert index.stats()["not_lent"]["unreadable"] == 1


def test_a_file_of_other_tensors_is_not_used(
    shared: Server, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(shared, tenant=tenant)
    index = index_of(shared, tenant=tenant)
    expected = bits_of(lend(index, THIRD))
    real = os.pread
    headers = (
        lambda data: data.replace(b'"k.0.0"', b'"k.9.0"'),
        lambda data: data.replace(b"[1,", b"[2,", 1),
        lambda data: data[:200],
        lambda data: b"[" + data[1:],
    )
    for change in headers:
        with monkeypatch.context() as patch:
            patch.setattr(
                os,
                "pread",
                lambda fd, n, at, c=change: c(real(fd, n, at)) if at else real(fd, n, at),
            )
            cache = index.restore(index.find(THIRD))
        assert cache is not None
        assert bits_of(cache) == expected
    assert index.stats()["not_lent"]["unsound"] == len(headers)


def test_rows_damaged_on_the_server_are_lent_to_nobody(
    server: Callable[..., Server], tenant: str
) -> None:
    """E02: the file is made from rows that fail their checksums: no file, and no rows over TCP."""
    running = server()
    talk(running, tenant=tenant)
    index = index_of(running, tenant=tenant)
    match = index.find(THIRD)
    segment = match.links[1].segment
    rows = next(rows for side, _, rows in segment.pieces() if side == "values")
    reply = running.client().call(
        *("V.FETCH", match.links[1].name + b"_pv", rows.layer, "RANGE", 0, rows.count),
        *("FMT", "PACKED"),
    )
    _flip_in(running.directory, bytes(reply))
    running.kill()
    running.restart()
    index = index_of(running, tenant=tenant)
    match = index.find(THIRD)
    for link in match.links:
        layout = borrowing_module.FileLayout.of_rows(link.segment)
        running.client().call("KV.PREFIX.LEND", link.name, link.segment.gen, layout.text)
    time.sleep(2.0)
    assert index.restore(match) is None
    assert index.stats()["hits_local"] == 0
    assert index.stats()["not_lent"] == {"refused": 1}


def _flip_in(directory: Path, rows: bytes) -> None:
    """One bit of these rows in whichever file holds them."""
    for path in directory.rglob("*"):
        if path.is_file():
            at = path.read_bytes().find(rows)
            if at >= 0:
                with path.open("r+b") as file:
                    file.seek(at + len(rows) // 2)
                    file.write(bytes([rows[len(rows) // 2] ^ 1]))
                return
    raise AssertionError("no file holds these rows")


def test_two_tenants_of_the_server_are_lent_their_own(server: Callable[..., Server]) -> None:
    """I01, I03: the same names and the same tokens; a tenant that has nothing is lent nothing."""
    running = server("--requirepass", "root", "--tenant", "a=pa", "--tenant", "b=pb")
    one = {"username": "a", "password": "pa"}
    other = {"username": "b", "password": "pb"}
    talk(running, **one)
    first = index_of(running, **one)
    expected = bits_of(lend(first, THIRD))
    match = first.find(THIRD)
    second = index_of(running, **other)
    assert second.find(THIRD).tokens == 0
    assert second.restore(match) is None
    assert second.stats()["hits_local"] == 0
    take_turn(index_of(running, **other), LLAMA, THIRD, step=75)
    theirs = bits_of(lend(second, THIRD))
    assert theirs != expected
    assert bits_of(lend(first, THIRD)) == expected


def test_a_server_started_anew_lends_what_was_used_last_at_the_first_restore(
    server: Callable[..., Server], tenant: str
) -> None:
    running = server()
    talk(running, tenant=tenant)
    running.kill()
    running.restart()
    index = index_of(running, tenant=tenant)
    index.prepare(1 << 30)
    await_files(running, [link.name for link in index.find(THIRD).links])
    assert index.restore(index.find(THIRD)) is not None
    assert index.stats()["hits_local"] == 1
    assert index.stats()["not_lent"] == {}


def await_files(server: Server, names: list[bytes]) -> None:
    """Until all of them are made; asking for files does not have them made."""
    lane = LocalLane.beside(Endpoint("127.0.0.1", server.port, connect_timeout=PATIENT), PATIENT)
    ends = time.monotonic() + PATIENT
    while None in (loans := lane.borrow_each(names, Patience(first_byte=PATIENT))):
        assert time.monotonic() < ends
        close_all(loans)
        time.sleep(0.05)
    close_all(loans)
    lane.close()


def close_all(loans: list[Loan | None]) -> None:
    for loan in loans:
        if loan is not None:
            loan.close()


def test_after_a_restart_what_was_stored_last_counts_as_used_last(
    server: Callable[..., Server], tenant: str
) -> None:
    """All ages are those of the restart then; what is used afterwards comes first again."""
    running = server()
    others = [ids_of(100 + number, 70) for number in range(4)]
    index = index_of(running, tenant=tenant)
    for ids in others:
        take_turn(index, LLAMA, ids)
    names = [index.find(ids).links[0].name for ids in others]
    index.close()
    running.kill()
    running.restart()
    again = index_of(running, tenant=tenant)
    nbytes = again.find(others[0]).nbytes
    orders: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "pion_vllm_mlx.lineage.index.order_files", lambda lane, names: orders.append(names)
        )
        again.prepare(2 * nbytes)
        assert orders == [[names[3], names[2]]]


def node(name: str, parent: str = "", nbytes: int = 10) -> Node:
    kind = {"t": Kind.TRACE, "s": Kind.STATE}.get(name[0], Kind.SEGMENT)
    return Node(name.encode(), nbytes, parent.encode(), kind)


def names_of(*nodes: Node, nbytes: int = 1000, most: int = 100) -> list[str]:
    found = worth_files({node.name: node for node in nodes}, nbytes, most)
    return [name.decode() for name in found]


def test_what_was_used_last_comes_first_and_never_without_what_it_hangs_on() -> None:
    root, left, right = node("a"), node("b", "a"), node("c", "a")
    everything = (node("t", "a"), right, left, node("x"), root)
    assert names_of(*everything) == ["a", "c", "b", "x"]
    assert names_of(*everything, nbytes=25) == ["a", "c"]
    assert names_of(*everything, most=3) == ["a", "c", "b"]
    assert names_of(*everything, nbytes=15) == []
    assert names_of() == []
    # Of states the one a conversation goes on from; those before it are of no use to it.
    states = node("sa", "a"), node("sc", "c")
    assert names_of(root, right, *states) == ["a", "c", "sc"]
    # A record that hangs on itself, or on one that is gone, is no reason to go on for ever.
    assert names_of(node("a", "a"), node("b", "gone")) == ["a", "b"]


def test_a_server_elsewhere_is_asked_for_no_files(
    shared: Server, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(shared, tenant=tenant)
    index = index_of(shared, tenant=tenant)
    orders: list[Any] = []
    monkeypatch.setattr(
        "pion_vllm_mlx.lineage.index.order_files", lambda lane, names: orders.append(names)
    )
    monkeypatch.setenv(OFF, "1")
    index.prepare(1 << 30)
    Lineage(LLAMA, Endpoint("127.0.0.1", shared.port), timeout=PATIENT).prepare(1 << 30)
    assert orders == []
    monkeypatch.delenv(OFF)
    index.prepare(1 << 30)
    assert len(orders) == 1


def test_a_server_without_a_socket_serves_over_tcp(
    server: Callable[..., Server], tenant: str
) -> None:
    running = server("--unixsocket", "none")
    talk(running, tenant=tenant)
    index = index_of(running, tenant=tenant)
    for _ in range(3):
        assert index.restore(index.find(THIRD)) is not None
    assert index.stats()["hits"] == 3
    assert index.stats()["not_lent"] == {"socketless": 3}


def test_a_chain_of_too_many_segments_comes_over_tcp(
    shared: Server, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(shared, tenant=tenant)
    index = index_of(shared, tenant=tenant)
    monkeypatch.setattr(borrowing_module, "MOST_FILES", 2)
    assert index.restore(index.find(THIRD)) is not None
    assert index.stats()["not_lent"] == {"large": 1}


def five_turns(server: Server, tenant: str) -> tuple[Lineage, list[int]]:
    """A conversation of five segments, no file of which was asked for yet."""
    ids = ids_of(50, 5 * 64)
    index = index_of(server, tenant=tenant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OFF, "1")
        for end in range(64, len(ids) + 1, 64):
            take_turn(index, LLAMA, ids[:end])
    assert len(index.find(ids).links) == 5
    return index, ids


def test_a_missing_middle_segment_shifts_none_of_those_after_it(
    server: Callable[..., Server], tenant: str
) -> None:
    """H09: of five, the third is gone: the first two are used, as they were, on both lanes."""
    running = server()
    index, ids = five_turns(running, tenant)
    expected = bits_of(lend(index, ids[:128]), 128)
    running.client().call("KV.PREFIX.DROP", index.find(ids).links[2].name)
    match = index.find(ids)
    assert match.tokens == 128
    assert len(match.links) == 2
    assert bits_of(lend(index, ids), 128) == bits_of(over_tcp(index, ids), 128) == expected


def test_each_file_of_one_round_trip_is_that_of_its_own_name(
    server: Callable[..., Server], tenant: str
) -> None:
    """H09: one without a file among five, in any place; descriptors keep to their names."""
    running = server()
    index, ids = five_turns(running, tenant)
    lend(index, ids)
    links = index.find(ids).links
    digests = [borrowing_module.FileLayout.of_rows(link.segment).digest for link in links]
    lane = LocalLane.beside(Endpoint("127.0.0.1", running.port, connect_timeout=PATIENT), PATIENT)
    for gone in range(5):
        names = [link.name if at != gone else b"nobody" for at, link in enumerate(links)]
        loans = lane.borrow_each(names, Patience(first_byte=PATIENT))
        found = [None if loan is None else loan.digest for loan in loans]
        assert found == [None if at == gone else digests[at] for at in range(5)]
        assert len({loan.fd for loan in loans if loan is not None}) == 4
        close_all(loans)
    lane.close()


def borrow_in_vain(lane: LocalLane, name: bytes) -> None:
    """Until the server says what keeps it from making the file."""
    ends = time.monotonic() + PATIENT
    while time.monotonic() < ends:
        assert lane.borrow_each([name], Patience(first_byte=PATIENT)) == [None]


def test_an_error_for_one_of_five_releases_the_files_of_the_others(
    server: Callable[..., Server], tenant: str
) -> None:
    """H09: a refusal in the middle: none is used, no descriptor stays open, TCP serves."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("nothing lists this process's descriptors")
    running = server()
    index, ids = five_turns(running, tenant)
    expected = bits_of(over_tcp(index, ids), len(ids))
    lane = LocalLane.beside(Endpoint("127.0.0.1", running.port, connect_timeout=PATIENT), PATIENT)
    client = running.client()
    links = index.find(ids).links
    for at, link in enumerate(links):
        layout = borrowing_module.FileLayout.of_rows(link.segment).text
        if at == 2:
            layout = layout.replace(b"b 64 ", b"b 32 " + 16 * b"0")
        assert client.call("KV.PREFIX.LEND", link.name, link.segment.gen, layout) == "OK"
    await_files(running, [link.name for link in (*links[:2], *links[3:])])
    with pytest.raises(NotLent, match="damaged: block 0"):
        borrow_in_vain(lane, links[2].name)
    lane.close()
    before = len(os.listdir("/proc/self/fd"))
    cache = index.restore(index.find(ids))
    assert cache is not None
    assert bits_of(cache, len(ids)) == expected
    assert index.stats()["not_lent"]["refused"] == 1
    index.close()
    assert len(os.listdir("/proc/self/fd")) <= before
