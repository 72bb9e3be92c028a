"""The path of mlx_lm.server that serves one request at a time, with checkpoints on the way.

A request with a seed, with `--kv-bits`, with a draft model, or for a model whose caches cannot be
batched is computed by `stream_generate`. The one here pauses its prefill where recurrent and
windowed layers can be resumed later, and hands what was computed there to the prompt cache.

With `--kv-bits` a prompt is quantised after every chunk of its prefill, and what the tokens of a
chunk see of each other is not: a run that goes on in the middle of a chunk gives another answer
than a cold one. So there the pauses are the ends of chunks, and nothing else is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache, stream_generate

from .prompt_memory import BLOCK, GRAIN

Processor = Callable[[mx.array, mx.array], mx.array]


@dataclass
class Single:
    """A request on its way: its whole prompt, and where its prefill pauses, with the kind of each.

    `keep(tokens, cache, kind)` takes a cache over, `pass_state(tokens, cache)` that of an answer
    under way; both get copies. `stateful`: whether the model has caches that cannot be cut.
    """

    prompt: Sequence[int]
    stops: Mapping[int, str]
    keep: Callable[[list[int], list[Any], str], None]
    pass_state: Callable[[list[int], list[Any]], None]
    stateful: bool

    def ends_with(self, rest: Sequence[int]) -> bool:
        """Whether these are its last tokens."""
        return list(self.prompt[len(self.prompt) - len(rest) :]) == list(rest)


def chunk_ends(length: int, start: int, step: int, *, stateful: bool) -> dict[int, str]:
    """The pauses of a prompt of `length` tokens with `--kv-bits`: the ends of whole chunks.

    Rows are kept at the last one, and at the last one before `start`, up to which they are not
    quantised: those a longer cache has no more. At the others there is only state to keep.
    """
    ends = list(range(step, length, step))
    kept = [*[end for end in ends if end < start][-1:], *ends[-1:]]
    return (dict.fromkeys(ends, BLOCK) if stateful else {}) | dict.fromkeys(kept, "user")


def stream_with_pauses(
    single: Single, model: Any, tokenizer: Any, prompt: Sequence[int], **options: Any
) -> Iterator[Any]:
    """As mlx-lm's `stream_generate`, for the tokens `prompt` after those in `prompt_cache`.

    Processors of logits see the whole prompt, as they do without any cache.
    """
    whole, done = single.prompt, len(single.prompt) - len(prompt)
    drafts = options.get("draft_model") is not None
    stops = {end: kind for end, kind in single.stops.items() if done < end < len(whole)}
    computed = done if drafts else _prefill(single, model, done, stops, options)
    progress, processors = options["prompt_progress_callback"], options["logits_processors"]
    options["prompt_progress_callback"] = _counted(progress, computed - done, len(prompt))
    if computed and processors:
        head = mx.array(list(whole[:computed]))
        options["logits_processors"] = [_after(head, processor) for processor in processors]
    passes = single.stateful and not drafts and options["kv_bits"] is None
    tokens = list(whole)
    for response in stream_generate(model, tokenizer, list(whole[computed:]), **options):
        tokens.append(response.token)
        # The cache has the token that is handed out already.
        if passes and len(tokens) % GRAIN == 0:
            single.pass_state(list(tokens), copy.deepcopy(options["prompt_cache"]))
        yield response


def _prefill(
    single: Single, model: Any, done: int, stops: Mapping[int, str], options: Mapping[str, Any]
) -> int:
    """Compute up to the last stop in the chunks `generate_step` has; where that is."""
    cache, step = options["prompt_cache"], options["prefill_step_size"]
    begun, total = done, len(single.prompt) - done
    for end in sorted(stops):
        while done < end:
            count = min(step, end - done)
            with mx.stream(options["stream"]):
                model(mx.array(list(single.prompt[done : done + count]))[None], cache=cache)
                _quantise(cache, options)
                mx.eval([leaf.state for leaf in cache])
            mx.clear_cache()
            done += count
            options["prompt_progress_callback"](done - begun, total)
        # A copy shares its arrays until one of the two is written to.
        single.keep(list(single.prompt[:end]), copy.deepcopy(cache), stops[end])
    return done


def _quantise(cache: list[Any], options: Mapping[str, Any]) -> None:
    quantise: Any = maybe_quantize_kv_cache
    quantise(cache, options["quantized_kv_start"], options["kv_group_size"], options["kv_bits"])


def _after(head: mx.array, processor: Processor) -> Processor:
    """A processor that sees the tokens of `head` before those it is given."""
    return lambda tokens, logits: processor(mx.concatenate([head, tokens]), logits)


def _counted(
    progress: Callable[[int, int], None], done: int, total: int
) -> Callable[[int, int], None]:
    """Progress of what is left, told as progress of the whole."""
    return lambda more, _: progress(done + more, total)
