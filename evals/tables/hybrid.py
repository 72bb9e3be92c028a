"""A hybrid model by prefix length: recurrent state and K/V come back to the bit.

Without `--model` a random qwen3_5 of the layer pattern of Qwen3.5-4B (24 linear and 8 softmax
attention layers, narrow) stands for its exactness, and for nothing else: the first 18 greedy tokens
after a fetched prefix are compared with those of mlx-lm alone on the whole prompt, every cache
with the one that was stored, and the logits that follow with those of the cache that was stored.
With `--model` a real hybrid is timed, too.

Expected: 18 of 18 tokens at every length, all layers bit for bit, logits that differ by exactly 0.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from evals.findings import NOT_MEASURED, Bar, Findings, Quoted, Table
from evals.random_models import random_hybrid, random_ids
from evals.serving import local_server
from evals.setting import Setting
from evals.speaking import speak
from evals.texts import read_long_text
from pion_vllm_mlx import PionPromptCache

#: Times of a random model are not reported: it may run beside others.
TIMED: Final = False

RANDOM_MODEL: Final = "a random qwen3_5 of Qwen3.5-4B's layer pattern, float32"
LENGTHS: Final = (174, 2048, 4096, 8192)
TOKENS: Final = 18
_SUFFIX: Final = 12


@dataclass(frozen=True, slots=True)
class Measured:
    """One prefix length: tokens and layers that agree, the largest logit difference, seconds."""

    length: int
    agree: int
    layers_exact: int
    layers: int
    logit_difference: float
    cold_seconds: float
    warm_seconds: float


class _NoEnd:
    """Stands for the tokenizer of a random model: no token ends an answer."""

    eos_token_ids = frozenset({-1})


def run(setting: Setting) -> Findings:
    return measure(setting, setting.take(LENGTHS))


def measure(setting: Setting, lengths: Sequence[int]) -> Findings:
    """The eval at some prefix lengths."""
    model, tokenizer, ids = _load(setting, max(lengths) + _SUFFIX)
    found = []
    with local_server() as server:
        for length in lengths:
            one = _measure_length(model, tokenizer, server.port, ids[: length + _SUFFIX])
            print(f"{length:>6} tokens: {one}", flush=True)
            found.append(one)
    return _findings(setting, found)


def _load(setting: Setting, tokens: int) -> tuple[Any, Any, list[int]]:
    if setting.model is None:
        return random_hybrid(setting.seed), _NoEnd(), random_ids(setting.seed, tokens)
    model, tokenizer = setting.load()
    ids = tokenizer.encode(read_long_text())
    return model, tokenizer, (ids * (tokens // len(ids) + 1))[:tokens]


def _measure_length(model: Any, tokenizer: Any, port: int, ids: list[int]) -> Measured:
    prefix, suffix = ids[:-_SUFFIX], ids[-_SUFFIX:]
    name = PionPromptCache.make_namespace("hybrid", len(prefix))
    vanilla = speak(model, tokenizer, ids, TOKENS)
    with (
        PionPromptCache(model, port=port, held_bytes=0, timeout=10, store="sync") as writer,
        PionPromptCache(model, port=port, held_bytes=0, timeout=10) as reader,
    ):
        stored = writer.get_or_prefill(prefix, name)
        fetched = reader.get_or_prefill(prefix, name)
        again = reader.get_or_prefill(prefix, name)
        started = time.perf_counter()
        warm = speak(model, tokenizer, suffix, TOKENS, reader.get_or_prefill(prefix, name), started)
        if reader.stats()["hits"] != 3:
            raise RuntimeError(f"a stored prefix was a miss: {reader.stats()}")
    exact = [_same_bits(a, b) for a, b in zip(stored, fetched, strict=True)]
    step = mx.array([suffix])
    difference = mx.abs(model(step, cache=stored) - model(step, cache=again)).max()
    return Measured(
        len(prefix),
        sum(a == b for a, b in zip(warm.tokens, vanilla.tokens, strict=False)),
        sum(exact),
        len(exact),
        float(difference),
        vanilla.first_seconds,
        warm.first_seconds,
    )


def _same_bits(one: Any, other: Any) -> bool:
    """Whether two layers' caches hold the same numbers, to the bit, whatever they pad."""
    if type(one) is not type(other) or getattr(one, "offset", 0) != getattr(other, "offset", 0):
        return False
    pairs = zip(_arrays(one), _arrays(other), strict=True)
    return all(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


def _arrays(layer: Any) -> list[np.ndarray[Any, Any]]:
    if hasattr(layer, "keys"):
        kept = [layer.keys[..., : layer.offset, :], layer.values[..., : layer.offset, :]]
    else:
        kept = [array for array in layer.cache if array is not None]
    # As words: half-precision numbers that numpy does not know keep their bits.
    return [np.array(mx.contiguous(array).view(mx.uint8)) for array in kept]


#: Prefix tokens, then vanilla and Pion in ms, speed-up and tokens, from the design document.
_DESIGN: Final = (
    (174, "not given", "3.3x"),
    (2048, "6,080 ms, 246 ms", "24.77x, 18/18"),
    (4096, "12,757 ms, 390 ms", "32.7x, 16/18"),
    (8192, "27,598 ms, 2,373 ms", "11.6x, 18/18"),
)


_COLUMNS: Final = (
    "prefix, tokens",
    "tokens as vanilla",
    "layers exact",
    "logit difference",
    "vanilla",
    "from Pion",
)


def _findings(setting: Setting, found: list[Measured]) -> Findings:
    real = setting.model is not None
    rows = []
    for one in found:
        times = (f"{one.cold_seconds * 1e3:.0f} ms", f"{one.warm_seconds * 1e3:.0f} ms")
        rows.append(
            (
                f"{one.length:,}",
                f"{one.agree}/{TOKENS}",
                f"{one.layers_exact}/{one.layers}",
                f"{one.logit_difference:g}",
                *(times if real else (NOT_MEASURED, NOT_MEASURED)),
            )
        )
    by_length = {one.length: one for one in found}
    quoted = []
    for length, quoted_times, rest in _DESIGN:
        ours = f"{NOT_MEASURED} in this run"
        if length in by_length:
            mine = by_length[length]
            ours = f"{mine.agree}/{TOKENS} tokens; times {NOT_MEASURED}: no Mac, random weights"
            if real:
                ours = f"{mine.cold_seconds * 1e3:.0f} ms, {mine.warm_seconds * 1e3:.0f} ms,"
                ours += f" {mine.cold_seconds / mine.warm_seconds:.1f}x, {mine.agree}/{TOKENS}"
        what = f"Qwen3.5-4B-MLX-4bit, {length:,} tokens: vanilla, Pion, speed-up, tokens"
        quoted.append(Quoted(what, f"{quoted_times}, {rest}", ours))
    model = setting.model or RANDOM_MODEL
    return Findings(
        model=model,
        figures={
            "real_model": real,
            "lengths": {
                str(one.length): {
                    "agree": one.agree,
                    "layers_exact": one.layers_exact,
                    "layers": one.layers,
                    "logit_difference": one.logit_difference,
                }
                | ({"cold": one.cold_seconds, "warm": one.warm_seconds} if real else {})
                for one in found
            },
        },
        tables=[
            Table(
                model,
                _COLUMNS,
                rows,
                "Tokens as vanilla: of the first 18, against the whole prompt at once. Layers and"
                " logits: against the cache that was stored.",
            )
        ],
        bars=[
            Bar("tokens as vanilla, least", min(one.agree for one in found), TOKENS, not real),
            Bar("layers exact, least", min(o.layers_exact for o in found), found[0].layers),
            Bar(
                "logits that differ by exactly 0, lengths",
                sum(one.logit_difference == 0 for one in found),
                len(found),
            ),
        ],
        quoted=quoted,
    )
