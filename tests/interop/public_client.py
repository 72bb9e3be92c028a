"""The public Pion client 0.1.6 as a black box against our server, judged by what comes out.

    python tests/interop/public_client.py [--venv DIR]

Makes a virtual environment with `pion-vllm-mlx` 0.1.6 from PyPI and mlx-lm (kept under `--venv`,
`.venv-public` unless told otherwise), starts our server, and runs the client's documented API on a
tiny random model, each step in a process of its own: a prefix computed once and restored, in fp16
and with protected boundary layers; stage 2; HybridRetrievalCache; and its `serve`, asked twice with
a SIGKILL in between. Exits 0 if everything passed. Its code is neither read nor imported here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "patches")]

from tests.conftest import RawClient  # noqa: E402
from tests.interop.redis_versions import run_server  # noqa: E402

NEEDED: Final = ("pion-vllm-mlx==0.1.6", "mlx-lm==0.32.2")
SECONDS: Final = 240.0

# Run by the public client's interpreter; argv: model folder, port, which step.
STEPS: Final = """
import json, sys
import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from pion_vllm_mlx import (
    HybridRetrievalCache, PionPromptCache, install_pion_attention_patch, make_pion_prompt_cache,
)

folder, port, step = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model, tokenizer = load(folder)
prefix = [3 + (7 * n) % 50 for n in range(200)]
suffix = [5, 11, 17]


def greedy(cache, count=12):
    tokens, found = mx.array([suffix]), []
    for _ in range(count):
        last = mx.argmax(model(tokens, cache=cache)[0, -1]).item()
        found.append(last)
        tokens = mx.array([[last]])
    return found


def cold():
    cache = make_prompt_cache(model)
    model(mx.array([prefix]), cache=cache)
    return greedy(cache)


said = {"cold": cold()}
if step in ("uniform", "boundary"):
    more = {"boundary_protect": 1} if step == "boundary" else {}
    pc = PionPromptCache(model, vquant="fp16", port=port, **more)
    said["answer"] = greedy(pc.get_or_prefill(prefix, namespace="public|" + step))
    said["stats"] = {key: pc.stats()[key] for key in ("hits", "misses")}
elif step == "stage2":
    install_pion_attention_patch()
    pc = PionPromptCache(model, vquant="fp16", stage2=True, port=port)
    pc.get_or_prefill(prefix, namespace="public|stage2")
    said["answer"] = greedy(make_pion_prompt_cache(model, "public|stage2", pc, len(prefix)))
    said["stats"] = {key: pc.stats()[key] for key in ("hits", "misses")}
elif step == "retrieval":
    hr = HybridRetrievalCache(model, backend="pion", port=port)
    hr.ingest("passage", prefix)
    cache, rest = hr.prepare("passage", suffix)
    said["answer"] = greedy(cache)
print("SAID " + json.dumps(said), flush=True)
"""

WRITE_MODEL: Final = """
import sys
from pathlib import Path
from tests.pion_vllm_mlx.model_folder import write_model
write_model(Path(sys.argv[1]), "llama", chat=True, head_dim=32)
"""


def make_venv(folder: Path) -> Path:
    """The Python of an environment with the public client, made on first use."""
    python, made = folder / "bin" / "python", folder / ".public-0.1.6"
    if not made.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        mlx = "mlx[cpu]==0.32.4" if sys.platform == "linux" else "mlx==0.32.4"
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *NEEDED, mlx], check=True)
        made.touch()
    return python


def outside(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment without ours: nothing of this repository on the path."""
    hidden = ("PYTHONPATH", "LD_PRELOAD")
    return {k: v for k, v in os.environ.items() if k not in hidden} | (extra or {})


