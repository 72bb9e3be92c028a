"""A Llama model in a GGUF file, rewritten as the folder ``mlx_lm.load`` reads.

Only what the small model needs: the ``llama`` architecture, byte-level BPE with the ``smollm``
pre-tokenizer, dense weights. Anything else is a ValueError, never a guess. Values are exact: packed
weights are expanded in float32 before they are rounded to the wanted dtype.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Progress = Callable[[int, int], None]

# Raised whenever the same GGUF would come out differently: it is part of the cache key.
CONVERTER_VERSION = 1

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_CONTROL, _USER_DEFINED = 3, 4  # token types that are matched whole, never built by merges


def convert_gguf(gguf: Path, folder: Path, dtype: str, progress: Progress | None = None) -> None:
    """Write `gguf` into the existing `folder` with weights of `dtype` (an MLX float type's name).

    `progress(done, total)` counts tensors. Raises ValueError for a file this module cannot rewrite
    exactly, OSError for one that cannot be read or written.
    """
    # MLX declares the return type of every file kind at once.
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    tensors: dict[str, mx.array] = loaded[0]
    metadata: dict[str, Any] = loaded[1]
    config = _build_config(metadata, dtype, vocabulary=len(metadata["tokenizer.ggml.tokens"]))
    config["tie_word_embeddings"] = "output.weight" not in tensors
    tokenizer, tokenizer_config = _build_tokenizer(metadata)

    names = [name for name in tensors if not name.endswith((".scales", ".biases"))]
    weights = {}
    for done, name in enumerate(names):
        if progress:
            progress(done, len(names))
        weights[_mlx_name(name)] = _dense(tensors, name, config, getattr(mx, dtype))
        mx.eval(weights[_mlx_name(name)])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_json(folder / "config.json", config)
    if progress:
        progress(len(names), len(names))


def _mlx_name(name: str) -> str:
    try:
        if name.startswith("blk."):
            _, layer, part, kind = name.split(".")
            return f"model.layers.{int(layer)}.{_LAYER_NAMES[part]}.{kind}"
        part, kind = name.split(".")
        return f"{_TOP_NAMES[part]}.{kind}"
    except (KeyError, ValueError):
        raise ValueError(f"tensor {name!r} has no place in a plain Llama model") from None


def _dense(
    tensors: Mapping[str, mx.array], name: str, config: Mapping[str, Any], dtype: mx.Dtype
) -> mx.array:
    weight = tensors[name]
    if weight.dtype == mx.uint32:  # packed in groups of 32, so as many words a group as bits
        scales = tensors[name.removesuffix("weight") + "scales"].astype(mx.float32)
        biases = tensors[name.removesuffix("weight") + "biases"].astype(mx.float32)
        bits = weight.shape[-1] // scales.shape[-1]
        weight = mx.dequantize(weight, scales, biases, group_size=32, bits=bits)
    if ".attn_q." in name:
        weight = _unpermute(weight, config["num_attention_heads"])
    elif ".attn_k." in name:
        weight = _unpermute(weight, config["num_key_value_heads"])
    return weight.astype(dtype)


def _unpermute(weight: mx.array, heads: int) -> mx.array:
    """Rows of `weight` [heads * D, width] from rotary pairs side by side to rotary halves.

    llama.cpp stores q and k with row 2i+s of a head where the model has row s*D/2 + i.
    """
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _build_config(metadata: Mapping[str, Any], dtype: str, vocabulary: int) -> dict[str, Any]:
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"architecture {metadata['general.architecture']!r} is not llama")
    if any(key.startswith("llama.rope.scaling") for key in metadata):
        raise ValueError("scaled rotary embeddings are not handled")

    def number(key: str) -> Any:
        return metadata[key].item()

    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": number("llama.embedding_length"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": number("llama.rope.dimension_count"),
        # Stored as float32: 9.99999974e-06 is 1e-05.
        "rms_norm_eps": float(f"{number('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": number("llama.rope.freq_base"),
        "max_position_embeddings": number("llama.context_length"),
        "vocab_size": vocabulary,
        "torch_dtype": dtype,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
    }


def _build_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind[0]!r} with pre-tokenizer {kind[1]!r} is not handled")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind_of_token in zip(tokens, types, strict=True)
            if kind_of_token in (_CONTROL, _USER_DEFINED)
        ]
    )

    def token(role: str) -> str:
        number: int = metadata[f"tokenizer.ggml.{role}_token_id"].item()
        return tokens[number]

    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "model_max_length": metadata["llama.context_length"].item(),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
