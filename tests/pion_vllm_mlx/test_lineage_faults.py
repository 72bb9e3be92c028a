"""Whatever is damaged, missing, swapped or cut short: a shorter match, never another answer."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from pion_vllm_mlx.lineage import BLOCK, Lineage
from pion_vllm_mlx.lineage.records import read_segment, write_segment
from pion_vllm_mlx.transport.endpoint import Endpoint
from tests.pion_patches.shipping import largest_difference
from tests.pion_patches.zoo import build
from tests.pion_vllm_mlx.conversation import (
    PATIENT,
    Cold,
    Turn,
    ids_of,
    index_of,
    logits_of,
    take_turn,
)
from tests.pion_vllm_mlx.fake_peer import Answer, Words, array, bulk
from tests.pion_vllm_mlx.mini_server import MiniServer

LLAMA = build("llama", seed=31)
HYBRID = build("qwen3_5", seed=31)
MODELS = {"llama": LLAMA, "qwen3_5": HYBRID}
FIRST = ids_of(1, 150)
SECOND = [*FIRST, *ids_of(2, 150)]


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


@pytest.fixture
def filled(model: Any) -> Iterator[MiniServer]:
    """A server that holds a conversation of two turns."""
    with MiniServer() as server:
        index = index_of(server, model)
        take_turn(index, model, FIRST)
        take_turn(index, model, SECOND)
        assert index.find(SECOND).tokens in (256, 300)
        index.close()
        server.requests.clear()
        yield server


def turn_of(server: MiniServer, model: Any, ids: list[int]) -> tuple[Turn, Lineage]:
    """A turn of a new client, checked against a cold run from where it was restored."""
    index = index_of(server, model)
    turn = take_turn(index, model, ids)
    if not turn.restored:
        cold = Cold(model).run(ids, 0, turn.ends)
        assert largest_difference(logits_of(model, turn.cache), logits_of(model, cold)) == 0.0
    index.close()
    return turn, index


def segments(server: MiniServer) -> list[bytes]:
    """Names of what holds rows, the first one first."""
    found = [ns for ns in server.manifests if not ns.startswith((b"plt1-", b"plx1-"))]
    return sorted(found, key=lambda ns: read_segment(server.manifests[ns][1]).start)


def state_of(segment: bytes) -> bytes:
    """The name of the state at a segment's end."""
    return segment.replace(b"plc1-", b"plx1-")


def rewrite(server: MiniServer, name: bytes, **changes: Any) -> None:
    """Another manifest under the same name, itself sound."""
    gen, blob = server.manifests[name]
    changed = dataclasses.replace(read_segment(blob), **changes)
    server.manifests[name] = (gen, write_segment(changed))


def test_the_filled_server_is_hit(filled: MiniServer, model: Any) -> None:
    """The control."""
    turn, index = turn_of(filled, model, SECOND)
    assert turn.restored == (300 if model is LLAMA else 256)
    assert index.stats()["hits"] == 1


def test_one_flipped_bit_in_any_block_is_a_miss(filled: MiniServer, model: Any) -> None:
    """E02, C15: checked block by block over all layers, then everything or nothing."""
    for key, rows in filled.rows.items():
        at = len(rows) // 2
        rows[at] ^= 1
        turn, index = turn_of(filled, model, SECOND)
        assert index.stats()["miss_reasons"] == {"checksum": 1}, key
        assert turn.restored == 0
        rows[at] ^= 1


@pytest.mark.parametrize("model", ["qwen3_5"], indirect=True)
def test_a_flipped_bit_in_a_state_is_a_miss(filled: MiniServer, model: Any) -> None:
    last = state_of(segments(filled)[-1])
    for (name, layer), blob in list(filled.blobs.items()):
        if name == last:
            filled.blobs[name, layer] = blob[:-1] + bytes([blob[-1] ^ 1])
            index = index_of(filled, model)
            assert index.restore(index.find(SECOND)) is None
            assert index.stats()["miss_reasons"] == {"checksum": 1}
            filled.blobs[name, layer] = blob
    index = index_of(filled, model)
    assert index.restore(index.find(SECOND)) is not None


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_only_what_is_read_is_checked(filled: MiniServer) -> None:
    """A prompt that leaves before the damage is still restored."""
    for key, rows in filled.rows.items():
        if key[0].startswith(segments(filled)[0]):
            rows[-1] ^= 1  # the tail of the first segment, after its last whole block
    index = index_of(filled, LLAMA)
    assert index.restore(index.find(FIRST[:128])) is not None
    assert index.restore(index.find(SECOND)) is not None
    assert index.restore(index.find(FIRST)) is None


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_swapped_layers_are_a_miss(filled: MiniServer, model: Any) -> None:
    """H09: each payload in its own place, or none."""
    rows = filled.rows
    sid = segments(filled)[0] + b"_pk"
    layers = sorted(layer for name, layer in rows if name == sid)
    rows[sid, layers[0]], rows[sid, layers[1]] = rows[sid, layers[1]], rows[sid, layers[0]]
    _, index = turn_of(filled, model, SECOND)
    assert index.stats()["miss_reasons"] == {"checksum": 1}


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {"ids": (*s.ids[:-1], (s.ids[-1] + 1) % 199)},
        lambda s: {"ids": ((s.ids[0] + 1) % 199, *s.ids[1:])},
        lambda s: {"fingerprint": "0" * 64},
        lambda s: {"digest": "0" * 64},
        lambda s: {"start": s.start + BLOCK, "base": "0" * 16},
        lambda s: {"start": 0 if s.start else BLOCK, "base": "" if s.start else "0" * 16},
    ],
)
def test_a_manifest_about_something_else_ends_the_match(
    filled: MiniServer, model: Any, change: Callable[[Any], dict[str, Any]]
) -> None:
    """G01, H01, E13, C09: ids, model, place and number of tokens are compared, not believed."""
    name = segments(filled)[-1]
    rewrite(filled, name, **change(read_segment(filled.manifests[name][1])))
    turn, _ = turn_of(filled, model, SECOND)
    assert turn.restored in ((0, 150, 299) if model is LLAMA else (0, 128))


