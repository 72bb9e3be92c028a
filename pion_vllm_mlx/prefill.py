"""Computing a prefix: chunk by chunk, evaluated, timed, with progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx

from pion_vllm_mlx.kv_bits import KvBits

#: Called with (tokens done, tokens in all): first with 0, last with all of them.
Progress: TypeAlias = Callable[[int, int], None]


def prefill(
    model: Any,
    ids: Sequence[int],
    cache: list[Any],
    step: int,
    progress: Progress | None = None,
    kv_bits: KvBits | None = None,
) -> float:
    """Run `ids` through the model into `cache`, `step` tokens at a time, and return the seconds.

    Every layer of every chunk is evaluated before its progress is reported, so the time is the
    time a restore saves. Chunks begin at multiples of `step`, as in mlx-lm's own prefill.
    """
    report = progress or _quiet
    report(0, len(ids))
    started = time.perf_counter()
    tokens = mx.array(list(ids), dtype=mx.uint32)
    for start in range(0, len(ids), step):
        model(tokens[start : start + step][None], cache=cache)
        if kv_bits is not None:
            kv_bits.apply(cache)
        mx.eval([leaf.state for leaf in cache])
        mx.clear_cache()
        report(min(start + step, len(ids)), len(ids))
    return time.perf_counter() - started


def require_suffix(suffix_ids: Sequence[int]) -> list[int]:
    """Return `suffix_ids` as a list, or raise ValueError if there are none.

    A restored prefix holds the state *after* its last token but not that token's logits: a model
    needs at least one token to run before it can say what comes next. So a prompt is split into
    prefix and suffix such that at least its last token is in the suffix.
    """
    suffix = [int(token) for token in suffix_ids]
    if not suffix:
        raise ValueError(
            "empty suffix: the model needs at least one token after the prefix to produce logits; "
            "keep the prompt's last token out of the prefix"
        )
    return suffix


def _quiet(done: int, total: int) -> None:
    """Report nothing."""
