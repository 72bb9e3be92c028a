"""A SAVE of all stores, and a copy of them elsewhere, in steps that stop nobody for long."""

from __future__ import annotations

import gc
import math
import time
from itertools import chain
from typing import TYPE_CHECKING

from pion_server.store.compaction import Compaction

if TYPE_CHECKING:
    from pion_server.store.opening import Stores


class Saving:
    """One SAVE in progress over all logs, step by step as `compaction` describes them."""

    def __init__(self, stores: Stores, parts: list[Compaction]) -> None:
        self._stores = stores
        self._parts = parts
        self._adoption = chain.from_iterable(part.frozen.adopt() for part in parts)
        stores.saving = True

    def write(self) -> None:
        """Write and flush the snapshots, then copy the records appended meanwhile."""
        for part in self._parts:
            part.write()
        for part in self._parts:
            part.catch_up()

    def finish(self) -> None:
        """Put the new files into place."""
        for part in self._parts:
            part.finish()

    def adopt(self, seconds: float = math.inf) -> bool:
        """Make the index refer to the new files, for about `seconds`; whether all of it does."""
        end = time.monotonic() + seconds
        for _ in self._adoption:
            if time.monotonic() >= end:
                return False
        self._stores.saving = False
        # Nor is it worth the collector's while ever after.
        gc.freeze()
        return True

    def abandon(self) -> None:
        """Forget everything; what is not in place yet leaves the old files as they were."""
        for part in self._parts:
            part.abandon()
        self._stores.saving = False

    def take_apart(self) -> None:
        """Let go of what is not needed any more, for a thread."""
        for part in self._parts:
            part.take_apart()


class Copying:
    """Extra snapshots, the V-store's and the other stores' of the same moment."""

    def __init__(self, vstore: Compaction, *others: Compaction) -> None:
        # The V-store's comes into place last: once it is there, so is what belongs to it.
        self._parts = [*others, vstore]
        for part in self._parts:
            part.ignore_new_records()

    def write(self) -> None:
        """Write and flush the files, then put them into place. Raises OSError."""
        try:
            for part in self._parts:
                part.write()
            for part in self._parts:
                part.publish_copy()
        except OSError:
            for part in self._parts:
                part.abandon()
            raise

    def take_apart(self) -> None:
        """Let go of what is not needed any more, for a thread."""
        for part in self._parts:
            part.take_apart()
