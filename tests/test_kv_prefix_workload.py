"""Many queries on a few prefixes, by the commands themselves: V.STOREBATCH and V.FETCH RANGE.

No `PionPromptCache`: REGISTER, one STOREBATCH a layer and side, LOOKUP, one FETCH a layer and side
as float32, `update_and_fetch` into fresh caches, as the design's warm path is drawn.

python tests/test_kv_prefix_workload.py [--start] [--prompts 3] [--queries 5] [--vquant fp16]

Expected: LOOKUP says MISS once a prefix, HIT after that; every first token is vanilla's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if __name__ == "__main__":
    from pion_vllm_mlx.blas import preload_blas

    preload_blas()

pytest.importorskip("mlx.core")

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from evals.findings import Bar, Findings, Table
from evals.serving import run_name, server_port
from evals.texts import read_prompts, read_queries, split_prompt
from pion_vllm_mlx.prefill import prefill
from tests.conftest import RawClient
from tests.design_script import make_parser, port_of, run_script, setting_of
from tests.pion_vllm_mlx.tiny import PREFIX, VOCAB, tiny_llama

if TYPE_CHECKING:
    from tests.conftest import ServerProcess


class RowClient:
    """K and V of plain `KVCache`s as rows `[tokens][heads * D]`, by single commands."""

    def __init__(self, client: RawClient, vquant: str) -> None:
        self.call = client.call
        self.vquant = vquant

    def store(self, ns: str, cache: list[Any]) -> None:
        width = cache[0].keys.shape[1] * cache[0].keys.shape[3]
        assert self.call("KV.PREFIX.REGISTER", ns, width, self.vquant) == "OK"
        for layer, one in enumerate(cache):
            for side, array in (("pk", one.keys), ("pv", one.values)):
                rows = np.array(array[0, :, : one.offset].transpose(1, 0, 2).astype(mx.float32))
                words = f"{ns}_{side}", layer, 0, len(rows), rows.tobytes()
                assert self.call("V.STOREBATCH", *words) == "OK"

    def fetch(self, ns: str, template: list[Any], like: list[Any], tokens: int) -> list[Any]:
        """Fill `template` with the stored rows; `like` says heads, dimensions and dtype."""
        for layer, (one, shape) in enumerate(zip(template, like, strict=True)):
            heads, dtype = shape.keys.shape[1], shape.keys.dtype
            sides = []
            for side in ("pk", "pv"):
                data = self.call("V.FETCH", f"{ns}_{side}", layer, "RANGE", 0, tokens)
                rows = np.frombuffer(data, np.float32).reshape(1, tokens, heads, -1)
                sides.append(mx.array(rows.transpose(0, 2, 1, 3)).astype(dtype))
            one.update_and_fetch(*sides)
        return template


def first_token(model: Any, ids: list[int], cache: list[Any]) -> int:
    return int(np.array(mx.argmax(model(mx.array([ids]), cache=cache)[0, -1])))


def prefill_cache(model: Any, ids: list[int]) -> list[Any]:
    cache: list[Any] = make_prompt_cache(model)
    prefill(model, ids, cache, 512)
    return cache


def test_rows_stored_and_fetched_by_hand_answer_as_vanilla(
    server: Callable[..., ServerProcess],
) -> None:
    model = tiny_llama()
    rows = RowClient(server("--kvcache", "-w", "1").client(), "fp32")
    random = np.random.default_rng(1)
    prefixes = {f"p{n}": [(token + n) % VOCAB for token in PREFIX] for n in range(3)}
    answers = []
    for turn in range(4):
        for ns, prefix in prefixes.items():
            suffix = [int(token) for token in random.integers(0, VOCAB, 3)]
            looked = rows.call("KV.PREFIX.LOOKUP", ns)
            cold = prefill_cache(model, prefix)
            if looked == "MISS":
                rows.store(ns, cold)
                warm = None
            else:
                warm = rows.fetch(ns, make_prompt_cache(model), cold, len(prefix))
            assert looked == ("HIT" if turn else "MISS")
            if warm is not None:
                answers.append(first_token(model, suffix, warm) == first_token(model, suffix, cold))
    assert answers == [True] * 9
    info = rows.call("KV.PREFIX.INFO").decode()
    assert "registered_prefixes:3\r\n" in info


def measure(options: Any) -> Findings:
    """The workload by commands, on the real model."""
    model, tokenizer = setting_of(options).load()
    salt, agreed, seconds = run_name(), 0, {"cold": [0.0], "warm": [0.0]}
    prompts = read_prompts()[: options.prompts]
    with server_port(port_of(options)) as port:
        rows = RowClient(RawClient("127.0.0.1", port), options.vquant)
        stored: dict[str, list[Any]] = {}
        for turn in range(options.queries):
            for prompt in prompts:
                prefix, suffix = split_prompt(
                    tokenizer, prompt.system, read_queries(prompt, options.queries)[turn]
                )
                started = time.perf_counter()
                vanilla = first_token(model, [*prefix, *suffix], make_prompt_cache(model))
                seconds["cold"].append(time.perf_counter() - started)
                ns = f"{salt}-{prompt.name}"
                if rows.call("KV.PREFIX.LOOKUP", ns) == "MISS":
                    stored[ns] = prefill_cache(model, prefix)
                    rows.store(ns, stored[ns])
                started = time.perf_counter()
                cache = rows.fetch(ns, make_prompt_cache(model), stored[ns], len(prefix))
                agreed += first_token(model, suffix, cache) == vanilla
                seconds["warm"].append(time.perf_counter() - started)
    count = options.queries * len(prompts)
    cold, warm = (sum(values) / count for values in seconds.values())
    columns = ("queries", "cold, mean", "warm, mean", "first token as vanilla")
    row = (count, f"{cold * 1e3:.0f} ms", f"{warm * 1e3:.0f} ms", f"{agreed}/{count}")
    return Findings(
        figures={"cold_seconds": cold, "warm_seconds": warm, "agreed": agreed},
        tables=[Table(f"By single commands, {options.vquant}", columns, [row])],
        bars=[Bar("first token as vanilla", agreed, count)],
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--queries", type=int, default=5)
    parser.add_argument("--vquant", default="fp16")
    options = parser.parse_args()
    run_script(lambda: measure(options))


if __name__ == "__main__":
    main()
