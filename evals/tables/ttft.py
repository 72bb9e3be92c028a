"""Time to first token by prefix length: vanilla, cache rebuild, shared prefix.

* A: vanilla mlx-lm prefills prefix and question.
* B: `PionPromptCache` rebuilds the cache: fetched over TCP, borrowed as a file over the local lane,
  or held in the process.
* C: the attention patch: a cache that shares one copy of the prefix, held in the process, or one
  whose prefix stays in the server, which computes the attention to it.

Every lane answers the same question after the same prefix, in turns, and must say A's first token.
B and C open a cache and run the question; the median of the rounds is given. A, which takes the
longest, runs in the first two rounds only.

Expected: B at 1,024 tokens at least 10 times sooner than A; C in process the soonest of all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from evals.findings import NOT_MEASURED, Bar, Findings, Plot, Quoted, Table
from evals.lanes import IN_PROCESS, LANES, RESP, Prefix
from evals.serving import SERVER_FLAGS, run_name, server_port
from evals.setting import Setting
from evals.speaking import speak
from evals.texts import fill_system, read_prompts, split_prompt

LENGTHS: Final = (256, 1024, 2048)
RUNS: Final = 5
COLD_RUNS: Final = 2
REDUCTION: Final = 90.0

VANILLA: Final = "A vanilla"


def run(setting: Setting) -> Findings:
    return measure(setting, setting.take(LENGTHS), setting.count(RUNS, 2))


def measure(
    setting: Setting, lengths: Sequence[int], runs: int, port: int | None = None
) -> Findings:
    """Seconds of every lane at prefixes of about `lengths` tokens, `runs` rounds each.

    On the server at `port`, or on one of its own.
    """
    model, tokenizer = setting.load()
    found: dict[int, dict[str, float]] = {}
    agreed = True
    with server_port(port, *SERVER_FLAGS) as found_port:
        for length in lengths:
            prompt = read_prompts()[0]
            system = fill_system(tokenizer, prompt, length)
            ids, suffix = split_prompt(tokenizer, system, prompt.questions[0])
            prefix = Prefix(model, found_port, tuple(ids), run_name())
            seconds, same = _measure_length(prefix, suffix, tokenizer, runs)
            found[len(ids)] = {lane: median(values) for lane, values in seconds.items()}
            agreed = agreed and same
            _print_line(len(ids), found[len(ids)])
    return _findings(found, agreed, runs)


def _measure_length(
    prefix: Prefix, suffix: list[int], tokenizer: Any, runs: int
) -> tuple[dict[str, list[float]], bool]:
    seconds: dict[str, list[float]] = {VANILLA: []}
    wanted: tuple[int, ...] | None = None
    same = True
    prefix.store()
    for number in range(runs + 1):
        if number < min(COLD_RUNS, runs):
            said = speak(prefix.model, tokenizer, [*prefix.ids, *suffix], 1)
            wanted = said.tokens
            seconds[VANILLA].append(said.first_seconds)
        for lane, make in LANES.items():
            # Made anew for each round: a lane must not keep a patch installed under the others.
            with make(prefix) as open_cache:
                open_cache()
                started = time.perf_counter()
                said = speak(prefix.model, tokenizer, suffix, 1, open_cache(), started)
            same = same and said.tokens == wanted
            if number:  # the first round warms up
                seconds.setdefault(lane, []).append(said.first_seconds)
    return seconds, same


def _findings(found: dict[int, dict[str, float]], agreed: bool, runs: int) -> Findings:
    lanes = [VANILLA, *LANES]
    rows = []
    for length, seconds in found.items():
        for lane in lanes:
            sooner = seconds[VANILLA] / seconds[lane]
            rows.append((f"{length:,}", lane, f"{seconds[lane] * 1e3:.1f} ms", f"{sooner:.2f}x"))
    reduction = {
        length: 100 * (1 - seconds[RESP] / seconds[VANILLA]) for length, seconds in found.items()
    }
    near = next((value for length, value in reduction.items() if abs(length - 1024) < 16), None)
    return Findings(
        figures={
            "runs": runs,
            "seconds": {str(length): seconds for length, seconds in found.items()},
            "reduction_percent": {str(length): value for length, value in reduction.items()},
            "first_token_agrees": agreed,
        },
        tables=[
            Table(
                f"Time to first token, median of {runs} rounds",
                ("prefix, tokens", "lane", "first token", "sooner than A"),
                rows,
            )
        ],
        plots=[
            Plot(
                "lanes",
                "Time to first token by prefix length",
                "tokens in the prefix",
                "milliseconds (logarithmic)",
                {
                    lane: [(length, seconds[lane] * 1e3) for length, seconds in found.items()]
                    for lane in lanes
                },
                log=True,
            )
        ],
        bars=[
            Bar("every lane says A's first token", float(agreed), 1.0),
            Bar("reduction of TTFT at 1,024 tokens, RESP, %", near, REDUCTION, decides=False),
        ],
        quoted=_quoted(found),
    )


#: Model and prompt tokens, then A, B and C in ms, from the design document.
_DESIGN: Final = (
    ("Llama-3.2-1B-4bit", 256, 185.8, 11.5, 23.8),
    ("Llama-3.2-1B-4bit", 1024, 742.7, 35.1, 26.0),
    ("Llama-3.2-1B-4bit", 2048, 1530.0, 83.8, 30.2),
    ("Llama-3.2-3B-4bit", 1024, 1951.0, 136.7, 53.7),
)


def _quoted(found: dict[int, dict[str, float]]) -> list[Quoted]:
    lines = []
    for model, tokens, a, b, c in _DESIGN:
        near = [length for length in found if abs(length - tokens) < 16]
        ours = f"{NOT_MEASURED} (no such model here)"
        if near and "1B" in model:
            seconds = found[near[0]]
            ways = (VANILLA, RESP, IN_PROCESS)
            ours = "the small model: " + ", ".join(f"{seconds[way] * 1e3:.1f} ms" for way in ways)
        elif "1B" in model:
            ours = f"{NOT_MEASURED} in this run"
        lines.append(Quoted(f"{model}, {tokens} tokens: A, B, C", f"{a} ms, {b} ms, {c} ms", ours))
    return lines


def _print_line(length: int, seconds: Mapping[str, float]) -> None:
    figures = ", ".join(f"{lane} {value * 1e3:.1f} ms" for lane, value in seconds.items())
    print(f"{length:>6,} tokens: {figures}", flush=True)
