"""The real small model: 50 greedy tokens, patched on a shared prefix and vanilla without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache

from pion_patches.attention import is_installed, pion_attention_patch
from pion_patches.inproc import InprocStore
from pion_patches.prefix_cache import make_pion_prompt_cache
from pion_patches.prefix_entry import capture_prefix
from pion_vllm_mlx.small_model import load_small_model

make_prompt_cache: Any = cache.make_prompt_cache  # mlx-lm is not typed

SYSTEM = """You are the librarian of a small town by the sea. The library has two rooms, a reading
lamp for every table and a cat called Ferret. Visitors ask about tides, old ships and the weather.
You answer in full sentences, you never invent a book that is not on the shelves, and when you do
not know something you say so and name the shelf where the visitor may look for it. The shelves are
numbered one to nine: one is for the sea, two for birds, three for poems, four for ships, five
for the history of the town, six for maps, seven for tools, eight for letters, nine for the cat."""
QUESTION = "\n\nVisitor: Where do I find something about the old ships, and who is Ferret?\nAnswer:"


def greedy(model: Any, ids: list[int], prompt_cache: list[Any] | None, count: int) -> list[int]:
    steps = generate_step(mx.array(ids), model, max_tokens=count, prompt_cache=prompt_cache)
    return [int(token) for token, _ in steps]


@pytest.mark.model
def test_fifty_greedy_tokens_are_those_of_vanilla_mlx_lm() -> None:
    model, tokenizer = load_small_model()
    prefix, rest = tokenizer.encode(SYSTEM), tokenizer.encode(QUESTION)
    assert not is_installed()
    vanilla = greedy(model, prefix + rest, None, 50)

    source = make_prompt_cache(model)
    model(mx.array([prefix]), cache=source)
    store = InprocStore()
    assert store.hold("library", capture_prefix(model, source, len(prefix)))
    pc = SimpleNamespace(_mlx_prefix_kv=store)
    with pion_attention_patch():
        split = make_pion_prompt_cache(model, "library", pc, len(prefix))
        assert greedy(model, rest, split, 50) == vanilla
        assert all(layer.attended for layer in split)
        # Another request on the same prefix, fed in chunks of three.
        again = make_pion_prompt_cache(model, "library", pc, len(prefix))
        for start in range(0, len(rest) - 1, 3):
            model(mx.array([rest[start : min(start + 3, len(rest) - 1)]]), cache=again)
        assert greedy(model, rest[-1:], again, 10) == vanilla[:10]
