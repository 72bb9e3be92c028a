"""A conversation of several segments, restored by its tokens: lent files against TCP.

Expected: files at most 0.8 times TCP, both for finding and restoring alone and with the first
append of one token; beside them mlx-lm's file of the same cache, which needs to be told its name.
A random model of SmolLM2-135M's cache shapes, 30 plain layers, with few other weights; a turn is a
quarter of the conversation. Everybody takes turns in one process, in another order each round.
Ratios are medians of the rounds' own ratios with their 95% interval.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models import llama

from evals.bench.restore_local import take_turns
from evals.bench.restore_tcp import PLAIN, VOCAB, append_one
from evals.rounds import medians, ratio_of
from pion_vllm_mlx.lineage import Lineage
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.transport.endpoint import Endpoint
from pion_vllm_mlx.transport.local import OFF, LocalLane

TOKENS: Final = (1024, 2048)
ROUNDS: Final = 15
TURNS: Final = 4
_stock: Any = mlx_lm_caches  # mlx-lm is not typed
Ways = Mapping[str, Callable[[], list[Any]]]


def run(lengths: tuple[int, ...] = TOKENS, rounds: int = ROUNDS) -> Mapping[str, Any]:
    """Seconds of every round by conversation length and way, and the ratios of files to TCP."""
    model = llama.Model(llama.ModelArgs(**PLAIN))
    model.eval()
    mx.eval(model.parameters())
    print(f"{'tokens':<8}{'':<18}{'files':>12}{'TCP':>12}{'mlx-lm':>12}{'files / TCP':>24}")
    return {str(tokens): _measure(model, tokens, rounds) for tokens in lengths}


def _measure(model: Any, tokens: int, rounds: int) -> Mapping[str, Any]:
    ids = np.random.default_rng(tokens).integers(0, VOCAB, tokens).tolist()
    with tempfile.TemporaryDirectory(prefix="pion-bench-") as folder:
        file = str(Path(folder) / "cache.safetensors")
        with LocalServer(Path(folder) / "data", Path(folder) / "server.log") as server:
            lane = Endpoint("127.0.0.1", server.port, connect_timeout=10)
            index = Lineage(model, lane, local=LocalLane.beside(lane, 10), timeout=10)
            _stock.save_prompt_cache(file, _talk(index, model, ids))
            ways: Ways = {
                "files": lambda: _restored(index, ids),
                "TCP": lambda: _over_tcp(index, ids),
                "mlx-lm": lambda: list(_stock.load_prompt_cache(file)),
            }
            _await_files(index, ids)
            if len({append_one(model, way()) for way in ways.values()}) != 1:
                raise RuntimeError("the ways do not continue alike")
            before = index.stats()["hits_local"]
            seconds = take_turns(model, ways, rounds)
            if index.stats()["hits_local"] - before != 2 * (rounds + 1):
                raise RuntimeError(f"not everything came from files: {index.stats()}")
            index.close()
    return {what: _tell(tokens, what, times) for what, times in seconds.items()}


def _talk(index: Lineage, model: Any, ids: list[int]) -> list[Any]:
    """Compute and store the conversation turn by turn; its cache."""
    cache: list[Any] = _stock.make_prompt_cache(model)
    turn = len(ids) // TURNS
    for start in range(0, len(ids), turn):
        prefill(model, ids[start : start + turn], cache, turn)
        capture = index.capture(ids[: start + turn], cache)
        if capture is None or index.store(capture) != "stored":
            raise RuntimeError("a turn was not stored")
    return cache


def _restored(index: Lineage, ids: list[int]) -> list[Any]:
    cache, tokens = index.fetch(ids)
    if cache is None or tokens != len(ids):
        raise RuntimeError(f"{tokens} tokens were restored: {index.stats()}")
    return cache


def _over_tcp(index: Lineage, ids: list[int]) -> list[Any]:
    os.environ[OFF] = "1"
    try:
        return _restored(index, ids)
    finally:
        os.environ[OFF] = "0"


def _await_files(index: Lineage, ids: list[int]) -> None:
    """Until the server has made the files, a restore comes over TCP."""
    ends = time.monotonic() + 30
    while not index.stats()["hits_local"]:
        if time.monotonic() > ends:
            raise RuntimeError(f"no files were lent: {index.stats()}")
        _restored(index, ids)
        time.sleep(0.1)


def _tell(tokens: int, what: str, seconds: dict[str, list[float]]) -> Mapping[str, Any]:
    middle = medians(seconds)
    ratio = ratio_of(seconds["files"], seconds["TCP"])
    cells = "".join(f"{middle[way] * 1e3:>9.1f} ms" for way in ("files", "TCP", "mlx-lm"))
    interval = f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    print(f"{tokens:<8}{what:<18}{cells}{interval:>24}", flush=True)
    to_file = ratio_of(seconds["files"], seconds["mlx-lm"])
    return {"seconds": seconds, "files_to_tcp": ratio, "files_to_mlx_lm": to_file}


if __name__ == "__main__":
    run()
