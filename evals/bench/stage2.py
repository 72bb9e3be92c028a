"""Time to first token by lane: vanilla, and a prefix attended to in the server or in the process.

The design's workload in small: prompts of about 512 tokens, questions after each, every question
asked once on every lane, in turns. *RESP* and *binary lane*: the process holds no prefix; each
layer asks the server, for the first token and for those after it. *in process*: the prefix is held
here. *held cache*: a copy of the KVCache that vanilla mlx-lm prefilled, as good as it gets.
*vanilla* prefills prompt and question; it takes the longest and runs for the first question of each
prompt only.

Expected: every first token is the held cache's; 30 calls a forward pass, one a layer; the binary
lane no slower than RESP; in process near the held cache.

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=$(python -m pion_vllm_mlx.blas) python -m evals.bench stage2
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from evals.serving import SERVER_FLAGS, run_name, server_port
from evals.setting import Setting
from evals.speaking import speak
from evals.texts import fill_system, read_prompts, read_queries, split_prompt
from pion_vllm_mlx import PionPromptCache, make_pion_prompt_cache
from pion_vllm_mlx.mlx_lm_patch import pion_attention_patch

PROMPTS, QUERIES, LENGTH, DECODED = 2, 5, 512, 8
VANILLA, HELD = "vanilla", "held cache (upper bound)"
RESP, BINARY, IN_PROCESS = "RESP", "binary lane", "in process"


@dataclass
class _Lane:
    """One lane's requests: seconds to the first token and for each later one, calls, agreement."""

    open: Callable[[], list[Any]]
    calls: Callable[[], tuple[int, float]]
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    called: list[tuple[int, float]] = field(default_factory=list)
    agreed: int = 0


def run(
    prompts: int = PROMPTS,
    queries: int = QUERIES,
    length: int = LENGTH,
    model: str | None = None,
    port: int | None = None,
) -> Mapping[str, Any]:
    """Measure on the server at `port` or on one of its own, print the table, return the figures."""
    loaded, tokenizer = Setting(model).load()
    measured: dict[str, list[_Lane]] = {}
    vanilla: list[float] = []
    with server_port(port, *SERVER_FLAGS) as found, pion_attention_patch():
        for prompt in read_prompts()[:prompts]:
            system = fill_system(tokenizer, prompt, length)
            name = f"{run_name()}-{prompt.name}"
            ids, _ = split_prompt(tokenizer, system, prompt.questions[0])
            with ExitStack() as stack:
                lanes = _open_lanes(stack, loaded, found, name, ids)
                for number, question in enumerate(read_queries(prompt, queries)):
                    _, suffix = split_prompt(tokenizer, system, question)
                    if number == 0:
                        said = speak(loaded, tokenizer, [*ids, *suffix], 1)
                        vanilla.append(said.first_seconds)
                    _ask_all(lanes, loaded, tokenizer, suffix)
            for lane, one in lanes.items():
                measured.setdefault(lane, []).append(one)
    return _summarise(measured, vanilla)


def _open_lanes(
    stack: ExitStack, model: Any, port: int, name: str, ids: list[int]
) -> dict[str, _Lane]:
    """Store the prefix once, then every lane on it; the first opening of each is not measured."""

    def client(**settings: Any) -> PionPromptCache:
        return stack.enter_context(
            PionPromptCache(model, port=port, stage2=True, timeout=5, **settings)
        )

    here = client(store="sync")
    held = here.get_or_prefill(ids, name)

    def open_on(pc: PionPromptCache) -> Callable[[], list[Any]]:
        return lambda: make_pion_prompt_cache(model, name, pc, len(ids))

    def calls_of(pc: PionPromptCache) -> Callable[[], tuple[int, float]]:
        def calls() -> tuple[int, float]:
            stats = pc.stats()
            return stats["attend_binary"] + stats["attend_resp"], stats["attend_ms_total"]

        return calls

    far = {RESP: client(held_bytes=0, binary_port=0), BINARY: client(held_bytes=0)}
    lanes = {lane: _Lane(open_on(pc), calls_of(pc)) for lane, pc in far.items()}
    lanes[IN_PROCESS] = _Lane(open_on(here), calls_of(here))
    lanes[HELD] = _Lane(lambda: copy.deepcopy(held), lambda: (0, 0.0))
    for lane in lanes.values():
        lane.open()
    return lanes


def _ask_all(lanes: dict[str, _Lane], model: Any, tokenizer: Any, suffix: list[int]) -> None:
    wanted: tuple[int, ...] | None = None
    # The held cache answers first: it is what the others are compared with.
    for lane in reversed(lanes.values()):
        before = lane.calls()
        started = time.perf_counter()
        said = speak(model, tokenizer, suffix, 1, lane.open(), started)
        after = lane.calls()
        lane.first.append(said.first_seconds)
        lane.called.append((after[0] - before[0], after[1] - before[1]))
        wanted = said.tokens if wanted is None else wanted
        lane.agreed += said.tokens == wanted
        more = speak(model, tokenizer, suffix, DECODED, lane.open())
        if len(more.tokens) > 1:
            lane.later.append((more.seconds - more.first_seconds) / (len(more.tokens) - 1))


def _summarise(measured: dict[str, list[_Lane]], vanilla: list[float]) -> dict[str, Any]:
    cold = mean(vanilla)
    figures: dict[str, Any] = {VANILLA: {"ttft_mean_ms": cold * 1e3, "requests": len(vanilla)}}
    print(f"{'lane':<26}{'TTFT mean':>11}{'p50':>10}{'calls':>7}{'ms each':>9}", end="")
    print(f"{'vs vanilla':>12}{'a token':>10}{'first tokens':>14}")
    print(f"{VANILLA:<26}{cold * 1e3:>8.1f} ms")
    for lane, parts in measured.items():
        first = [one for part in parts for one in part.first]
        later = [one for part in parts for one in part.later]
        calls = sum(count for part in parts for count, _ in part.called)
        waited = sum(ms for part in parts for _, ms in part.called)
        figures[lane] = one = {
            "ttft_mean_ms": mean(first) * 1e3,
            "ttft_p50_ms": median(first) * 1e3,
            "calls_a_request": calls / len(first),
            "ms_a_call": waited / calls if calls else 0.0,
            "sooner_than_vanilla": cold / mean(first),
            "token_p50_ms": median(later) * 1e3 if later else 0.0,
            "first_tokens_agree": sum(part.agreed for part in parts),
            "requests": len(first),
        }
        print(
            f"{lane:<26}{one['ttft_mean_ms']:>8.1f} ms{one['ttft_p50_ms']:>7.1f} ms"
            f"{one['calls_a_request']:>7.0f}{one['ms_a_call']:>9.2f}"
            f"{one['sooner_than_vanilla']:>11.2f}x{one['token_p50_ms']:>7.1f} ms"
            f"{one['first_tokens_agree']:>10}/{one['requests']}",
            flush=True,
        )
    return figures
