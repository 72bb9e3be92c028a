"""Prefixes kept as MLX arrays that many requests attend to: what `make_pion_prompt_cache` opens."""

from __future__ import annotations

from typing import Any

from pion_patches.inproc import InprocStore
from pion_patches.prefix_entry import CannotSplit, capture_prefix
from pion_vllm_mlx.tally import Tally


class SplitPrefixes:
    """The prefixes of one model by namespace, and of which tokens and weights each one is."""

    def __init__(self, model: Any, tally: Tally) -> None:
        self.store = InprocStore()
        self._model = model
        self._tally = tally
        self._keys: dict[str, tuple[tuple[int, ...], str]] = {}

    def hold(self, name: bytes, ids: tuple[int, ...], fingerprint: str, cache: list[Any]) -> None:
        """Keep what `cache` holds of `ids`, unless it is kept already."""
        namespace, key = name.decode("utf-8", "surrogateescape"), (ids, fingerprint)
        if namespace in self.store and self._keys.get(namespace) == key:
            return
        self.store.drop(namespace)
        try:
            self.store.hold(namespace, capture_prefix(self._model, cache, len(ids)))
        except CannotSplit:
            return  # `make_pion_prompt_cache` says why, to whoever asks for one
        except Exception as error:
            self._tally.wonder("a prefix could not be kept for split attention", error)
            return
        self._keys[namespace] = key

    def clear(self) -> None:
        """Forget everything."""
        self.store.clear()
        self._keys.clear()
