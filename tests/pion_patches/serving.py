"""mlx_lm.server without HTTP: a generator of responses around a tiny model, and questions to it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from mlx_lm import tokenizer_utils
from transformers import PreTrainedTokenizerFast

from pion_patches.mlx_lm_server import mlx_lm_server_patch
from tests.pion_vllm_mlx.model_folder import text_of, write_model

stock: Any = importlib.import_module("mlx_lm.server")  # not typed

#: Every message is framed by words of its role; the answer starts after a frame of its own.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}w2 {% elif m['role'] == 'user' %}w3 "
    "{% elif m['role'] == 'tool' %}w4 {% else %}w5 {% endif %}"
    "{{ m['content'] }} w6 {% endfor %}"
    "{% if add_generation_prompt %}w5 w7{% endif %}"
)


def server_flags(*flags: str) -> argparse.Namespace:
    """What mlx_lm.server makes of a command line, defaults included."""

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        raise _Parsed(parser)

    class _Parsed(Exception):
        pass

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            stock.main()
        except _Parsed as parsed:
            parser: argparse.ArgumentParser = parsed.args[0]
    return parser.parse_args(list(flags))


@dataclass(frozen=True)
class Answer:
    """Generated tokens, and how many of the prompt's were not computed."""

    tokens: list[int]
    cached: int
    finish: str


class Questions:
    """Puts prompts to a generator; each call waits for its answer."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    @property
    def memory(self) -> Any:
        return self.generator.prompt_cache

    def ids(self, prompt: Sequence[int], **options: Any) -> Answer:
        """A prompt of token ids; the tokenizer has a word a token."""
        request = stock.CompletionRequest("text", text_of(list(prompt)), [], None, None)
        return self.ask(request, **options)

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Answer:
        request = stock.CompletionRequest("chat", "", messages, options.pop("tools", None), None)
        return self.ask(request, **options)

    def ask(self, request: Any, count: int = 8, seed: int | None = None, **options: Any) -> Answer:
        context, responses = self.generator.generate(request, arguments(count, seed, **options))
        found = list(responses)
        finish = found[-1].finish_reason if found else ""
        return Answer([r.token for r in found], context.prompt_cache_count, finish)


def arguments(
    count: int, seed: int | None = None, temperature: float = 0.0, penalty: float = 0.0
) -> Any:
    """Generation of at most `count` tokens, greedy unless told otherwise."""
    return stock.GenerationArguments(
        model=stock.ModelDescription("default_model", "default_model", None),
        sampling=stock.SamplingArguments(temperature, 1.0, 0, 0.0, 0.0, 0.1),
        logits=stock.LogitsProcessorArguments(None, penalty, 20, 0.0, 20, 0.0, 20),
        stop_words=[],
        max_tokens=count,
        num_draft_tokens=3,
        logprobs=False,
        top_logprobs=-1,
        seed=seed,
        chat_template_kwargs=None,
    )


def chat_model(folder: Path, family: str, **options: Any) -> Path:
    """A tiny model of the zoo whose tokenizer has `TEMPLATE`."""
    write_model(folder, family, **options)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@contextmanager
def serving(
    folder: Path, *flags: str, memory: Any = None, patched: bool = True
) -> Iterator[Questions]:
    """A server's generator for the model in `folder`: a patched one, or mlx-lm's own."""
    # transformers goes by the model's type where it has a tokenizer class for it, and by the files
    # of the folder only where it has none.
    plain = mock.patch.object(tokenizer_utils, "AutoTokenizer", PreTrainedTokenizerFast)
    patch = mlx_lm_server_patch() if patched else nullcontext()
    with patch, plain, redirect_stdout(sys.stderr):
        provider = stock.ModelProvider(server_flags("--model", str(folder), *flags))
        generator = stock.ResponseGenerator(
            provider, memory if memory is not None else stock.LRUPromptCache()
        )
        try:
            yield Questions(generator)
        finally:
            generator.stop_and_join()
