"""vllm-mlx 0.6.0 with our prefix cache, in a virtual environment of its own, on the CPU.

    python tests/interop/vllm_mlx_smoke.py [--venvs DIR]

vllm-mlx wants an mlx-lm older than the project's, and would bring gigabytes of CUDA: it is
installed without its dependencies, then what its text scheduler and server import. Its text
scheduler answers prompts to tiny random models: with no cache at all, patched with Pion behind it,
in a fresh process on the same store, and with the pion-server killed. Every answer has to be the
cold one, and the cached tokens have to be right. Then its HTTP server is started by ``pion-vllm-mlx
serve --engine vllm-mlx``, killed and started again. Exits 0 if everything passed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pion_vllm_mlx.local_server import LocalServer

ROOT = Path(__file__).parents[2]
WORKER = "tests.pion_patches.vllm_mlx_worker"
FAMILIES = ("llama", "qwen3_5", "gemma3_text")
#: Recurrent and windowed layers are resumed at multiples of this many tokens after a restart.
BLOCK = 64
STOCK = ["vllm-mlx==0.6.0", "mlx-vlm==0.7.10"]
WANTED = ["mlx-lm==0.31.3", "mlx[cpu]==0.31.2" if sys.platform == "linux" else "mlx==0.31.2"]
#: What vllm-mlx's scheduler, generators and HTTP server import beside those.
IMPORTED = ["psutil", "requests", "jsonschema", "pillow", "uvicorn", "fastapi", "python-multipart"]
OURS = ["hiredis", "google-crc32c", "xxhash", "rich", "uvloop", "prometheus-client"]

RANDOM = random.Random(7)
WORDS = [RANDOM.randrange(10, 190) for _ in range(900)]
RESULTS: list[bool] = []


def check(what: str, found: Any, expected: Any) -> None:
    """Print a line; `expected` is a value or a predicate."""
    good = bool(expected(found)) if callable(expected) else found == expected
    RESULTS.append(good)
    print(f"{'ok  ' if good else 'FAIL'}  {what}: {found}"[:150], flush=True)


def make_environment(folder: Path) -> Path:
    """The Python of an environment with vllm-mlx and this project in it."""
    python = folder / "vllm-mlx-0.6.0" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*install, *WANTED, *IMPORTED, *OURS], check=True)
    subprocess.run([*install, "--no-deps", *STOCK, "--editable", str(ROOT)], check=True)
    return python


class Scheduler:
    """vllm-mlx's text scheduler in a process of its own; port 0 is without any cache."""

    def __init__(self, python: Path, family: str, port: int, *flags: str) -> None:
        command = [str(python), "-m", WORKER, family, str(port), *flags]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        # Killed: what was not written is lost.
        self._process.kill()
        self._process.wait()

    def tell(self, **question: Any) -> Any:
        """One line of JSON there, one back."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the scheduler's process has ended")
        return json.loads(line)

    def ask(self, *prompts: Sequence[int], penalty: float = 1.0) -> Any:
        """Tokens, cached tokens and the seconds of the fetch, of prompts that come at once."""
        asked = [list(prompt) for prompt in prompts]
        found = self.tell(prompts=asked, count=8, penalty=penalty)
        return found if len(prompts) > 1 else found[0]


class Family:
    """The prompts, what a scheduler without any cache answers, and how much may be resumed."""

    def __init__(self, python: Path, name: str) -> None:
        self.python, self.name = python, name
        first = WORDS[:300]
        with Scheduler(python, name, 0) as cold:
            answer = cold.ask(first)["tokens"]
            self.prompts = {
                "first": first,
                "turn": [*first, *answer, *WORDS[300:330]],
                "other turn": [*first, *answer, *WORDS[330:360]],
                "parting": [*WORDS[:200], *WORDS[400:440]],
                "parting again": [*WORDS[:200], *WORDS[500:540]],
                "unknown": WORDS[450:800],
            }
            self.cold = {n: cold.ask(prompt)["tokens"] for n, prompt in self.prompts.items()}
            self.penalised = cold.ask(first, penalty=1.3)["tokens"]
            # As many as vllm-mlx computes at once, each new to the cache.
            self.crowd = [WORDS[number : number + 200] for number in range(21, 29)]
            self.crowd_cold = [cold.ask(prompt)["tokens"] for prompt in self.crowd]
        self.answered = len(first) + len(answer)
        self.plain = name == "llama"

    def start(self, port: int, *flags: str) -> Scheduler:
        return Scheduler(self.python, self.name, port, *flags)

    def check(self, scheduler: Scheduler, when: str, prompt: str, least: int, most: int) -> None:
        """Ask, and compare with the cold answer."""
        found = scheduler.ask(self.prompts[prompt])
        what = f"{self.name}, {when}, {prompt}"
        check(f"{what}: the cold answer", found["tokens"] == self.cold[prompt], True)
        check(f"{what}: {least} to {most} cached", found["cached"], lambda n: least <= n <= most)
        check(f"{what}: seconds of the lookup", found["seconds"], lambda s: s < 3)


def in_one_process(family: Family, port: int) -> None:
    name = family.name
    with family.start(port) as warm:
        family.check(warm, "new", "first", 0, 0)
        family.check(warm, "in memory", "first", 299, 299)
        family.check(warm, "in memory", "turn", family.answered, family.answered)
        # A state exists only where a prefill has stopped: the next one stops where they part.
        family.check(warm, "in memory", "parting", *((200, 200) if family.plain else (0, 200)))
        family.check(warm, "in memory", "parting again", 200, 200)
        names = ["unknown", "first", "parting", "turn"]
        found = warm.ask(*(family.prompts[name] for name in names))
        answers = [answer["tokens"] for answer in found]
        check(f"{name}, at once", answers == [family.cold[n] for n in names], True)
        penalised = warm.ask(family.prompts["first"], penalty=1.3)
        check(f"{name}, penalty for repetitions", penalised["tokens"] == family.penalised, True)
        check(f"{name}, penalty for repetitions: cached", penalised["cached"], 299)
        check(f"{name}, written within 30 s", warm.tell(flush=30), True)
        check(f"{name}, restores so far", warm.tell(stats=1)["tier_hits"], 0)


def beside_empty_prompts(family: Family, port: int) -> None:
    """vllm-mlx ends everybody's request at an empty prompt (A16)."""
    name = family.name
    with family.start(port) as scheduler:
        alone = scheduler.ask([])
        check(f"{name}, an empty prompt", alone["end"], "error")
        *others, empty = scheduler.ask(*family.crowd, [])
        check(f"{name}, an empty prompt behind a full batch", empty["end"], "error")
        answers = [found["tokens"] for found in others]
        check(f"{name}, an empty prompt: the others", answers == family.crowd_cold, True)
        first, empty, last = scheduler.ask(WORDS[:300], [], family.crowd[0])
        check(f"{name}, an empty prompt between others", empty["end"], "error")
        answers = [first["tokens"], last["tokens"]]
        expected = [family.cold["first"], family.crowd_cold[0]]
        check(f"{name}, an empty prompt: before and after it", answers == expected, True)


