"""The Unix socket for clients on this machine, beside the TCP ports of `doors`."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from pion_server.config import Config
from pion_server.flag_values import ConfigError
from pion_server.store.files import PRIVATE_FILE

DEFAULT_NAME = "pion.sock"
# Bytes of a path that every system's socket address holds, its final NUL included (macOS: 104).
_LONGEST_PATH = 104
_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class UnixDoor:
    """A listening socket and the absolute path it stands under."""

    path: Path
    socket: socket.socket
    inode: int

    def remove(self) -> None:
        """Take the name away, unless another server has put its own there."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self.inode:
                self.path.unlink()


def open_unix_door(config: Config, suffix: str = "") -> tuple[UnixDoor | None, str]:
    """Listen at `--unixsocket`, or in the data directory, which is locked and ours alone.

    `suffix` tells several workers' apart. Without a socket (`none`, or no room for its path in an
    address) a notice says why. Raises ConfigError for a path that was asked for and cannot be had.
    """
    asked = config.unix_socket
    if asked == Path("none"):
        return None, ""
    path = (asked or config.directory / DEFAULT_NAME).absolute()
    path = path.with_name(path.name + suffix)
    if len(os.fsencode(path)) >= _LONGEST_PATH:
        text = f"{path} is too long for a Unix socket ({_LONGEST_PATH - 1} bytes at most)"
        if asked is not None:
            raise ConfigError(f"--unixsocket: {text}")
        return None, f"no Unix socket: {text}; name a shorter one with --unixsocket"
    try:
        _clear_away(path)
        return _listen(path), ""
    except OSError as error:
        text = f"cannot listen on {path}: {error.strerror or error}"
        if asked is not None:
            raise ConfigError(f"--unixsocket: {text}") from None
        return None, f"no Unix socket: {text}"


def _clear_away(path: Path) -> None:
    """Remove a socket that nobody listens at. Raises ConfigError for anything else there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"--unixsocket: {path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"--unixsocket: {path} is in use by another program")


def _listen(path: Path) -> UnixDoor:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The process's umask keeps everybody else out, from the first moment on.
        listener.bind(str(path))
        path.chmod(PRIVATE_FILE)
        listener.listen(_BACKLOG)
        return UnixDoor(path, listener, path.stat().st_ino)
    except BaseException:
        listener.close()
        raise
