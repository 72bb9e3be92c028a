"""mlx_lm.server with our prompt cache: every answer is that of a server that knows nothing yet."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, LRUPromptCache

from pion_patches import mlx_lm_server as patch
from pion_patches._patch import PatchConflict, UnsupportedVersion
from pion_patches.prompt_memory import PromptMemory
from tests.pion_patches.serving import Answer, Questions, chat_model, serving
from tests.pion_vllm_mlx.model_folder import text_of

SERVER: Any = importlib.import_module("mlx_lm.server")
FAMILIES = ("llama", "qwen3_5", "gemma3_text", "gpt_oss")
RANDOM = np.random.default_rng(0)
WORDS = [int(token) for token in RANDOM.integers(10, 190, 700)]
SYSTEM = {"role": "system", "content": text_of(WORDS[:100])}


def user(*words: int) -> dict[str, Any]:
    return {"role": "user", "content": text_of(list(words))}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {family: chat_model(base / family, family) for family in (*FAMILIES, "mamba")}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def warm(folders: dict[str, Path], family: str) -> Iterator[Questions]:
    with serving(folders[family]) as questions:
        yield questions


@pytest.fixture
def cold(folders: dict[str, Path], family: str) -> Iterator[Questions]:
    """Forgets everything before each question."""
    with serving(folders[family], memory=Forgetful()) as questions:
        yield questions


class Forgetful(PromptMemory):
    """The negative control: the same server without any reuse."""

    def insert_cache(self, *arguments: Any, **options: Any) -> None:
        """Keep nothing."""


def test_the_same_prompt_again_is_answered_from_the_cache(warm: Questions, cold: Questions) -> None:
    """A01, B07, C01: the last token is computed again, the rest is not."""
    for prompt in (WORDS[600:603], WORDS[:300]):
        expected = cold.ids(prompt)
        answers = [warm.ids(prompt) for _ in range(3)]
        assert [answer.tokens for answer in answers] == [expected.tokens] * 3
        assert [answer.cached for answer in answers] == [0, len(prompt) - 1, len(prompt) - 1]
        assert answers[-1].finish in ("length", "stop")


def test_a_seed_takes_the_sequential_path_and_is_answered_from_the_cache(
    warm: Questions, cold: Questions
) -> None:
    """A01 on the path that serves one request at a time."""
    expected = cold.ids(WORDS[:90], seed=5)
    warm.ids(WORDS[:90])
    again = [warm.ids(WORDS[:90], seed=5) for _ in range(2)]
    assert [answer.tokens for answer in again] == [expected.tokens] * 2
    assert again[0].cached == 89


def test_the_next_turn_computes_only_what_is_new(warm: Questions, cold: Questions) -> None:
    """L04: the answer is followed by another question."""
    messages = [SYSTEM, user(*WORDS[100:130])]
    first = warm.chat(messages)
    messages += [
        {"role": "assistant", "content": text_of(first.tokens[:-1])},
        user(*WORDS[130:150]),
    ]
    follow = warm.chat([dict(message) for message in messages])
    assert follow.tokens == cold.chat(messages).tokens
    # 102 words of the system message, 32 of the question: all that both prompts begin with.
    assert follow.cached >= 134


def test_a_tool_result_is_answered_from_the_cache(warm: Questions, cold: Questions) -> None:
    """L05: a last message that is no user's."""
    messages = [SYSTEM, user(20, 21), {"role": "assistant", "content": "w30 w31"}]
    messages.append({"role": "tool", "content": text_of(WORDS[:40])})
    warm.chat([dict(message) for message in messages])
    messages += [{"role": "assistant", "content": "w40"}, {"role": "tool", "content": "w41"}]
    step = warm.chat([dict(message) for message in messages])
    assert step.tokens == cold.chat(messages).tokens
    assert step.cached >= 102 + 4 + 4 + 42


