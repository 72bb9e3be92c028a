"""The model zoo: a tiny random model of every family the installed mlx-lm can build on a CPU.

Every module of ``mlx_lm.models`` with a ``Model`` class is a family. Its arguments come from the
fields of its ``ModelArgs``: a field whose name is in ``SMALL`` gets that value, whatever its
default, and ``SPECIAL`` adds what a family needs beyond that. So a family a later mlx-lm brings is
built, or listed in ``left_out``, without a line here.

    model = families["qwen3_5"](seed=7, dtype=mx.float16)
    logits = model(mx.array([[1, 2, 3]]), cache=model.make_cache())

Parameters are randomised after construction, since some families start with whole tensors at zero
and a test on those would hold whatever the cache contained.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import pkgutil
import sys
import types
from collections.abc import Iterator
from typing import Any, Protocol

import mlx.core as mx
import mlx_lm.models
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache

VOCAB = 199
WINDOW = 8
LAYERS = 4
# mlx-lm before 0.32 trims a padded ChunkedKVCache wrongly unless a chunk is a whole buffer step.
RECENT = hasattr(KVCache, "keys_and_values")
CHUNK = WINDOW if RECENT else 256


class Builder(Protocol):
    def __call__(self, seed: int = 0, dtype: mx.Dtype = mx.float32) -> Module: ...


# Field name -> small value. Widths are chosen so that heads * head_dim == hidden_size.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": WINDOW,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # latent attention
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    # recurrent layers
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "conv_kernel": 4,
    "state_size": 16,
    "n_groups": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 8,
    "time_step_limit": (0.001, 100.0),
    "time_step_min": 0.001,
    "time_step_max": 100.0,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    # other names for the same things
    "n_embd": 64,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "n_kv_heads": 2,
    "num_kv_heads": 2,
    "n_positions": 4096,
    "n_ctx": 4096,
    "n_inner": 96,
    "hidden_dim": 64,
    "d_model": 64,
    "model_dim": 64,
    "num_vocab": VOCAB,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.25,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
}

# What the odd size of a field means for these families, and the fields only they have.
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
YARN = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
ROPE_BY_TYPE = {kind: {"rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")}
KDA = {
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
    "num_heads": 4,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}
QWEN3_5 = {"head_dim": 32, "num_experts": 0}
NO_ROW = {"no_op": True, "replace_with_linear": False}
NAS_BLOCK = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}}


@dataclasses.dataclass(frozen=True)
class Text:
    """Stands for the configuration of a text model inside a wrapper: its module and class."""

    module: str
    arguments: str = "ModelArgs"
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


SPECIAL: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": WINDOWED},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 4},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 4},
    "bailing_moe_v3": {"head_dim": 32},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": YARN, "topk_method": "greedy", "scoring_func": "softmax"},
    "deepseek_v41": {
        "head_dim": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "scoring_func": "sqrtsoftplus",
        "compress_ratios": (4, 4, 0, 1),
        "kv_source_layer_ids": (0, 3),
        "index_source_layer_ids": (0,),
        "hc_mult": 2,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": WINDOWED, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": [*WINDOWED[:3], "conv_mixer"]},
    "gemma3": {"text_config": Text("gemma3_text"), "vocab_size": VOCAB},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma3n": {
        "text_config": Text(
            "gemma3n",
            "TextConfig",
            {
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCAB,
                "rope_local_base_freq": 10000.0,
                "final_logit_softcapping": 30.0,
                "layer_types": WINDOWED,
                "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                "hidden_size_per_layer_input": 8,
                "altup_num_inputs": 2,
                "altup_coef_clip": 120.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 8,
            },
        )
    },
    "gemma4": {"text_config": Text("gemma4_text")},
    "gemma4_text": {
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "layer_types": WINDOWED,
    },
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {"layer_types": WINDOWED},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "hunyuan": {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k25": {"text_config": Text("deepseek_v3")},
    "kimi_k3": {"text_config": Text("kimi_k3", "TextArgs", {"linear_attn_config": KDA})},
    "kimi_linear": {
        "linear_attn_config": KDA,
        "model_max_length": 4096,
        "num_expert_group": 1,
        "first_k_dense_replace": 1,
    },
    "kimi_vl": {"text_config": Text("kimi_vl", "TextArgs")},
    "laguna": {"layer_types": WINDOWED, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "lfm2": {
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "lfm2-vl": {"text_config": Text("lfm2")},
    "lfm2_moe": {"use_expert_bias": True, "full_attn_idxs": [1, 3]},
    "lille-130m": {"block_size": 4096},
    "llama4": {
        "text_config": Text(
            "llama4",
            "TextArgs",
            {
                "attention_chunk_size": CHUNK,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 96,
            },
        )
    },
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 1,
        "num_layers": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 1,
        "num_layers": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "mamba2": {"ssm_state_size": 16, "head_dim": 32, "intermediate_size": 128},
    "mellum": {"layer_types": WINDOWED, "rope_parameters": ROPE_BY_TYPE},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "n_shared_experts": None,
        "head_dim": 24,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "attention_value_scale": 0.7,
    },
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12.0},
    "minicpm3": {
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 12.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
            "original_max_position_embeddings": 4096,
        },
    },
    "minimax": {"rotary_dim": 8},
    "minimax_m3_vl": {
        "text_config": Text(
            "minimax_m3_vl",
            "TextArgs",
            {
                "dense_intermediate_size": 96,
                "mlp_layer_types": ["dense", *["sparse"] * 3],
                "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
                "index_block_size": 4,
                "index_topk_blocks": 4,
            },
        )
    },
    "ministral3": {"rope_parameters": YARN, "layer_types": WINDOWED},
    "mistral3": {"text_config": Text("llama")},
    "mistral4": {"rope_parameters": YARN},
    "muse_glimmer": {"layer_types": WINDOWED},
    "muse_spark": {
        "text_config": Text(
            "muse_spark",
            "TextArgs",
            {
                "post_norm_eps": 1e-8,
                "rope_parameters": {"rope_theta": 10000.0},
                "layer_rope_theta": [10000.0, 0, 10000.0, 0],
                "layer_types": WINDOWED,
                "final_logit_softcapping": 20.0,
                "output_multiplier": 0.2,
                "moe_hidden_size": 32,
                "num_shared_experts": 0,
            },
        )
    },
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [NAS_BLOCK, {**NAS_BLOCK, "attention": NO_ROW}, NAS_BLOCK, NAS_BLOCK]
    },
    "nemotron_h": {"ssm_state_size": 16, "hybrid_override_pattern": ["M", "*", "M", "-"]},
    "olmo": {"mlp_hidden_size": 96, "embedding_size": VOCAB},
    "olmo3": {"layer_types": WINDOWED},
    "olmo_hybrid": {"linear_allow_neg_eigval": True},
    "openelm": {
        "num_transformer_layers": LAYERS,
        "ffn_dim_divisor": 16,
        "num_query_heads": [2, 4, 4, 4],
        "num_kv_heads": [1, 2, 2, 4],
        "ffn_multipliers": [0.5, 1.0, 1.5, 2.0],
    },
    "phi3small": {
        "vocab_size": 100352,  # the model writes to token ids up to there, unchecked
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2,
    },
    "phimoe": {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
            "short_mscale": 1.1,
            "long_mscale": 1.2,
        }
    },
    "phixtral": {"rotary_dim": 8},
    "pixtral": {"text_config": Text("llama")},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"hidden_size_per_head": 16},
    "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {
        "text_config": Text("qwen3_5", "TextModelArgs", {**QWEN3_5, "intermediate_size": 512}),
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": "model.layers.0.mlp.down_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 512,
            }
        ],
    },
    "qwen": {"kv_channels": 16},
    "qwen2_vl": {"text_config": Text("qwen2")},
    "qwen3_5": {"text_config": Text("qwen3_5", "TextModelArgs", QWEN3_5)},
    "qwen3_5_moe": {"text_config": Text("qwen3_5", "TextModelArgs", {"head_dim": 32})},
    "qwen3_vl": {"text_config": Text("qwen3")},
    "qwen3_vl_moe": {"text_config": Text("qwen3_moe")},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
        "head_dim": 32,
    },
    "smollm3": {"layer_types": WINDOWED},
    "spark2_5": {"layer_types": WINDOWED, "rope_parameters": ROPE_BY_TYPE},
    "stablelm": {"use_qkv_bias": False},
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": WINDOWED,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
    },
}

# Families no small configuration can build or run on a CPU, and why.
CANNOT: dict[str, str] = {
    "bitnet": "its linear layers call a Metal kernel, which a CPU build of MLX cannot run",
    "muse_spark": "its attention calls a Metal kernel, which a CPU build of MLX cannot run",
}
if not RECENT:
    CANNOT["phi3small"] = "mlx-lm before 0.32 lets it write outside its logits"

# Families that fail on a call of several tokens, with or without any cache of ours.
ONE_TOKEN_A_CALL: dict[str, str] = {
    "olmo": 'it adds the mask, which is the string "causal", to the scores',
}


def small_arguments(
    module: str, cls: str = "ModelArgs", extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Small keyword arguments for dataclass `cls` of ``mlx_lm.models.<module>``."""
    arguments = getattr(load_module(module), cls)
    named = {field.name for field in dataclasses.fields(arguments)}
    wanted: dict[str, Any] = {"model_type": module, **SMALL}
    wanted |= SPECIAL.get(module, {}) if cls == "ModelArgs" else {}
    wanted |= extra or {}
    small = {name: value for name, value in wanted.items() if name in named}
    for name, value in small.items():
        if isinstance(value, Text):
            small[name] = small_arguments(value.module, value.arguments, value.extra)
    return copy.deepcopy(small)


