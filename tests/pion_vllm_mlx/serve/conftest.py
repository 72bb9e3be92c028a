"""One endpoint with a parrot behind it, for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pion_vllm_mlx.serve.endpoint import Endpoint, endpoint


@pytest.fixture(scope="module")
def parrot() -> Iterator[Endpoint]:
    with endpoint() as served:
        yield served
