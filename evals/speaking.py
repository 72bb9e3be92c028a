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


@dataclass(frozen=True, slots=True)
class Draft:
    """A question whose answer will be much like one that is known.

    ids: what stands behind `cache`. cache: the question's own; it can be trimmed. said: the other.
    """

    ids: Sequence[int]
    cache: list[Any]
    said: Said


@dataclass(slots=True)
class _Begun:
    """An answer as far as its draft was right, and the token chosen there instead."""

    tokens: list[int]
    first_seconds: float
    started: float
    ended: bool = False

    def finish(self) -> Said:
        seconds = time.perf_counter() - self.started
        return Said(tuple(self.tokens), self.ended, self.first_seconds, seconds)


def speak_after(model: Any, tokenizer: Any, asked: Sequence[Draft], count: int) -> list[Said]:
    """As `speak` for each of `asked`, sooner: drafts are checked first, the rest is said together.

    One pass over a question and its draft shows which token is chosen at every place of it. Up to
    the first that differs these are the tokens greedy decoding says one by one; from there on the
    questions go on in one batch, where mlx-lm can merge their caches. Both up to the rounding of a
    product of many rows against one of one row.
    """
    begun = [_check_draft(model, tokenizer, one, count) for one in asked]
    going = [n for n, one in enumerate(begun) if not one.ended and len(one.tokens) < count]
    caches = {n: asked[n].cache for n in going}
    if len(going) > 1 and all(hasattr(layer, "merge") for n in going for layer in caches[n]):
        _go_on_together(model, tokenizer, [begun[n] for n in going], list(caches.values()), count)
    else:
        for n in going:
            one = begun[n]
            more = speak(model, tokenizer, one.tokens[-1:], count - len(one.tokens), caches[n])
            one.tokens += more.tokens
            one.ended = more.ended
    return [one.finish() for one in begun]


def _check_draft(model: Any, tokenizer: Any, asked: Draft, count: int) -> _Begun:
    """The tokens up to the draft's first wrong one and the right one there; trims the cache."""
    started = time.perf_counter()
    eos = next(iter(tokenizer.eos_token_ids))
    wanted = asked.said.with_end(eos)[:count]
    logits = model(mx.array([[*asked.ids, *wanted[:-1]]]), cache=asked.cache)[0, -len(wanted) :]
    chosen = [int(token) for token in np.array(mx.argmax(logits, axis=-1))]
    begun = _Begun([], time.perf_counter() - started, started)
    for token, other in zip(chosen, wanted, strict=True):
        if token in tokenizer.eos_token_ids:
            begun.ended = True
            break
        begun.tokens.append(token)
        if token != other:
            trim_prompt_cache(asked.cache, len(wanted) - len(begun.tokens))
            break
    return begun


def _go_on_together(
    model: Any, tokenizer: Any, answers: list[_Begun], caches: list[list[Any]], count: int
) -> None:
    """Say the rest of `answers` in one batch: a product of many rows costs little more than one."""
    together = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
    going = list(answers)
    while going:
        step = mx.array([[one.tokens[-1]] for one in going])
        chosen = np.array(mx.argmax(model(step, cache=together)[:, -1], axis=-1))
        stay = []
        for place, (one, token) in enumerate(zip(going, chosen, strict=True)):
            one.ended = int(token) in tokenizer.eos_token_ids
            if not one.ended:
                one.tokens.append(int(token))
                if len(one.tokens) < count:
                    stay.append(place)
        if stay and len(stay) < len(going):
            for layer in together:
                layer.filter(mx.array(stay))
        going = [going[place] for place in stay]


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
