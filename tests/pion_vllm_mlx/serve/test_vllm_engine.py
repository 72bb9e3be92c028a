"""``serve --engine vllm-mlx``: what it hands over, and what it says where it cannot."""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pion_patches.vllm_mlx import is_installed
from pion_vllm_mlx.serve.command import run
from pion_vllm_mlx.serve.options import add_arguments
from pion_vllm_mlx.serve.tier import PionTier
from tests.pion_patches.vllm_mlx_stand_in import stand_in


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_subparsers().add_parser("serve"))
    return parser.parse_args(["serve", "--model", "m", "--engine", "vllm-mlx", *flags])


class Engine:
    """Takes the place of vllm-mlx's command: notes how it is run."""

    def __init__(self) -> None:
        self.flags: list[str] = []
        self.tier: Any = None
        self.patched = False

    def main(self) -> None:
        self.flags, self.patched = sys.argv, is_installed()
        self.tier = sys.modules["vllm_mlx.scheduler"].MemoryAwarePrefixCache.tier


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    # What a process does before it imports MLX; this one has.
    monkeypatch.setattr("pion_vllm_mlx.blas.preload_blas", lambda: None)
    found = Engine()
    cli: Any = types.ModuleType("vllm_mlx.cli")
    cli.main = found.main
    with stand_in(), mock.patch.dict(sys.modules, {"vllm_mlx.cli": cli}):
        yield found


def test_vllm_mlx_gets_its_flags_and_a_cache_that_outlives_it(
    engine: Engine, tmp_path: Path
) -> None:
    before = sys.argv
    flags = ["--port", "9000", "--pion-dir", str(tmp_path), "--", "--max-num-seqs", "8"]
    assert run(parse(*flags)) == 0
    assert engine.flags == [
        *("vllm-mlx", "serve", "m", "--host", "127.0.0.1", "--port", "9000"),
        *("--continuous-batching", "--max-num-seqs", "8"),
    ]
    assert engine.patched
    assert isinstance(engine.tier, PionTier)
    assert (tmp_path / "data").is_dir()
    # All of it is taken back.
    assert not is_installed()
    assert sys.argv is before
    assert not engine.tier._writer.is_alive()


def test_without_pion_it_has_the_memory_alone(engine: Engine) -> None:
    assert run(parse("--no-pion")) == 0
    assert engine.patched
    assert engine.tier is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--temp", "0.5"], "--temp is for mlx_lm.server"),
        (["--prompt-cache-bytes", "8GB"], "--prompt-cache-bytes is for mlx_lm.server"),
        (["--no-normalize"], "--no-normalize is for mlx_lm.server"),
        (["--cors-origin", "*"], "--cors-origin is for mlx_lm.server"),
        (["--", "--use-paged-cache"], "--use-paged-cache leaves nothing"),
    ],
)
def test_flags_that_are_not_for_it_end_it(engine: Engine, flags: Sequence[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said) as ended:
        run(parse(*flags))
    assert "\n" not in str(ended.value)
    assert engine.flags == []


@pytest.mark.parametrize("version", ["0.5.0", "0.6.1"])
def test_another_version_ends_it_with_one_line(version: str) -> None:
    with stand_in(vllm_mlx=version), pytest.raises(SystemExit) as ended:
        run(parse())
    assert f"vllm-mlx {version} is installed here" in str(ended.value)
    assert "\n" not in str(ended.value)


def test_without_vllm_mlx_it_ends_with_one_line() -> None:
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm-mlx")
    with pytest.raises(SystemExit, match=r"needs vllm-mlx 0\.6\.0") as ended:
        run(parse())
    assert "\n" not in str(ended.value)


def test_an_mlx_lm_it_was_not_tested_with_ends_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = metadata.version
    versions = {"mlx-lm": "0.32.2"}
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or stock(name))
    with pytest.raises(SystemExit, match=r"found mlx-lm 0\.32\.2"):
        run(parse("--no-pion"))
    assert engine.flags == []


def test_flags_of_an_engine_without_one_are_refused() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit, match="--max-num-seqs: not a flag of serve"):
        run(parser.parse_args(["--model", "m", "--", "--max-num-seqs", "8"]))
