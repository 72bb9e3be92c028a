"""Generating through the wire when things happen to the server, the prefix or the request."""

from __future__ import annotations

import copy
import gc
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.attention import pion_attention_patch
from pion_patches.inproc import SWITCH
from pion_patches.prefix_entry import CannotSplit
from pion_patches.remote import RemoteKVCache
from pion_patches.split_cache import PrefixTrimError
from pion_server.attend.requests import DIMS
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.attend_wire import HEAD_DIMS
from pion_vllm_mlx.mlx_lm_patch import make_pion_prompt_cache, plain_prompt_cache
from pion_vllm_mlx.transport import ServerError
from tests.attention_client import AttentionClient, normal
from tests.pion_vllm_mlx.tiny import PREFIX, VOCAB, tiny_llama

NAME = "shared"
REST = [int(token) for token in np.random.default_rng(5).integers(0, VOCAB, 16)]
Server = Any


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(head_dim=32)


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with pion_attention_patch():
        yield


@pytest.fixture
def stored(server: Callable[..., Server], model: Any) -> Server:
    """A server that holds `PREFIX` under `NAME`, ready for queries."""
    running = server()
    fill(running, model)
    return running


def fill(running: Server, model: Any, name: str = NAME, ids: list[int] = PREFIX) -> None:
    with PionPromptCache(model, port=running.port, stage2=True) as first:
        first.get_or_prefill(ids, name)
        assert first.flush()
        assert first.stats()["stores"] == 1
        assert first.lookup(name)


def opened(pc: PionPromptCache, model: Any, tokens: int = len(PREFIX), **options: Any) -> list[Any]:
    cache = make_pion_prompt_cache(model, NAME, pc, tokens, **options)
    assert all(isinstance(one, RemoteKVCache) for one in cache)
    return cache


def ordinary(model: Any, ids: list[int] = PREFIX) -> list[Any]:
    cache: list[Any] = make_prompt_cache(model)
    model(mx.array([ids]), cache=cache)
    return cache


def logits(model: Any, cache: list[Any], ids: list[int]) -> Any:
    """Of every one of `ids`, fed one by one."""
    return np.stack([np.array(model(mx.array([[one]]), cache=cache)[0, -1]) for one in ids])


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    return float(np.abs(found - expected).max()) < tolerance


LANES = pytest.mark.parametrize("binary_port", [None, 0], ids=["binary", "resp"])
NO_SESSIONS = Path(__file__).with_name("no_sessions.py")


@LANES
@pytest.mark.parametrize("extra", [None, NO_SESSIONS], ids=["append", "resend"])
def test_both_lanes_agree_whether_the_server_keeps_the_suffix_or_not(
    server: Callable[..., Server], model: Any, extra: Path | None, binary_port: int | None
) -> None:
    running = server(extra=extra)
    fill(running, model)
    with PionPromptCache(model, port=running.port, stage2=True, binary_port=binary_port) as pc:
        cache, plain = opened(pc, model), ordinary(model)
        for one in (cache, plain):
            model(mx.array([REST[:5]]), cache=one)
        assert close(logits(model, cache, REST[5:]), logits(model, plain, REST[5:]))
        stats = pc.stats()
        asked = "attend_resp" if binary_port == 0 else "attend_binary"
        assert stats[asked] == stats["attend_resp"] + stats["attend_binary"] == 2 * 12
        assert stats["wire_losses"] == 0


@LANES
def test_a_server_killed_and_restarted_between_tokens_goes_on_with_the_generation(
    stored: Server, model: Any, binary_port: int | None
) -> None:
    expected = logits(model, ordinary(model), REST)
    with PionPromptCache(model, port=stored.port, stage2=True, binary_port=binary_port) as pc:
        cache = opened(pc, model)
        first = logits(model, cache, REST[:8])
        stored.kill()
        stored.restart()
        second = logits(model, cache, REST[8:])
        assert close(np.concatenate([first, second]), expected)
        assert pc.stats()["wire_losses"] == pc.stats()["misses"] == 0
        assert pc.cold_rehydrates_observed == 1


