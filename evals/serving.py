"""A pion-server of an eval's own, in a temporary directory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pion_vllm_mlx.local_server import LocalServer


@contextmanager
def local_server(*flags: str) -> Iterator[LocalServer]:
    """A fresh server on a free port; gone with its data at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="pion-eval-") as name:
        folder = Path(name)
        with LocalServer(folder / "data", folder / "server.log", flags) as server:
            yield server
