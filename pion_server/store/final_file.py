"""A file that nobody can change any more, to be handed to another process by its descriptor."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from pion_server.store.files import PRIVATE_DIR, PRIVATE_FILE, StoreFile

_READ_ONLY = 0o400


def make_final_file(
    directory: Path, nbytes: int, write: Callable[[StoreFile], object]
) -> StoreFile:
    """A file of what `write(file)` puts into it, without a name and open for reading only.

    Its name is gone before its first byte is there, and nobody is left who may write to it. Not
    memory sealed by Linux: pages of a disk's cache are larger there, and read a third faster.

    Raises OSError; ENOSPC also where as much again would not stay free for the logs.
    """
    directory.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
    path = directory / f".lent-{os.urandom(8).hex()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    draft = StoreFile(path, os.open(path, flags, PRIVATE_FILE))
    try:
        final = StoreFile(path, os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    space = os.fstatvfs(draft.fileno())
    if space.f_bavail * space.f_frsize < 2 * nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write(draft)
    os.fchmod(draft.fileno(), _READ_ONLY)
    return final
