"""The bindings in vllm-mlx; what its scheduler does with them is in tests/interop."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator

from pion_patches import vllm_mlx as patch
from pion_patches._patch import PatchConflict, UnsupportedVersion
from pion_patches.engine_cache import TieredPrefixCache
from pion_patches.resumable_batches import ResumableBatchGenerator
from tests.pion_patches.test_prompt_memory import Tier
from tests.pion_patches.vllm_mlx_stand_in import MemoryAwarePrefixCache, stand_in

SCHEDULER, MULTIMODAL = "vllm_mlx.scheduler", "vllm_mlx.mllm_batch_generator"


@pytest.fixture
def modules() -> Iterator[dict[str, Any]]:
    with stand_in() as found:
        yield found
        patch.uninstall_vllm_mlx()


def test_it_binds_three_names_and_gives_them_back(modules: dict[str, Any]) -> None:
    tier = Tier(0)
    patch.install_vllm_mlx(tier)
    assert patch.is_installed()
    cache = modules[SCHEDULER].MemoryAwarePrefixCache
    assert cache is modules[MULTIMODAL].MemoryAwarePrefixCache
    assert issubclass(cache, TieredPrefixCache)
    assert issubclass(cache, MemoryAwarePrefixCache)
    assert cache.tier is tier
    assert modules[SCHEDULER].BatchGenerator is ResumableBatchGenerator
    patch.install_vllm_mlx(tier)
    assert modules[SCHEDULER].MemoryAwarePrefixCache is cache
    patch.uninstall_vllm_mlx()
    assert not patch.is_installed()
    patch.uninstall_vllm_mlx()
    assert modules[SCHEDULER].MemoryAwarePrefixCache is MemoryAwarePrefixCache
    assert modules[MULTIMODAL].MemoryAwarePrefixCache is MemoryAwarePrefixCache
    assert modules[SCHEDULER].BatchGenerator is BatchGenerator


def test_a_block_leaves_what_was_there_before(modules: dict[str, Any]) -> None:
    tier = Tier(0)
    with patch.vllm_mlx_patch(tier):
        assert patch.is_installed()
    assert not patch.is_installed()
    patch.install_vllm_mlx(tier)
    with patch.vllm_mlx_patch(tier):
        pass
    assert patch.is_installed()


def test_another_tier_is_not_taken_silently(modules: dict[str, Any]) -> None:
    patch.install_vllm_mlx(Tier(0))
    with pytest.raises(PatchConflict, match="another tier"):
        patch.install_vllm_mlx(Tier(0))


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({"vllm_mlx": "0.6.1"}, r"found vllm-mlx 0\.6\.1"),
        ({"vllm_mlx": "0.5.9"}, r"found vllm-mlx 0\.5\.9"),
        ({"mlx_lm": "0.32.2"}, r"found mlx-lm 0\.32\.2"),
    ],
)
def test_another_version_is_refused(versions: dict[str, str], found: str) -> None:
    with stand_in(**versions) as modules:
        with pytest.raises(UnsupportedVersion, match=found):
            patch.install_vllm_mlx(None)
        assert not patch.is_installed()
        assert modules[SCHEDULER].MemoryAwarePrefixCache is MemoryAwarePrefixCache


def test_without_vllm_mlx_it_is_refused() -> None:
    with pytest.raises(UnsupportedVersion, match="no vllm-mlx"):
        patch.install_vllm_mlx(None)


def test_another_signature_is_refused(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryAwarePrefixCache, "fetch", lambda self, ids: (None, ids))
    with pytest.raises(UnsupportedVersion, match=r"self, tokens"):
        patch.install_vllm_mlx(None)
    assert modules[SCHEDULER].BatchGenerator is BatchGenerator


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (SCHEDULER, "MemoryAwarePrefixCache"),
        (MULTIMODAL, "MemoryAwarePrefixCache"),
        (SCHEDULER, "BatchGenerator"),
    ],
)
def test_somebody_elses_replacement_is_not_touched(
    modules: dict[str, Any], module: str, name: str
) -> None:
    stock = getattr(modules[module], name)
    theirs = type("Theirs", (stock,), {})
    setattr(modules[module], name, theirs)
    with pytest.raises(PatchConflict):
        patch.install_vllm_mlx(None)
    assert not patch.is_installed()
    setattr(modules[module], name, stock)
    patch.install_vllm_mlx(None)
    ours = getattr(modules[module], name)
    setattr(modules[module], name, type("Over", (ours,), {}))
    with pytest.raises(PatchConflict, match="since"):
        patch.uninstall_vllm_mlx()
    assert patch.is_installed()
    setattr(modules[module], name, ours)


def test_importing_it_changes_and_imports_nothing_of_vllm_mlx() -> None:
    code = (
        "import sys, pion_patches.vllm_mlx as p; print('vllm_mlx' in sys.modules, p.is_installed())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
