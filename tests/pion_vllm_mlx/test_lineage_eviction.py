"""The byte budget: leaves leave first, longest unused first, and nothing else is harmed."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_vllm_mlx.lineage import Lineage
from pion_vllm_mlx.lineage.tree import Kind, Node, choose, unreachable
from tests.pion_patches.shipping import largest_difference
from tests.pion_patches.zoo import build
from tests.pion_vllm_mlx.conversation import Cold, ids_of, index_of, logits_of, take_turn

Server = Any
MODEL = build("llama", seed=21)
HYBRID = build("qwen3_5", seed=21)


def tree(*nodes: Node) -> dict[bytes, Node]:
    return {node.name: node for node in nodes}


# --- the choice, without a server ------------------------------------------------------------


def test_the_longest_unused_leaf_goes_first_and_its_trunk_never_before_it() -> None:
    """The root was touched longest ago, and everything rests on it."""
    nodes = tree(
        Node(b"root", 10, b"", unused=100),
        Node(b"old", 5, b"root", unused=50),
        Node(b"new", 5, b"root", unused=1),
    )
    assert choose(nodes, 1, 0).names == [b"old"]
    assert choose(nodes, 6, 0).names == [b"old", b"new"]
    assert choose(nodes, 11, 0).names == [b"old", b"new", b"root"]
    assert choose(nodes, 100, 0).nbytes == 20


def test_a_trace_goes_with_its_segment_only() -> None:
    nodes = tree(
        Node(b"s", 10, b"", unused=5),
        Node(b"t", 0, b"s", kind=Kind.TRACE, unused=90),
        Node(b"other", 10, b"", unused=1),
    )
    assert choose(nodes, 1, 0).names == [b"s", b"t"]


def test_what_is_kept_keeps_what_it_rests_on() -> None:
    nodes = tree(
        Node(b"root", 10, b"", unused=100),
        Node(b"leaf", 5, b"root", unused=50),
        Node(b"other", 5, b"", unused=1),
    )
    assert choose(nodes, 100, 0, keep=[b"leaf"]).names == [b"other"]


def test_session_slots_are_freed_by_segments_that_have_rows() -> None:
    nodes = tree(
        Node(b"ids", 0, b"", unused=100, rows=False), Node(b"rows", 10, b"", unused=1, rows=True)
    )
    plan = choose(nodes, 0, 2)
    assert plan.sessions == 2
    assert plan.names == [b"ids", b"rows"]


def test_what_hangs_on_nothing_is_unreachable() -> None:
    nodes = tree(
        Node(b"a", 1, b""),
        Node(b"b", 1, b"a"),
        Node(b"lost", 1, b"gone"),
        Node(b"below", 1, b"lost"),
        Node(b"loop", 1, b"pool"),
        Node(b"pool", 1, b"loop"),
        Node(b"self", 1, b"self"),
    )
    assert {node.name for node in unreachable(nodes)} == {
        b"lost",
        b"below",
        b"loop",
        b"pool",
        b"self",
    }


def chain(*ends: int, bare: tuple[int, ...] = (), anchor: int = 0) -> dict[bytes, Node]:
    """A conversation of a model with state: a segment to each end, with 10 bytes of state."""
    nodes, above = [], b""
    for end in ends:
        name = b"s%d" % end
        nodes.append(Node(name, 1, above, end=end, stateful=True, unused=2000.0 - end))
        if end not in bare:
            state = Node(b"x%d" % end, 10, name, Kind.STATE, 2000.0 - end, rows=False)
            nodes.append(dataclasses.replace(state, anchor=end == anchor))
        above = name
    return tree(*nodes)


def test_states_within_a_conversation_go_before_any_leaf_and_its_rows_stay() -> None:
    nodes = chain(*range(64, 64 * 11, 64)) | tree(Node(b"old", 100, unused=9999.0))
    assert all(name.startswith(b"x") for name in choose(nodes, 60, 0).names)
    assert choose(nodes, 80, 0).names[-1] == b"old"


def test_states_that_stay_lie_the_denser_the_nearer_the_end_they_are() -> None:
    ends = range(64, 64 * 33, 64)
    gone = {int(name[1:]) for name in choose(chain(*ends), 220, 0).names}
    left = [end for end in ends if end not in gone]
    gaps = [after - before for before, after in zip([0, *left], left, strict=False)]
    assert len(left) == 10
    assert left[-3:] == [64 * 30, 64 * 31, 64 * 32]
    # Twice as far from the end, about twice as far apart, and never in one jump to the start.
    assert gaps[-1] == gaps[-2] == 64
    assert gaps[0] == max(gaps)
    assert 64 * 6 <= gaps[0] <= 64 * 16


def test_the_states_that_most_is_expected_of_go_last() -> None:
    """The end of the system prompt, where conversations part, and the last two of each."""
    other = Node(b"fork", 1, b"s320", end=384, stateful=True)
    state = Node(b"xfork", 10, b"fork", Kind.STATE, rows=False)
    nodes = chain(*range(64, 64 * 11, 64), anchor=128) | tree(other, state)
    keep = [b"s%d" % end for end in range(64, 64 * 11, 64)] + [b"fork"]
    order = choose(nodes, 10_000, 0, keep).names
    spare = {b"x64", b"x192", b"x256", b"x384", b"x448"}
    assert set(order[: len(spare)]) == spare
    assert order[-1] == b"x128"
    assert set(order[len(spare) :]) >= {b"x512", b"x576", b"x320"}


def test_a_segment_without_its_state_goes_once_nothing_rests_on_it() -> None:
    nodes = chain(64, 128, 192, 256, bare=(128, 192), anchor=64) | tree(
        Node(b"old", 5, unused=1990.0)
    )
    assert choose(nodes, 1, 0).names == [b"old"]
    assert choose(nodes, 6, 0).names == [b"old", b"s256", b"x256"]
    assert choose(nodes, 18, 0).names[3:] == [b"s192", b"s128"]


def test_a_leaf_without_rows_is_as_old_as_its_state() -> None:
    """The server knows no age of a manifest alone."""
    nodes = tree(
        *(Node(b"s%d" % n, 0, end=64, stateful=True, rows=False) for n in range(3)),
        *(Node(b"x%d" % n, 10, b"s%d" % n, Kind.STATE, (5.0, 9.0, 1.0)[n]) for n in range(3)),
    )
    assert choose(nodes, 15, 0).names == [b"s1", b"x1", b"s0", b"x0"]


@st.composite
def forests(draw: st.DrawFn) -> dict[bytes, Node]:
    count = draw(st.integers(0, 20))
    nodes: dict[bytes, Node] = {}
    for number in range(count):
        parent = draw(st.sampled_from([b"", *(n for n in nodes if n.isdigit())]))
        size, age = draw(st.integers(0, 50)), float(draw(st.integers(0, 9)))
        name, above = b"%d" % number, nodes[parent].end if parent else 0
        nodes[name] = Node(name, size, parent, unused=age, end=above + 64, stateful=True)
        for kind in draw(st.sets(st.sampled_from([Kind.STATE, Kind.TRACE]))):
            anchor, size = (
                draw(st.booleans()),
                draw(st.integers(0, 50)) if kind is Kind.STATE else 0,
            )
            hung = name + kind.value.encode()
            nodes[hung] = Node(hung, size, name, kind, age, rows=False, anchor=anchor)
    return nodes


@settings(max_examples=200, deadline=None)
@given(forests(), st.integers(0, 600), st.data())
def test_whatever_the_tree_enough_is_freed_and_what_is_left_is_a_tree(
    nodes: dict[bytes, Node], nbytes: int, data: st.DataObject
) -> None:
    leaf = data.draw(st.sampled_from([b"", *(name for name in nodes if name.isdigit())]))
    keep = []
    while leaf:
        keep.append(leaf)
        leaf = nodes[leaf].parent
    plan = choose(nodes, nbytes, 0, keep)
    free = sum(node.nbytes for node in nodes.values() if node.name not in keep)
    assert plan.nbytes >= min(nbytes, free)
    assert plan.nbytes == sum(nodes[name].nbytes for name in set(plan.names))
    assert len(set(plan.names)) == len(plan.names)
    assert not set(plan.names) & set(keep)
    left = {name: node for name, node in nodes.items() if name not in plan.names}
    assert not unreachable(left)


# --- with a server ---------------------------------------------------------------------------


@pytest.fixture
def running(server: Callable[..., Server]) -> Server:
    return server()


def bytes_held(server: Server) -> int:
    """Rows and state, by the server's own account."""
    info = server.client().call("KV.PREFIX.INFO").decode()
    rows = int(info.partition("vstore_bytes:")[2].split("\r\n")[0])
    state = sum(int(row[2]) for row in server.client().call("KV.PREFIX.LIST", b"pl"))
    return rows + state


