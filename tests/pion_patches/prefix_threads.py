"""A prefix captured in one thread, used by a second and read by a third; run as a script.

Prints "ok" or a traceback. Threads that computed are parked, not ended, and the process leaves
without clean-up: MLX's CPU build can abort when such a thread ends, with stock code alone.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models import cache

from pion_patches.attention import install_pion_attention_patch
from pion_patches.inproc import InprocStore
from pion_patches.prefix_cache import make_pion_prompt_cache
from pion_patches.prefix_entry import capture_prefix
from tests.pion_patches.zoo import families

caches: Any = cache  # mlx-lm is not typed
PREFIX, REST = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]), mx.array([8, 9, 7])


def run_parked(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a thread of its own, which then sleeps for ever."""
    done, results = threading.Event(), []

    def body() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)
        done.set()
        threading.Event().wait()

    threading.Thread(target=body, daemon=True).start()
    assert done.wait(60), "the thread did not finish"
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def build_cache(model: Any) -> list[Any]:
    made: list[Any] = caches.make_prompt_cache(model)
    model(PREFIX, cache=made)
    return made  # not evaluated: capturing has to do that


def greedy(model: Any, made: list[Any]) -> list[int]:
    return [int(t) for t, _ in generate_step(REST, model, max_tokens=8, prompt_cache=made)]


def check_family(name: str) -> None:
    model = families[name](seed=7)
    expected = greedy(model, build_cache(model))
    store = InprocStore()
    pc = SimpleNamespace(_mlx_prefix_kv=store)

    def capture() -> None:
        store.hold("system", capture_prefix(model, build_cache(model), PREFIX.shape[1]))

    def generate() -> tuple[list[Any], list[int]]:
        made = make_pion_prompt_cache(model, "system", pc, PREFIX.shape[1])
        said = greedy(model, made)
        # A request's own rows belong to the thread that generates until they are evaluated.
        mx.eval([one.state for one in made])
        return made, said

    def read() -> list[Any]:
        entry = store["system"]
        return [np.array(array) for slot in entry.slots for array in slot.arrays()]

    run_parked(capture)
    made, said = run_parked(generate)
    assert said == expected, (said, expected)
    arrays = run_parked(read)
    assert arrays
    assert all(np.isfinite(array).all() for array in arrays)
    # The request moves on to yet another thread.
    run_parked(lambda: mx.eval(model(REST[None], cache=made)))
    assert run_parked(generate)[1] == expected


def main() -> None:
    install_pion_attention_patch()
    try:
        for name in ("llama", "gemma3_text", "qwen3_5"):
            check_family(name)
        print("ok", flush=True)
    except BaseException:
        print(traceback.format_exc(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