class Client:
    """The public client, one process a step."""

    def __init__(self, python: Path, model: Path, port: int, home: Path) -> None:
        self.python, self._model, self._port, self._home = python, model, port, home

    def run(self, step: str) -> dict[str, Any]:
        """What the step said; AssertionError with its last words if it said nothing.

        MLX's CPU build may abort while the interpreter exits: the exit status is no answer.
        """
        words = [str(self.python), "-c", STEPS, str(self._model), str(self._port), step]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=SECONDS, check=False, env=outside(),
            cwd=self._home,
        )  # fmt: skip
        for line in done.stdout.splitlines():
            if line.startswith("SAID "):
                said: dict[str, Any] = json.loads(line[5:])
                return said
        last_words = done.stderr.strip().splitlines()[-1:]
        raise AssertionError(f"{step}: {last_words}")

    @contextmanager
    def serve(self) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
        """Its `serve` on a free port, ready."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = str(self.python.with_name("pion-vllm-mlx"))
        words = [program, "serve", "--model", str(self._model), "--port", str(port)]
        words += ["--pion-port", str(self._port), "--pion-min-gain", "16", "--max-tokens", "8"]
        with (self._home / "serve.log").open("ab") as log:
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=log,
                cwd=self._home,
                env=outside({"HOME": str(self._home)}),
            )
        try:
            _wait_for(port, process)
            yield port, process
        finally:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    raise AssertionError("its serve did not get ready")


def chat(port: int, messages: list[dict[str, str]]) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt came from a cache."""
    body = {"messages": messages, "temperature": 0.0, "max_tokens": 8}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        reply = json.load(answer)
    details = reply["usage"].get("prompt_tokens_details") or {}
    return reply["choices"][0]["message"]["content"], details.get("cached_tokens", 0)


def check_prefixes(client: Client, figures: RawClient) -> Iterator[tuple[str, bool, object]]:
    """Each lane twice, in two processes: a miss that stores, then a hit with the same answer."""
    for step in ("uniform", "boundary", "stage2"):
        first, second = client.run(step), client.run(step)
        yield f"{step}: the first computes", first["stats"] == {"hits": 0, "misses": 1}, first
        yield f"{step}: the second restores", second["stats"] == {"hits": 1, "misses": 0}, second
        # fp16 rows of a float32 model: the same greedy tokens, not the same bits.
        yield f"{step}: the same answer", second["answer"] == first["answer"], (first, second)
        yield f"{step}: that of a cold run", second["answer"] == second["cold"], second
    before = _sessions(figures)
    first, second = client.run("retrieval"), client.run("retrieval")
    yield "retrieval: kept in the server", _sessions(figures) > before, before
    yield "retrieval: that of a cold run", first["answer"] == first["cold"], first
    yield "retrieval: the same again", second["answer"] == first["answer"], second


def _sessions(figures: RawClient) -> int:
    lines = figures.call("KV.PREFIX.INFO").decode().split("\r\n")
    return int(dict(line.split(":", 1) for line in lines if line)["vstore_sessions"])


def check_serve(client: Client, figures: RawClient) -> Iterator[tuple[str, bool, object]]:
    """A conversation goes on after its server was killed."""
    words = " ".join(f"w{3 + (7 * n) % 50}" for n in range(300))
    conversation = [{"role": "user", "content": words}]
    with client.serve() as (port, process):
        first, _ = chat(port, conversation)
        deadline = time.monotonic() + 30
        while not figures.call("SCAN", "0", "MATCH", "pps:*:seg:*", "COUNT", 1000)[1]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        time.sleep(1.0)
        process.send_signal(signal.SIGKILL)
    segments = figures.call("SCAN", "0", "MATCH", "pps:*:seg:*", "COUNT", 1000)[1]
    yield "serve: a conversation is stored", bool(segments), figures.call("KEYS", "*")
    yield "serve: its order of use is kept", figures.call("ZCARD", "pps:lru") > 0, None
    hits = _hits(figures)
    with client.serve() as (port, _):
        again, cached = chat(port, conversation)
    yield "serve: the same answer after SIGKILL", again == first, (first, again)
    yield "serve: most of the prompt came back", cached >= 200, cached
    yield "serve: the receipt counts it", _hits(figures) > hits, hits


def _hits(figures: RawClient) -> int:
    flat = figures.call("PION.STATS")
    return int(dict(zip(flat[::2], flat[1::2], strict=True))[b"kvprefix_hits"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-public")
    options, _ = parser.parse_known_args()
    python = make_venv(options.venv.absolute())
    results: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="pion-public-") as name:
        home = Path(name)
        model = home / "model"
        path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'patches'}"}
        subprocess.run(
            [sys.executable, "-c", WRITE_MODEL, str(model)], check=True, env=os.environ | path
        )
        with run_server(home / "data") as port:
            client, figures = Client(python, model, port, home), RawClient("127.0.0.1", port)
            for check in (check_prefixes, check_serve):
                try:
                    for what, passed, seen in check(client, figures):
                        print(f"{'ok  ' if passed else 'FAIL'}  {what}", flush=True)
                        if not passed:
                            print(f"      {seen}")
                        results.append(passed)
                except (AssertionError, OSError) as error:
                    print(f"FAIL  {check.__name__}: {error}")
                    results.append(False)
    print(f"{sum(results)} of {len(results)} passed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
