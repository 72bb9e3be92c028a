"""Fixtures of the fault tests: one forge for all, and servers out of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pion_server.faults.forge import Forge, ForgedServer


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    made = Forge()
    yield made
    made.close()


@pytest.fixture
def forged(forge: Forge, tmp_path: Path) -> Iterator[Callable[..., ForgedServer]]:
    """`forged(*flags, directory=None, faults=None)` starts a server; all end with the test.

    What else may be requested of it: `Forge.start`.
    """
    started: list[ForgedServer] = []

    def start(
        *flags: str, directory: Path | None = None, faults: Path | None = None, **request: Any
    ) -> ForgedServer:
        data = directory or tmp_path / f"data{len(started)}"
        data.mkdir(mode=0o700, exist_ok=True)
        server = ForgedServer(forge, data, flags, faults, **request)
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory where fsync costs nothing, if there is one: a killed process cannot tell."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="pion-faults-", dir=memory))
    yield path
    shutil.rmtree(path)
