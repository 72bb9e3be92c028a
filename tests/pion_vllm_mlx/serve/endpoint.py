"""An endpoint in this process: the real HTTP server on a free port, a tiny model behind it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pion_patches.mlx_lm_server import mlx_lm_server_patch
from pion_patches.prompt_memory import PromptMemory
from pion_vllm_mlx.serve.door import Door
from pion_vllm_mlx.serve.generator import Generator
from pion_vllm_mlx.serve.guard import Guard
from pion_vllm_mlx.serve.provider import Provider
from pion_vllm_mlx.serve.service import Service
from pion_vllm_mlx.serve.tier import PionTier
from tests.pion_patches.serving import server_flags
from tests.pion_vllm_mlx.serve.parrot import Parrot, ParrotProvider


@dataclass
class Endpoint:
    """Where it is, and what is behind it."""

    door: Door
    service: Service
    provider: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.door.port}"

    @property
    def parrot(self) -> Parrot:
        found: Parrot = self.provider.parrot
        return found

    def say(self, text: str) -> None:
        """Have the parrot answer with a text."""
        encode = self.provider.tokenizer.encode
        self.parrot.say(*encode(text, add_special_tokens=False))

    def ask(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        """Status, headers and body (decoded where it is JSON) of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.door.port, timeout=60)
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request("GET" if raw is None else "POST", path, raw, headers or {})
            response = connection.getresponse()
            data = response.read()
            kind = response.headers.get("Content-Type") or ""
            found = json.loads(data) if kind.startswith("application/json") else data.decode()
            return response.status, response.headers, found
        finally:
            connection.close()

    def cached(self) -> int:
        """Prompt tokens that were not computed so far, all requests together."""
        self.settle()
        return self.service.figures.totals["cached_tokens"]

    def settle(self) -> None:
        """Wait until every request is counted: that is after its answer is sent."""
        deadline = time.monotonic() + 30
        while self.service.figures.running:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@contextmanager
def endpoint(
    provider_class: type[Provider] = ParrotProvider,
    *flags: str,
    guard: Guard | None = None,
    memory: PromptMemory | None = None,
    normalise: bool = True,
    tier: PionTier | None = None,
) -> Iterator[Endpoint]:
    """Serve until the block ends."""
    with mlx_lm_server_patch(), Door("127.0.0.1", 0, guard or Guard()) as door:
        provider = provider_class(server_flags("--model", "tiny", *flags))
        memory = PromptMemory() if memory is None else memory
        generator = Generator(provider, memory)
        service = Service(generator, memory, "tiny", normalise, tier)
        door.service = service
        listener = threading.Thread(target=door.serve_forever, args=(0.05,), daemon=True)
        listener.start()
        try:
            assert provider.ready.wait(60)
            assert provider.failure is None
            yield Endpoint(door, service, provider)
        finally:
            door.shutdown()
            generator.stop()
            assert generator.wait_for_end(30)
            memory.close()
