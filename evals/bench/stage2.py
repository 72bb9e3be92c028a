"""Time to first token by lane: vanilla, and a prefix attended to in the server or in the process.

The design's workload in small: prompts of about 512 tokens, questions after each, every question
asked once on every lane, in turns. *RESP* and *binary lane*: the process holds no prefix; each
layer asks the server, for the first token and for those after it. *in process*: the prefix is held
here. *a held cache*: a copy of the KVCache that vanilla mlx-lm prefilled, as good as it gets.
*vanilla* prefills prompt and question; it takes the longest and runs for the first question of each
prompt only.

Expected: every first token is the held cache's; 30 calls a forward pass, one a layer; the binary
lane no slower than RESP; in process near the held cache.

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=$(python -m pion_vllm_mlx.blas) python -m evals.bench stage2
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from evals.findings import Bar, Cell, Findings, Table
from evals.serving import SERVER_FLAGS, run_name, server_port
from evals.setting import Setting
from evals.speaking import speak
from evals.texts import fill_system, read_prompts, read_queries, split_prompt
from pion_vllm_mlx import PionPromptCache, make_pion_prompt_cache
from pion_vllm_mlx.mlx_lm_patch import pion_attention_patch

PROMPTS, QUERIES, LENGTH, DECODED = 2, 5, 512, 8
VANILLA, HELD = "vanilla prefill", "a held cache, copied"
RESP, BINARY, IN_PROCESS = "server, RESP", "server, binary lane", "in process"


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
) -> Findings:
    """Measure on the server at `port` or on one of its own: figures of every lane."""
    setting = Setting(model)
    loaded, tokenizer = setting.load()
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
    return _findings(setting.model_name, length, measured, vanilla)


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


def _findings(
    model: str, length: int, measured: Mapping[str, list[_Lane]], vanilla: list[float]
) -> Findings:
    cold = mean(vanilla)
    figures: dict[str, Any] = {VANILLA: {"ttft_mean_ms": cold * 1e3, "requests": len(vanilla)}}
    rows: list[Sequence[Cell]] = [(VANILLA, _ms(cold), *[None] * 6)]
    for lane, parts in measured.items():
        first = [one for part in parts for one in part.first]
        later = [one for part in parts for one in part.later]
        calls = sum(count for part in parts for count, _ in part.called)
        waited = sum(ms for part in parts for _, ms in part.called)
        agreed = sum(part.agreed for part in parts)
        figures[lane] = {
            "ttft_mean_ms": mean(first) * 1e3,
            "ttft_p50_ms": median(first) * 1e3,
            "calls_a_request": calls / len(first),
            "ms_a_call": waited / calls if calls else 0.0,
            "sooner_than_vanilla": cold / mean(first),
            "token_p50_ms": median(later) * 1e3 if later else 0.0,
            "first_tokens_agree": agreed,
            "requests": len(first),
        }
        rows.append(
            (
                *(lane, _ms(mean(first)), _ms(median(first)), f"{calls / len(first):.0f}"),
                f"{waited / calls:.1f} ms" if calls else None,
                *(f"{cold / mean(first):.1f}x", _ms(median(later)) if later else None),
                f"{agreed}/{len(first)}",
            )
        )
    return Findings(
        figures,
        tables=[
            Table(
                "First token by lane",
                (
                    *("lane", "first token, mean", "median", "calls", "a call"),
                    *("sooner than vanilla", "each later token", "first tokens equal"),
                ),
                rows,
                f"Prompts of about {length} tokens, questions after them. A request is three "
                "forward passes: mlx-lm feeds the question, its last token, and computes one token "
                "ahead.",
            )
        ],
        bars=_bars(figures),
        model=model,
    )


def _bars(figures: Mapping[str, Mapping[str, float]]) -> list[Bar]:
    asked = [one for lane, one in figures.items() if lane != VANILLA]
    equal = sum(one["first_tokens_agree"] for one in asked) / sum(one["requests"] for one in asked)
    lanes = figures[RESP]["ms_a_call"] / figures[BINARY]["ms_a_call"]
    held = figures[HELD]["ttft_p50_ms"] / figures[IN_PROCESS]["ttft_p50_ms"]
    return [
        Bar("first tokens equal to the held cache's, of all", equal, 1.0),
        Bar("RESP / binary lane, a call", lanes, 1.0, decides=False),
        Bar("held cache / in process, first token", held, 0.9, decides=False),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"
