"""A TCP connection under deadlines: what every lane of the client sends and receives through."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from pion_vllm_mlx.transport import GivenUp, Patience, TimedOut, Unavailable

#: Seconds for which a full socket is only waited for. Peers that wait for each other take turns.
_UNTIL_READING: Final = 0.01


class Channel:
    """A non-blocking socket under the deadlines of one exchange."""

    def __init__(self, sock: socket.socket, patience: Patience) -> None:
        self._socket = sock
        self._patience = patience
        self._ends = time.monotonic() + patience.total
        self._poll = select.poll()

    def has_input(self) -> bool:
        """Whether anything, an end of file included, has arrived already."""
        self._poll.register(self._socket, select.POLLIN)
        return bool(self._poll.poll(0))

    def send(self, chunks: Sequence[memoryview]) -> int | None:
        """Bytes the kernel took, or None if its buffer is full."""
        try:
            return self._socket.sendmsg(chunks)
        except BlockingIOError:
            return None

    def wait_to_write(self, can_read: bool) -> bool:
        """Wait until the socket takes bytes or, if `can_read`, brings some; True for the latter.

        What it brings counts only where it takes nothing for a while: each small reply of a long
        pipeline is no reason to wake up.
        """
        self._poll.register(self._socket, select.POLLOUT)
        if can_read and self._poll.poll(_UNTIL_READING * 1000):
            return False
        events = self._wait(select.POLLOUT | (select.POLLIN if can_read else 0), "request stalled")
        return bool(events & select.POLLIN) and not events & select.POLLOUT

    def await_first_byte(self) -> None:
        """Wait until the answer begins."""
        self._wait(select.POLLIN, "no answer", self._patience.first_byte)

    def receive_into(self, target: memoryview) -> int:
        """Receive 1 to `len(target)` bytes."""
        while True:
            try:
                count = self._take(target)
            except BlockingIOError:
                self._wait(select.POLLIN, "answer stalled")
                continue
            if count == 0:
                raise Unavailable("connection closed by the server")
            if self._patience.watch is not None and not self._patience.watch(count):
                raise GivenUp("what is left takes longer than it is worth")
            return count

    def _take(self, target: memoryview) -> int:
        return self._socket.recv_into(target)

    def _wait(self, events: int, what: str, limit: float | None = None) -> int:
        limit = self._patience.stall if limit is None else limit
        seconds = min(limit, self._ends - time.monotonic())
        self._poll.register(self._socket, events)
        ready = self._poll.poll(max(seconds, 0) * 1000)
        if not ready:
            raise TimedOut(f"{what} within {max(seconds, 0):.3g} s")
        return ready[0][1]


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """Open a non-blocking TCP connection before `deadline`, trying each address of `host`."""
    failure: OSError | None = None
    for family, address in _addresses(host, port, deadline):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(seconds_left(deadline, "to connect"))
            sock.connect(address)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as error:
            failure = error
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise Unavailable(f"cannot connect: {failure}") from failure


def _addresses(host: str, port: int, deadline: float) -> list[tuple[int, Any]]:
    """Resolve `host`; in a thread unless it is numeric, as a resolver knows no deadline."""
    found: list[tuple[int, Any]] = []
    failures: list[Exception] = []

    # Text would load the IDNA codec first: milliseconds of a fresh process's first hit.
    name = host.encode() if host.isascii() else host

    def resolve(flags: int = 0) -> None:
        try:
            answers = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=flags)
            found.extend((family, address) for family, _, _, _, address in answers)
        except (OSError, UnicodeError) as error:
            failures.append(error)

    resolve(socket.AI_NUMERICHOST)
    if not found:
        failures.clear()
        resolver = threading.Thread(target=resolve, daemon=True)
        resolver.start()
        resolver.join(seconds_left(deadline, "to resolve the host name"))
    if not found:
        raise Unavailable(f"cannot resolve {host!r}: {failures[0] if failures else 'too slow'}")
    return found


def seconds_left(deadline: float, purpose: str) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimedOut(f"no time left {purpose}")
    return seconds
