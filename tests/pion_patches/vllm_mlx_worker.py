"""vllm-mlx around a tiny random model, asked by lines of JSON; see tests/interop.

    python -m tests.pion_patches.vllm_mlx_worker FAMILY PORT     # 0: no prefix cache at all
    python -m tests.pion_patches.vllm_mlx_worker --write FOLDER  # a model for its HTTP server

It is the text scheduler, or with `--multimodal` the generator of models that take pictures.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: A scheduler that has not answered by then does not get on.
_MOST_STEPS = 1000


class Tokenizer:
    """The scheduler gets token ids, and text is no matter here."""

    eos_token_id = 0
    clean_up_tokenization_spaces = False

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(str(token) for token in ids)


def install(port: int) -> Any:
    """The tier vllm-mlx is patched with, or None without a port."""
    if not port:
        return None
    from pion_patches.vllm_mlx import install_vllm_mlx
    from pion_vllm_mlx.serve.tier import PionTier
    from pion_vllm_mlx.transport.endpoint import Endpoint

    tier = PionTier(Endpoint("127.0.0.1", port))
    install_vllm_mlx(tier)
    return tier


class TextEngine:
    """A scheduler, patched unless the port is 0."""

    def __init__(self, family: str, port: int, *, quantised: bool) -> None:
        from tests.pion_patches.zoo import build

        self.tier = install(port)
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
        ends = {}
        for _ in range(_MOST_STEPS):
            if not self.scheduler.has_requests():
                break
            for output in self.scheduler.step().outputs:
                if output.finished:
                    ends[output.request_id] = output.finish_reason
        return [
            {
                "tokens": list(request.output_token_ids),
                "cached": request.cached_tokens,
                "seconds": waited,
                "end": ends.get(request.request_id),
            }
            for request, waited in zip(requests, seconds, strict=True)
        ]

    def stats(self) -> Any:
        return self.scheduler.memory_aware_cache.get_stats()


class MultimodalEngine:
    """The generator that multimodal models have, on prompts of text alone."""

    def __init__(self, family: str, port: int) -> None:
        from tests.pion_patches.zoo import build

        self.tier = install(port)
        from vllm_mlx.memory_cache import MemoryCacheConfig
        from vllm_mlx.mllm_batch_generator import MLLMBatchGenerator

        self.generator: Any = MLLMBatchGenerator(
            SimpleNamespace(language_model=build(family, seed=1)),
            SimpleNamespace(tokenizer=SimpleNamespace()),
            prefix_cache_config=MemoryCacheConfig(max_memory_mb=500) if port else None,
            stop_tokens={0},
        )
        self.asked = 0

    def ask(self, prompts: list[list[int]], count: int, penalty: float) -> list[dict[str, Any]]:
        """Answers to prompts, one after the other, greedy."""
        return [self._answer(prompt, count, penalty) for prompt in prompts]

    def _answer(self, prompt: list[int], count: int, penalty: float) -> dict[str, Any]:
        import mlx.core as mx
        from vllm_mlx.mllm_batch_generator import MLLMBatchRequest

        self.asked += 1
        options = {"temperature": 0.0, "repetition_penalty": penalty, "max_tokens": count}
        request = MLLMBatchRequest(0, str(self.asked), "", input_ids=mx.array([prompt]), **options)
        self.generator.insert([request])
        tokens = []
        while True:
            for answer in self.generator.next():
                tokens.append(int(answer.token))
                if answer.finish_reason is not None:
                    key = getattr(self.generator.prefix_cache, "_last_matched_key", None)
                    return {"tokens": tokens, "cached": len(key or ()), "seconds": 0.0}

    def stats(self) -> Any:
        return self.generator.get_prefix_cache_stats()


def reply(engine: TextEngine | MultimodalEngine, question: dict[str, Any]) -> Any:
    if "prompts" in question:
        return engine.ask(question["prompts"], question["count"], question["penalty"])
    if "flush" in question:
        return engine.tier.flush(question["flush"])
    return engine.stats()


def main() -> None:
    if sys.argv[1] == "--write":
        from tests.pion_vllm_mlx.model_folder import write_model

        write_model(Path(sys.argv[2]), "llama", chat=True)
        return
    logging.disable(logging.WARNING)
    family, port = sys.argv[1], int(sys.argv[2])
    engine: TextEngine | MultimodalEngine
    if "--multimodal" in sys.argv:
        engine = MultimodalEngine(family, port)
    else:
        engine = TextEngine(family, port, quantised="--quantised" in sys.argv)
    for line in sys.stdin:
        print(json.dumps(reply(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
