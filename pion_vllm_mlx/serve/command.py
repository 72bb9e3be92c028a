"""Serve a model to OpenAI and Anthropic clients; what it has computed outlives it.

Chat, completions, messages and responses, streaming and tools, on top of mlx_lm.server; or, with
--engine vllm-mlx, vllm-mlx's own server on the same memory.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from pion_vllm_mlx.serve.options import add_arguments

if TYPE_CHECKING:
    from rich.console import Console

    from pion_vllm_mlx.serve.door import Door
    from pion_vllm_mlx.serve.generator import Generator
    from pion_vllm_mlx.serve.provider import Provider

__all__ = ["add_arguments", "run"]

#: Seconds by which the last conversation may hold up the start; it goes on behind it.
_PRELOAD: Final = 2.0


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted or terminated."""
    if options.engine == "vllm-mlx":
        from pion_vllm_mlx.serve.vllm_engine import run_vllm_mlx

        return run_vllm_mlx(options)
    if options.engine_flags:
        raise SystemExit(f"pion-vllm-mlx serve: {options.engine_flags[0]}: not a flag of serve")
    from pion_vllm_mlx.blas import preload_blas

    # Before anything imports MLX, which takes the BLAS it finds at that moment.
    preload_blas()
    from rich.console import Console

    from pion_patches.mlx_lm_server import mlx_lm_server_patch
    from pion_vllm_mlx.serve.door import Door
    from pion_vllm_mlx.serve.guard import Guard

    logging.basicConfig(
        level=options.log_level, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    # mlx_lm.server logs to the root; what it says at every request is said better by ours.
    logging.getLogger().setLevel(max(logging.WARNING, logging.getLevelName(options.log_level)))
    logging.getLogger("pion_vllm_mlx").setLevel(options.log_level)
    if options.prompt_cache_bytes is None:
        options.prompt_cache_bytes = _quarter_of_memory()
    guard = Guard([options.host, *options.allowed_host], options.allowed_origins)
    try:
        door = Door(options.host, options.port, guard)
    except OSError as error:
        place = f"{options.host}:{options.port}"
        raise SystemExit(f"pion-vllm-mlx serve: cannot listen on {place}: {error}") from None
    with door, mlx_lm_server_patch(), ExitStack() as ends:
        return _serve(options, door, Console(stderr=True, highlight=False), ends)


def _serve(options: argparse.Namespace, door: Door, console: Console, ends: ExitStack) -> int:
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    from pion_patches.prompt_memory import PromptMemory
    from pion_vllm_mlx.serve.generator import Generator
    from pion_vllm_mlx.serve.opening import open_tier
    from pion_vllm_mlx.serve.provider import Provider, warm_up
    from pion_vllm_mlx.serve.service import Service

    _ = maybe_set_recommended_wired_limit()
    tier = open_tier(options, console, ends)
    memory = PromptMemory(options.prompt_cache_size, options.prompt_cache_bytes, tier=tier)

    def prepare(loaded: Provider) -> None:
        memory.attach(loaded.model_key, loaded)
        last = memory.preload(loaded.model_key)
        warm_up(loaded)
        if last is not None:
            last.finish(_PRELOAD)

    provider = Provider(options, prepare)
    generator = Generator(provider, memory)
    listener = threading.Thread(target=door.serve_forever, name="pion-serve-http", daemon=True)
    # Already now, so that /health can say that the model is loading.
    listener.start()
    try:
        door.service = Service(generator, memory, options.model, options.normalise, tier)
        _await_model(console, provider, options.model)
        url = f"http://{options.host}:{door.port}"
        # One line, however narrow the terminal: programs read it too.
        text = f"pion-vllm-mlx serve ready on {url} (OpenAI: {url}/v1, Anthropic: {url})"
        console.print(text, soft_wrap=True)
        return _watch(generator)
    finally:
        door.shutdown()
        _end(generator)
        memory.close()


def _await_model(console: Console, provider: Provider, name: str) -> None:
    """Show that the model is loading until it is there; SystemExit if it cannot be."""
    with console.status(f"loading {name}"):
        if not console.is_terminal:
            console.print(f"loading {name}", soft_wrap=True)
        provider.ready.wait()
    if provider.failure is not None:
        reason = " ".join(str(provider.failure).split()) or type(provider.failure).__name__
        raise SystemExit(f"pion-vllm-mlx serve: cannot load {name}: {reason}")
    console.print(f"loaded {name} in {provider.seconds:.1f} s", soft_wrap=True)


def _watch(generator: Generator) -> int:
    """Wait for a signal; 1 when the generation thread has ended by itself."""
    while not generator.wait_for_end(1.0):
        pass
    print("pion-vllm-mlx serve: the generation thread has ended", file=sys.stderr)
    return 1


def _end(generator: Generator) -> None:
    generator.stop()
    generator.wait_for_end(10.0)


def _quarter_of_memory() -> int:
    return max(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
