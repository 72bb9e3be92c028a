"""The ways from a stored prefix to a cache a model can go on with. A new lane is one entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.mlx_lm_patch import make_pion_prompt_cache, pion_attention_patch

#: Makes the cache of one request; what it costs is part of the request's time.
Open: TypeAlias = Callable[[], list[Any]]


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a lane is made for: a prefix of a model, on a server that holds it or will."""

    model: Any
    port: int
    ids: tuple[int, ...]
    salt: str = "lanes"

    @property
    def namespace(self) -> str:
        return PionPromptCache.make_namespace(self.salt, *self.ids)

    def store(self) -> list[Any]:
        """Compute and store it; returns the cache that was computed, which nothing restored."""
        with self._client(held_bytes=0, store="sync") as pc:
            cache = pc.get_or_prefill(self.ids, self.namespace)
            if pc.stats()["hits"]:
                raise RuntimeError("the server held this prefix already")
            return cache

    def _client(self, **settings: Any) -> PionPromptCache:
        return PionPromptCache(self.model, port=self.port, timeout=5, **settings)

    @contextmanager
    def rebuild_resp(self) -> Iterator[Open]:
        with self._client(held_bytes=0) as pc:
            yield lambda: pc.get_or_prefill(self.ids, self.namespace)

    @contextmanager
    def rebuild_held(self) -> Iterator[Open]:
        with self._client() as pc:
            pc.get_or_prefill(self.ids, self.namespace)
            yield lambda: pc.get_or_prefill(self.ids, self.namespace)

    @contextmanager
    def share_in_process(self) -> Iterator[Open]:
        with pion_attention_patch(), self._client() as pc:
            pc.get_or_prefill(self.ids, self.namespace)
            yield lambda: make_pion_prompt_cache(self.model, self.namespace, pc, len(self.ids))


Lane: TypeAlias = Callable[[Prefix], AbstractContextManager[Open]]

RESP: Final = "B rebuild, RESP"
IN_PROCESS: Final = "C shared, in process"

#: B rebuilds the cache, C leaves the prefix where it is and merges attention.
LANES: Final[Mapping[str, Lane]] = {
    RESP: Prefix.rebuild_resp,
    "B rebuild, held in process": Prefix.rebuild_held,
    IN_PROCESS: Prefix.share_in_process,
}
