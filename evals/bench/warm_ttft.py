"""Time to first token of a fresh process at 1,024 tokens: cold, from Pion, from mlx-lm's own file.

Expected: from Pion at least 10 times sooner than cold, and close to a cache file read by mlx-lm,
most of both being the forward pass of the question. SmolLM2-135M in float32. Every figure is a new
interpreter with the model loaded; what is stored is stored meanwhile. Also the restores alone.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evals.rounds import medians
from evals.tables.cross_instance import answer_in_process, run_child
from pion_vllm_mlx.demo_request import Job, Outcome
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.small_model import small_model_dir

TOKENS = 1024
ROUNDS = 3

# The same prompt by mlx-lm alone: prefill and save the file if need be, then load and go on.
_FILE_LANE = """
import json, os, sys, time
import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from pion_vllm_mlx.demo_request import make_prompt

model_path, tokens, file, outcome = sys.argv[1:]
model, tokenizer = load(model_path)[:2]
prefix, suffix = make_prompt(tokenizer, int(tokens))
if not os.path.exists(file):
    cache = make_prompt_cache(model)
    for _ in generate_step(mx.array(prefix), model, max_tokens=0, prompt_cache=cache):
        pass
    save_prompt_cache(file, cache)
started = time.perf_counter()
cache = load_prompt_cache(file)
mx.eval([layer.state for layer in cache])
ready = time.perf_counter() - started
next(generate_step(mx.array(suffix), model, max_tokens=1, prompt_cache=cache))
with open(outcome, "w") as out:
    json.dump({"ready": ready, "ttft": time.perf_counter() - started}, out)
os._exit(0)
"""


def run() -> Mapping[str, Any]:
    """Seconds of every round, medians and ratios."""
    model = str(small_model_dir())
    ttft: dict[str, list[float]] = {"cold": [], "Pion": [], "mlx-lm file": []}
    ready: dict[str, list[float]] = {"Pion": [], "mlx-lm file": []}
    with tempfile.TemporaryDirectory(prefix="pion-bench-") as name:
        folder = Path(name)
        _read_file(folder, model)  # writes it
        for number in range(ROUNDS):
            with LocalServer(folder / f"data{number}", folder / "server.log") as server:
                cold = _request(server, folder, model)
                warm = _request(server, folder, model)
            if cold.hit or not warm.hit:
                raise RuntimeError(f"expected a miss and a hit, got {cold.hit} and {warm.hit}")
            file = _read_file(folder, model)
            ttft["cold"].append(cold.ttft)
            ttft["Pion"].append(warm.ttft)
            ttft["mlx-lm file"].append(file["ttft"])
            ready["Pion"].append(warm.ready)
            ready["mlx-lm file"].append(file["ready"])
    first, restored = medians(ttft), medians(ready)
    print(f"{'':<14}{'first token':>14}{'sooner than cold':>19}{'restore alone':>16}")
    for lane, value in first.items():
        alone = f"{restored[lane] * 1e3:.0f} ms" if lane in restored else ""
        print(f"{lane:<14}{value:>12.3f} s{first['cold'] / value:>18.1f}x{alone:>16}")
    return {
        "tokens": TOKENS,
        "ttft_seconds": ttft,
        "restore_seconds": ready,
        "speedup": {lane: first["cold"] / value for lane, value in first.items()},
    }


def _request(server: LocalServer, folder: Path, model: str) -> Outcome:
    return answer_in_process(Job(model, server.port, TOKENS, 1, str(folder / "outcome.json")))


def _read_file(folder: Path, model: str) -> dict[str, float]:
    path = folder / "file.json"
    path.unlink(missing_ok=True)
    file = str(folder / "cache.safetensors")
    run_child(["-c", _FILE_LANE, model, str(TOKENS), file, str(path)])
    document: dict[str, float] = json.loads(path.read_text())
    return document
