"""A prefix that grows under one name: only new rows travel, and no reader ever sees a mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pion_vllm_mlx.prompt_cache import PionPromptCache
from pion_vllm_mlx.transport import Command, Patience, Reply
from pion_vllm_mlx.transport.endpoint import Endpoint
from tests.pion_patches.shipping import continuation, feed, token_ids
from tests.pion_patches.zoo import build
from tests.pion_vllm_mlx.mini_server import MiniServer, dying
from tests.pion_vllm_mlx.tiny import VOCAB, cold_answer, continue_greedily, tiny_llama

Server = Any
MODEL = tiny_llama()
STEP = 16
IDS = [token % VOCAB for token in token_ids(0, 20 * STEP)]
SHORT, LONG = IDS[:48], IDS[:96]
#: Bytes of a token's rows: two layers, two sides, two heads of 16 in float32.
ROW = 2 * 2 * 32 * 4
#: Generous: the first answer of a server on a busy machine may take long.
PATIENT = 20.0


pytestmark = pytest.mark.usefixtures("no_lane_in_process")


def client(port: int, model: Any = MODEL, **settings: Any) -> PionPromptCache:
    defaults: dict[str, Any] = {"timeout": PATIENT, "store": "sync", "prefill_step_size": STEP}
    return PionPromptCache(model, port=port, **(defaults | settings))


def store(port: int, name: str, prefix: Sequence[int], **settings: Any) -> dict[str, Any]:
    """One call of a client of its own, which has to answer as cold; its figures."""
    with client(port, **settings) as pc:
        cache = pc.get_or_prefill(prefix, name)
        if "vquant" not in settings:
            step = settings.get("prefill_step_size", STEP)
            assert continue_greedily(MODEL, cache) == cold_answer(MODEL, list(prefix), step)
        return pc.stats()


def is_hit(port: int, name: str, prefix: Sequence[int] = LONG, **settings: Any) -> bool:
    return bool(store(port, name, prefix, store="off", **settings)["hits"])


def test_a_longer_prefix_sends_only_its_new_rows(shared: Server, namespace: str) -> None:
    assert store(shared.port, namespace, SHORT)["bytes_stored"] == len(SHORT) * ROW
    stats = store(shared.port, namespace, LONG)
    assert stats["miss_reasons"] == {"length": 1}
    assert stats["stores"] == 1
    assert stats["bytes_stored"] == (len(LONG) - len(SHORT)) * ROW
    assert is_hit(shared.port, namespace)
    assert not is_hit(shared.port, namespace, SHORT)


def test_a_chat_of_twenty_turns_writes_its_last_prefix_once(shared: Server, namespace: str) -> None:
    """E16: written is what the longest prefix takes, not what all of them take together."""
    written = 0
    with client(shared.port) as pc:
        for turn in range(1, 21):
            pc.get_or_prefill(IDS[: turn * STEP], namespace)
        written = pc.stats()["bytes_stored"]
    assert written == len(IDS) * ROW
    assert is_hit(shared.port, namespace, IDS)


def test_rows_computed_in_other_chunks_are_compared_not_trusted(
    shared: Server, namespace: str
) -> None:
    """Whether they are the same bits or not, the stored prefix is the one just computed."""
    store(shared.port, namespace, SHORT, prefill_step_size=7)
    store(shared.port, namespace, LONG)
    assert is_hit(shared.port, namespace)


def test_another_prefix_is_stored_whole(shared: Server, namespace: str) -> None:
    store(shared.port, namespace, SHORT)
    other = [(SHORT[0] + 1) % VOCAB, *LONG[1:]]
    assert store(shared.port, namespace, other)["bytes_stored"] == len(other) * ROW
    assert is_hit(shared.port, namespace, other)


@pytest.mark.parametrize(
    ("vquant", "sent"), [("fp16", 48 * ROW // 2), ("mlx4g32", 48 * 2 * 2 * 20), ("int8", None)]
)
def test_encoded_rows_are_extended_where_each_row_is_encoded_by_itself(
    shared: Server, namespace: str, vquant: str, sent: int | None
) -> None:
    """int8 has one scale for all rows stored together, so those rows differ, and all are sent."""
    store(shared.port, namespace, SHORT, vquant=vquant)
    stats = store(shared.port, namespace, LONG, vquant=vquant)
    assert stats["stores"] == 1
    if sent is not None:
        assert stats["bytes_stored"] == sent
    assert is_hit(shared.port, namespace, vquant=vquant)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5", "mamba2"])
def test_windows_and_recurrent_state_are_replaced(
    shared: Server, namespace: str, family: str
) -> None:
    """A window that has moved on holds other rows; a state is another state."""
    model, ids = build(family, seed=1), token_ids(0, 96)
    calls = (4, 1)
    for tokens in (32, 64, 96):
        with client(shared.port, model) as pc:
            pc.get_or_prefill(ids[:tokens], namespace)
            assert pc.stats()["stores"] == 1
        cold = model.make_cache()
        for start in range(0, tokens, STEP):
            feed(family, model, cold, start, STEP)
        expected = continuation(family, model, cold, tokens, calls).tobytes()
        with client(shared.port, model, store="off") as pc:
            cache = pc.get_or_prefill(ids[:tokens], namespace)
            assert pc.stats()["hits"] == 1
            assert continuation(family, model, cache, tokens, calls).tobytes() == expected


COMMANDS = 12  # META GET, LOOKUP, GET, GET, BEGIN, 4 STOREBATCH, SET; two to spare


@pytest.mark.parametrize("survived", range(COMMANDS))
@pytest.mark.parametrize("answered", [False, True])
def test_a_server_killed_while_a_prefix_grows_shows_no_mixture(
    survived: int, answered: bool
) -> None:
    """Killed before or after acknowledging its n-th command: either length whole, or a miss."""
    with MiniServer() as server:
        store(server.port, "ns", SHORT)
        server.meddle = dying(survived, answered)
        store(server.port, "ns", LONG)
        with server.restart() as again:
            readers = [store(again.port, "ns", prefix, store="off") for prefix in (SHORT, LONG)]
            reasons = [stats["miss_reasons"] for stats in readers if not stats["hits"]]
            assert all(set(reason) <= {"absent", "length"} for reason in reasons)
            store(again.port, "ns", LONG)
            assert is_hit(again.port, "ns")


class Counting(Endpoint):
    """Notes the rows of each exchange."""

    def __init__(self, port: int) -> None:
        super().__init__(port=port, connect_timeout=PATIENT)
        self.pipelines: list[int] = []

    def exchange(
        self, commands: Sequence[Command], patience: Patience, *, retry: bool = True
    ) -> list[Reply]:
        self.pipelines.append(sum(command.words[0] == "V.STOREBATCH" for command in commands))
        return super().exchange(commands, patience, retry=retry)


@pytest.mark.parametrize(("limit", "value"), [("_BATCH", 1), ("_LONGEST_SILENCE", -1.0)])
def test_much_or_slowly_encoded_rows_are_sent_in_parts(
    shared: Server, namespace: str, limit: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that memory stays bounded, and the fill's lease is renewed in time."""
    lane = Counting(shared.port)
    assert store(shared.port, namespace, LONG, lane=lane)["bytes_stored"] == len(LONG) * ROW
    monkeypatch.setattr(f"pion_vllm_mlx.ship.{limit}", value)
    parts = Counting(shared.port)
    stats = store(shared.port, f"{namespace}2", LONG, lane=parts)
    assert stats["bytes_stored"] == len(LONG) * ROW
    assert [count for count in lane.pipelines if count] == [4]
    assert [count for count in parts.pipelines if count] == [1, 1, 1, 1]
    assert is_hit(shared.port, f"{namespace}2")


