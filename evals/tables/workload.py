"""The headline workload: five system prompts, thirty queries each, through `PionPromptCache`.

Every query first comes to vanilla mlx-lm, which prefills system prompt and query (for ten queries a
prompt), and then to Pion, which prefills a system prompt once and fetches it after that, over TCP,
nothing being held in process. Queries of the five prompts take turns.

* cold, warm: mean time to first token of vanilla, and of Pion's hits.
* throughput: all queries by vanilla, at its mean, against all by Pion, the five misses included.
* first token: of the queries vanilla answered, those whose first token Pion says too.

Expected: hit rate 96.7% (145 of 150), first token 50/50, 90% or more saved at 1,024 tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any, Final

from evals.findings import NOT_MEASURED, Bar, Findings, Plot, Quoted, Table
from evals.lanes import over_tcp
from evals.serving import run_name, server_port
from evals.setting import Setting
from evals.speaking import speak
from evals.texts import fill_system, read_prompts, read_queries, split_prompt
from pion_vllm_mlx import PionPromptCache

PROMPTS: Final = 5
QUERIES: Final = 30
COMPARED: Final = 10
PREFIX_TOKENS: Final = 1024
REDUCTION: Final = 90.0
#: From this fraction on, only the number of vanilla's answers is less than in the full run.
_WHOLE: Final = 0.2


@dataclass(frozen=True, slots=True)
class Workload:
    """How much of what: compared is the number of queries a prompt that vanilla answers too."""

    prompts: int = PROMPTS
    queries: int = QUERIES
    compared: int = COMPARED
    prefix_tokens: int = PREFIX_TOKENS
    vquant: str = "auto"
    boundary_protect: int = 0
    #: The system prompt this many times over, instead of a prefix of `prefix_tokens`.
    repeats: int = 0


@dataclass(slots=True)
class _Times:
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    misses: list[float] = field(default_factory=list)
    agreed: int = 0


def run(setting: Setting) -> Findings:
    compared = setting.count(COMPARED)
    if setting.fraction >= _WHOLE:
        # Vanilla takes nearly all of the time: fewer of its answers, the workload as it is.
        return measure(setting, Workload(compared=compared))
    queries = setting.count(QUERIES, 4)
    return measure(setting, Workload(2, queries, compared, prefix_tokens=256))


def measure(setting: Setting, workload: Workload, port: int | None = None) -> Findings:
    """Run the workload on the server at `port`, or on one of its own."""
    model, tokenizer = setting.load()
    prompts = read_prompts()[: workload.prompts]
    if workload.repeats:
        systems = [" ".join([one.system] * workload.repeats) for one in prompts]
        longest = max(len(split_prompt(tokenizer, system, "A")[0]) for system in systems)
        workload = replace(workload, prefix_tokens=longest)
    else:
        systems = [fill_system(tokenizer, one, workload.prefix_tokens) for one in prompts]
    queries = [read_queries(one, workload.queries) for one in prompts]
    times, salt = _Times(), run_name()
    with (
        over_tcp(),
        server_port(port) as found,
        PionPromptCache(
            model,
            vquant=workload.vquant,
            boundary_protect=workload.boundary_protect,
            port=found,
            held_bytes=0,
            timeout=5,
        ) as pc,
    ):
        for turn in range(workload.queries):
            for number, system in enumerate(systems):
                split = split_prompt(tokenizer, system, queries[number][turn])
                compared = turn < workload.compared
                _ask(model, tokenizer, pc, split, times, compared, salt)
        stats = pc.stats()
    return _findings(workload, times, stats)


def _ask(
    model: Any,
    tokenizer: Any,
    pc: PionPromptCache,
    split: tuple[list[int], list[int]],
    times: _Times,
    compared: bool,
    salt: str,
) -> None:
    prefix, suffix = split
    vanilla = speak(model, tokenizer, [*prefix, *suffix], 1) if compared else None
    hits = pc.stats()["hits"]
    started = time.perf_counter()
    name = PionPromptCache.make_namespace(salt, tokenizer.decode(prefix))
    cache = pc.get_or_prefill(prefix, name)
    said = speak(model, tokenizer, suffix, 1, cache, started)
    (times.warm if pc.stats()["hits"] > hits else times.misses).append(said.first_seconds)
    pc.flush(60)  # prefixes are stored behind the caller; the next request is another one's
    if vanilla is not None:
        times.cold.append(vanilla.first_seconds)
        times.agreed += said.tokens == vanilla.tokens


def _findings(workload: Workload, times: _Times, stats: dict[str, Any]) -> Findings:
    count = workload.prompts * workload.queries
    cold, warm = mean(times.cold), mean(times.warm)
    reduction = 100 * (1 - warm / cold)
    throughput = cold * count / (sum(times.warm) + sum(times.misses))
    hit_rate = 100 * stats["hits"] / count
    # What one miss a prompt leaves: 96.7% of 5 x 30.
    possible = 100 * (1 - 1 / workload.queries)
    compared = len(times.cold)
    figures = {
        "prompts": workload.prompts,
        "queries": workload.queries,
        "prefix_tokens": workload.prefix_tokens,
        "cold_seconds": cold,
        "warm_seconds": warm,
        "warm_median_seconds": median(times.warm),
        "reduction_percent": reduction,
        "speedup": cold / warm,
        "throughput": throughput,
        "hit_rate_percent": hit_rate,
        "miss_seconds": mean(times.misses),
        "first_token_agrees": times.agreed,
        "compared": compared,
        "fetch_ms_mean": stats["fetch_ms_total"] / max(stats["hits"], 1),
    }
    ours = (
        f"{cold * 1e3:.0f} ms, {warm * 1e3:.0f} ms, {reduction:.1f}% ({cold / warm:.2f}x),"
        f" {throughput:.2f}x, {times.agreed}/{compared}"
    )
    print(ours, flush=True)
    return Findings(
        figures=figures,
        tables=[_table(workload, figures)],
        plots=[
            Plot(
                "ttft",
                f"{workload.prompts} prompts x {workload.queries} queries: time to first token",
                f"prefix of about {workload.prefix_tokens:,} tokens",
                "milliseconds",
                {
                    "mean": [
                        ("vanilla", cold * 1e3),
                        ("Pion, hit", warm * 1e3),
                        ("Pion, miss", mean(times.misses) * 1e3),
                    ]
                },
            )
        ],
        bars=[
            Bar("hit rate, %", round(hit_rate, 6), round(possible, 6)),
            Bar("first token as vanilla", times.agreed, compared),
            Bar(
                "reduction of TTFT at 1,024 tokens, %",
                reduction if workload.prefix_tokens == PREFIX_TOKENS else None,
                REDUCTION,
                decides=False,
            ),
        ],
        quoted=[
            Quoted(
                "Llama-3.2-1B-Instruct-4bit: cold, warm, reduction, throughput, first token",
                "846 ms, 91 ms, 89.2% (9.26x), 9.20x, 50/50",
                f"the small model: {ours}",
            ),
            Quoted(
                "Llama-3.2-3B-Instruct-4bit: the same",
                "2075 ms, 278 ms, 86.6% (7.47x), 7.46x, 50/50",
                NOT_MEASURED + " (no such model here)",
            ),
        ],
    )


def _table(workload: Workload, figures: dict[str, Any]) -> Table:
    rows = [
        ("prefix, tokens", f"{workload.prefix_tokens:,}"),
        ("cold TTFT (vanilla), mean", f"{figures['cold_seconds'] * 1e3:.0f} ms"),
        ("warm TTFT (hits), mean", f"{figures['warm_seconds'] * 1e3:.0f} ms"),
        ("TTFT of misses, mean", f"{figures['miss_seconds'] * 1e3:.0f} ms"),
        ("reduction", f"{figures['reduction_percent']:.1f}% ({figures['speedup']:.2f}x)"),
        ("throughput", f"{figures['throughput']:.2f}x"),
        ("hit rate", f"{figures['hit_rate_percent']:.1f}%"),
        ("first token as vanilla", f"{figures['first_token_agrees']}/{figures['compared']}"),
        ("a fetch, mean", f"{figures['fetch_ms_mean']:.0f} ms"),
    ]
    title = f"{workload.prompts} prompts x {workload.queries} queries, vquant={workload.vquant}"
    note = (
        f"Vanilla mlx-lm answered {figures['compared']} of the"
        f" {workload.prompts * workload.queries} queries, too. Throughput: all of them at its mean,"
        " against Pion's hits and misses. Prefixes come over TCP, nothing is held in the process."
    )
    return Table(title, ("", "measured"), rows, note)
