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
from statistics import median
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
ROUNDS = 3
PROCESSES = ("A stores", "B fetches", "C after SIGKILL")


def run(setting: Setting) -> Findings:
    rounds = ROUNDS if setting.fraction == 1 else 1
    return measure(setting, setting.count(PREFIX_TOKENS, 128), setting.count(TOKENS, 12), rounds)


def measure(setting: Setting, prefix_tokens: int, tokens: int, rounds: int = 1) -> Findings:
    """The eval for a prefix length and a number of answered tokens; each round a fresh server."""
    seen, restarts = [], []
    answers: dict[str, list[Outcome]] = {who: [] for who in PROCESSES}
    for _ in range(rounds):
        with local_server() as server, tempfile.TemporaryDirectory(prefix="pion-eval-") as name:
            job = Job(setting.model_path, server.port, prefix_tokens, tokens, f"{name}/out.json")
            answers["A stores"].append(answer_in_process(job))
            seen.append(_lookup(server, job))
            answers["B fetches"].append(answer_in_process(job))
            server.kill()
            restarts.append(server.start())
            answers["C after SIGKILL"].append(answer_in_process(job))
        print(
            ", ".join(f"{who} {said[-1].ttft:.3f} s" for who, said in answers.items()), flush=True
        )
    return _findings(answers, seen, median(restarts))


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


def _findings(answers: dict[str, list[Outcome]], seen: list[str], restart: float) -> Findings:
    first = answers["A stores"][0]
    ttft = {who: median(one.ttft for one in said) for who, said in answers.items()}
    cold = ttft["A stores"]
    rows, figures = [], {}
    for who, said in answers.items():
        bleu = min(text_bleu(one.text, first.text) for one in said)
        agree = min(_agreeing(one, first) for one in said)
        figures[who[0].lower()] = {
            "hits": sum(one.hit for one in said),
            "ttft": ttft[who],
            "fetch": median(one.fetch for one in said),
            "bleu": bleu,
            "agree": agree,
            "sooner": cold / ttft[who],
        }
        rows.append(
            (
                who,
                "hit" if all(one.hit for one in said) else "miss",
                f"{ttft[who]:.3f} s",
                f"{cold / ttft[who]:.1f}x",
                f"{bleu:.4f}",
                f"{agree}/{len(first.tokens)}",
            )
        )
    rounds = len(seen)
    as_promised = {"a": 0, "b": rounds, "c": rounds}
    hits = all(figures[who]["hits"] == wanted for who, wanted in as_promised.items())
    return Findings(
        figures={
            "prefix_tokens": first.prefix_tokens,
            "tokens": len(first.tokens),
            "rounds": rounds,
            "lookups_before_any_work": seen,
            "restart_seconds": restart,
            **figures,
        },
        tables=[
            Table(
                f"A prefix of {first.prefix_tokens:,} tokens, {len(first.tokens)} greedy tokens",
                ("process", "prefix", "first token", "sooner than A", "BLEU to A", "tokens as A"),
                rows,
                "" if rounds == 1 else f"Median of {rounds} rounds, agreement the least of them.",
            )
        ],
        bars=[
            Bar(
                "HIT before any local work, and a miss and two hits",
                float(_all_hit(seen) and hits),
                1.0,
            ),
            Bar("BLEU between processes", min(one["bleu"] for one in figures.values()), 1.0),
            Bar(
                "tokens identical, least",
                min(one["agree"] for one in figures.values()),
                len(first.tokens),
            ),
        ],
        quoted=[
            Quoted(
                "second instance, 50 greedy tokens",
                "HIT before any local work, BLEU 1.0000",
                f"{', '.join(sorted(set(seen)))} before any local work,"
                f" BLEU {figures['b']['bleu']:.4f}",
            )
        ],
    )


def _all_hit(seen: list[str]) -> bool:
    return all(answer == "HIT" for answer in seen)


def _agreeing(one: Outcome, other: Outcome) -> int:
    return sum(a == b for a, b in zip(one.tokens, other.tokens, strict=True))
