"""`make_pion_prompt_cache` where the prefix is not in this process: rebuilt from the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pion_patches.inproc import SWITCH
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.mlx_lm_patch import (
    PrefixNotHeld,
    make_pion_prompt_cache,
    pion_attention_patch,
)
from tests.pion_vllm_mlx.tiny import PREFIX, cold_answer, continue_greedily, tiny_llama

NAME = "shared"


@pytest.fixture
def stored(server: Callable[..., Any]) -> Iterator[tuple[Any, Any]]:
    """A running server that holds `PREFIX` of a tiny model, and the model."""
    running, model = server(), tiny_llama()
    with PionPromptCache(model, port=running.port, store="sync") as first:
        first.get_or_prefill(PREFIX, NAME)
        assert first.stats()["stores"] == 1
    with pion_attention_patch():
        yield running, model


def test_a_prefix_of_another_process_is_rebuilt(stored: tuple[Any, Any]) -> None:
    running, model = stored
    with PionPromptCache(model, port=running.port, store="sync") as fresh:
        cache = make_pion_prompt_cache(model, NAME, fresh, len(PREFIX))
        assert fresh.stats()["hits"] == 1
        assert continue_greedily(model, cache) == cold_answer(model, PREFIX)
        again = make_pion_prompt_cache(model, NAME, fresh, len(PREFIX))
        assert continue_greedily(model, again) == cold_answer(model, PREFIX)


def test_the_lane_turned_off_means_rebuild(
    stored: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, model = stored
    monkeypatch.setenv(SWITCH, "1")
    with PionPromptCache(model, port=running.port, store="sync") as pc:
        pc.get_or_prefill(PREFIX, NAME)
        cache = make_pion_prompt_cache(model, NAME, pc, len(PREFIX))
        assert pc.stats()["hits_in_process"] == 0
        assert continue_greedily(model, cache) == cold_answer(model, PREFIX)


def test_nothing_is_rebuilt_for_another_length_model_or_name(stored: tuple[Any, Any]) -> None:
    running, model = stored
    with PionPromptCache(model, port=running.port, store="sync") as fresh:
        for name, tokens in ((NAME, len(PREFIX) - 1), ("other", len(PREFIX))):
            with pytest.raises(PrefixNotHeld, match="get_or_prefill"):
                make_pion_prompt_cache(model, name, fresh, tokens)
    other = tiny_llama(seed=1)
    with (
        PionPromptCache(other, port=running.port, store="sync") as fresh,
        pytest.raises(PrefixNotHeld, match="nor stored for this model"),
    ):
        make_pion_prompt_cache(other, NAME, fresh, len(PREFIX))
