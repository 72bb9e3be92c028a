"""What does not grow: the memory of a server that has answered many requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from pion_patches.prompt_memory import PromptMemory
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.serve.tier import PionTier
from pion_vllm_mlx.transport.endpoint import Endpoint
from tests.pion_patches.serving import chat_model, serving

MB = 1 << 20


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_memory_is_flat_over_500_requests(tmp_path: Path, family: str) -> None:
    folder = chat_model(tmp_path / "model", family)
    random = np.random.default_rng(4)
    process = psutil.Process()
    sizes = []
    with LocalServer(tmp_path / "data", tmp_path / "log", ["--no-attention"]) as store:
        tier = PionTier(Endpoint("127.0.0.1", store.port), budget_bytes=4_000_000)
        memory = PromptMemory(10, tier=tier)
        with serving(folder, memory=memory) as questions:
            for number in range(500):
                prompt = [int(token) for token in random.integers(10, 190, 200)]
                questions.ids(prompt, count=4)
                assert len(memory) <= 10
                if number % 100 == 99:
                    assert tier.flush(60)
                    sizes.append(process.memory_info().rss)
        assert tier.figures()["used_bytes"] <= 4_000_000
        memory.close()
    # A request's prompt alone is 300 kB of cache: kept, 400 of them are 120 MB.
    assert sizes[-1] - sizes[0] < 40 * MB, [size // MB for size in sizes]