@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["llama", "qwen3_5"])
def test_the_budget_is_never_exceeded_and_exact(running: Server, model: Any) -> None:
    """F01, F04: a hard limit on rows and state; the newest conversation is always there."""
    probe = index_of(running, model)
    take_turn(probe, model, ids_of(0, 192))
    size = probe.used_bytes
    assert size == bytes_held(running) > 0
    probe.trim(0)
    assert probe.used_bytes == bytes_held(running) == 0
    budget = 3 * size + size // 2
    index = index_of(running, model, budget_bytes=budget)
    for seed in range(1, 8):
        turn = take_turn(index, model, ids_of(seed, 192))
        assert set(turn.outcomes) == {"stored"}
        assert index.used_bytes == bytes_held(running) <= budget
        assert index.find(ids_of(seed, 192)).tokens == 192
    assert index.stats()["evictions"] >= 4
    found = [index.find(ids_of(seed, 192)).tokens for seed in range(1, 8)]
    assert found == [0, 0, 0, 0, 192, 192, 192]


def test_of_a_growing_conversation_the_oldest_part_stays_and_it_resumes(running: Server) -> None:
    """E16 and the root that is written once: other conversations leave, then its own last turn."""
    index = index_of(running, MODEL)
    trunk = ids_of(30, 128)
    for seed in range(31, 35):
        take_turn(index, MODEL, [*trunk, *ids_of(seed, 128)])
    used = index.used_bytes
    assert index.restore(index.find([*trunk, *ids_of(31, 128)])) is not None  # the oldest, touched
    index.trim(used - 1)
    found = [index.find([*trunk, *ids_of(seed, 128)]).tokens for seed in range(31, 35)]
    assert found[0] == 256
    assert sorted(found[1:]) == [128, 256, 256]
    assert found[1] == 128


