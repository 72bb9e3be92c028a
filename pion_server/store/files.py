"""Files of a data directory: private modes, real durability, and one server at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import sys
import threading
from pathlib import Path

from pion_server.store.holes import punch_hole, reserve_blocks

PAGE = 4096
SLOW_TO_FREE = 16 << 20
# Blocks had ready at once, and the room that has to be left beside them.
AHEAD = 8 << 20
PLENTY = 1 << 30
# Less than this behind the end of a file may be its own bookkeeping.
WORTH_RELEASING = 1 << 17
PRIVATE_DIR = 0o700
PRIVATE_FILE = 0o600


class DirectoryInUse(Exception):
    """Another server holds this data directory."""


def whole_pages(offset: int, length: int) -> tuple[int, int]:
    """Start and end of the whole pages in these bytes, of which there must be some."""
    return -(-offset // PAGE) * PAGE, (offset + length) // PAGE * PAGE


class StoreFile:
    """An open file that stays open while anybody refers to it.

    Sent replies refer to the file their rows lie in, so a compaction may rename another file over
    its path at any time: the old bytes stay readable until the last reply is out.

    `trust` is what verified data holds on to: `doubt()`, called when somebody else was caught
    changing the file, makes it another object, and everything has to be verified again.

    `dead` lists (offset, length) of bodies nobody refers to any more, until `punch` is called.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.trust = object()
        self.dead: list[tuple[int, int]] = []
        self._fd = fd
        self._reserved = 0
        self._reserves = True

    @classmethod
    def open(cls, path: Path, *, truncate: bool = False) -> StoreFile:
        """Open (and create with mode 0600) a file for reading and writing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if truncate else 0)
        return cls(path, os.open(path, flags, PRIVATE_FILE))

    @classmethod
    def anonymous(cls, directory: Path) -> StoreFile:
        """A file without a name: rows live there, nothing survives the process."""
        path = directory / f".pion-{os.getpid()}-{os.urandom(4).hex()}.anon"
        file = cls.open(path)
        path.unlink()
        return file

    def fileno(self) -> int:
        return self._fd

    def size(self) -> int:
        """Current length in bytes."""
        return os.fstat(self._fd).st_size

    def allocated(self) -> int:
        """Bytes it takes on the disk: its length without the holes and what is only had ready."""
        status = os.fstat(self._fd)
        ready = max(0, self._reserved - status.st_size)
        return min(status.st_size, max(0, status.st_blocks * 512 - ready))

    def reserve(self, start: int, end: int) -> None:
        """Have blocks ready for `[start, end)`, all that is about to be appended, and for more.

        Finding every page its block takes a third of a write. Without effect where there is no
        plenty of room, or no way to do it; the file's length stays.
        """
        if end <= self._reserved or not self._reserves:
            return
        space = os.fstatvfs(self._fd)
        if space.f_bavail * space.f_frsize < PLENTY + end - start:
            return
        start = max(start, self._reserved)
        end += AHEAD
        try:
            reserve_blocks(self._fd, start, end - start)
        except OSError:
            self._reserves = False
        else:
            self._reserved = end

    def release_reserved(self) -> None:
        """Give back what stands behind the end of the file, as an earlier process may have left."""
        status = os.fstat(self._fd)
        if status.st_blocks * 512 >= status.st_size + WORTH_RELEASING:
            with contextlib.suppress(OSError):  # it stays there, then, until the next start
                self.truncate(status.st_size)

    def can_punch(self) -> bool:
        """Whether this file system has holes; asked for one behind the end of the file."""
        start, _ = whole_pages(self.size(), PAGE)
        try:
            punch_hole(self._fd, start, PAGE)
        except OSError as error:
            return error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS)
        return True

    def punch(self) -> list[tuple[int, int]]:
        """Give the whole pages of dead bodies back to the disk; those of `dead` it was done to.

        Pages are never changed in place: one on its way to a socket keeps its bytes. Where holes
        cannot be made nothing happens.
        """
        ranges, self.dead = self.dead, []
        punched = []
        for offset, length in ranges:
            start, end = whole_pages(offset, length)
            with contextlib.suppress(OSError):
                punch_hole(self._fd, start, end - start)
                punched.append((offset, length))
        return punched

    def expect_jumps(self, jumps: bool) -> None:
        """Tell the system whether to read ahead of what is asked for."""
        if hasattr(os, "posix_fadvise"):
            advice = os.POSIX_FADV_RANDOM if jumps else os.POSIX_FADV_NORMAL
            os.posix_fadvise(self._fd, 0, 0, advice)

    def doubt(self) -> None:
        """Nothing read from this file counts as verified any more."""
        self.trust = object()

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes at `offset`; shorter only at the end of the file."""
        data = os.pread(self._fd, length, offset)
        if len(data) == length or not data:
            return data
        pieces = [data]
        got = len(data)
        while got < length:
            more = os.pread(self._fd, length - got, offset + got)
            if not more:
                break
            pieces.append(more)
            got += len(more)
        return b"".join(pieces)

    def write(self, parts: list[bytes | bytearray | memoryview], offset: int) -> int:
        """Write all parts from `offset` on and return their total length; short writes go on."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        total = sum(view.nbytes for view in views)
        at = offset
        while views:
            written = os.pwritev(self._fd, views[:64], at)
            if written <= 0:
                raise OSError(f"wrote {written} bytes to {self.path.name}")
            at += written
            while views and written >= views[0].nbytes:
                written -= views[0].nbytes
                views.pop(0)
            if written:
                views[0] = views[0][written:]
        return total

    def truncate(self, length: int) -> None:
        os.ftruncate(self._fd, length)
        self._reserved = 0

    def sync(self) -> None:
        """Flush to stable storage: F_FULLFSYNC on macOS, fsync elsewhere."""
        if sys.platform == "darwin":
            fcntl.fcntl(self._fd, fcntl.F_FULLFSYNC)
        else:
            os.fsync(self._fd)

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            closer.close(fd)


class _Closer:
    """Closes large removed files in a thread of its own: freeing their blocks takes the system up
    to seconds, and who lets go of one last may be the thread that serves clients."""

    def __init__(self) -> None:
        # Its `put` may be called from a destructor, wherever that happens to run.
        self._files: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on large files are closed by the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pion-close", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            os.close(self._files.get())

    def close(self, fd: int) -> None:
        status = os.fstat(fd)
        large = status.st_nlink == 0 and status.st_size >= SLOW_TO_FREE
        if large and self._thread is not None:
            self._files.put(fd)
        else:
            os.close(fd)


closer = _Closer()


def sync_directory(directory: Path) -> None:
    """Make renames and new names in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class DirectoryLock:
    """The right to a data directory; released by `close()` or by the process's end.

    `shared`: with other workers of the same server, whose parent sees to it that each has files of
    its own there.
    """

    def __init__(self, directory: Path, *, shared: bool = False) -> None:
        directory.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
        self._fd = os.open(
            directory / "pion.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE
        )
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 64, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise DirectoryInUse(
                f"data directory {directory} is in use by another pion-server"
                + (f" (pid {holder})" if holder else "")
            ) from error
        if not shared:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def share(self) -> None:
        """Let workers in, and nobody who wants the directory alone. Raises OSError."""
        fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
