"""Greedy answers: what a model says on a cache, when its first token came, and how answers agree.

Nothing is said after the end of an answer, and nothing is compared there: an answer is the tokens
before EOS, and `ended` says that EOS came.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: tokens without EOS; seconds from the call to the first token and to the last."""

    tokens: tuple[int, ...]
    ended: bool
    first_seconds: float
    seconds: float

    def with_end(self, eos: int) -> list[int]:
        """The tokens that were chosen, EOS included if it was."""
        return [*self.tokens, eos] if self.ended else list(self.tokens)


def speak(
    model: Any,
    tokenizer: Any,
    ids: Sequence[int],
    count: int,
    cache: list[Any] | None = None,
    started: float | None = None,
) -> Said:
    """Answer `ids` greedily with at most `count` tokens, by mlx-lm's own loop.

    cache: holds what stands before `ids`; None is an empty one, so the whole prompt is prefilled.
    started: when the request began (`time.perf_counter()`), if before this call.
    """
    if started is None:
        started = time.perf_counter()
    made = make_prompt_cache(model) if cache is None else cache
    said: list[int] = []
    first, ended = 0.0, False
    for token, _ in generate_step(mx.array(list(ids)), model, max_tokens=count, prompt_cache=made):
        if not said:
            first = time.perf_counter() - started
        if int(token) in tokenizer.eos_token_ids:
            ended = True
            break
        said.append(int(token))
    return Said(tuple(said), ended, first, time.perf_counter() - started)


def speak_after(
    model: Any,
    tokenizer: Any,
    ids: Sequence[int],
    count: int,
    cache: list[Any],
    draft: Said,
) -> Said:
    """As `speak`, sooner where the answer will be much like `draft`: the draft is checked first.

    One pass over `ids` and the draft shows which token is chosen at every place of it. Up to the
    first that differs these are the tokens greedy decoding says one by one (up to the rounding of
    a product of many rows against one of one row); from there on it goes on token by token. Needs
    a cache that can be trimmed.
    """
    started = time.perf_counter()
    eos = next(iter(tokenizer.eos_token_ids))
    wanted = draft.with_end(eos)[:count]
    logits = model(mx.array([[*ids, *wanted[:-1]]]), cache=cache)[0, -len(wanted) :]
    chosen = [int(token) for token in np.array(mx.argmax(logits, axis=-1))]
    first = time.perf_counter() - started
    agreed = 0
    while agreed < len(wanted) and _same_token(chosen[agreed], wanted[agreed], tokenizer):
        agreed += 1
    said = wanted[:agreed]
    if said and said[-1] in tokenizer.eos_token_ids:
        return Said(tuple(said[:-1]), True, first, time.perf_counter() - started)
    if agreed == len(wanted):
        return Said(tuple(said), False, first, time.perf_counter() - started)
    turn = chosen[agreed]
    if turn in tokenizer.eos_token_ids:
        return Said(tuple(said), True, first, time.perf_counter() - started)
    trim_prompt_cache(cache, len(wanted) - 1 - agreed)
    said.append(turn)
    rest = count - len(said)
    if rest == 0:
        return Said(tuple(said), False, first, time.perf_counter() - started)
    more = speak(model, tokenizer, [turn], rest, cache)
    said.extend(more.tokens)
    return Said(tuple(said), more.ended, first, time.perf_counter() - started)


def _same_token(one: int, other: int, tokenizer: Any) -> bool:
    ends = tokenizer.eos_token_ids
    return one == other or (one in ends and other in ends)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How an answer compares with the reference's.

    bleu: sacrebleu's sentence BLEU of the texts, 0 to 1. before: tokens in front of the first
    difference. share: places at which the tokens are equal, of the longer answer's.
    """

    bleu: float
    first: bool
    identical: bool
    before: int
    share: float


def compare(tokenizer: Any, answer: Said, reference: Said) -> Agreement:
    """Compare up to the end of the answers; two that are equally empty agree."""
    eos = next(iter(tokenizer.eos_token_ids))
    # EOS takes part once, as the token that ends: an answer that stops early is a difference.
    a, b = answer.with_end(eos), reference.with_end(eos)
    equal = [x == y for x, y in zip(a, b, strict=False)]
    before = equal.index(False) if False in equal else len(equal)
    longer = max(len(a), len(b))
    return Agreement(
        bleu=text_bleu(tokenizer.decode(list(answer.tokens)), tokenizer.decode(reference.tokens)),
        first=a[:1] == b[:1],
        identical=a == b,
        before=before,
        share=sum(equal) / longer if longer else 1.0,
    )


def text_bleu(text: str, reference: str) -> float:
    """sacrebleu's sentence BLEU, 0 to 1; equal texts are 1 even where they are empty."""
    import sacrebleu

    if text == reference:
        return 1.0
    return float(sacrebleu.sentence_bleu(text, [reference]).score) / 100
