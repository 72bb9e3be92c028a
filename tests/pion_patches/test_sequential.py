"""One request at a time: as many checkpoints as in batches, and the answers of mlx-lm's own server.

The cold runs are those of an unpatched mlx_lm.server that keeps nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, LRUPromptCache

from pion_patches.prompt_memory import PromptMemory
from pion_patches.sequential import chunk_ends
from tests.pion_patches.serving import Questions, chat_model, serving
from tests.pion_vllm_mlx.model_folder import text_of

WORDS = [int(token) for token in np.random.default_rng(5).integers(10, 190, 500)]
SYSTEM = {"role": "system", "content": text_of(WORDS[:100])}
STEP = 64
QUANTISED = ("--kv-bits", "4", "--kv-group-size", "32", "--prefill-step-size", str(STEP))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    made = {name: chat_model(base / name, name) for name in ("qwen3_5", "llama4_text", "mamba")}
    draft = chat_model(base / "draft", "llama", seed=3, head_dim=32)
    return made | {"llama": chat_model(base / "llama", "llama", head_dim=32), "draft": draft}


def user(*words: int) -> dict[str, Any]:
    return {"role": "user", "content": text_of(list(words))}


class Forgetful(LRUPromptCache):
    """mlx-lm's own prompt cache, which keeps nothing: every prompt is a server's first."""

    def insert_cache(self, *arguments: Any, **options: Any) -> None:
        """Keep nothing."""


def stock(folder: Path, *flags: str) -> AbstractContextManager[Questions]:
    """A server of mlx-lm's own that knows nothing yet, at every prompt.

    What is patched meanwhile for another server is mlx-lm's own on the thread of this one.
    """
    make: Any = Forgetful
    return serving(folder, *flags, patched=False, memory=make())


# --- seeds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "mamba", "llama4_text"])
def test_a_seeded_request_is_resumed_and_answers_as_before(
    folders: dict[str, Path], family: str
) -> None:
    """A01, A03, C01 on this path: sampled, twice, with another tail, and after more turns.

    llama4 has layers of two kinds, which are cut in different ways.
    """
    seeded: dict[str, Any] = {"seed": 7, "temperature": 1.0, "count": 12}
    messages = [SYSTEM, user(*WORDS[100:140])]
    other = [SYSTEM, user(*WORDS[200:240])]
    with stock(folders[family]) as cold, serving(folders[family]) as warm:
        expected = cold.chat([dict(m) for m in messages], **seeded)
        answers = [warm.chat([dict(m) for m in messages], **seeded) for _ in range(3)]
        assert [answer.tokens for answer in answers] == [expected.tokens] * 3
        assert [a.cached for a in answers] == [0, 102 + 42 + 1, 102 + 42 + 1]
        second = warm.chat([dict(m) for m in other], **seeded)
        assert second.tokens == cold.chat([dict(m) for m in other], **seeded).tokens
        assert second.cached >= 102
        said = {"role": "assistant", "content": text_of(expected.tokens[:-1])}
        turn = [*messages, said, user(*WORDS[300:320])]
        third = warm.chat([dict(m) for m in turn], **seeded)
        assert third.tokens == cold.chat([dict(m) for m in turn], **seeded).tokens
        assert third.cached >= 144
        assert warm.memory.counts["errors"] == warm.memory.counts["incoherent"] == 0


def test_a_hybrids_long_answer_is_resumed_at_a_multiple_of_the_grain(
    folders: dict[str, Path],
) -> None:
    """Its state is kept while it is generated; an answer that was cut to another text resumes."""
    with serving(folders["qwen3_5"]) as warm:
        answers = ((s, warm.ids(WORDS[s : s + 100], count=120, seed=1)) for s in range(20))
        start, answer = next(a for a in answers if len(a[1].tokens) > 70)
        prompt = [*WORDS[start : start + 100], *answer.tokens[:60], *WORDS[300:320]]
        found = warm.ids(prompt, seed=1)
        assert found.cached == 128
        with stock(folders["qwen3_5"]) as cold:
            assert found.tokens == cold.ids(prompt, seed=1).tokens


def test_penalties_count_the_tokens_that_were_not_computed(folders: dict[str, Path]) -> None:
    """mlx-lm's own sequential path forgets those it had in its cache."""
    strict: dict[str, Any] = {"seed": 1, "penalty": 1.8, "count": 24}
    for family in ("llama", "qwen3_5"):
        with stock(folders[family]) as cold, serving(folders[family]) as warm:
            expected = cold.ids(WORDS[:150], **strict)
            answers = [warm.ids(WORDS[:150], **strict) for _ in range(2)]
            assert [answer.tokens for answer in answers] == [expected.tokens] * 2
            assert answers[1].cached == 149