def test_an_oversize_conversation_empties_nothing(running: Server) -> None:
    """F04: it is refused, everything else is kept, and told once."""
    index = index_of(running, MODEL)
    take_turn(index, MODEL, ids_of(40, 128))
    budget = 2 * index.used_bytes
    index = index_of(running, MODEL, budget_bytes=budget)
    turn = take_turn(index, MODEL, ids_of(41, 64 * 5))
    assert turn.outcomes == ("oversize",)
    assert index.stats()["oversize"] == 1
    assert index.stats()["evictions"] == 0
    assert index.find(ids_of(40, 128)).tokens == 128
    grown = take_turn(index, MODEL, [*ids_of(40, 128), *ids_of(42, 128)])
    assert grown.outcomes == ("stored",)
    more = take_turn(index, MODEL, [*ids_of(40, 128), *ids_of(42, 128), *ids_of(43, 64)])
    assert more.outcomes == ("oversize",)
    assert more.restored == 256


def test_growing_turns_write_each_row_about_once(running: Server) -> None:
    """E16: 20 turns; bytes written are no more than twice the final conversation."""
    index = index_of(running, MODEL)
    ids: list[int] = []
    for turn in range(20):
        ids += ids_of(50 + turn, 100)
        take_turn(index, MODEL, ids)
    row_bytes = 4 * 2 * 2 * 16 * 4  # layers, sides, heads, head_dim, float32
    assert index.stats()["bytes_stored"] <= 1.4 * row_bytes * len(ids)
    assert index.find(ids).tokens >= len(ids) - len(ids) % 64


def test_session_slots_run_out_leaf_first(server: Callable[..., Server]) -> None:
    """The server's own eviction takes the root first; so the index makes room before it has to."""
    running = server("--vstore-sessions", "24")
    index = index_of(running, MODEL)
    trunk = ids_of(60, 64)
    for seed in range(61, 75):
        turn = take_turn(index, MODEL, [*trunk, *ids_of(seed, 64)])
        assert turn.restored in (0, 64)
        assert turn.restored == 64 or seed == 61
    info = running.client().call("KV.PREFIX.INFO").decode()
    assert "vstore_evictions:0\r\n" in info
    assert index.stats()["evictions"] > 0


def test_a_root_that_the_server_evicted_is_a_clean_miss_that_heals(running: Server) -> None:
    """A parent gone under a living leaf: the match ends there, and the next turn stores it anew."""
    index = index_of(running, MODEL)
    ids = ids_of(80, 128)
    take_turn(index, MODEL, ids)
    longer = [*ids, *ids_of(81, 128)]
    take_turn(index, MODEL, longer)
    root = index.find(longer).links[0].name
    running.client().call("KV.PREFIX.DROP", root)
    fresh = index_of(running, MODEL)
    assert fresh.find(longer).tokens == 0
    turn = take_turn(fresh, MODEL, longer)
    assert turn.restored == 0
    cold = Cold(MODEL).run(longer, 0, [len(longer)])
    assert largest_difference(logits_of(MODEL, turn.cache), logits_of(MODEL, cold)) == 0.0
    again = index_of(running, MODEL)
    assert again.find(longer).tokens == len(longer)
    again.reconcile()
    assert again.find(longer).tokens == len(longer)
    assert names(running) == {link.name for link in again.find(longer).links}


