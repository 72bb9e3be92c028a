"""Every error a command can answer, as one tree.

CommandError                the whole reply text after `-`, one line
├── BadArgument             ERR …: refused before any effect
├── NotFound                ERR … not found
├── OutOfMemory             -OOM: over a byte limit and nothing left to evict
├── LogFailed               -MISCONF: the log cannot take the record (disk full, I/O error)
├── Stale                   -STALE: a fill that is no longer the current one
├── DamagedEntry            ERR: a checksum or a read failed; only this entry is affected
├── EngineOff               ERR attention engine not available …
├── ColdMiss                -COLDMISS: demoted attention state, to be brought back by WARM
├── Replay                  -REPLAY: a decode session is not held as its client believes
├── Elsewhere               ERR … lives on worker N: to be asked there
├── AuthRequired            -NOAUTH
├── NotPermitted            -NOPERM: not for tenants
└── WrongPassword           -WRONGPASS
"""

from __future__ import annotations


def printable(name: bytes | bytearray | memoryview, limit: int = 64) -> str:
    """User bytes made safe for a one-line reply: ASCII only, escaped, cut at `limit` characters."""
    text = bytes(name[: limit + 1]).decode("latin-1")
    safe = text.encode("unicode_escape").decode("ascii")
    return safe if len(name) <= limit else safe[:limit] + "..."


class CommandError(Exception):
    """A refused command. `str(error)` is the reply line after the leading `-`."""

    prefix = "ERR"

    def __init__(self, text: str) -> None:
        super().__init__(f"{self.prefix} {text}" if self.prefix else text)


class BadArgument(CommandError):
    """An argument is missing, malformed or out of range."""


class NotFound(CommandError):
    """A session, namespace, layer or snapshot that is not held."""


class OutOfMemory(CommandError):
    """The memory limit or a quota is reached and nothing can be evicted."""

    prefix = "OOM"


class LogFailed(CommandError):
    """The write could not be made durable; memory is unchanged."""

    prefix = "MISCONF"


class Stale(CommandError):
    """The fill generation named by a write is not the current one."""

    prefix = "STALE"


class DamagedEntry(CommandError):
    """Stored bytes failed their checksum or could not be read."""


class EngineOff(CommandError):
    """Attention is turned off, or MLX is not installed or does not work."""


class ColdMiss(CommandError):
    """The attention state was demoted; KV.PREFIX.WARM brings it back from stored rows."""

    prefix = "COLDMISS"


class Replay(CommandError):
    """A decode session that is not held, or not as long as said: its client begins a new one."""

    prefix = "REPLAY"


class Elsewhere(CommandError):
    """Another worker of this server has what is asked for."""


class AuthRequired(CommandError):
    """No authentication yet on this connection."""

    prefix = "NOAUTH"


class NotPermitted(CommandError):
    """A command that this user may not give."""

    prefix = "NOPERM"


class WrongPassword(CommandError):
    """Wrong user or password."""

    prefix = "WRONGPASS"
