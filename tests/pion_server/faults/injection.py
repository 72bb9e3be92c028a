"""Faults inside a server: file operations that fail, wait, tear or kill, by a plan in a file.

The plan is a JSON list of `Fault`s and is read again whenever it changes, so a test arms and
disarms a running server. Only files named `pion.*` are meant: the store's, not the status file.

    write_plan(path, Fault("fsync", "pion.vstore.wal.*", errno=errno.EIO))
"""

from __future__ import annotations

import fcntl
import fnmatch
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OPERATIONS = ("write", "fsync", "rename", "truncate", "unlink", "read", "send")
CHANGES = ("write", "fsync", "rename", "truncate", "unlink")


@dataclass(frozen=True)
class Fault:
    """The operations numbered `skip` to `skip + times - 1` among those that match, and what
    happens to each: `sleep` seconds, then `errno` is raised or the process is killed, a write
    after its first half where `tear` is set. `op` "change": all but reads."""

    op: str
    name: str = "pion.*"
    skip: int = 0
    times: int = 1 << 30
    errno: int = 0
    kill: bool = False
    tear: bool = False
    sleep: float = 0.0

    def means(self, op: str, name: str) -> bool:
        named = self.op == op or (self.op == "change" and op in CHANGES)
        return named and fnmatch.fnmatch(name, self.name)


def write_plan(path: Path, *faults: Fault) -> None:
    """Arm these faults in the server that has `path` as its plan; none: disarm."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps([asdict(fault) for fault in faults]))
    draft.replace(path)


class Plan:
    """The plan as the server sees it, with a counter for each fault."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._stamp: tuple[int, int] | None = None
        self._faults: list[Fault] = []
        self._counts: list[int] = []
        self._lock = threading.Lock()
        # The originals: the plan's own file operations must not be faulted.
        self._stat, self._open = os.stat, open

    def due(self, op: str, name: str) -> list[Fault]:
        """Count this operation and return what shall happen to it."""
        with self._lock:
            self._refresh()
            found = []
            for number, fault in enumerate(self._faults):
                if fault.means(op, name):
                    count = self._counts[number]
                    self._counts[number] += 1
                    if fault.skip <= count < fault.skip + fault.times:
                        found.append(fault)
            return found

    def _refresh(self) -> None:
        try:
            status = self._stat(self._path)
        except FileNotFoundError:
            return
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp != self._stamp:
            with self._open(self._path) as file:
                self._faults = [Fault(**fields) for fields in json.load(file)]
            self._counts = [0] * len(self._faults)
            self._stamp = stamp


def name_of(fd: int) -> str:
    """The name an open file was opened under (or was renamed to since)."""
    if sys.platform == "darwin":
        path = fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0").decode()
    else:
        path = os.readlink(f"/proc/self/fd/{fd}")
    path = path.removesuffix(" (deleted)")
    return "pion.directory" if os.path.isdir(path) else os.path.basename(path)


def install(path: Path) -> None:
    """Put the plan at `path` between this process and its files."""
    plan = Plan(path)

    def strike(op: str, name: str, tear: Callable[[], object] = lambda: None) -> None:
        for fault in plan.due(op, name):
            time.sleep(fault.sleep)
            if fault.tear:
                tear()
            if fault.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.errno:
                raise OSError(fault.errno, os.strerror(fault.errno))

    def by_fd(op: str, original: Callable[..., Any], position: int = 0) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            strike(op, name_of(args[position]))
            return original(*args)

        return wrapped

    def by_path(op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **keywords: Any) -> Any:
            strike(op, os.path.basename(os.fspath(args[0])))
            return original(*args, **keywords)

        return wrapped

    pwritev = os.pwritev

    def write(fd: int, parts: list[Any], offset: int) -> int:
        def half() -> None:
            data = b"".join(parts)
            pwritev(fd, [data[: len(data) // 2]], offset)

        strike("write", name_of(fd), half)
        return pwritev(fd, parts, offset)

    if sys.platform == "darwin":
        control = fcntl.fcntl

        def flush_or_control(fd: int, command: int, *rest: Any) -> Any:
            if command == fcntl.F_FULLFSYNC:
                strike("fsync", name_of(fd))
            return control(fd, command, *rest)

        fcntl.fcntl = flush_or_control
    os.pwritev = write  # type: ignore[assignment]
    os.fsync = by_fd("fsync", os.fsync)
    os.ftruncate = by_fd("truncate", os.ftruncate)
    os.pread = by_fd("read", os.pread)
    os.preadv = by_fd("read", os.preadv)
    os.sendfile = by_fd("send", os.sendfile, 1)
    os.replace = by_path("rename", os.replace)
    os.unlink = by_path("unlink", os.unlink)
