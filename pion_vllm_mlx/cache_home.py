"""The folders of this package: what it can make again, and what it is asked to keep."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_home() -> Path:
    """The per-user cache folder: ``$XDG_CACHE_HOME/pion``, ``~/.cache/pion``, on macOS
    ``~/Library/Caches/pion``. Not created here."""
    # The XDG rules say that a relative path is to be ignored.
    if (chosen := os.environ.get("XDG_CACHE_HOME", "")) and Path(chosen).is_absolute():
        return Path(chosen) / "pion"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pion"
    return Path.home() / ".cache" / "pion"


def data_home() -> Path:
    """The per-user data folder: ``$XDG_DATA_HOME/pion``, ``~/.local/share/pion``, on macOS
    ``~/Library/Application Support/pion``. Not created here."""
    if (chosen := os.environ.get("XDG_DATA_HOME", "")) and Path(chosen).is_absolute():
        return Path(chosen) / "pion"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "pion"
    return Path.home() / ".local" / "share" / "pion"