def test_a_second_session_shares_the_system_prompt(warm: Questions, cold: Questions) -> None:
    warm.chat([SYSTEM, user(*WORDS[100:130])])
    other = warm.chat([SYSTEM, user(*WORDS[300:330])])
    assert other.tokens == cold.chat([SYSTEM, user(*WORDS[300:330])]).tokens
    assert other.cached >= 102


def test_a_regenerated_answer_starts_at_the_last_token(warm: Questions, cold: Questions) -> None:
    messages = [SYSTEM, user(*WORDS[100:130])]
    first, again = warm.chat([dict(m) for m in messages]), warm.chat([dict(m) for m in messages])
    assert first.tokens == again.tokens == cold.chat(messages).tokens
    assert again.cached == 102 + 32 + 2 - 1


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_reuse_ends_where_the_prompts_part(warm: Questions, cold: Questions) -> None:
    """A07, A13: at the steps of the buffer as anywhere else."""
    warm.ids(WORDS[:650])
    for length in (255, 256, 257, 600):
        prompt = [*WORDS[:length], 3, 5, 7]
        answer = warm.ids(prompt)
        assert answer.cached == length
        assert answer.tokens == cold.ids(prompt).tokens
    assert warm.ids([3, 5, 7]).cached == 0


def test_an_empty_prompt_is_an_error_and_the_next_request_works(warm: Questions) -> None:
    """A16: stock mlx-lm's thread dies of it."""
    with pytest.raises(ValueError, match="empty"):
        warm.ids([])
    assert warm.ids(WORDS[:5]).tokens
    with pytest.raises(ValueError, match="empty"):
        warm.ids([])
    assert warm.generator.is_healthy


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3_text", "gpt_oss"], indirect=True)
@pytest.mark.parametrize("streams", [4, pytest.param(16, marks=pytest.mark.nightly)])
def test_streams_at_the_same_time_get_the_answers_they_get_alone(
    warm: Questions, cold: Questions, streams: int
) -> None:
    """G01: prompts of other lengths, beginnings shared and not, twice."""
    warm.memory.max_size = 2 * streams
    prompts = [[*WORDS[: 40 + 17 * number], number] for number in range(streams)]
    prompts[1::2] = [[*reversed(prompt)] for prompt in prompts[1::2]]
    expected = [cold.ids(prompt).tokens for prompt in prompts]
    with ThreadPoolExecutor(streams) as pool:
        first = list(pool.map(warm.ids, prompts))
        second = list(pool.map(warm.ids, prompts))
    assert [answer.tokens for answer in first] == expected
    assert [answer.tokens for answer in second] == expected
    assert all(answer.cached >= len(p) - 1 for answer, p in zip(second, prompts, strict=True))


def test_prompts_of_other_lengths_are_never_padded_on_the_right(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """mamba takes such padding for tokens: its state, and the answer, are others then."""
    padded: list[Any] = []
    monkeypatch.setattr(BatchKVCache, "prepare", lambda *_, **options: padded.append(options))
    prompts = [WORDS[start : start + 30 + 40 * start] for start in range(4)]
    for name in ("llama", "mamba"):
        with serving(folders[name]) as questions, ThreadPoolExecutor(4) as pool:
            together = [answer.tokens for answer in pool.map(questions.ids, prompts)]
        with serving(folders[name], memory=Forgetful()) as questions:
            assert together == [questions.ids(prompt).tokens for prompt in prompts]
    assert padded == []


def test_text_that_is_cut_into_other_tokens_is_reused_up_to_there(
    warm: Questions, cold: Questions
) -> None:
    """L01: what was generated as 13, 271 comes back from the client's text as 382."""
    head, tail = WORDS[:195], WORDS[200:220]
    warm.ids([*head, 13, 71, *tail])
    joined = [*head, 82, *tail]
    found = warm.ids(joined)
    assert found.tokens == cold.ids(joined).tokens
    # The state of a hybrid is kept at the last multiple of 64 before the end.
    assert found.cached in (195, 192)


def test_no_conversation_shows_in_another(folders: dict[str, Path]) -> None:
    """G01: twenty with a word of their own, room for five, two fresh prompts at a time."""
    prompts = [[number + 10, *WORDS[:60], number + 100] for number in range(20)]
    fresh = [[*WORDS[300 + turn : 360 + turn], turn + 10] for turn in range(40)]
    with serving(folders["llama"], memory=Forgetful()) as cold:
        expected = [cold.ids(prompt, count=4).tokens for prompt in fresh]
    with serving(folders["llama"], memory=PromptMemory(5)) as warm:
        for prompt in prompts:
            warm.ids(prompt, count=4)
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda prompt: warm.ids(prompt, count=4), fresh))
        assert len(warm.memory) <= 5
    assert [answer.tokens for answer in answers] == expected
    # A word or two at the beginning may be the same by chance.
    assert max(answer.cached for answer in answers) <= 3


