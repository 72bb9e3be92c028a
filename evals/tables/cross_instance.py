"""One process stores, another answers: two interpreters, two sockets, two model objects.

Process A prefills a prefix, stores it and answers; then the server says HIT for the namespace,
before process B has done any work; B, a fresh interpreter, fetches the prefix and answers. The two
50-token greedy answers are compared token by token and by BLEU. The server is then killed with
SIGKILL and started again, and a third process answers.

Expected: HIT, BLEU 1.0000, the very same tokens, after the restart too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evals.findings import Bar, Findings, Quoted, Table
from evals.serving import local_server
from evals.setting import Setting
from evals.speaking import text_bleu
from pion_vllm_mlx.blas import child_environment
from pion_vllm_mlx.demo_request import Job, Outcome, namespace_of, read_outcome
from pion_vllm_mlx.local_server import LocalServer

PREFIX_TOKENS = 1024
TOKENS = 50


def run(setting: Setting) -> Findings:
    return measure(setting, setting.count(PREFIX_TOKENS, 128), setting.count(TOKENS, 12))


def measure(setting: Setting, prefix_tokens: int, tokens: int) -> Findings:
    """The eval for a prefix length and a number of answered tokens."""
    with local_server() as server, tempfile.TemporaryDirectory(prefix="pion-eval-") as name:
        job = Job(setting.model_path, server.port, prefix_tokens, tokens, f"{name}/outcome.json")
        first = answer_in_process(job)
        seen = _lookup(server, job)
        second = answer_in_process(job)
        server.kill()
        restart = server.start()
        third = answer_in_process(job)
    return _findings(first, second, third, seen, restart)


def answer_in_process(job: Job) -> Outcome:
    """Run the job in an interpreter of its own; raises NoOutcome if it wrote none."""
    path = Path(job.outcome)
    path.unlink(missing_ok=True)
    job_file = path.with_suffix(".job")
    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    run_child(["-m", "pion_vllm_mlx.demo_request", str(job_file)])
    return read_outcome(path)


def run_child(arguments: list[str]) -> None:
    """Run Python with a real BLAS. Its exit status says nothing: MLX's CPU build may abort."""
    subprocess.run(
        [sys.executable, *arguments],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=False,
    )


def _lookup(server: LocalServer, job: Job) -> str:
    reply: Any = server.command("KV.PREFIX.LOOKUP", namespace_of(job))
    return reply.decode() if isinstance(reply, bytes) else str(reply)


def _findings(
    first: Outcome, second: Outcome, third: Outcome, seen: str, restart: float
) -> Findings:
    cold = first.ttft
    rows, figures = [], []
    for who, one in (("A stores", first), ("B fetches", second), ("C after SIGKILL", third)):
        bleu = text_bleu(one.text, first.text)
        same = one.tokens == first.tokens
        figures.append(
            {"hit": one.hit, "ttft": one.ttft, "fetch": one.fetch, "bleu": bleu, "same": same}
        )
        rows.append(
            (
                who,
                "hit" if one.hit else "miss",
                f"{one.ttft:.3f} s",
                f"{cold / one.ttft:.1f}x",
                f"{bleu:.4f}",
                f"{sum(a == b for a, b in zip(one.tokens, first.tokens, strict=True))}"
                f"/{len(first.tokens)}",
            )
        )
    same = all(figure["same"] for figure in figures)
    hits = (first.hit, second.hit, third.hit) == (False, True, True) and seen == "HIT"
    return Findings(
        figures={
            "prefix_tokens": first.prefix_tokens,
            "tokens": len(first.tokens),
            "lookup_before_any_work": seen,
            "restart_seconds": restart,
            "a": figures[0],
            "b": figures[1],
            "c": figures[2],
            "speedup_b": cold / second.ttft,
            "speedup_c": cold / third.ttft,
        },
        tables=[
            Table(
                f"A prefix of {first.prefix_tokens:,} tokens, {len(first.tokens)} greedy tokens",
                ("process", "prefix", "first token", "sooner than A", "BLEU to A", "tokens as A"),
                rows,
            )
        ],
        bars=[
            Bar("HIT before any local work, and a miss and two hits", float(hits), 1.0),
            Bar("BLEU between processes", min(f["bleu"] for f in figures), 1.0),
            Bar("tokens identical", float(same), 1.0),
        ],
        quoted=[
            Quoted(
                "second instance, 50 greedy tokens",
                "HIT before any local work, BLEU 1.0000",
                f"{seen} before any local work, BLEU {figures[1]['bleu']:.4f}",
            )
        ],
    )
