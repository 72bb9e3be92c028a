"""One default server a module, a connection and a name of its own for each test."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess


@pytest.fixture(scope="module")
def running(module_server: Callable[..., ServerProcess]) -> ServerProcess:
    """A server with default flags that all tests of a module share."""
    return module_server()


@pytest.fixture
def client(running: ServerProcess) -> RawClient:
    """A connection to it."""
    return running.client()


@pytest.fixture
def ns(request: pytest.FixtureRequest) -> bytes:
    """A namespace no other test uses."""
    name = str(request.node.nodeid)
    return b"ns-" + hashlib.blake2b(name.encode(), digest_size=6).hexdigest().encode()