def load_module(name: str) -> types.ModuleType:
    """Import a model module; olmo only asks whether ``hf_olmo`` is there, so a bare one will do."""
    sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))
    return importlib.import_module(f"mlx_lm.models.{name}")


def randomise(model: Any, seed: int, dtype: mx.Dtype) -> None:
    """Move every floating parameter away from its initial value, then cast all of them to `dtype`.

    Packed integer weights get random words; integer tables are left alone.
    """
    random = np.random.RandomState(seed)

    def shift(parameter: mx.array) -> mx.array:
        if parameter.dtype == mx.uint32:
            return mx.array(random.randint(0, 1 << 32, parameter.shape, dtype=np.uint32))
        if mx.issubdtype(parameter.dtype, mx.floating):
            noise = random.standard_normal(parameter.shape).astype(np.float32)
            return (parameter.astype(mx.float32) + 0.1 * mx.array(noise)).astype(dtype)
        return parameter

    model.update(tree_map(shift, model.parameters()))
    model.eval()
    mx.eval(model.parameters())


def build(family: str, seed: int = 0, dtype: mx.Dtype = mx.float32, **changes: Any) -> Module:
    """Build the tiny model of `family`; `changes` replace fields of its (text) configuration."""
    module = load_module(family)
    mx.random.seed(seed)
    small = small_arguments(family)
    inner = small.get("text_config", small)
    inner.update(changes)
    model: Module = module.Model(module.ModelArgs.from_dict(small))
    randomise(model, seed, dtype)
    return model


def model_modules() -> Iterator[str]:
    """Names of the modules of ``mlx_lm.models`` that define a model."""
    for found in sorted(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)):
        # RuntimeError: bitnet of mlx-lm 0.31 builds its Metal kernel when it is imported.
        with contextlib.suppress(ImportError, RuntimeError):
            if hasattr(load_module(found), "Model"):
                yield found


_found = tuple(model_modules())
left_out: dict[str, str] = {name: why for name, why in CANNOT.items() if name in _found}
families: dict[str, Builder] = {
    name: functools.partial(build, name) for name in _found if name not in left_out
}
