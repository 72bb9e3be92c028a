"""``serve --engine vllm-mlx``: vllm-mlx's own server, its prefix cache on our memory and Pion."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Final

from pion_vllm_mlx.serve.options import given_stock_flags

VERSION: Final = "0.6.0"
_HINT: Final = "see docs/serve.md"
#: Flags of vllm-mlx by which it has another prefix cache, or none.
_WITHOUT: Final = ("--disable-prefix-cache", "--no-memory-aware-cache", "--use-paged-cache")


def run_vllm_mlx(options: argparse.Namespace) -> int:
    """Serve until interrupted or terminated; SystemExit with one line where that cannot be."""
    _check(options)
    from pion_vllm_mlx.blas import preload_blas

    # Before anything imports MLX, which takes the BLAS it finds at that moment.
    preload_blas()
    from rich.console import Console

    from pion_patches._patch import PatchConflict, UnsupportedVersion
    from pion_patches.vllm_mlx import vllm_mlx_patch
    from pion_vllm_mlx.serve.opening import open_tier

    source = options.model if Path(options.model).exists() else None
    with ExitStack() as ends:
        tier = open_tier(options, Console(stderr=True, highlight=False), ends)
        if tier is not None:
            ends.callback(tier.close)
        try:
            ends.enter_context(vllm_mlx_patch(tier, source=source))
        except (UnsupportedVersion, PatchConflict) as refusal:
            raise SystemExit(f"pion-vllm-mlx serve: --engine vllm-mlx: {refusal}") from None
        from vllm_mlx.cli import main

        with _command_line(_flags_of(options)):
            main()
    return 0


def _check(options: argparse.Namespace) -> None:
    try:
        found = metadata.version("vllm-mlx")
    except metadata.PackageNotFoundError:
        found = ""
    if found != VERSION:
        what = f"vllm-mlx {found} is" if found else "nothing of it is"
        raise SystemExit(
            f"pion-vllm-mlx serve: --engine vllm-mlx needs vllm-mlx {VERSION} in an environment of"
            f" its own, and {what} installed here ({_HINT})"
        )
    if other := next((flag for flag in options.engine_flags if flag in _WITHOUT), None):
        raise SystemExit(f"pion-vllm-mlx serve: {other} leaves nothing that Pion could keep")
    if others := given_stock_flags(options):
        raise SystemExit(
            f"pion-vllm-mlx serve: {others[0]} is for mlx_lm.server; flags of vllm-mlx follow"
            f" after -- ({_HINT})"
        )


def _flags_of(options: argparse.Namespace) -> list[str]:
    """The command line of vllm-mlx. Only its scheduler has the cache that is replaced."""
    address = ["--host", options.host, "--port", str(options.port)]
    return ["serve", options.model, *address, "--continuous-batching", *options.engine_flags]


@contextmanager
def _command_line(flags: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["vllm-mlx", *flags]
    try:
        yield
    finally:
        sys.argv = before
