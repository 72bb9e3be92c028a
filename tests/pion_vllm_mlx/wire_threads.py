"""Several threads generate on one remote prefix while its server is killed; run as a script.

    python -m tests.pion_vllm_mlx.wire_threads PORT PID

Prints "ok" or a traceback. Threads that computed are parked, not ended, and the process leaves
without clean-up: MLX's CPU build can abort when such a thread ends, with stock code alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.mlx_lm_patch import install_pion_attention_patch, make_pion_prompt_cache
from tests.pion_vllm_mlx.tiny import PREFIX, VOCAB, tiny_llama

THREADS, STEPS = 4, 12
Rows = list[list[int]]


def feed(model: Any, cache: list[Any], ids: list[int], at_half: threading.Barrier | None) -> Any:
    """Logits of every one of `ids`; half-way all threads wait for each other, twice."""
    out = []
    for number, one in enumerate(ids):
        if number == STEPS // 2 and at_half is not None:
            at_half.wait(60)
            at_half.wait(60)
        out.append(np.array(model(mx.array([[one]]), cache=cache)[0, -1]))
    return np.stack(out)


def main(port: int, pid: int) -> None:
    install_pion_attention_patch()
    model = tiny_llama(head_dim=32)
    ids: Rows = np.random.default_rng(2).integers(0, VOCAB, (THREADS, STEPS)).tolist()
    expected = []
    for one in ids:
        plain = make_prompt_cache(model)
        model(mx.array([PREFIX]), cache=plain)
        expected.append(feed(model, plain, one, None))
    with PionPromptCache(model, port=port, stage2=True) as first:
        first.get_or_prefill(PREFIX, "threads")
        assert first.flush()
    pc = PionPromptCache(model, port=port, stage2=True)
    at_half = threading.Barrier(THREADS + 1)
    done = threading.Semaphore(0)
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        try:
            cache = make_pion_prompt_cache(model, "threads", pc, len(PREFIX))
            found[number] = feed(model, cache, ids[number], at_half)
        except Exception as error:
            found[number] = error
        done.release()
        threading.Event().wait()

    for number in range(THREADS):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    at_half.wait(60)
    asked = pc.stats()["attend_binary"]
    assert asked == 2 * THREADS * STEPS // 2, asked
    os.kill(pid, signal.SIGKILL)
    at_half.wait(60)
    for _ in range(THREADS):
        assert done.acquire(timeout=60), "a thread did not finish"
    for number, wanted in enumerate(expected):
        if isinstance(found[number], Exception):
            raise found[number]
        assert np.abs(found[number] - wanted).max() < 1e-5
    # Whatever the number of requests, the prefix is computed once.
    assert pc.stats()["misses"] == 1, pc.stats()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
        print("ok", flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(0)
