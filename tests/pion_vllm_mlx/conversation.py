"""A conversation on the index as a client has it, and the cold run it has to equal.

The cold run makes the same calls of the model in the same order, without any store: what it kept
after each of them is what a later turn of the same tokens begins with.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from pion_vllm_mlx.lineage import Lineage
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.transport.endpoint import Endpoint

#: Generous: the first answer of a server on a busy machine may take long.
PATIENT = 20.0
STEP = 48


def index_of(server: Any, model: Any, **settings: Any) -> Lineage:
    """A client of its own, as another process would have one."""
    settings = {"timeout": PATIENT, "min_gain": 1} | settings
    return Lineage(model, Endpoint("127.0.0.1", server.port, connect_timeout=PATIENT), **settings)


def ids_of(seed: int, count: int, vocab: int = 199) -> list[int]:
    """Reproducible token ids."""
    return [int(token) for token in np.random.RandomState(seed).randint(0, vocab, count)]


@dataclass(frozen=True)
class Turn:
    """What one turn got: its caches, how many tokens were restored, where its prefill paused, and
    what storing answered."""

    cache: list[Any]
    restored: int
    ends: tuple[int, ...]
    outcomes: tuple[str, ...]


def take_turn(index: Lineage, model: Any, ids: Sequence[int], step: int = STEP) -> Turn:
    """Restore what is stored of `ids`, compute and store the rest."""
    match = index.find(ids)
    cache = index.restore(match)
    restored = 0 if cache is None else match.tokens
    if cache is None:
        cache = make_prompt_cache(model)
    outcomes = []
    pauses = index.checkpoints(restored, len(ids), at=[match.seen])
    ends = [*pauses, len(ids)] if pauses[-1:] != (len(ids),) else pauses
    start = restored
    for end in ends:
        prefill(model, ids[start:end], cache, step)
        capture = index.capture(ids[:end], cache)
        if capture is not None:
            outcomes.append(index.store(capture))
        start = end
    return Turn(cache, restored, tuple(ends), tuple(outcomes))


@dataclass
class Cold:
    """The same calls without a store. `kept`: caches by the tokens they hold."""

    model: Any
    kept: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)

    def run(
        self, ids: Sequence[int], start: int, ends: Sequence[int], step: int = STEP
    ) -> list[Any]:
        """Compute `ids[start:]`, pausing at `ends`, on top of what was kept of `ids[:start]`."""
        cache = self._at(ids[:start])
        for end in ends:
            prefill(self.model, ids[start:end], cache, step)
            self.kept[tuple(ids[:end])] = copy.deepcopy(cache)
            start = end
        return cache

    def _at(self, ids: Sequence[int]) -> list[Any]:
        """A copy of what was kept after these tokens, or the first rows of what began so."""
        if not ids:
            made: list[Any] = make_prompt_cache(self.model)
            return made
        if tuple(ids) in self.kept:
            return copy.deepcopy(self.kept[tuple(ids)])
        longer = next(kept for kept in self.kept if kept[: len(ids)] == tuple(ids))
        cache = copy.deepcopy(self.kept[longer])
        for leaf in cache:
            assert leaf.trim(len(longer) - len(ids)) == len(longer) - len(ids)
        return cache


def logits_of(model: Any, cache: list[Any], count: int = 4) -> np.ndarray[Any, Any]:
    """Float32 logits of a block of three tokens and of `count` single ones after it."""
    rows = []
    for step in ([5, 17, 60], *([token] for token in range(3, 3 + count))):
        logits = model(mx.array([step]), cache=cache)
        rows.append(np.array(logits[0, -1].astype(mx.float32)))
    return np.stack(rows)