def after_a_restart(family: Family, port: int) -> None:
    slack = 0 if family.plain else BLOCK
    with family.start(port) as again:
        done = family.answered
        family.check(again, "restarted", "other turn", done - slack, done)
        check(f"{family.name}, restores", again.tell(stats=1)["tier_hits"], 1)
        family.check(again, "restarted", "first", 299 - slack, 299)
        family.check(again, "restarted", "parting", 239 - slack, 239)


def without_the_server(family: Family, server: LocalServer) -> None:
    with family.start(server.port) as scheduler:
        family.check(scheduler, "server there", "first", 299 - BLOCK, 299)
        server.kill()
        family.check(scheduler, "server killed", "first", 299 - BLOCK, 299)
        family.check(scheduler, "server killed", "parting", 0, 200)
        # Its first words are no other's.
        family.check(scheduler, "server killed", "unknown", 0, 0)
    with family.start(server.port) as scheduler:
        family.check(scheduler, "no server", "first", 0, 0)
        family.check(scheduler, "no server", "first", 299, 299)


def with_quantisation(family: Family, port: int) -> None:
    """vllm-mlx quantises its prefix cache if told so; ours keeps every bit (D01)."""
    with family.start(port, "--quantised") as scheduler:
        for prompt in family.prompts:
            found = scheduler.ask(family.prompts[prompt])
            same = found["tokens"] == family.cold[prompt]
            check(f"{family.name}, --kv-cache-quantization, {prompt}", same, True)


def on_the_multimodal_route(python: Path, port: int) -> None:
    """Prompts of text alone, as a model that takes pictures answers them."""
    prompts = {"first": WORDS[:300], "parting": [*WORDS[:200], *WORDS[400:440]]}
    with Scheduler(python, "llama", 0, "--multimodal") as scheduler:
        cold = {name: scheduler.ask(prompt)["tokens"] for name, prompt in prompts.items()}
    for when, expected in (
        ("new", [("first", 0), ("first", 299), ("parting", 200)]),
        ("restarted", [("first", 299), ("parting", 239)]),
    ):
        with Scheduler(python, "llama", port, "--multimodal") as scheduler:
            for name, cached in expected:
                found = scheduler.ask(prompts[name])
                what = f"multimodal generator, {when}, {name}"
                check(f"{what}: the cold answer", found["tokens"] == cold[name], True)
                check(f"{what}: {cached} cached", found["cached"], cached)
            check(f"multimodal generator, {when}: written", scheduler.tell(flush=30), True)


