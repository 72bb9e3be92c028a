"""Restore plus first append: Pion over TCP and in process against mlx-lm's load_prompt_cache.

Expected: at most 1.1 times mlx-lm's own file in process, and over TCP the price of the bytes on
top. Two random models with real cache shapes and few other weights, so that the restore is what is
measured: 30 plain layers (those of SmolLM2-135M) and a Qwen3.5 mix, 18 recurrent and 6 attention
layers. The append is one token, evaluated. The three ways take turns in one process; the file is in
the page cache, and so are the server's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models import llama, qwen3_5

from evals.rounds import interleave, medians
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.transport.local import OFF

TOKENS: Final = 1024
ROUNDS: Final = 15
VOCAB: Final = 256
_stock: Any = mlx_lm_caches  # mlx-lm is not typed
PLAIN: Final[Mapping[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 192,
    "num_hidden_layers": 30,
    "intermediate_size": 64,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}
_HYBRID: Final[Mapping[str, Any]] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "num_hidden_layers": 24,
    "full_attention_interval": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "num_experts": 0,
    "max_position_embeddings": 4096,
}


def run(tokens: int = TOKENS, rounds: int = ROUNDS) -> Mapping[str, Any]:
    """Seconds of every round by model and way, medians and ratios to mlx-lm's file."""
    os.environ[OFF] = "1"  # on one machine it would be a file
    print(
        f"{'':<12}{'MB':>7}",
        *(f"{way:>18}" for way in ("TCP", "in process", "mlx-lm file")),
        sep="",
    )
    figures = {}
    hybrid: Any = qwen3_5
    for name, model in (
        ("30 plain", llama.Model(llama.ModelArgs(**PLAIN))),
        (
            "qwen3_5",
            hybrid.Model(
                hybrid.ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": {**_HYBRID}})
            ),
        ),
    ):
        model.eval()
        mx.eval(model.parameters())
        figures[name] = _measure(name, model, tokens, rounds)
    return {"tokens": tokens, "models": figures}


def _measure(name: str, model: Any, tokens: int, rounds: int) -> Mapping[str, Any]:
    ids = np.random.default_rng(tokens).integers(0, VOCAB, tokens).tolist()
    with tempfile.TemporaryDirectory(prefix="pion-bench-") as folder:
        file = str(Path(folder) / "cache.safetensors")
        with (
            LocalServer(Path(folder) / "data", Path(folder) / "server.log") as server,
            PionPromptCache(
                model, port=server.port, timeout=10, held_bytes=0, store="sync"
            ) as over_tcp,
            PionPromptCache(model, port=server.port, timeout=10) as in_process,
        ):
            _stock.save_prompt_cache(file, over_tcp.get_or_prefill(ids, name))
            ways: dict[str, Callable[[], bytes]] = {
                "TCP": lambda: append_one(model, over_tcp.get_or_prefill(ids, name)),
                "in process": lambda: append_one(model, in_process.get_or_prefill(ids, name)),
                "mlx-lm file": lambda: append_one(model, _stock.load_prompt_cache(file)),
            }
            if len({way() for way in ways.values()}) != 1:
                raise RuntimeError("the three ways do not continue alike")
            seconds = interleave(ways, rounds)
            stats = over_tcp.stats(), in_process.stats()
    if stats[0]["hits"] != rounds + 2 or stats[1]["hits_in_process"] != rounds + 1:
        raise RuntimeError(f"not everything was a hit: {stats}")
    nbytes = stats[0]["bytes_fetched"] // stats[0]["hits"]
    middle = medians(seconds)
    ratios = {way: middle[way] / middle["mlx-lm file"] for way in ways}
    cells = (f"{middle[way] * 1e3:>10.1f} ms {ratios[way]:.2f}x" for way in ways)
    print(f"{name:<12}{nbytes / 1e6:>7.1f}", *cells, sep="", flush=True)
    return {"bytes": nbytes, "seconds": seconds, "ratio": ratios}


def append_one(model: Any, cache: list[Any]) -> bytes:
    logits = model(mx.array([[7]]), cache=cache)
    mx.eval(logits, [leaf.state for leaf in cache])
    return np.array(logits).tobytes()


if __name__ == "__main__":
    run()
