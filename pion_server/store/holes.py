"""Blocks of files, apart from their length: given back to the disk, or had ready in advance."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_F_PUNCHHOLE = 99
_FPUNCHHOLE = struct.Struct("=IIqq")


@cache
def _libc() -> ctypes.CDLL:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Free whole pages `[offset, offset + length)`, which read as zeros from then on.

    Raises OSError; EOPNOTSUPP where the file system or platform has no holes.
    """
    if sys.platform == "darwin":
        fcntl.fcntl(fd, _F_PUNCHHOLE, _FPUNCHHOLE.pack(0, 0, offset, length))
        return
    _allocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length)


def reserve_blocks(fd: int, offset: int, length: int) -> None:
    """Have blocks ready for `[offset, offset + length)`, behind the end of the file or before it.

    Raises OSError; EOPNOTSUPP where that cannot be done without making the file longer.
    """
    if sys.platform == "darwin":
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    _allocate(fd, _KEEP_SIZE, offset, length)


def _allocate(fd: int, mode: int, offset: int, length: int) -> None:
    import ctypes

    fallocate = getattr(_libc(), "fallocate64", None) or getattr(_libc(), "fallocate", None)
    if fallocate is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    wide = ctypes.c_int64
    if fallocate(ctypes.c_int(fd), ctypes.c_int(mode), wide(offset), wide(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