def test_a_segment_computed_on_other_rows_is_not_joined_to_these(
    filled: MiniServer, model: Any
) -> None:
    """Two runs over the same tokens differ in last bits: their parts are never mixed."""
    first, second = segments(filled)[:2]
    rewrite(filled, second, base="f" * 16)
    index = index_of(filled, model)
    assert index.find(SECOND).tokens == (150 if model is LLAMA else 128)
    rewrite(
        filled, second, base=read_segment(filled.manifests[first][1]).trail[-1], parent="1" * 64
    )
    assert index.find(SECOND).tokens == (150 if model is LLAMA else 128)


@pytest.mark.parametrize("model", ["qwen3_5"], indirect=True)
def test_a_missing_state_is_a_miss_of_its_segment(filled: MiniServer, model: Any) -> None:
    """C04, C15: one blob gone makes all of it a miss."""
    gone = [key for key in filled.blobs if key[0] == state_of(segments(filled)[-1])]
    del filled.blobs[gone[0]]
    _, index = turn_of(filled, model, SECOND)
    assert index.stats()["miss_reasons"] == {"rows": 1}


def test_a_missing_layer_is_a_miss(filled: MiniServer, model: Any) -> None:
    del filled.rows[segments(filled)[0] + b"_pv", b"0"]
    _, index = turn_of(filled, model, SECOND)
    assert index.stats()["miss_reasons"] == {"rows": 1}