class Meddling(Endpoint):
    """Lets somebody else act just before rows are sent."""

    act: Callable[[], object] = staticmethod(lambda: None)
    times = 0

    def exchange(
        self, commands: Sequence[Command], patience: Patience, *, retry: bool = True
    ) -> list[Reply]:
        if commands[0].words[0] == "V.STOREBATCH" and self.times > 0:
            self.times -= 1
            self.act()
        return super().exchange(commands, patience, retry=retry)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("command", ["KV.PREFIX.DROP {}", "V.DROP {}_pk"])
def test_a_base_that_goes_while_it_is_extended_makes_no_prefix_with_a_gap(
    shared: Server, namespace: str, command: str, times: int
) -> None:
    """Then all of it is stored, or, if that goes too, nothing."""
    store(shared.port, namespace, SHORT)
    lane = Meddling(port=shared.port, connect_timeout=PATIENT)
    lane.act = lambda: shared.client().call(*command.format(namespace).split())
    lane.times = times
    stats = store(shared.port, namespace, LONG, lane=lane)
    if times == 1:
        assert stats["bytes_stored"] == len(LONG) * ROW
    else:
        assert stats["stores"] == 0
        assert shared.client().call("KV.PREFIX.META", namespace, "GET") is None
        store(shared.port, namespace, LONG)
    assert is_hit(shared.port, namespace)


def test_damaged_rows_under_an_extension_are_a_miss_that_heals(
    shared: Server, namespace: str
) -> None:
    """E02: the base's rows are not what its manifest says; nobody noticed before it grew."""
    store(shared.port, namespace, SHORT)
    raw = shared.client()
    _, blob = raw.call("KV.PREFIX.META", namespace, "GET")
    gen = raw.call("KV.PREFIX.META", namespace, "BEGIN")
    raw.call("V.STOREBATCH", f"{namespace}_pv", 1, 9, 1, bytes(128), "FMT", "PACKED", "GEN", gen)
    raw.call("KV.PREFIX.META", namespace, "SET", gen, blob)
    store(shared.port, namespace, LONG)
    stats = store(shared.port, namespace, LONG)
    assert stats["miss_reasons"] == {"checksum": 1}
    assert stats["bytes_stored"] == len(LONG) * ROW
    assert is_hit(shared.port, namespace)
