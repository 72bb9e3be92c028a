"""The status file (rewritten each second) and the crash log (a line at start and at exit).

Together they tell a supervisor what a vanished process was doing: a status of `running` whose
process is gone, and a start line without its exit line, mean that it was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

from pion_server import __version__
from pion_server.process import rss_bytes, total_ram_bytes

_PERIOD = 1.0


class StatusFile:
    """`key=value` lines, replaced whole so that a reader never sees half of them."""

    def __init__(self, path: Path, port: int) -> None:
        self.path = path
        self._port = port
        self._ticks = 0
        self._started = time.monotonic()

    def write(self, state: str) -> None:
        """One heartbeat. A full disk must not stop the server: failures are ignored."""
        self._ticks += 1
        lines = {
            "state": state,
            "pid": os.getpid(),
            "version": __version__,
            "port": self._port,
            "rss_bytes": rss_bytes(),
            "total_ram_bytes": total_ram_bytes(),
            "ticks": self._ticks,
            "heartbeat_unix_s": int(time.time()),
            "uptime_s": int(time.monotonic() - self._started),
        }
        text = "".join(f"{key}={value}\n" for key, value in lines.items())
        draft = self.path.with_name(self.path.name + ".tmp")
        with contextlib.suppress(OSError):
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as file:
                file.write(text)
            os.replace(draft, self.path)

    def read(self) -> dict[str, str]:
        """What the last writer, perhaps an earlier process, left; empty if nothing readable."""
        try:
            lines = self.path.read_text("ascii").splitlines()
        except (OSError, UnicodeDecodeError):
            return {}
        return dict(line.split("=", 1) for line in lines if "=" in line)

    async def beat(self) -> None:
        """Write once a second, until cancelled. Missing beats mean a blocked event loop."""
        while True:
            await asyncio.sleep(_PERIOD)
            # In a thread: a disk busy with a snapshot must not hold up the clients.
            await asyncio.to_thread(self.write, "running")


class CrashLog:
    """Appends one line per event. `path=None`: writes nothing."""

    def __init__(self, path: Path | None, port: int) -> None:
        self.path = path
        self._port = port
        self._started = time.monotonic()

    def note_start(self, previous: dict[str, str]) -> None:
        """The start line; before it, a line about a `previous` run that could not say goodbye."""
        if previous.get("state") in ("starting", "running", "stopping"):
            known = ("pid", "state", "rss_bytes", "heartbeat_unix_s")
            told = " ".join(f"{key}={previous.get(key, '?')}" for key in known)
            self._append(f"lost {told}")
        self._append(f"start pid={os.getpid()} port={self._port} version={__version__}")

    def note_exit(self, code: int, reason: str) -> None:
        uptime = time.monotonic() - self._started
        self._append(
            f"exit pid={os.getpid()} code={code} reason={reason} "
            f"uptime_s={uptime:.0f} rss_bytes={rss_bytes()}"
        )

    def note(self, text: str) -> None:
        """A line of one's own."""
        self._append(text)

    def _append(self, text: str) -> None:
        if self.path is None:
            return
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(self.path, flags, 0o600)
            with open(fd, "w") as file:
                file.write(f"{stamp} {text}\n")