def names(server: Server) -> set[bytes]:
    return {row[0] for row in server.client().call("KV.PREFIX.LIST", b"pl")}


def test_what_a_killed_client_left_half_written_is_invisible_and_dropped(running: Server) -> None:
    """E01: rows without a manifest are nobody's; an open fill is left alone."""
    raw = running.client()
    digest = b"ab" * 32
    gen = raw.call("KV.PREFIX.META", b"pls1-" + digest, "BEGIN")
    raw.call("KV.PREFIX.REGISTER", b"pls1-" + digest, 32, "fp32")
    raw.call("V.STOREBATCH", b"pls1-" + digest + b"_pk", 0, 0, 1, bytes(128), "GEN", gen)
    index = index_of(running, MODEL)
    index.reconcile()
    assert names(running) == {b"pls1-" + digest}
    raw.close()
    for _ in range(50):
        index.reconcile()
        if not names(running):
            break
    assert names(running) == set()


def test_a_budget_counts_what_other_clients_stored(running: Server) -> None:
    """All clients of one index share it, and evict each other's leaves."""
    one, other = index_of(running, MODEL), index_of(running, MODEL)
    take_turn(one, MODEL, ids_of(90, 128))
    size = one.used_bytes
    limited: Lineage = index_of(running, MODEL, budget_bytes=2 * size)
    take_turn(other, MODEL, ids_of(91, 128))
    take_turn(limited, MODEL, ids_of(92, 128))
    assert limited.used_bytes == 2 * size
    assert one.find(ids_of(90, 128)).tokens == 0
    assert one.find(ids_of(91, 128)).tokens == 128


def test_restores_during_evictions_give_the_asked_conversation_or_nothing(
    running: Server,
) -> None:
    """G01: 12 conversations, room for 4, two readers and a writer at once; the rows that come are
    those of the conversation asked for."""
    prompts = [ids_of(200 + number, 128) for number in range(12)]
    probe = index_of(running, MODEL)
    rows: dict[int, bytes] = {}
    for number, ids in enumerate(prompts[:2]):
        take_turn(probe, MODEL, ids)
        assert probe.find(ids).tokens == 128, number
    size = probe.used_bytes // 2
    caches = {}
    for number, ids in enumerate(prompts):
        caches[number] = Cold(MODEL).run(ids, 0, [128])
        rows[number] = bits_of(caches[number])
    wrong: list[int] = []
    found: list[int] = []
    done = threading.Event()

    def read(seed: int) -> None:
        index = index_of(running, MODEL)
        turn = seed
        while not done.is_set():
            number = turn % len(prompts)
            cache = index.restore(index.find(prompts[number]))
            if cache is not None:
                found.append(number)
                if bits_of(cache) != rows[number]:
                    wrong.append(number)
            turn += 1

    readers = [threading.Thread(target=read, args=(seed,)) for seed in (0, 5)]
    for reader in readers:
        reader.start()
    writer = index_of(running, MODEL, budget_bytes=4 * size)
    try:
        for _ in range(3):
            for number, ids in enumerate(prompts):
                capture = writer.capture(ids, caches[number], start=0)
                assert capture is not None
                assert writer.store(capture) in ("stored", "known")
                assert writer.used_bytes <= 4 * size
    finally:
        done.set()
        for reader in readers:
            reader.join(60)
    assert wrong == []
    assert found
    assert writer.stats()["evictions"] > 0


def bits_of(cache: list[Any]) -> bytes:
    """All rows of all layers."""
    return b"".join(
        np.array(side[..., :128, :]).tobytes()
        for leaf in cache
        for side in (leaf.keys, leaf.values)
    )


def test_another_models_conversations_count_and_are_evicted(running: Server) -> None:
    """F01: what the model in use cannot read still takes its room, and makes it, after a restart
    as before."""
    old, new = MODEL, build("llama", seed=22)
    index = index_of(running, old)
    for seed in range(300, 304):
        take_turn(index, old, ids_of(seed, 128))
    budget = index.used_bytes
    for _ in range(2):
        current = index_of(running, new, budget_bytes=budget)
        for seed in range(310, 313):
            take_turn(current, new, ids_of(seed, 128))
            assert current.used_bytes == bytes_held(running) <= budget
        running.kill()
        running.restart()
        assert bytes_held(running) <= budget
    assert [index_of(running, new).find(ids_of(seed, 128)).tokens for seed in range(310, 313)] == [
        128,
        128,
        128,
    ]
    survivors = [index_of(running, old).find(ids_of(seed, 128)).tokens for seed in range(300, 304)]
    assert survivors == [0, 0, 0, 128]
