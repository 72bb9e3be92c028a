"""Time to first token by prefix length over every lane, beside mlx-lm's own ways.

SmolLM2-135M in float32 and a question of 16 tokens. In turns, each with its own cache: vanilla
mlx-lm prefills all of it (in two rounds); a cache held in memory is copied; `load_prompt_cache`
reads its file; Pion answers from this process, over the local lane, over TCP, and over TCP from
4-bit rows. `PION_BENCH_LONG=1` adds 4,096 tokens.

Expected: every lane far below cold, the local lane beside mlx-lm's file.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from evals.findings import Bar, Findings, Plot, Table
from evals.lanes import over_tcp
from evals.rounds import medians, ratio_of
from evals.serving import local_server
from evals.setting import Setting
from evals.speaking import speak
from evals.texts import read_long_text
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.prefill import prefill

LENGTHS: Final = (34, 256, 1024, 2048)
LONG: Final = 4096
QUESTION: Final = 16
ROUNDS: Final = 9
COLD_ROUNDS: Final = 2
FILE: Final = "mlx-lm, its file"
COLD: Final = "mlx-lm, cold"
LOCAL: Final = "Pion, local lane"

_stock: Any = mlx_lm_cache
Open = Callable[[], list[Any]]


@dataclass(frozen=True, slots=True)
class _Scene:
    """A prefix of a model, where mlx-lm's file is, and the server that holds it."""

    model: Any
    ids: tuple[int, ...]
    file: Path
    port: int

    def client(self, vquant: str = "auto", held_bytes: int = 0) -> PionPromptCache:
        return PionPromptCache(
            self.model, vquant, port=self.port, timeout=5, held_bytes=held_bytes, store="sync"
        )

    def open_with(self, pc: PionPromptCache, name: str) -> Open:
        return lambda: pc.get_or_prefill(self.ids, f"lanes-{name}-{len(self.ids)}")


def run() -> Findings:
    lengths = [*LENGTHS, LONG] if os.environ.get("PION_BENCH_LONG") else list(LENGTHS)
    return measure(lengths, ROUNDS)


def measure(lengths: list[int], rounds: int) -> Findings:
    """Seconds of every lane at every length."""
    model, tokenizer = Setting().load()
    ids = tokenizer.encode(read_long_text(), add_special_tokens=False)
    found: dict[int, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="pion-bench-") as folder, local_server() as server:
        for length in lengths:
            prefix = tuple((ids * (length // len(ids) + 1))[:length])
            scene = _Scene(model, prefix, Path(folder) / f"{length}.safetensors", server.port)
            question = ids[-QUESTION:]
            found[length] = _measure_one(scene, tokenizer, question, rounds)
            middle = medians(found[length])
            told = ", ".join(f"{lane} {value * 1e3:.1f} ms" for lane, value in middle.items())
            print(f"{length:>6,} tokens: {told}", flush=True)
    return _findings(found)


def _measure_one(
    scene: _Scene, tokenizer: Any, question: list[int], rounds: int
) -> dict[str, list[float]]:
    cold: list[Any] = _stock.make_prompt_cache(scene.model)
    prefill(scene.model, scene.ids, cold, 512)
    _stock.save_prompt_cache(str(scene.file), cold)
    with ExitStack() as stack:
        lanes = {name: stack.enter_context(make(scene, cold)) for name, make in _LANES.items()}
        seconds: dict[str, list[float]] = {COLD: [], **{name: [] for name in lanes}}
        wanted: tuple[int, ...] | None = None
        for number in range(rounds + 1):
            if number < COLD_ROUNDS:
                said = speak(scene.model, tokenizer, [*scene.ids, *question], 1)
                seconds[COLD].append(said.first_seconds)
                wanted = said.tokens
            for name, open_cache in lanes.items():
                # TCP is what is left where the local lane is turned off.
                with over_tcp() if "TCP" in name else nullcontext():
                    started = time.perf_counter()
                    cache = open_cache()
                    said = speak(scene.model, tokenizer, question, 1, cache, started)
                if number:  # the first round warms up
                    seconds[name].append(said.first_seconds)
                if said.tokens != wanted and "mlx4g32" not in name:
                    raise RuntimeError(f"{name} said {said.tokens}, cold {wanted}")
    return seconds


@contextmanager
def _held(scene: _Scene, cold: list[Any]) -> Iterator[Open]:
    yield lambda: copy.deepcopy(cold)


@contextmanager
def _file(scene: _Scene, cold: list[Any]) -> Iterator[Open]:
    def load() -> list[Any]:
        cache: list[Any] = _stock.load_prompt_cache(str(scene.file))
        mx.eval([layer.state for layer in cache])
        return cache

    yield load


@contextmanager
def _pion(
    scene: _Scene, cold: list[Any], name: str = "auto", vquant: str = "auto", held: int = 0
) -> Iterator[Open]:
    with scene.client(vquant) as writer:
        scene.open_with(writer, name)()
    with scene.client(vquant, held) as pc:
        yield scene.open_with(pc, name)
        stats = pc.stats()
        if stats["misses"]:
            raise RuntimeError(f"a stored prefix was a miss: {stats}")


_LANES: Final[Mapping[str, Callable[..., Any]]] = {
    "mlx-lm, held in memory": _held,
    FILE: _file,
    "Pion, in process": lambda scene, cold: _pion(scene, cold, held=1 << 30),
    LOCAL: _pion,
    "Pion, TCP": _pion,
    "Pion, TCP, mlx4g32": lambda scene, cold: _pion(scene, cold, "mlx4g32", "mlx4g32"),
}


def _findings(found: Mapping[int, dict[str, list[float]]]) -> Findings:
    rows, bars = [], []
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for length, seconds in found.items():
        middle = medians(seconds)
        beside = {
            name: ratio_of(values, seconds[FILE])
            for name, values in seconds.items()
            if name not in (COLD, FILE)
        }
        ratios[str(length)] = beside
        for name, value in middle.items():
            ratio = beside.get(name)
            told = (
                f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
                if ratio
                else "-"
            )
            rows.append(
                (f"{length:,}", name, f"{value * 1e3:.1f} ms", f"{middle[COLD] / value:.1f}x", told)
            )
        if length in (1024, 2048):
            what = f"mlx-lm's file / local lane, TTFT at {length:,} tokens"
            # It holds where the 95% interval of the ratio reaches it.
            bars.append(Bar(what, 1 / beside[LOCAL]["low"], 1 / 1.02, decides=False))
    lanes = list(next(iter(found.values())))
    return Findings(
        figures={
            "seconds": {str(length): seconds for length, seconds in found.items()},
            "ratios_to_file": ratios,
        },
        tables=[
            Table(
                "Time to first token, median of interleaved rounds",
                (
                    "prefix, tokens",
                    "lane",
                    "first token",
                    "sooner than cold",
                    "to mlx-lm's file (95%)",
                ),
                rows,
            )
        ],
        plots=[
            Plot(
                "ttft",
                "Time to first token by prefix length",
                "tokens in the prefix",
                "milliseconds (logarithmic)",
                {
                    lane: [(n, medians(seconds)[lane] * 1e3) for n, seconds in found.items()]
                    for lane in lanes
                },
                log=True,
            )
        ],
        bars=bars,
    )
