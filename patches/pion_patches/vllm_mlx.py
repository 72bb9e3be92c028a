"""vllm-mlx with a prefix cache that outlives it, in a second tier of the caller's choice.

    install_vllm_mlx(tier)
    vllm_mlx.cli.main()

`MemoryAwarePrefixCache` is bound by name in the text scheduler and in the multimodal generator:
both get a subclass of it, a `TieredPrefixCache`. The text scheduler's `BatchGenerator` becomes one
that stops prefills where recurrent and windowed layers can be resumed. No code of vllm-mlx is
changed. Engines that run keep what they have.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, ClassVar, Final

from mlx_lm.generate import BatchGenerator

from ._patch import Patch, PatchConflict, UnsupportedVersion, require_signature, require_version
from .engine_cache import TieredPrefixCache
from .even_batches import EvenBatchGenerator
from .resumable_batches import ResumableBatchGenerator
from .second_tier import SecondTier

LOW, BELOW = "0.6.0", "0.6.1"
MLX_LM_LOW, MLX_LM_BELOW = "0.31.3", "0.32"

_SCHEDULER, _MULTIMODAL = "vllm_mlx.scheduler", "vllm_mlx.mllm_batch_generator"
_CACHE: Final = "MemoryAwarePrefixCache"
#: Module and name of each binding that is replaced.
_BOUND: Final = ((_SCHEDULER, _CACHE), (_MULTIMODAL, _CACHE), (_SCHEDULER, "BatchGenerator"))
#: What is overridden or relied on, with the same parameters.
_METHODS: Final = (
    "__init__",
    "fetch",
    "store",
    "remove",
    "clear",
    "get_stats",
    "set_ssd_tier",
    "check_ssd",
    "save_to_disk",
    "load_from_disk",
)


class VllmMlxPatch(Patch):
    """Two names of vllm-mlx's scheduler and one of its multimodal generator."""

    name: ClassVar[str] = "vllm_mlx"

    def __init__(self) -> None:
        super().__init__()
        self.tier: SecondTier | None = None
        self.source: str | None = None
        self._stock: list[Any] = []
        self._ours: list[Any] = []

    def check(self) -> None:
        for package, low, below in (
            ("vllm-mlx", LOW, BELOW),
            ("mlx-lm", MLX_LM_LOW, MLX_LM_BELOW),
        ):
            try:
                found = metadata.version(package)
            except metadata.PackageNotFoundError:
                required = f"{package} >= {low}, < {below}"
                raise UnsupportedVersion(f"no {package}", required) from None
            require_version(package, found, low, below)
        try:
            bound = [getattr(importlib.import_module(module), name) for module, name in _BOUND]
            stock = getattr(importlib.import_module("vllm_mlx.memory_cache"), _CACHE)
        except (ImportError, AttributeError) as error:
            required = "a vllm-mlx whose text scheduler can be imported"
            raise UnsupportedVersion(f"vllm-mlx: {error}", required) from error
        for (module, name), found in zip(_BOUND, bound, strict=True):
            if found is not (stock if name == _CACHE else BatchGenerator):
                raise PatchConflict(f"{module}.{name} is not the package's own any more")
        for name in _METHODS:
            require_signature(getattr(stock, name), getattr(TieredPrefixCache, name))
        require_signature(BatchGenerator._next, EvenBatchGenerator._next)

    def is_installed(self) -> bool:
        ours = (TieredPrefixCache, ResumableBatchGenerator)
        found = (getattr(sys.modules.get(module), name, None) for module, name in _BOUND)
        return any(isinstance(item, type) and issubclass(item, ours) for item in found)

    def apply(self) -> None:
        self._stock = [getattr(sys.modules[module], name) for module, name in _BOUND]
        chosen = {"tier": self.tier, "source": self.source, "__doc__": TieredPrefixCache.__doc__}
        cache = type("PionPrefixCache", (TieredPrefixCache, self._stock[0]), chosen)
        self._ours = [cache, cache, ResumableBatchGenerator]
        for (module, name), item in zip(_BOUND, self._ours, strict=True):
            setattr(sys.modules[module], name, item)

    def revert(self) -> None:
        for (module, name), item in zip(_BOUND, self._ours, strict=True):
            if getattr(sys.modules[module], name) is not item:
                raise PatchConflict(f"somebody else has replaced {module}.{name} since")
        for (module, name), item in zip(_BOUND, self._stock, strict=True):
            setattr(sys.modules[module], name, item)


PATCH = VllmMlxPatch()


def install_vllm_mlx(tier: SecondTier | None, *, source: str | None = None) -> None:
    """Give engines that vllm-mlx makes from now on a `TieredPrefixCache`; again is a no-op.

    `tier`: where what was computed outlives the process, None for memory only; it stays the
    caller's to close. `source`: the folder the one model's weights come from, which spares hashing
    them at every start. Raises `UnsupportedVersion` (found, required) where vllm-mlx is not
    installed, not 0.6.0, or has other signatures; `PatchConflict` where somebody else has replaced
    one of the names, or where it is installed with another tier.
    """
    with PATCH._lock:
        if not PATCH.is_installed():
            PATCH.tier, PATCH.source = tier, source
        elif PATCH.tier is not tier:
            raise PatchConflict("vllm_mlx is patched already, with another tier")
        PATCH.install()


def uninstall_vllm_mlx() -> None:
    """Bind the names to their own classes again; engines that run keep theirs."""
    PATCH.uninstall()


def is_installed() -> bool:
    """Say whether the patch is in force in this process."""
    return PATCH.is_installed()


@contextmanager
def vllm_mlx_patch(tier: SecondTier | None, *, source: str | None = None) -> Iterator[None]:
    """Install for a ``with`` block; what was installed before it stays installed after."""
    before = is_installed()
    install_vllm_mlx(tier, source=source)
    try:
        yield
    finally:
        if not before:
            uninstall_vllm_mlx()
