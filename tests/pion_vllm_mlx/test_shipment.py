"""A shipment whose rows are computed while the first of them are sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache

from pion_patches.cache_rebuild import dismantle
from pion_vllm_mlx.shipment import Arriving, Shipment, Unstorable, pack_prefix
from pion_vllm_mlx.tier import Tier

TOKENS, LAYERS = 5, 3


@pytest.fixture
def shipment() -> Callable[[bool], Shipment]:
    stock: Any = mlx_lm_cache
    caches = [stock.KVCache() for _ in range(LAYERS)]
    for number, cache in enumerate(caches):
        rows = mx.full((1, 2, TOKENS, 4), float(number))
        mx.eval(cache.update_and_fetch(rows, rows + 0.5))

    def make(wait: bool) -> Shipment:
        image = dismantle(caches, TOKENS, wait=wait)
        ids = range(TOKENS)
        return pack_prefix(image, ids, "f" * 64, Tier(), prefill_ms=1, prefill_step=512, wait=wait)

    return make


def test_another_thread_packs_each_piece_once_it_is_computed(
    shipment: Callable[[bool], Shipment],
) -> None:
    """And gets the same bytes as from what was computed before."""
    late = shipment(False)
    packed: list[bytes] = []
    thread = threading.Thread(target=lambda: packed.extend(bytes(p.pack()) for p in late.pieces))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert packed == []
    late.evaluate()
    thread.join(30)
    assert packed == [bytes(piece.pack()) for piece in shipment(True).pieces]
    assert len(packed) == 2 * LAYERS


def test_nobody_waits_for_rows_that_could_not_be_computed(
    shipment: Callable[[bool], Shipment], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = shipment(False)
    late.pieces[0].views.evaluate()

    def fail(self: Arriving) -> None:
        raise MemoryError

    monkeypatch.setattr(Arriving, "evaluate", fail)
    with pytest.raises(MemoryError):
        late.evaluate()
    assert late.pieces[0].pack().nbytes == TOKENS * 2 * 4 * 4
    with pytest.raises(Unstorable, match="could not be computed"):
        late.pieces[1].pack()
