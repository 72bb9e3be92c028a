"""What the server knows about one client connection, apart from its socket."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Connection:
    """One client. Commands read and change it; the wire encodes by `protocol`."""

    id: int
    address: str
    local_address: str
    peer_is_local: bool
    # A Unix socket: a reply may carry a descriptor.
    takes_descriptors: bool = False
    authenticated: bool = True
    # Whose stores its commands reach; None: the admin's, or everybody's where there is no password.
    tenant: bytes | None = None
    protocol: int = 2
    name: str = ""
    user: str = "default"
    library: str = ""
    library_version: str = ""
    opened_at: float = field(default_factory=time.monotonic)
    last_command: str = ""
    last_command_at: float = field(default_factory=time.monotonic)
    # Set by a command (QUIT): close once its reply, if any, is sent; execute nothing more.
    closing: bool = False
    # Reply bytes in memory that the client has not taken yet, as of the last attempt.
    queued_bytes: int = 0
    # Called once each, when the connection is gone: an open fill ends with its owner.
    on_close: list[Callable[[], None]] = field(default_factory=list)

    def used(self, command: str) -> float:
        """Note the command being executed, for CLIENT LIST; the time, as `time.monotonic`."""
        self.last_command = command
        self.last_command_at = now = time.monotonic()
        return now
