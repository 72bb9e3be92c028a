"""Two tenants with one model, one prompt and one name: neither finds the other's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.transport import Command, Patience
from pion_vllm_mlx.transport.endpoint import Endpoint
from pion_vllm_mlx.transport.local import OFF
from tests.pion_vllm_mlx.tiny import PREFIX, cold_answer, continue_greedily, tiny_llama

Server = Any
MODEL = tiny_llama()
PROMPT = 4 * PREFIX  # long enough to be kept without a name, too
COLD = cold_answer(MODEL, PROMPT)
USERS = ("--requirepass", "root", "--tenant", "ann=apple", "--tenant", "bob=berry")
ANN, BOB, ROOT = ("ann", "apple"), ("bob", "berry"), (None, "root")


def figures(server: Server, who: tuple[str | None, str], name: str | None) -> dict[str, Any]:
    """What one call by a new client of this user found; its answer is always the cold one."""
    user, password = who
    url = {"user": user} if user else {}
    settings: dict[str, Any] = {"timeout": 20, "store": "sync", "held_bytes": 0, **url}
    with PionPromptCache(MODEL, port=server.port, password=password, **settings) as pc:
        assert continue_greedily(MODEL, pc.get_or_prefill(PROMPT, name)) == COLD
        return pc.stats()


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("lane", ["tcp", "local"])
def test_a_prompt_of_one_tenant_is_a_miss_for_everybody_else(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, lane: str, workers: str
) -> None:
    """I01: paired, so that nobody passes by never finding anything; and after a restart."""
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    monkeypatch.setenv(OFF, "1" if lane == "tcp" else "0")
    shared = server(*USERS, "--no-attention", "-w", workers)
    for name in ("the same", None):
        assert figures(shared, ANN, name)["tokens_restored"] == 0
        for other in (BOB, ROOT):
            assert figures(shared, other, name)["tokens_restored"] == 0
        assert figures(shared, ANN, name)["tokens_restored"] == len(PROMPT)
    if lane == "local":
        lend(shared, ANN, "the same")
    shared.kill()
    shared.restart()
    for name in ("the same", None):
        assert figures(shared, ANN, name)["tokens_restored"] == len(PROMPT)
    # What the admin drops is the admin's.
    root = Endpoint(port=shared.port, password="root", connect_timeout=20)
    assert root.exchange([Command.of("KV.PREFIX.DROP", "the same")], Patience(20)) == [1]
    root.close()
    for who in (ANN, BOB):
        assert figures(shared, who, "the same")["tokens_restored"] == len(PROMPT)


def lend(server: Server, who: tuple[str, str], name: str) -> None:
    """Until a file is made and lent: it is the tenant's own, too."""
    ends = time.monotonic() + 30
    while not figures(server, who, name)["hits_local"]:
        assert time.monotonic() < ends
        time.sleep(0.1)
    assert figures(server, who, name)["hits_local"] == 1
