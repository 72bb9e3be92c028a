"""Python's garbage collector beside a million records that stay.

Records, extents and sessions form no cycles, so counting references frees them all. A full pass
looks at each of them nevertheless, a quarter of a second for 200,000 with every client waiting.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class _Pauses:
    """How many are open, and whether the collector was on before the first."""

    count = 0
    was_on = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """No pass meanwhile: what is being made stays, and would be gone through again and again.

    Pauses may overlap; for one thread.
    """
    if not _Pauses.count:
        _Pauses.was_on = gc.isenabled()
        gc.disable()
    _Pauses.count += 1
    try:
        yield
    finally:
        _Pauses.count -= 1
        if not _Pauses.count and _Pauses.was_on:
            gc.enable()


def look_once() -> None:
    """From now on what survives a full pass is not looked at again.

    So no pass takes longer than the few ten thousand objects that have come since the last. A
    cycle that breaks later is not found; closed connections and answered requests leave none.
    """
    gc.callbacks.append(_set_survivors_aside)


def _set_survivors_aside(phase: str, about: Mapping[str, Any]) -> None:
    if phase == "stop" and about["generation"] == 2:
        gc.freeze()