class HttpServer:
    """A server of vllm-mlx as a process, once it answers."""

    def __init__(self, command: Sequence[str | Path], home: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        env = os.environ | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
        words = [str(word).replace("PORT", str(self.port)) for word in command]
        self.log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(words, env=env, stdout=file, stderr=file)
        deadline = time.monotonic() + 120
        while "Uvicorn running" not in log.read_text(errors="replace"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(log.read_text(errors="replace")[-3000:])
            time.sleep(0.1)

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self.status = self._process.wait(30)

    def ask(self, path: str, body: Any = None) -> Any:
        raw = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", raw, headers)
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return json.load(reply)

    def chat(self, model: Path, words: Sequence[int]) -> str:
        text = " ".join(f"w{word}" for word in words)
        messages = [{"role": "user", "content": text}]
        body = {"model": str(model), "messages": messages, "max_tokens": 8, "temperature": 0}
        return str(self.ask("/v1/chat/completions", body)["choices"][0]["message"]["content"])

    def complete_nothing(self, model: Path) -> int:
        """The status of the answer to an empty prompt."""
        try:
            self.ask("/v1/completions", {"model": str(model), "prompt": "", "max_tokens": 8})
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def tier_tokens(self) -> int:
        return int(self.ask("/v1/cache/stats")["engine_cache"]["tier_tokens"])


def over_http(python: Path, base: Path) -> None:
    """`serve --engine vllm-mlx`, ended and started again on the same folder."""
    model = base / "model"
    write = [str(python), "-m", WORKER, "--write", str(model)]
    subprocess.run(write, cwd=ROOT, check=True)
    prompts = [WORDS[:300], [*WORDS[:250], *WORDS[400:420]]]
    commands = python.parent
    cold: list[str | Path] = [
        commands / "vllm-mlx",
        "serve",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        "PORT",
    ]
    with HttpServer(
        [*cold, "--continuous-batching", "--disable-prefix-cache"], base, base / "c"
    ) as s:
        expected = [s.chat(model, prompt) for prompt in prompts]
    ours: list[str | Path] = [
        commands / "pion-vllm-mlx",
        "serve",
        "--engine",
        "vllm-mlx",
        "--model",
        model,
    ]
    ours += ["--port", "PORT", "--pion-dir", base / "pion", "--", "--max-num-seqs", "8"]
    for when, restored in (("first run", 0), ("restarted", 570)):
        with HttpServer(ours, base, base / "log") as server:
            answers = [server.chat(model, prompt) for prompt in prompts]
            check(f"HTTP, {when}: the cold answers", answers == expected, True)
            check(f"HTTP, {when}: {restored} tokens restored", server.tier_tokens(), restored)
            with ThreadPoolExecutor() as pool:
                beside = [pool.submit(server.chat, model, prompt) for prompt in prompts]
                status = server.complete_nothing(model)
            check(f"HTTP, {when}: status of an empty prompt", status, 500)
            answers = [found.result() for found in beside]
            check(f"HTTP, {when}: the answers beside it", answers == expected, True)
        text = server.log.read_text(errors="replace")
        check(f"HTTP, {when}: ends in order", "Traceback" not in text, True)
    refused = subprocess.run(
        [*ours[:6], "--temp", "0.5"], capture_output=True, text=True, check=False, timeout=60
    )
    check("HTTP, a flag of mlx_lm.server", refused.stderr.count("\n"), 1)


@contextmanager
def own_server(folder: Path) -> Iterator[LocalServer]:
    flags = ["--no-attention", "--vstore-sessions", "4096"]
    with LocalServer(folder / "data", folder / "log", flags) as server:
        yield server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venvs", type=Path, help="keep the environment here and reuse it")
    options, _ = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="pion-interop-") as name:
        temporary = Path(name)
        python = make_environment((options.venvs or temporary).absolute())
        for family in (Family(python, name) for name in FAMILIES):
            folder = temporary / family.name
            folder.mkdir()
            with own_server(folder) as server:
                in_one_process(family, server.port)
                beside_empty_prompts(family, server.port)
                after_a_restart(family, server.port)
                if family.plain:
                    with_quantisation(family, server.port)
                without_the_server(family, server)
        with own_server(temporary) as server:
            on_the_multimodal_route(python, server.port)
        over_http(python, temporary)
    print(f"{sum(RESULTS)} of {len(RESULTS)} passed")
    return 0 if all(RESULTS) else 1


if __name__ == "__main__":
    sys.exit(main())
