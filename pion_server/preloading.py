"""What requests need and a start does not: loaded once the server serves, in a thread.

A request that comes before imports what it needs itself, as it finds it.
"""

from __future__ import annotations

import gc
import importlib
import threading

from pion_server.formats import load_formats

# numpy comes with the formats; MLX waits for the first ATTEND command.
_MODULES = ("pion_server.store.tensor_file", "hmac")


def start_preloading() -> threading.Thread:
    """Import in the background. Not a daemon: a process must not end in the middle of an import."""
    thread = threading.Thread(target=preload, name="pion-preload")
    thread.start()
    return thread


def preload() -> None:
    """Import all of it now."""
    load_formats()
    for name in _MODULES:
        importlib.import_module(name)
    # All of it lives as long as the process: the collector need not look at it.
    gc.freeze()