def test_a_cache_too_small_for_its_streams_holds_nobody_up(folders: dict[str, Path]) -> None:
    """G05: two places, sixteen prompts."""
    memory = PromptMemory(2)
    prompts = [[number, *WORDS[: 20 + number]] for number in range(10, 26)]
    with serving(folders["qwen3_5"], memory=memory) as warm, ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(warm.ids, prompt).result(60) for prompt in prompts]
        assert all(answer.tokens for answer in answers)
        assert len(memory) <= 2
        assert warm.generator.is_healthy


def test_one_failing_fetch_costs_one_request_its_reuse(
    warm: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G08: the next request is served as if nothing had been."""
    expected = warm.ids(WORDS[:50])
    with monkeypatch.context() as failing:
        failing.setattr(PromptMemory, "_best", _fail)
        assert warm.ids(WORDS[:50]) == Answer(expected.tokens, 0, expected.finish)
    assert warm.ids(WORDS[:50]).cached == 49
    assert warm.memory.counts["errors"] == 1


def _fail(*_: Any) -> Any:
    raise RuntimeError("a fault that was put there")


def test_a_model_under_an_old_name_starts_without_what_the_old_one_left(
    tmp_path: Path,
) -> None:
    """E13: the weights behind a path are replaced and loaded again."""
    folder = chat_model(tmp_path / "model", "llama", seed=1)
    with serving(folder) as questions:
        before = questions.ids(WORDS[:50])
        folder.rename(tmp_path / "old")
        chat_model(folder, "llama", seed=2)
        questions.generator.model_provider.reset()
        questions.generator.model_provider.load_default()
        after = questions.ids(WORDS[:50], seed=1)
    assert after.cached == 0
    assert after.tokens != before.tokens


class TestPatch:
    def test_it_binds_its_names_and_gives_them_back(self) -> None:
        stock = SERVER.LRUPromptCache
        with patch.mlx_lm_server_patch():
            patch.install_mlx_lm_server_patch()
            assert patch.is_installed()
            assert SERVER.LRUPromptCache is PromptMemory
        assert not patch.is_installed()
        assert SERVER.LRUPromptCache is stock is LRUPromptCache

    def test_another_version_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mlx_lm.__version__", "0.34.0")
        with pytest.raises(UnsupportedVersion, match=r"found mlx-lm 0\.34\.0"):
            patch.install_mlx_lm_server_patch()
        assert not patch.is_installed()

    def test_another_signature_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(LRUPromptCache, "insert_cache", lambda self, model, tokens: None)
        with pytest.raises(UnsupportedVersion, match="self, model, tokens, prompt_cache"):
            patch.install_mlx_lm_server_patch()

    def test_somebody_elses_replacement_is_not_touched(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Theirs(LRUPromptCache):
            pass

        with monkeypatch.context() as theirs:
            theirs.setattr(SERVER, "LRUPromptCache", Theirs)
            with pytest.raises(PatchConflict):
                patch.install_mlx_lm_server_patch()
        patch.install_mlx_lm_server_patch()
        with monkeypatch.context() as theirs:
            theirs.setattr(SERVER, "LRUPromptCache", Theirs)
            with pytest.raises(PatchConflict):
                patch.uninstall_mlx_lm_server_patch()
        patch.uninstall_mlx_lm_server_patch()