@LANES
def test_a_server_gone_for_good_costs_one_prefill_and_one_warning(
    stored: Server, model: Any, binary_port: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(model, ordinary(model), REST)
    with PionPromptCache(model, port=stored.port, stage2=True, binary_port=binary_port) as pc:
        cache, other = opened(pc, model), opened(pc, model)
        first = logits(model, cache, REST[:8])
        stored.kill()
        with caplog.at_level(logging.WARNING, "pion_vllm_mlx"):
            second = logits(model, cache, REST[8:])
            assert close(logits(model, other, REST), expected)
        assert close(np.concatenate([first, second]), expected)
        assert pc.stats()["misses"] == pc.stats()["wire_losses"] == 1
        assert len(caplog.records) == 1
        # Meanwhile the prefix is held in this process, so the next request needs no server.
        again = make_pion_prompt_cache(model, NAME, pc, len(PREFIX))
        assert close(logits(model, again, REST), expected)


@LANES
def test_a_server_that_falls_silent_is_waited_for_no_longer_than_a_prefill_and_a_little(
    stored: Server, model: Any, binary_port: int | None
) -> None:
    expected = logits(model, ordinary(model), REST)
    with PionPromptCache(model, port=stored.port, stage2=True, binary_port=binary_port) as pc:
        cache = opened(pc, model)
        first = logits(model, cache, REST[:8])
        os.kill(stored.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            second = logits(model, cache, REST[8:])
            assert time.monotonic() - started < 30
        finally:
            os.kill(stored.pid, signal.SIGCONT)
        assert close(np.concatenate([first, second]), expected)
        assert pc.stats()["wire_losses"] == 1


def test_slots_that_turned_cold_are_made_again_unnoticed(
    server: Callable[..., Server], model: Any
) -> None:
    running = server("--sdpa-slots", "3")
    fill(running, model)
    expected = logits(model, ordinary(model), REST)
    with PionPromptCache(model, port=running.port, stage2=True) as pc:
        cache = opened(pc, model)
        first = logits(model, cache, REST[:8])
        fill(running, model, "other", PREFIX[::-1])
        assert not pc.lookup(NAME)
        second = logits(model, cache, REST[8:])
        assert close(np.concatenate([first, second]), expected)
        assert pc.cold_rehydrates_observed >= 1
        assert pc.stats()["wire_losses"] == 0
        assert pc.lookup(NAME)


def test_a_server_with_fewer_slots_than_layers_is_given_up_with_the_same_answer(
    server: Callable[..., Server], model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    running = server("--sdpa-slots", "1")
    with PionPromptCache(model, port=running.port) as first:
        first.get_or_prefill(PREFIX, NAME)
    with (
        PionPromptCache(model, port=running.port, stage2=True) as pc,
        caplog.at_level(logging.WARNING, "pion_vllm_mlx"),
    ):
        cache = make_pion_prompt_cache(model, NAME, pc, len(PREFIX))
        assert close(logits(model, cache, REST), logits(model, ordinary(model), REST))
        assert pc.stats()["wire_losses"] == 1
    assert len(caplog.records) == 1
    assert "attention in the server ended" in caplog.text


BLOCKS = {"K_block": 8, "K_blocks": 5}


@LANES
@pytest.mark.parametrize("extra", [None, NO_SESSIONS], ids=["append", "resend"])
@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["dense", "blocks"])
def test_a_prefix_replaced_under_its_name_never_answers(
    server: Callable[..., Server],
    model: Any,
    extra: Path | None,
    binary_port: int | None,
    blocks: dict[str, int] | None,
) -> None:
    """A namespace that names too much costs speed, never the answer, however quick it is."""
    running = server(extra=extra)
    fill(running, model)
    client = AttentionClient(running)
    k, v = normal(1, 2, len(PREFIX), 32), normal(2, 2, len(PREFIX), 32)
    with PionPromptCache(model, port=running.port, stage2=True, binary_port=binary_port) as pc:
        cache = opened(pc, model, sparse_full_layers=blocks)
        first = logits(model, cache, REST[:8])
        # As another process does it, in no time at all.
        assert client.raw.call("KV.PREFIX.META", NAME, "BEGIN") > 0
        for layer in range(len(cache)):
            client.store(f"{NAME}_attn", layer, k, v)
        second = logits(model, cache, REST[8:])
        assert close(np.concatenate([first, second]), logits(model, ordinary(model), REST))
        assert pc.stats()["wire_losses"] == 1


def test_a_batch_on_a_prefix_that_is_replaced_goes_on_as_if_nothing_had_been(
    stored: Server, model: Any
) -> None:
    client = AttentionClient(stored)
    rows = mx.array([REST[:6], REST[6:12]])
    plain: list[Any] = make_prompt_cache(model)
    model(mx.repeat(mx.array([PREFIX]), 2, axis=0), cache=plain)
    with PionPromptCache(model, port=stored.port, stage2=True) as pc:
        cache = opened(pc, model)
        for start in (0, 3):
            expected = model(rows[:, start : start + 3], cache=plain)
            found = model(rows[:, start : start + 3], cache=cache)
            assert mx.allclose(found, expected, atol=1e-5)
            k, v = normal(1, 2, len(PREFIX), 32), normal(2, 2, len(PREFIX), 32)
            assert client.raw.call("KV.PREFIX.META", NAME, "BEGIN") > 0
            for layer in range(2):
                client.store(f"{NAME}_attn", layer, k, v)
        assert pc.stats()["wire_losses"] == 1


def test_slots_that_somebody_else_filled_are_made_anew(stored: Server, model: Any) -> None:
    """The prefix is the same; what lies in its attention session is whoever's."""
    client = AttentionClient(stored)
    for layer in range(2):
        k, v = normal(1, 2, len(PREFIX), 32), normal(2, 2, len(PREFIX), 32)
        client.store(f"{NAME}_attn", layer, k, v)
    with PionPromptCache(model, port=stored.port, stage2=True) as pc:
        found = logits(model, opened(pc, model), REST)
        assert close(found, logits(model, ordinary(model), REST))
        assert pc.stats()["wire_losses"] == 0
        assert pc.cold_rehydrates_observed == 1


def test_another_process_that_fills_the_name_anew_ends_the_wire_and_is_found_next(
    stored: Server, model: Any
) -> None:
    other = PREFIX[::-1]
    with PionPromptCache(model, port=stored.port, stage2=True) as pc:
        cache = opened(pc, model)
        first = logits(model, cache, REST[:8])
        fill(stored, model, NAME, other)
        second = logits(model, cache, REST[8:])
        assert close(np.concatenate([first, second]), logits(model, ordinary(model), REST))
        assert pc.stats()["wire_losses"] == 1
    with PionPromptCache(model, port=stored.port, stage2=True) as pc:
        pc.get_or_prefill(other, NAME)
    with PionPromptCache(model, port=stored.port, stage2=True) as pc:
        found = logits(model, opened(pc, model), REST)
        assert close(found, logits(model, ordinary(model, other), REST))


def test_a_fill_takes_the_slots_of_the_one_before_along(stored: Server, model: Any) -> None:
    client = AttentionClient(stored)
    assert client.lookup(f"{NAME}_attn") == "HIT"
    assert client.raw.call("KV.PREFIX.META", NAME, "BEGIN") > 0
    assert client.lookup(f"{NAME}_attn") == "MISS"


def test_copies_and_rewound_requests_go_their_own_ways(stored: Server, model: Any) -> None:
    with PionPromptCache(model, port=stored.port, stage2=True) as pc:
        cache, plain = opened(pc, model), ordinary(model)
        for one in (cache, plain):
            logits(model, one, REST[:6])
        twins = copy.deepcopy(cache), copy.deepcopy(plain)
        assert close(logits(model, cache, REST[6:]), logits(model, plain, REST[6:]))
        found, expected = (logits(model, one, REST[::-1]) for one in twins)
        assert close(found, expected)
        for one in (*cache, *plain):
            assert one.trim(7) == 7
        assert close(logits(model, cache, REST[:4]), logits(model, plain, REST[:4]))
        with pytest.raises(PrefixTrimError, match="came after the shared prefix of 40"):
            cache[0].trim(14)
        assert cache[0].offset == plain[0].offset == len(PREFIX) + 13
        assert pc.stats()["attend_resp"] == pc.stats()["bytes_fetched"] == 0


def test_ordinary_caches_can_be_made_of_remote_ones(stored: Server, model: Any) -> None:
    """For saving, batching or quantising: then the rows are fetched."""
    with PionPromptCache(model, port=stored.port, stage2=True) as pc:
        cache, expected = opened(pc, model), ordinary(model)
        for one in (cache, expected):
            logits(model, one, REST[:3])
        plain = plain_prompt_cache(cache)
        for one, same in zip(plain, expected, strict=True):
            assert type(one) is type(same)
            assert mx.allclose(one.keys[..., :43, :], same.keys[..., :43, :], atol=1e-5)
        assert close(logits(model, plain, REST[3:]), logits(model, expected, REST[3:]))


def test_a_long_own_part_is_merged_here_and_not_sent(
    server: Callable[..., Server], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step sends stops growing with the suffix, even where the server keeps none."""
    running = server(extra=NO_SESSIONS)
    fill(running, model)
    monkeypatch.setattr("pion_vllm_mlx.wire_prefix._LARGEST_SUFFIX", 8 * 2 * 32 * 4)
    with PionPromptCache(model, port=running.port, stage2=True) as pc:
        found = logits(model, opened(pc, model), REST)
        assert close(found, logits(model, ordinary(model), REST))
        assert pc.stats()["attend_binary"] == 4 * 2
        assert pc.stats()["attend_resp"] == 12 * 2


def test_rows_in_the_store_and_rows_sent_make_the_same_slots(stored: Server, model: Any) -> None:
    """KV.PREFIX.WARM of a lossless format is bit for bit what ATTEND.PREFIX.STORE would leave."""
    client = AttentionClient(stored)
    q = normal(1, 2, 5, 32)
    for layer, cache in enumerate(ordinary(model)):
        k, v = (np.array(side[0, :, : len(PREFIX)]) for side in (cache.keys, cache.values))
        client.store("sent", layer, k, v)
        sent, warmed = (client.query(sid, layer, q) for sid in ("sent", f"{NAME}_attn"))
        for one, other in zip(sent, warmed, strict=True):
            assert one.tobytes() == other.tobytes()


def test_a_lossy_format_is_pushed_exact_and_comes_back_as_stored(
    server: Callable[..., Server], model: Any
) -> None:
    running = server()
    exact = logits(model, ordinary(model), REST)
    with PionPromptCache(model, "int8", port=running.port, stage2=True) as first:
        first.get_or_prefill(PREFIX, NAME)
        assert first.flush()
        assert first.lookup(NAME)
    with PionPromptCache(model, "int8", port=running.port, stage2=True) as pc:
        assert close(logits(model, opened(pc, model), REST), exact)
    running.kill()
    running.restart()
    with PionPromptCache(model, "int8", port=running.port, stage2=True) as pc:
        found = logits(model, opened(pc, model), REST)
        restored = logits(model, pc.get_or_prefill(PREFIX, NAME), REST)
        assert close(found, restored)
        assert not close(found, exact)


def test_lookup_asks_both_stores(stored: Server, model: Any) -> None:
    client = AttentionClient(stored)
    with PionPromptCache(model, port=stored.port, stage2=True) as pc:
        assert pc.lookup(NAME)
        assert not pc.lookup("other")
        assert client.raw.call("ATTEND.PREFIX.DROP", pc._attend_session(NAME), 1) == 1
        assert not pc.lookup(NAME)
        with PionPromptCache(model, port=stored.port) as without:
            assert without.lookup(NAME)
        opened(pc, model)
        assert pc.lookup(NAME)
        stored.kill()
        assert not pc.lookup(NAME)


def test_without_an_engine_the_prefix_is_rebuilt_here(
    server: Callable[..., Server], model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    running = server("--no-attention")
    with (
        PionPromptCache(model, port=running.port, stage2=True) as pc,
        caplog.at_level(logging.WARNING, "pion_vllm_mlx"),
    ):
        pc.get_or_prefill(PREFIX, NAME)
        assert pc.flush()
        assert not pc.lookup(NAME)
    assert "attention engine not available (--no-attention)" in caplog.text
    with PionPromptCache(model, port=running.port, stage2=True) as pc:
        cache = make_pion_prompt_cache(model, NAME, pc, len(PREFIX))
        assert not isinstance(cache[0], RemoteKVCache)
        assert close(logits(model, cache, REST), logits(model, ordinary(model), REST))
        with pytest.raises(
            CannotSplit, match="sparse_full_layers needs the prefix in this process"
        ):
            make_pion_prompt_cache(model, NAME, pc, len(PREFIX), {"K_block": 8})


def test_blocks_that_cover_the_prefix_are_dense_attention(stored: Server, model: Any) -> None:
    expected = logits(model, ordinary(model), REST)
    with PionPromptCache(model, port=stored.port, stage2=True) as pc:
        for selector in ("block_mean", "quest"):
            whole = {"K_block": 8, "K_blocks": 5, "selector": selector}
            assert close(logits(model, opened(pc, model, sparse_full_layers=whole), REST), expected)
        few = opened(pc, model, sparse_full_layers={"K_block": 4, "K_blocks": 1})
        assert not close(logits(model, few, REST), expected)
        assert pc.stats()["attend_binary"] == 0
        # More than one query at once is attended to densely.
        block = mx.array([REST])
        few = opened(pc, model, sparse_full_layers={"K_block": 4, "K_blocks": 1})
        assert mx.allclose(model(block, cache=few), model(block, cache=ordinary(model)), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"K_block": 0}, "K_block is a number of 1 or more"),
        ({"K_blocks": True}, "K_blocks is a number of 1 or more"),
        ({"selector": "best"}, "selector 'best' is not one of block_mean, quest"),
        ({"top": 1}, "sparse_full_layers knows K_block, K_blocks, selector"),
    ],
)
def test_sparse_settings_that_mean_nothing(
    stored: Server, model: Any, settings: dict[str, Any], words: str
) -> None:
    with (
        PionPromptCache(model, port=stored.port, stage2=True) as pc,
        pytest.raises(ValueError, match=words),
    ):
        make_pion_prompt_cache(model, NAME, pc, len(PREFIX), settings)


def test_a_password_opens_both_lanes(server: Callable[..., Server], model: Any) -> None:
    running = server("--requirepass", "sesame")
    secret = {"port": running.port, "stage2": True, "password": "sesame"}
    with PionPromptCache(model, **secret) as first:
        first.get_or_prefill(PREFIX, NAME)
    with PionPromptCache(model, **secret) as pc:
        found = logits(model, opened(pc, model), REST)
        assert close(found, logits(model, ordinary(model), REST))
        assert pc.stats()["attend_binary"] == 2 * len(REST)


def test_what_requests_leave_in_the_server_goes_when_the_next_one_opens(
    stored: Server, model: Any
) -> None:
    client = AttentionClient(stored)
    with PionPromptCache(model, port=stored.port, stage2=True) as pc:
        for _ in range(2):
            cache = opened(pc, model)
            logits(model, cache, REST[:2])
            assert client.info()["decode_sessions"] == 1
            del cache
            gc.collect()
        twins = [opened(pc, model) for _ in range(2)]
        for one in twins:
            logits(model, one, REST[:2])
        assert client.info()["decode_sessions"] == 2


def test_the_process_lane_turned_off_means_the_wire_as_soon_as_the_prefix_is_stored(
    server: Callable[..., Server], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The design's way to measure the wire on one machine, with the store still going on."""
    monkeypatch.setenv(SWITCH, "1")
    with PionPromptCache(model, port=server().port, stage2=True, timeout=5) as pc:
        pc.get_or_prefill(PREFIX, NAME)
        found = logits(model, opened(pc, model), REST)
        assert close(found, logits(model, ordinary(model), REST))
        assert pc.stats()["attend_binary"] == 2 * len(REST)


@LANES
@pytest.mark.parametrize("extra", [None, NO_SESSIONS], ids=["append", "resend"])
def test_a_window_that_the_server_has_by_default_is_not_the_model_s(
    server: Callable[..., Server], model: Any, extra: Path | None, binary_port: int | None
) -> None:
    running = server("--fa-window", "4", extra=extra)
    fill(running, model)
    with PionPromptCache(model, port=running.port, stage2=True, binary_port=binary_port) as pc:
        cache, plain = opened(pc, model), ordinary(model)
        for batch in (1, 2):
            tokens = mx.array([REST[:5]] * batch)
            if batch == 2:
                cache, plain = opened(pc, model), make_prompt_cache(model)
                model(mx.array([PREFIX] * 2), cache=plain)
            assert mx.allclose(model(tokens, cache=cache), model(tokens, cache=plain), atol=1e-5)
        assert pc.stats()["wire_losses"] == 0


def test_the_longest_namespace_has_a_session(server: Callable[..., Server], model: Any) -> None:
    running = server()
    name = "n" * 200
    fill(running, model, name)
    with PionPromptCache(model, port=running.port, stage2=True) as pc:
        cache = make_pion_prompt_cache(model, name, pc, len(PREFIX))
        assert isinstance(cache[0], RemoteKVCache)


def test_a_tenant_has_both_lanes_and_sees_nobody_else_s_sessions(
    server: Callable[..., Server], model: Any
) -> None:
    running = server("--requirepass", "sesame", "--tenant", "ann=a", "--tenant", "bob=b")
    ann, bob = (
        {"port": running.port, "stage2": True, "user": name, "password": name[0]}
        for name in ("ann", "bob")
    )
    with PionPromptCache(model, **ann) as first:
        first.get_or_prefill(PREFIX, NAME)
        assert first.flush()
        assert first.lookup(NAME)
    with PionPromptCache(model, **bob) as other:
        assert not other.lookup(NAME)
        assert other.open_remote(NAME, len(PREFIX)) is None
        with pytest.raises(ServerError, match="session not found"):
            other.attend_query(NAME, 0, normal(1, 2, 1, 32))
    for port in (None, 0):
        with PionPromptCache(model, **ann, binary_port=port) as pc:
            found = logits(model, opened(pc, model), REST)
            assert close(found, logits(model, ordinary(model), REST))
            used = "attend_resp" if port == 0 else "attend_binary"
            assert pc.stats()[used] == 2 * len(REST)


def test_quantised_caches_are_rebuilt_here(
    server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    model, running = tiny_llama(head_dim=32), server()
    quantised: Any = {"port": running.port, "stage2": True, "kv_bits": 4, "kv_group_size": 32}
    with PionPromptCache(model, **quantised) as first:
        first.get_or_prefill(PREFIX, NAME)
        assert first.flush()
    with (
        PionPromptCache(model, **quantised) as pc,
        caplog.at_level(logging.WARNING, "pion_vllm_mlx"),
    ):
        cache = make_pion_prompt_cache(model, NAME, pc, len(PREFIX))
        assert type(cache[0]).__name__ == "QuantizedKVCache"
    assert "a QuantizedKVCache is not attended to in the server" in caplog.text


def test_a_prefix_of_one_token(server: Callable[..., Server], model: Any) -> None:
    running = server()
    fill(running, model, NAME, PREFIX[:1])
    with PionPromptCache(model, port=running.port, stage2=True) as pc:
        found = logits(model, opened(pc, model, 1), REST)
        assert close(found, logits(model, ordinary(model, PREFIX[:1]), REST))


def test_the_client_knows_the_engine_s_head_dimensions() -> None:
    assert HEAD_DIMS == DIMS


def test_the_example_of_the_page_runs(stored: Server, model: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "stages.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {
        "model": model,
        "namespace": NAME,
        "prefix_tokens": len(PREFIX),
        "suffix": mx.array([REST]),
    }
    exec(code.replace("port=1974", f"port={stored.port}"), names)
    with names["pc"] as pc:
        assert mx.allclose(
            names["logits"], model(mx.array([REST]), cache=ordinary(model)), atol=1e-5
        )
        assert pc.stats()["attend_binary"] == 2