def half(answer: Answer) -> Answer:
    assert isinstance(answer, bytes)
    return [answer[: len(answer) // 2], None]


WRONG: dict[str, Callable[[Answer], Answer]] = {
    "half a reply": half,
    "an error": lambda answer: b"-ERR internal\r\n",
    "null": lambda answer: b"$-1\r\n",
    "an integer": lambda answer: b":7\r\n",
    "an empty array": lambda answer: b"*0\r\n",
    "nulls": lambda answer: array(bulk(None), bulk(None)),
    "short bulks": lambda answer: array(bulk(b"abc"), bulk(b"abc")),
    "nonsense": lambda answer: b"HTTP/1.1 200 OK\r\n\r\n",
}
COMMANDS = ("KV.PREFIX.META", "KV.PREFIX.LOOKUP", "V.FETCH", "SSM.PREFIX.FETCH")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_answer_to_a_read_is_a_miss_then_all_is_well(
    filled: MiniServer, model: Any, command: str
) -> None:
    """WIRE 15.12, G08: no exception, and the next client finds everything again."""
    before = dict(filled.manifests)
    for wrong in WRONG:
        filled.meddle = lambda words, answer, w=wrong: (
            WRONG[w](answer) if words[0] == command.encode() else answer
        )
        index = index_of(filled, model)
        match = index.find(SECOND)
        cache = index.restore(match)
        if cache is not None:
            assert command in ("KV.PREFIX.LOOKUP", "SSM.PREFIX.FETCH"), wrong
            assert cache[0] is not None
        index.close()
        filled.meddle = None
    assert filled.manifests == before
    assert turn_of(filled, model, SECOND)[0].restored >= 256


@pytest.mark.parametrize("survived", range(16))
def test_a_server_killed_between_any_two_commands_of_a_store_leaves_whole_records(
    model: Any, survived: int
) -> None:
    """WIRE 15.11, E01: a segment without a manifest does not exist; the next turn heals it."""
    seen = 0

    def die(words: Words, answer: Answer) -> Answer:
        nonlocal seen
        seen += words[0] != b"KV.PREFIX.META" or words[2] != b"GET"
        return answer if seen <= survived else None

    with MiniServer(die) as server:
        index = index_of(server, model)
        cold = Cold(model).run(FIRST, 0, take_turn(index, model, FIRST).ends)
        index.close()
        with server.restart() as again:
            later = index_of(again, model)
            turn = take_turn(later, model, FIRST)
            later.close()
            assert turn.restored in ((0, 150) if model is LLAMA else (0, 128))
            one = logits_of(model, turn.cache)
            assert largest_difference(one, logits_of(model, cold)) == 0.0
            assert turn_of(again, model, FIRST)[0].restored == (150 if model is LLAMA else 128)


def test_a_refused_store_is_counted_and_nothing_is_visible(model: Any) -> None:
    for command in (b"V.STOREBATCH", b"KV.PREFIX.REGISTER", b"SSM.PREFIX.STORE"):
        if command == b"SSM.PREFIX.STORE" and model is LLAMA:
            continue

        def refuse(words: Words, answer: Answer, name: bytes = command) -> Answer:
            return b"-OOM no room\r\n" if words[0].startswith(name) else answer

        with MiniServer(refuse) as server:
            index = index_of(server, model)
            turn = take_turn(index, model, FIRST)
            assert turn.outcomes == ("failed",)
            assert index.stats()["stores_failed"] == 1
            assert segments(server) == []
            assert index.find(FIRST).tokens == 0


def test_another_client_that_fills_the_same_segment_is_left_alone(model: Any) -> None:
    """Fills are leases: of two cold clients one ships."""
    with MiniServer() as server:
        one, other = index_of(server, model), index_of(server, model)
        first = take_turn(one, model, FIRST)
        name = segments(server)[0]
        held = server.manifests.pop(name)
        server.fills[name] = (99, 0)
        assert take_turn(other, model, FIRST).outcomes == ("busy",)
        server.manifests[name] = held
        assert first.outcomes == ("stored",)


def test_no_server_costs_no_exception_and_no_store(model: Any) -> None:
    with MiniServer() as server:
        port = server.port
    index = Lineage(model, Endpoint("127.0.0.1", port, connect_timeout=PATIENT), timeout=PATIENT)
    turn = take_turn(index, model, FIRST)
    assert turn.restored == 0
    assert turn.outcomes == ("failed",)
    assert index.stats()["miss_reasons"] == {"unavailable": 1}
    assert index.used_bytes == 0
    index.trim(0)
    index.reconcile()


def test_threads_that_share_an_index_get_the_same_bits(filled: MiniServer, model: Any) -> None:
    """G03, G09: one index, several threads; caches made in one are used in another."""
    index = index_of(filled, model)
    expected = logits_of(model, index.fetch(SECOND)[0] or [])
    caches: list[Any] = []

    def work() -> None:
        caches.extend(index.fetch(SECOND)[0] for _ in range(4))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(caches) == 12
    for cache in caches:
        assert largest_difference(logits_of(model, cache), expected) == 0.0


def test_markers_of_other_conversations_never_come_up(filled: MiniServer) -> None:
    """G01: what a fresh prompt gets is its own, whatever lies beside it under the same trunk."""
    index = index_of(filled, LLAMA)
    trunk = ids_of(70, 64)
    for seed in range(71, 81):
        take_turn(index, LLAMA, [*trunk, *ids_of(seed, 70)])
    for seed in range(90, 100):
        ids = [*trunk, *ids_of(seed, 70)]
        match = index.find(ids)
        assert match.tokens == 64
        cache = index.restore(match)
        assert cache is not None
        assert all(leaf.offset == 64 for leaf in cache)
        # A06: nothing behind the match is reachable either.
        assert all(not mx.any(leaf.keys[..., 64:, :]).item() for leaf in cache)


def test_another_tenant_or_adapter_finds_nothing_and_the_first_still_does(
    filled: MiniServer,
) -> None:
    """I01, I02: the salt is part of every name; paired with a hit."""
    for settings in ({"tenant": "X"}, {"adapter": "X"}):
        index = index_of(filled, LLAMA, **settings)
        assert index.find(SECOND).tokens == 0
        take_turn(index, LLAMA, SECOND)
        assert index.find(SECOND).tokens == 300
    assert len([name for name in filled.manifests if name.startswith(b"pls1-")]) >= 2
    plain = index_of(filled, LLAMA)
    expected = 300 if any(n.startswith(b"pls1-") for n in segments(filled)) else 0
    assert plain.find(SECOND).tokens in (0, expected)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_an_exception_nobody_foresaw_is_one_miss(
    filled: MiniServer, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G08: in a server's generation thread one exception would end serving for good."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("injected")

    index = index_of(filled, model)
    for name in ("search", "fetch_match", "capture_cache", "rebuild"):
        with monkeypatch.context() as patch:
            patch.setattr(f"pion_vllm_mlx.lineage.index.{name}", fail)
            turn = take_turn(index, model, [*SECOND, *ids_of(3, 70)])
            assert len(turn.cache) == 4, name
    assert index.restore(index.find(SECOND)) is not None
