"""What the operating system says about this process and machine, in bytes."""

from __future__ import annotations

import io
import os
import resource
import sys
from typing import TextIO

_PROC_PIDTASKINFO = 4


def rss_bytes() -> int:
    """Resident memory now."""
    if sys.platform == "linux":
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "darwin":
        import ctypes

        # struct proc_taskinfo starts with two u64: virtual and resident size.
        info = (ctypes.c_uint64 * 12)()
        libproc = ctypes.CDLL("libproc.dylib")
        size = ctypes.sizeof(info)
        got = libproc.proc_pidinfo(
            os.getpid(), _PROC_PIDTASKINFO, ctypes.c_uint64(0), ctypes.byref(info), size
        )
        if got >= 16:
            return int(info[1])
    return peak_rss_bytes()


def peak_rss_bytes() -> int:
    """The largest resident memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def total_ram_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def raise_file_limit(wanted: int) -> int:
    """Allow as many open files as `wanted`, or as many as the system grants; how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return wanted if soft == resource.RLIM_INFINITY else soft


class LossyStream(io.TextIOBase):
    """Text output that may vanish: a reader that has gone away must not stop a server."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()


def keep_talking() -> None:
    """From now on a closed stdout or stderr is no error."""
    sys.stdout = LossyStream(sys.stdout)
    sys.stderr = LossyStream(sys.stderr)
