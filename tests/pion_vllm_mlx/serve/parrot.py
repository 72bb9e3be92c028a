"""A model that answers what it is told to, with SmolLM2's tokenizer and a template with tools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import load as load_tokenizer

from pion_vllm_mlx.serve.provider import Provider
from pion_vllm_mlx.small_model import small_model_dir

VOCAB = 49152
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>tools\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content or '' }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
{{- '<tool_call>' + ({'name': tool_call.name, 'arguments': tool_call.arguments} | tojson) }}
{{- '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TOOL_CALL = '<tool_call>{"name": "look_up", "arguments": {"zebra": 1, "apple": "b"}}</tool_call>'


class Parrot(Module):
    """Says `script`, then ends. Its one cache holds the tokens it has seen, as keys."""

    def __init__(self, begin: list[int], end: int) -> None:
        initialise: Any = super().__init__
        initialise()
        self.args = SimpleNamespace(vocab_size=VOCAB)
        self.layers = [None]
        self._begin, self._end = begin, end
        self._script: list[list[int]] = [[]]
        self.forwarded: list[int] = []

    def say(self, *tokens: int) -> None:
        """From now on answer with these tokens."""
        self._script[0] = list(tokens)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        seen = inputs.astype(mx.float32)[:, None, :, None]
        keys, _ = cache[0].update_and_fetch(seen, seen)
        self.forwarded.append(inputs.shape[1])
        logits = np.zeros((*inputs.shape, VOCAB), dtype=np.float32)
        for row, history in enumerate(np.array(keys)[:, 0, :, 0].astype(int).tolist()):
            spoken = next(
                (
                    len(history) - at - len(self._begin)
                    for at in range(len(history) - len(self._begin), -1, -1)
                    if history[at : at + len(self._begin)] == self._begin
                ),
                0,
            )
            script = [*self._script[0], self._end]
            logits[row, -1, script[min(max(spoken, 0), len(script) - 1)]] = 10.0
        return mx.array(logits)


class ParrotProvider(Provider):
    """Loads a Parrot, whatever the flags name."""

    parrot: Parrot

    def _load(self, *names: Any) -> None:
        self.reset()
        load: Any = load_tokenizer
        tokenizer = load(small_model_dir(), {"chat_template": TEMPLATE})
        begin = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
        end = tokenizer.eos_token_id
        mine: Any = self
        mine.model_key = (*names, None, None)[:3]
        mine.parrot = mine.model = Parrot(begin, end)
        mine.tokenizer = tokenizer
        mine.is_batchable = True
