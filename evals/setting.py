"""What every eval is told: which model, how much of the full run, which seed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

#: What happens to randomness: weights of random models and planted needles come from this.
SEED = 20261130


@dataclass(frozen=True, slots=True)
class Setting:
    """model: a folder or hub id for `mlx_lm.load`; None is the small model in float32.

    fraction: 1.0 is the full run, which is what the tables show. Smaller ones take fewer questions,
    shorter prefixes and fewer repetitions, and say so.
    """

    model: str | None = None
    fraction: float = 1.0
    seed: int = SEED

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError("fraction is above 0 and at most 1")

    @property
    def model_path(self) -> str:
        """What `mlx_lm.load` loads, here and in child processes."""
        if self.model is not None:
            return self.model
        from pion_vllm_mlx.small_model import small_model_dir

        return str(small_model_dir())

    @property
    def model_name(self) -> str:
        from pion_vllm_mlx.small_model import SMALL_MODEL

        return self.model or f"{SMALL_MODEL} (float32)"

    def load(self) -> tuple[Any, Any]:
        """The model and its tokenizer, loaded once a process."""
        return _load(self.model_path)

    def count(self, full: int, least: int = 1) -> int:
        """`full` scaled by the fraction, rounded up, but `least` or more (and never above full)."""
        return min(full, max(least, math.ceil(full * self.fraction)))

    def take(self, values: Sequence[T], least: int = 1) -> list[T]:
        """The first of `values`, as many as the fraction says."""
        return list(values[: self.count(len(values), least)])


@functools.lru_cache(maxsize=1)
def _load(path: str) -> tuple[Any, Any]:
    from mlx_lm import load

    loaded: tuple[Any, Any] = load(path)[:2]
    return loaded
