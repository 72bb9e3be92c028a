"""The texts and questions of `evals/data`, and how they become token ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"

#: More than a token of English has, so that this many are enough.
_CHARACTERS = 6


class TwoBeginnings(ValueError):
    """A prompt begins with two BOS tokens: rendered by a template and encoded as if it were not."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A system prompt and the questions that are put to it."""

    name: str
    system: str
    questions: tuple[str, ...]


def read_records(name: str) -> list[dict[str, Any]]:
    """The records of `evals/data/<name>.jsonl`, or the lines of `<name>.txt` as `text`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from datasets import Dataset, disable_progress_bars

    from pion_vllm_mlx.cache_home import cache_home

    disable_progress_bars()
    folder = str(cache_home() / "datasets")
    lines = DATA / f"{name}.jsonl"
    if lines.exists():
        loaded = Dataset.from_json(str(lines), cache_dir=folder, keep_in_memory=True)
    else:
        loaded = Dataset.from_text(str(DATA / f"{name}.txt"), cache_dir=folder, keep_in_memory=True)
    return [dict(record) for record in loaded]


def read_prompts() -> list[Prompt]:
    """Five system prompts with four questions of their own each."""
    questions = read_records("questions")
    return [
        Prompt(
            record["name"],
            record["system"],
            tuple(one["question"] for one in questions if one["prompt"] == record["name"]),
        )
        for record in read_records("prompts")
    ]


def read_queries(prompt: Prompt, count: int) -> list[str]:
    """`count` queries for a prompt: its own questions, then the common ones, then those again."""
    all_of_them = [*prompt.questions, *(record["question"] for record in read_records("queries"))]
    return [all_of_them[number % len(all_of_them)] for number in range(count)]


def read_long_text() -> str:
    """65 KB of running English, about 16,000 tokens."""
    lines = (record["text"].strip() for record in read_records("jargon"))
    # Paragraphs are lines between empty ones, set in a column.
    return " ".join(line or "\n\n" for line in lines).replace(" \n\n ", "\n\n")


def render(tokenizer: Any, system: str, question: str) -> list[int]:
    """Token ids of a conversation that waits for the answer; raises TwoBeginnings.

    With a chat template its messages are rendered as ids by the template, which writes BOS itself;
    without one, system and question are encoded as one text with the tokenizer's own BOS.
    """
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    else:
        ids = list(tokenizer.encode(f"{system}\n\n{question}\n"))
    check_beginning(ids, tokenizer.bos_token_id)
    return ids


def check_beginning(ids: Sequence[int], bos: int | None) -> None:
    """Raise TwoBeginnings if `ids` start with BOS twice.

    A second BOS makes different prompts look more alike than they are, since attention sinks into
    it, and scores against a reference that has it too rise. (Some templates write the BOS token
    before every message: only the very beginning says anything.)
    """
    if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
        raise TwoBeginnings(f"the prompt begins with BOS ({bos}) twice")


def split_prompt(tokenizer: Any, system: str, question: str) -> tuple[list[int], list[int]]:
    """The ids that stand before any question, and the rest of this one's; both not empty."""
    ids = render(tokenizer, system, question)
    others = [render(tokenizer, system, word) for word in ("A", "Is", "9", "(", "the")]
    shared = len(ids) - 1
    for other in others:
        pairs = zip(ids[:shared], other, strict=False)
        shared = next((place for place, (a, b) in enumerate(pairs) if a != b), shared)
    if shared < 1:
        raise ValueError("questions of this tokenizer's template share no beginning")
    return ids[:shared], ids[shared:]


def fill_system(tokenizer: Any, prompt: Prompt, tokens: int) -> str:
    """The system prompt, followed by long text until the prefix has about `tokens` tokens."""
    missing = tokens - len(split_prompt(tokenizer, prompt.system, "A")[0])
    if missing <= 0:
        return prompt.system
    # No more text than needed is encoded: tokenizers warn beyond their model's context.
    text = read_long_text()[: _CHARACTERS * missing]
    filler = tokenizer.encode(text, add_special_tokens=False)
    filler = (filler * (missing // len(filler) + 1))[:missing]
    return f"{prompt.system}\n\n{tokenizer.decode(filler)}"
