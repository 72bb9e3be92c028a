"""Fingerprints kept between processes, by the identity of the files they were computed from."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Final

from pion_vllm_mlx.cache_home import cache_home

_ENTRIES: Final = 256
_LARGEST_FILE: Final = 1 << 20


def file_identity(source: Path) -> str | None:
    """Name a file, or all files directly in a folder, by path, size, mtime_ns and inode.

    None where nothing is there: then nothing can be kept for it.
    """
    try:
        root = source.resolve(strict=True)
        paths = sorted(path for path in root.iterdir()) if root.is_dir() else [root]
        lines = []
        for path in paths:
            stat = path.stat()  # through links: a hub's snapshot folder links to its blobs
            if path.is_file():
                lines.append(
                    f"{path}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_dev}:{stat.st_ino}"
                )
    except OSError:
        return None
    return "\n".join(lines) or None


class FingerprintFile:
    """A small JSON file `{key: fingerprint}`, newest last; any damage reads as empty.

    In the per-user cache folder, unless told another. Writing is atomic (rename); of two
    processes that write at once, one entry is lost and hashed again later.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or cache_home()) / "fingerprints.json"

    def get(self, key: str) -> str | None:
        """The fingerprint kept under `key`, if it is there and well formed."""
        return self._read().get(key)

    def put(self, key: str, fingerprint: str) -> None:
        """Keep `fingerprint`; a folder that cannot be written only costs the next process time."""
        entries = self._read()
        entries.pop(key, None)
        entries[key] = fingerprint
        newest = dict(list(entries.items())[-_ENTRIES:])
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".fingerprints-")
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    json.dump(newest, file)
                os.replace(name, self.path)
            except OSError:
                os.unlink(name)
                raise

    def _read(self) -> dict[str, str]:
        try:
            if self.path.stat().st_size > _LARGEST_FILE:
                return {}
            loaded = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(loaded, dict):
            return {}
        return {key: value for key, value in loaded.items() if _is_digest(value)}


def _is_digest(value: object) -> bool:
    return (
        isinstance(value, str)
        and len(value) == 64
        and all(letter in "0123456789abcdef" for letter in value)
    )
