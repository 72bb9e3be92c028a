"""vllm-mlx's text scheduler around a tiny random model, asked by lines of JSON; see tests/interop.

python -m tests.pion_patches.vllm_mlx_worker FAMILY PORT     # 0: no prefix cache at all
python -m tests.pion_patches.vllm_mlx_worker --write FOLDER  # a model for its HTTP server
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any


class Tokenizer:
    """The scheduler gets token ids, and text is no matter here."""

    eos_token_id = 0
    clean_up_tokenization_spaces = False

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(str(token) for token in ids)


class Worker:
    """A scheduler, patched unless the port is 0."""

    def __init__(self, family: str, port: int, *, quantised: bool) -> None:
        from tests.pion_patches.zoo import build

        self.tier: Any = None
        if port:
            from pion_patches.vllm_mlx import install_vllm_mlx
            from pion_vllm_mlx.serve.tier import PionTier
            from pion_vllm_mlx.transport.endpoint import Endpoint

            self.tier = PionTier(Endpoint("127.0.0.1", port))
            install_vllm_mlx(self.tier)
        from vllm_mlx.scheduler import Scheduler, SchedulerConfig

        config = SchedulerConfig(
            enable_prefix_cache=bool(port), cache_memory_mb=500, kv_cache_quantization=quantised
        )
        self.scheduler = Scheduler(build(family, seed=1), Tokenizer(), config)
        self.asked = 0

    def ask(self, prompts: list[list[int]], count: int, penalty: float) -> list[dict[str, Any]]:
        """Answers to prompts that come at once, greedy."""
        from vllm_mlx.request import Request, SamplingParams

        requests, seconds = [], []
        for prompt in prompts:
            self.asked += 1
            sampling = SamplingParams(max_tokens=count, temperature=0.0, repetition_penalty=penalty)
            request = Request(str(self.asked), prompt, sampling)
            requests.append(request)
            started = time.monotonic()
            self.scheduler.add_request(request)
            seconds.append(time.monotonic() - started)
        while self.scheduler.has_requests():
            self.scheduler.step()
        return [
            {"tokens": list(r.output_token_ids), "cached": r.cached_tokens, "seconds": waited}
            for r, waited in zip(requests, seconds, strict=True)
        ]

    def reply(self, question: dict[str, Any]) -> Any:
        if "prompts" in question:
            return self.ask(question["prompts"], question["count"], question["penalty"])
        if "flush" in question:
            return self.tier.flush(question["flush"])
        return self.scheduler.memory_aware_cache.get_stats()


def main() -> None:
    if sys.argv[1] == "--write":
        from tests.pion_vllm_mlx.model_folder import write_model

        write_model(Path(sys.argv[2]), "llama", chat=True)
        return
    logging.disable(logging.WARNING)
    worker = Worker(sys.argv[1], int(sys.argv[2]), quantised="--quantised" in sys.argv)
    for line in sys.stdin:
        print(json.dumps(worker.reply(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
