"""One process of the demo: load the model, get the prefix, answer the question, write the figures.

``python -m pion_vllm_mlx.demo_request JOB.json``. Progress goes to stdout, a JSON array a line; the
outcome goes to the file the job names. That file is what counts: MLX's CPU build may abort while
the interpreter exits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

QUESTION = "Which two boats are there?"


@dataclass(frozen=True, slots=True)
class Job:
    """What the demo asks of a process."""

    model: str
    port: int
    prefix_tokens: int
    new_tokens: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a process measured. Times in seconds, from the request on.

    `ready` is when the cache was there, `ttft` when the first token was; `store` and `fetch` are
    the parts of `ready` spent with the server.
    """

    hit: bool
    prefix_tokens: int
    ready: float
    ttft: float
    store: float
    fetch: float
    tokens: list[int]
    text: str


class NoOutcome(Exception):
    """The process has no figures; the message says why."""


def read_outcome(path: Path) -> Outcome:
    """What the process wrote to `path`. Raises NoOutcome if it failed or wrote nothing whole."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise NoOutcome("the process ended without a result") from None
    if "error" in document:
        raise NoOutcome(document["error"])
    return Outcome(**document)


def make_prompt(tokenizer: Any, prefix_tokens: int) -> tuple[list[int], list[int]]:
    """The handbook followed by a question: the first `prefix_tokens` ids, and the rest."""
    handbook = resources.files("pion_vllm_mlx").joinpath("handbook.txt").read_text("utf-8")

    def render(text: str) -> list[int]:
        ids: list[int]
        if getattr(tokenizer, "chat_template", None):
            message = {"role": "user", "content": text}
            ids = tokenizer.apply_chat_template([message], add_generation_prompt=True)
        else:
            ids = tokenizer.encode(text)
        return ids

    # What the template puts in front of any text, so that the prefix ends where the handbook does.
    pairs = zip(render("A"), render("B"), strict=False)
    head = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
    room = max(prefix_tokens - head, 1)
    body: list[int] = tokenizer.encode(handbook, add_special_tokens=False)
    # A longer prefix than the handbook gets several copies of it.
    body = (body * (room // len(body) + 1))[:room]
    ids = render(f"{tokenizer.decode(body)}\n\n{QUESTION}")
    return ids[:prefix_tokens], ids[prefix_tokens:]


def namespace_of(job: Job) -> str:
    """Where a process with this job stores the prefix, and where it looks for it."""
    from pion_vllm_mlx.namespace import make_namespace

    return make_namespace("pion-demo", job.model, str(job.prefix_tokens))


def measure(job: Job) -> Outcome:
    """Load the model, then answer the question once, timed."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    from pion_vllm_mlx import PionPromptCache

    model, tokenizer = load(job.model)[:2]
    prefix, suffix = make_prompt(tokenizer, job.prefix_tokens)
    namespace = namespace_of(job)
    with PionPromptCache(model, port=job.port) as prompt_cache:
        _report("loaded")
        started = time.perf_counter()
        cache = prompt_cache.get_or_prefill(
            prefix, namespace, progress=lambda done, total: _report("prefill", done, total)
        )
        ready = time.perf_counter() - started
        tokens: list[int] = []
        ttft = 0.0
        steps = generate_step(
            mx.array(suffix), model, max_tokens=job.new_tokens, prompt_cache=cache
        )
        for token, _ in steps:
            if not tokens:
                ttft = time.perf_counter() - started
            tokens.append(int(token))
            _report("token", len(tokens), job.new_tokens)
        prompt_cache.flush()
        stats = prompt_cache.stats()
    answer = tokens[: next((i for i, t in enumerate(tokens) if t in tokenizer.eos_token_ids), None)]
    return Outcome(
        hit=bool(stats["hits"]),
        prefix_tokens=len(prefix),
        ready=ready,
        ttft=ttft,
        store=stats["store_ms_total"] / 1000,
        fetch=stats["fetch_ms_total"] / 1000,
        tokens=tokens,
        text=tokenizer.decode(answer).strip(),
    )


def main() -> int:
    """Run the job in the file named on the command line."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    document: dict[str, Any]
    try:
        document = asdict(measure(job))
    except Exception as error:
        document = {"error": f"{type(error).__name__}: {error}"}
    outcome = Path(job.outcome)
    partial = outcome.with_suffix(".partial")
    partial.write_text(json.dumps(document), encoding="utf-8")
    partial.rename(outcome)
    # Nothing is left to do, and an orderly exit is where MLX's CPU build may abort.
    sys.stdout.flush()
    os._exit(0)


def _report(*words: str | int) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
