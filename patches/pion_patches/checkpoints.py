"""Where a prefill stops so that recurrent and windowed layers can be resumed there later.

Their state cannot be cut to an earlier token, so the places have to be chosen beforehand: where
the next request is likely to leave this one (after the system prompt, before and after the last
user message, before the generation prompt) and at multiples of a block in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .live_caches import arrays_of, has_rows, leaves_of
from .prompt_memory import ANCHOR, BLOCK, GRAIN

log = logging.getLogger("pion_patches")

#: Tokens between two stops that no message asks for, at least.
STRIDE: Final = 512
#: The same for a model without any rows, all of whose cache is state.
ROWLESS_STRIDE: Final = 2048

#: A message's end in tokens, to the kind of the checkpoint there.
Wishes = dict[int, str]


def choose_stops(length: int, wishes: Wishes, grain: int = GRAIN, stride: int = STRIDE) -> Wishes:
    """Every stop in a prompt of `length` tokens, with its kind.

    Each wish is kept as it is; those that are worth storing are floored to the grain as well, as is
    the end; multiples of the stride lie in between. Not worth it is the end of an earlier answer:
    its state was stored with it. The end of the system prompt is an anchor.
    """
    stops = dict.fromkeys(range(stride, length - 1, stride), BLOCK)
    stored = {place: kind for place, kind in wishes.items() if kind != "assistant"} | {
        length - 1: BLOCK
    }
    for place, kind in sorted(stored.items(), key=lambda wish: wish[1] == "system"):
        if place >= grain:
            stops[place - place % grain] = ANCHOR if kind == "system" else BLOCK
    stops |= {place: kind for place, kind in wishes.items() if 0 < place < length}
    return stops


def stride_of(model: Any) -> int:
    """Tokens between two stops for a model: as many as weigh what one state weighs.

    So the states of a long prompt take no more room than its rows. Nothing is computed: the shapes
    of what a model leaves in its caches are known before.
    """
    make: Any = make_prompt_cache
    leaves = leaves_of(cache := make(model))
    model(mx.zeros((1, 2), dtype=mx.int32), cache=cache)
    row, state = 0, 0
    for leaf in leaves:
        if has_rows(leaf):
            row += sum(array.nbytes // array.shape[2] for array in arrays_of(leaf))
        elif hasattr(leaf, "max_size"):
            one = sum(array.nbytes // array.shape[2] for array in arrays_of(leaf))
            state += one * leaf.max_size
        else:
            state += sum(array.nbytes for array in arrays_of(leaf))
    wanted = -(-state // row) if row else ROWLESS_STRIDE
    return max(STRIDE, -(-wanted // GRAIN) * GRAIN)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a model can be resumed: at every token, or where its prefill stopped."""

    #: Whether any of its caches cannot be cut at every token.
    stateful: bool
    #: Tokens between two stops of such a model.
    stride: int = STRIDE


def places_of(model: Any) -> Places:
    """Never raises for a model that `make_prompt_cache` makes caches for."""
    make: Any = make_prompt_cache
    if all(has_rows(leaf) for leaf in leaves_of(make(model))):
        return Places(False)
    try:
        return Places(True, stride_of(model))
    except Exception as error:
        log.debug("the size of a state is not known: %r", error)
        return Places(True, ROWLESS_STRIDE)


def cut_segments(
    segments: Sequence[Sequence[int]], kinds: Sequence[str], stops: Wishes
) -> tuple[list[list[int]], list[str]]:
    """The segments of a prompt with further ends at `stops`; an end that was there keeps its kind.

    Each kind says what the checkpoint at the end of its segment is.
    """
    prompt = [token for segment in segments for token in segment]
    ends = dict(sorted(stops.items()))
    place = 0
    for segment, kind in zip(segments, kinds, strict=True):
        place += len(segment)
        ends[place] = kind
    parts: list[list[int]] = []
    start = 0
    for end in sorted(ends):
        if start < end <= len(prompt):
            parts.append(prompt[start:end])
            start = end
    return parts, [ends[end] for end in sorted(ends) if 0 < end <= len(prompt)]


def find_wishes(
    tokenizer: Any, messages: Sequence[dict[str, Any]], prompt: Sequence[int], **template: Any
) -> Wishes:
    """Ends of messages in a rendered prompt, in tokens. Empty where they cannot be told.

    `template`: the keyword arguments of `apply_chat_template` the prompt was rendered with. One
    tokenisation in all: texts are compared, and an offset of the whole text is a token.
    """

    def render(part: Sequence[dict[str, Any]], generation: bool = False) -> str:
        options = {**template, "add_generation_prompt": generation, "tokenize": False}
        return str(tokenizer.apply_chat_template(list(part), **options))

    whole = render(messages, generation=True)
    count_tokens = _token_counter(tokenizer, whole, prompt)
    if count_tokens is None:
        return {}
    roles = [message.get("role") for message in messages]
    users = [number for number, role in enumerate(roles) if role == "user"]
    systems = next((n for n, role in enumerate(roles) if role != "system"), len(roles))
    parts = [(messages, "user")]
    for number in users[-1:]:
        parts += [(messages[:number], "assistant"), (messages[: number + 1], "user")]
    if systems:
        # With an empty question behind it, as some templates render no conversation without one.
        parts.append(([*messages[:systems], {"role": "user", "content": ""}], "system"))
    wishes: Wishes = {}
    for part, kind in parts:
        if not part:
            continue
        try:
            place = count_tokens(_common(whole, render(part)))
        except Exception:
            continue  # whatever a template raises for a part of a conversation
        if 0 < place < len(prompt):
            wishes[place] = kind
    return wishes


def _token_counter(tokenizer: Any, text: str, prompt: Sequence[int]) -> Callable[[int], int] | None:
    """How many tokens lie whole within the first so many characters of `text`."""
    encode = getattr(tokenizer, "_tokenizer", tokenizer)
    try:
        encoded = encode(text, add_special_tokens=False, return_offsets_mapping=True)
    except (NotImplementedError, TypeError, ValueError):
        return None  # a tokenizer in Python knows no offsets
    if list(encoded["input_ids"]) != list(prompt):
        return None
    ends = [end for _, end in encoded["offset_mapping"]]

    def count(characters: int) -> int:
        return next((i for i, end in enumerate(ends) if end > characters), len(ends))

    return count


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
