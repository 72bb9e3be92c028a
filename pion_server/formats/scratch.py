"""Work arrays that outlive one chunk of rows.

The allocator gives arrays of a hundred kilobytes back to the system at once, so that a fresh one
costs a page fault every 4 KiB: more than the arithmetic done in it.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)


class Scratch:
    """The work arrays of one encoding or decoding, by name; not to be shared by threads.

    `saturated` counts what `Run.saturated` says, chunk by chunk.
    """

    def __init__(self) -> None:
        self.saturated = 0
        self._memory: dict[str, NDArray[np.uint8]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: type[Scalar]) -> NDArray[Scalar]:
        """A contiguous array of undefined content, good until the name is asked for again."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < nbytes:
            memory = self._memory[name] = np.empty(nbytes, dtype=np.uint8)
        return memory[:nbytes].view(dtype).reshape(shape)
