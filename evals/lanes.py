"""The ways from a stored prefix to a cache a model can go on with. A new lane is one entry."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from pion_patches.remote import RemoteKVCache
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.mlx_lm_patch import make_pion_prompt_cache, pion_attention_patch
from pion_vllm_mlx.transport import local

#: Makes the cache of one request; what it costs is part of the request's time.
Open: TypeAlias = Callable[[], list[Any]]

#: `binary_port` of a client that keeps to RESP, and of one that takes the next port.
_RESP_ONLY, _NEXT_PORT = 0, None
#: Seconds until a prefix that was hit twice must come as a file.
_UNTIL_LENT: Final = 10.0


@contextmanager
def over_tcp() -> Iterator[None]:
    """Prefixes come over the network in this block, on the server's own machine too."""
    os.environ[local.OFF] = "1"
    try:
        yield
    finally:
        del os.environ[local.OFF]


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
        """Compute and store it, for attention in the server too.

        Returns the cache that was computed, which nothing restored.
        """
        with self._client(held_bytes=0, stage2=True) as pc:
            cache = pc.get_or_prefill(self.ids, self.namespace)
            if pc.stats()["hits"]:
                raise RuntimeError("the server held this prefix already")
            if not pc.flush(120):
                raise RuntimeError(f"the prefix was not stored: {pc.stats()}")
            return cache

    def _client(self, **settings: Any) -> PionPromptCache:
        return PionPromptCache(self.model, port=self.port, timeout=5, **settings)

    @contextmanager
    def rebuild_resp(self) -> Iterator[Open]:
        with over_tcp(), self._client(held_bytes=0) as pc:
            yield lambda: pc.get_or_prefill(self.ids, self.namespace)

    @contextmanager
    def rebuild_local(self) -> Iterator[Open]:
        with self._client(held_bytes=0) as pc:
            # A prefix becomes a file when it is hit again.
            ends = time.monotonic() + _UNTIL_LENT
            while not pc.stats()["hits_local"]:
                if time.monotonic() > ends:
                    raise RuntimeError(f"the server lends no file: {pc.stats()}")
                pc.get_or_prefill(self.ids, self.namespace)
            others = pc.stats()["hits"] - pc.stats()["hits_local"]
            yield lambda: pc.get_or_prefill(self.ids, self.namespace)
            if pc.stats()["hits"] - pc.stats()["hits_local"] != others:
                raise RuntimeError(f"a prefix came over the network: {pc.stats()}")

    @contextmanager
    def rebuild_held(self) -> Iterator[Open]:
        with self._client() as pc:
            pc.get_or_prefill(self.ids, self.namespace)
            yield lambda: pc.get_or_prefill(self.ids, self.namespace)

    @contextmanager
    def share_in_process(self, blocks: Mapping[str, Any] | None = None) -> Iterator[Open]:
        with pion_attention_patch(), self._client() as pc:
            pc.get_or_prefill(self.ids, self.namespace)
            yield lambda: make_pion_prompt_cache(
                self.model, self.namespace, pc, len(self.ids), sparse_full_layers=blocks
            )

    @contextmanager
    def attend_in_server(
        self, binary_port: int | None, blocks: Mapping[str, Any] | None = None
    ) -> Iterator[Open]:
        with (
            pion_attention_patch(),
            self._client(held_bytes=0, stage2=True, binary_port=binary_port) as pc,
        ):

            def open_cache() -> list[Any]:
                cache = make_pion_prompt_cache(
                    self.model, self.namespace, pc, len(self.ids), sparse_full_layers=blocks
                )
                if not any(isinstance(one, RemoteKVCache) for one in cache):
                    raise RuntimeError("no layer is attended to in the server")
                return cache

            yield open_cache
            if pc.stats()["wire_losses"]:
                raise RuntimeError(f"the wire was given up: {pc.stats()}")


Lane: TypeAlias = Callable[[Prefix], AbstractContextManager[Open]]

RESP: Final = "B rebuild, RESP"
LOCAL: Final = "B rebuild, local lane"
IN_PROCESS: Final = "C shared, in process"
IN_SERVER: Final = "C in the server, binary lane"

#: B rebuilds the cache; C leaves the prefix where it is, here or in the server.
LANES: Final[Mapping[str, Lane]] = {
    RESP: Prefix.rebuild_resp,
    LOCAL: Prefix.rebuild_local,
    "B rebuild, held in process": Prefix.rebuild_held,
    IN_PROCESS: Prefix.share_in_process,
    "C in the server, RESP": partial(Prefix.attend_in_server, binary_port=_RESP_ONLY),
    IN_SERVER: partial(Prefix.attend_in_server, binary_port=_NEXT_PORT),
}

_BLOCKS: Final = {"K_block": 64, "K_blocks": 8}

#: Lanes that read a part of the prefix only: the 8 best blocks of 64 tokens for each query.
APPROXIMATE: Final[Mapping[str, Lane]] = {
    "C in process, 8 blocks of 64": partial(Prefix.share_in_process, blocks=_BLOCKS),
    "C in the server, 8 blocks of 64": partial(
        Prefix.attend_in_server, binary_port=_NEXT_PORT, blocks=_BLOCKS
    ),
}
