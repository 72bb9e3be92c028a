"""The one model a server serves, and whether it is there yet."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

from mlx_lm.server import ModelProvider


class Provider(ModelProvider):
    """Loads its model on the generation thread. `ready` is set when that has worked or failed.

    `prepare(provider)` is called in between, on that thread.
    """

    def __init__(
        self, flags: argparse.Namespace, prepare: Callable[[Any], None] | None = None
    ) -> None:
        initialise: Any = super().__init__
        initialise(flags)
        self._prepare = prepare
        self.ready = threading.Event()
        self.failure: Exception | None = None
        self.seconds = 0.0

    def load_default(self) -> None:
        started = time.monotonic()
        load: Any = super().load_default
        try:
            load()
            if self._prepare is not None:
                self._prepare(self)
        except Exception as error:
            self.failure = error
            raise
        finally:
            self.seconds = time.monotonic() - started
            self.ready.set()
