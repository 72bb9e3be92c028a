"""Prompts join a batch and answers leave it: each stream computes what it computes alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.even_batches import EvenBatchGenerator
from pion_patches.prompt_memory import PromptMemory
from tests.pion_patches.zoo import VOCAB, WINDOW, families

WINDOWED = ("gemma3_text", "gpt_oss")
#: Rounding of another order of sums is below it, a key too much or too few above.
CLOSE = 2e-3
KEY = "model"


def compute_alone(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Log-probabilities [len(answer), VOCAB] of each token of an answer, as one prompt."""
    make: Any = make_prompt_cache
    whole = [*prompt, *answer[:-1]]
    logits = model(mx.array([whole]), cache=make(model))[0, len(prompt) - 1 :]
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@dataclass
class Stream:
    """A prompt in parts, when it joins (in steps), and what was answered to it."""

    joins: int
    parts: list[list[int]]
    count: int
    leaves: int = 1 << 30
    tokens: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        return [token for part in self.parts for token in part]

    def error(self, model: Any) -> float:
        """How far the answer's log-probabilities are from those of the stream alone."""
        if not self.tokens:
            return 0.0
        alone = compute_alone(model, self.prompt, self.tokens)
        return float(np.abs(np.array(self.logprobs) - alone).max())


def serve(model: Any, streams: Sequence[Stream], memory: PromptMemory, **options: Any) -> None:
    """What the loop of mlx_lm.server does for one stream after the other that joins."""
    generator: Any = EvenBatchGenerator(model, **options)  # not typed
    live: dict[int, Stream] = {}
    step, waiting = 0, sorted(streams, key=lambda stream: stream.joins)
    while waiting or live:
        while waiting and waiting[0].joins <= step:
            stream = waiting.pop(0)
            cache, rest = memory.fetch_nearest_cache(KEY, stream.prompt)
            cached = len(stream.prompt) - len(rest)
            segments, held = [], cached
            for part in stream.parts:
                segments.append(part[held:])
                held = max(0, held - len(part))
            (uid,) = generator.insert_segments(
                [segments], [stream.count], [cache], [stream.prompt[:cached]]
            )
            live[uid] = stream
        prompts, answers = generator.next()
        ends = [found.uid for found in prompts if found.end_of_segment and not found.end_of_prompt]
        for held_cache, tokens in generator.extract_cache(ends).values():
            memory.insert_cache(KEY, tokens[:], held_cache, cache_type="block")
        for found in answers:
            live[found.uid].tokens.append(found.token)
            live[found.uid].logprobs.append(np.array(found.logprobs))
            if found.finish_reason is not None:
                memory.insert_cache(KEY, found.all_tokens[:], found.prompt_cache)
                del live[found.uid]
        gone = [uid for uid, stream in live.items() if stream.leaves <= step]
        generator.remove(gone)
        for uid in gone:
            del live[uid]
        step += 1


def draw_tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(10, VOCAB - 9) for _ in range(count)]


def draw_streams(source: random.Random) -> list[Stream]:
    """Lengths around the window, beginnings shared or not; some hang up."""
    shared = draw_tokens(source, 5 * WINDOW)
    streams = []
    for _ in range(source.randint(2, 6)):
        length = source.randint(1, 5 * WINDOW)
        head = shared[: source.randrange(length)] if source.random() < 0.5 else []
        rest, parts = [*head, *draw_tokens(source, length - len(head))], []
        while rest:
            cut = source.choice((1, 2, 3, WINDOW - 1, WINDOW, 2 * WINDOW, 5 * WINDOW))
            parts.append(rest[:cut])
            rest = rest[cut:]
        leaves = source.randint(2, 12) if source.random() < 0.2 else 1 << 30
        streams.append(Stream(source.randint(0, 12), parts, source.randint(1, 30), leaves))
    return streams


@pytest.mark.parametrize("family", WINDOWED)
def test_a_prompt_shorter_than_the_window_joins_one_that_is_longer(family: str) -> None:
    """One step of one token, then one of more: a token of the short prompt was masked, for good."""
    model = families[family]()
    tokens = draw_tokens(random.Random(1), 60)
    long = Stream(0, [tokens[:WINDOW], tokens[WINDOW : WINDOW + 1], tokens[WINDOW + 1 : 30]], 8)
    short = Stream(1, [tokens[30:31], tokens[31:60]], 8)
    serve(model, (long, short), PromptMemory())
    assert [len(stream.tokens) for stream in (long, short)] == [8, 8]
    assert [stream.error(model) < CLOSE for stream in (long, short)] == [True, True]


@pytest.mark.parametrize("rounds", [3, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", *WINDOWED])
def test_streams_that_join_and_leave_compute_what_they_compute_alone(
    family: str, rounds: int
) -> None:
    model = families[family]()
    for seed in range(5, 5 + rounds):
        source = random.Random(seed)
        streams = draw_streams(source)
        batch = source.choice((2, 4, 8))
        serve(model, streams, PromptMemory(4), prefill_batch_size=batch, completion_batch_size=16)
        errors = [stream.error(model) for stream in streams]
        assert max(errors) < CLOSE, (seed, errors)