def test_a_draft_models_cache_is_resumed_with_the_models(folders: dict[str, Path]) -> None:
    flags = ("--draft-model", str(folders["draft"]))
    with stock(folders["llama"], *flags) as cold, serving(folders["llama"], *flags) as warm:
        for prompt, least in ((WORDS[:150], 0), (WORDS[:150], 149), ([*WORDS[:90], 5, 6], 90)):
            answer = warm.ids(prompt, count=16)
            assert answer.tokens == cold.ids(prompt, count=16).tokens
            assert answer.cached == least


# --- quantised caches ------------------------------------------------------------------------


def test_chunks_end_at_multiples_of_the_step() -> None:
    assert chunk_ends(300, 0, 64, stateful=False) == {256: "user"}
    assert chunk_ends(300, 150, 64, stateful=False) == {128: "user", 256: "user"}
    assert chunk_ends(300, 5000, 64, stateful=False) == {256: "user"}
    assert chunk_ends(200, 0, 64, stateful=True) == {64: "block", 128: "block", 192: "user"}
    assert chunk_ends(64, 0, 64, stateful=True) == {}
    assert chunk_ends(65, 0, 64, stateful=True) == {64: "user"}


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("start", [0, 150, 5000])
def test_a_quantised_cache_is_resumed_where_a_cold_run_has_the_same(
    folders: dict[str, Path], family: str, start: int
) -> None:
    """D01, D03: every answer is that of an own server of mlx-lm with the same flags, whether the
    cut is above or below the start of the quantised rows."""
    flags = (*QUANTISED, "--quantized-kv-start", str(start))
    prompts = [
        WORDS[:300],
        WORDS[:300],
        [*WORDS[:290], *WORDS[400:480]],
        [*WORDS[:150], 3, 4],
        [*WORDS[:100], 3, 4],
        [*WORDS[:60], 3, 4],
    ]
    with stock(folders[family], *flags) as cold, serving(folders[family], *flags) as warm:
        cached = []
        for prompt in prompts:
            answer = warm.ids(prompt, count=12)
            assert answer.tokens == cold.ids(prompt, count=12).tokens
            cached.append(answer.cached)
        # Up to 150 the rows are those of a run that has not quantised anything yet.
        assert cached == [0, 256, 256, 128, 64, 0]
        assert warm.memory.counts["inexact"] == 5
        assert warm.memory.counts["errors"] == warm.memory.counts["incoherent"] == 0


def test_a_turn_shorter_than_a_chunk_is_a_miss_and_counted(folders: dict[str, Path]) -> None:
    """The step is 2,048 tokens unless told otherwise: nothing of that can be resumed exactly."""
    flags = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
    with stock(folders["llama"], *flags) as cold, serving(folders["llama"], *flags) as warm:
        for prompt in (WORDS[:300], WORDS[:300]):
            answer = warm.ids(prompt)
            assert (answer.tokens, answer.cached) == (cold.ids(prompt).tokens, 0)


def test_a_float_cache_that_a_longer_one_has_quantised_stays() -> None:
    """D01: rows below the start exist in the shorter cache only, so it is not let go of."""

    class Provider:
        model = type("Model", (), {})()
        cli_args = type("Flags", (), {})()

    flags: Any = Provider.cli_args
    flags.kv_bits, flags.quantized_kv_start, flags.prefill_step_size = 4, 150, 64
    memory = PromptMemory()
    memory.attach("m", Provider)
    make: Any = KVCache
    plain, longer = make(), make()
    plain.update_and_fetch(*[mx.random.normal((1, 2, 128, 32))] * 2)
    memory.insert_cache("m", WORDS[:128], [plain], cache_type="user")
    longer.update_and_fetch(*[mx.random.normal((1, 2, 192, 32))] * 2)
    quantised = longer.to_quantized(group_size=32, bits=4)
    memory.insert_cache("m", WORDS[:192], [quantised], cache_type="user")
    memory.insert_cache("m", WORDS[:200], [longer], cache_type="assistant")
    assert len(memory) == 2
    assert [memory.match("m", WORDS[:n]) for n in (250, 193, 192, 129, 128, 64)] == [
        192,
        192,
        128,
        128,
        64,
        0,
    ]
