"""What the patch needs of vllm-mlx 0.6.0, for an environment that cannot have it.

The modules hold the names the patch binds, with vllm-mlx's signatures; the class keeps entries the
way the multimodal generator uses them. What vllm-mlx itself does with a patch is shown by
`make interop`.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any
from unittest import mock

from mlx_lm.generate import BatchGenerator


@dataclasses.dataclass(frozen=True)
class MemoryCacheConfig:
    max_entries: int = 1000
    kv_quantize: bool = False
    min_prefix_tokens: int = 128


@dataclasses.dataclass
class CacheStats:
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    tokens_saved: int = 0
    current_memory_bytes: int = 0
    entry_count: int = 0
    store_rejections: int = 0


@dataclasses.dataclass
class CacheEntry:
    tokens: tuple[int, ...]
    cache: list[Any]


class MemoryAwarePrefixCache:
    """Exact and whole-prefix matches only."""

    def __init__(self, model: Any, config: MemoryCacheConfig | None = None) -> None:
        self._config = config or MemoryCacheConfig()
        self._entries: dict[tuple[int, ...], CacheEntry] = {}
        self._max_memory = 1 << 30
        self._current_memory = 0
        self._stats = CacheStats()
        self._last_match_type: str | None = None
        self._last_matched_key: tuple[int, ...] | None = None

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        for length in range(len(tokens), 0, -1):
            if (entry := self._entries.get(tuple(tokens[:length]))) is not None:
                self._stats.hits += 1
                self._last_match_type = "exact" if length == len(tokens) else "prefix"
                self._last_matched_key = entry.tokens
                return entry.cache, tokens[length:]
        self._stats.misses += 1
        return None, tokens

    def commit_prepared(self, entry: CacheEntry, evict_prefixes: bool = True) -> bool:
        self._entries[entry.tokens] = entry
        return True

    def store(self, tokens: list[int], cache: list[Any], evict_prefixes: bool = True) -> bool:
        return self.commit_prepared(CacheEntry(tuple(tokens), cache), evict_prefixes)

    def remove(self, tokens: list[int], *, include_ssd: bool = False) -> bool:
        return self._entries.pop(tuple(tokens), None) is not None

    def clear(self) -> None:
        self._entries.clear()
        self._stats = CacheStats()

    def get_stats(self) -> dict[str, Any]:
        return dataclasses.asdict(self._stats)

    def set_ssd_tier(self, ssd_tier: Any) -> None:
        pass

    def check_ssd(self, tokens: list[int]) -> dict[str, Any] | None:
        return {"matched_tokens": len(tokens)}

    def save_to_disk(self, cache_dir: str) -> bool:
        raise OSError("no file is to be written")

    def load_from_disk(self, cache_dir: str) -> int:
        raise OSError("no file is to be read")


@contextmanager
def stand_in(vllm_mlx: str = "0.6.0", mlx_lm: str = "0.31.3") -> Iterator[dict[str, Any]]:
    """The modules by name, imported for the length of a block, with packages of those versions."""
    names = ("vllm_mlx", "vllm_mlx.memory_cache", "vllm_mlx.scheduler")
    modules: dict[str, Any] = {
        name: types.ModuleType(name) for name in (*names, "vllm_mlx.mllm_batch_generator")
    }
    for name in list(modules)[1:]:
        modules[name].MemoryAwarePrefixCache = MemoryAwarePrefixCache
    modules["vllm_mlx.scheduler"].BatchGenerator = BatchGenerator
    versions = {"vllm-mlx": vllm_mlx, "mlx-lm": mlx_lm}
    stock = metadata.version

    def version(name: str) -> str:
        return versions[name] if name in versions else stock(name)

    with mock.patch.dict(sys.modules, modules), mock.patch.object(metadata, "version", version):
        yield modules
