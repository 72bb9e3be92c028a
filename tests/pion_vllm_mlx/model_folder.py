"""A tiny model of the zoo as a folder `mlx_lm.load` reads, with a tokenizer of a word a token."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast as _TokenizerFast

from tests.pion_patches.zoo import VOCAB, build

#: Word number n stands for token n.
WORDS = [f"w{number}" for number in range(VOCAB)]
TEMPLATE = "{% for m in messages %}w1 {{ m['content'] }}{% endfor %}"


def text_of(ids: list[int]) -> str:
    """The text the tokenizer encodes as `ids`."""
    return " ".join(WORDS[token] for token in ids)


def write_model(
    folder: Path,
    family: str,
    seed: int = 1,
    *,
    chat: bool = False,
    dtype: mx.Dtype = mx.float32,
    **changes: Any,
) -> None:
    """With `chat` the tokenizer has a template: every text gets one token of its own in front.

    `changes` are fields of the configuration.
    """
    folder.mkdir()
    model: Any = build(family, seed=seed, dtype=dtype, **changes)
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = dataclasses.asdict(model.args) | {"eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    words: Any = models.WordLevel({word: token for token, word in enumerate(WORDS)}, "w0")
    backend = Tokenizer(words)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make_tokenizer: Any = _TokenizerFast  # not typed
    tokenizer = make_tokenizer(tokenizer_object=backend, eos_token="w0", unk_token="w0")
    if chat:
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
