"""TLS under a lane: what `tls=` stands for, and a channel over a TLS socket."""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Sequence
from typing import TypeAlias

from pion_vllm_mlx.transport import Patience, Unavailable
from pion_vllm_mlx.transport.channel import Channel, connect, seconds_left

#: True: certificates the system trusts. A path: those of this file only. False, None: no TLS.
Tls: TypeAlias = "bool | str | os.PathLike[str] | ssl.SSLContext | None"


def client_context(tls: Tls) -> ssl.SSLContext | None:
    """The context `tls` stands for; the server's certificate and name are always checked.

    Raises ValueError for a file that cannot be read or holds no certificate.
    """
    if tls is None or tls is False:
        return None
    if isinstance(tls, ssl.SSLContext):
        return tls
    try:
        return ssl.create_default_context(cafile=None if tls is True else os.fspath(tls))
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"tls: cannot use {tls}: {error.strerror or error}") from error


def wrap(sock: socket.socket, host: str, context: ssl.SSLContext, deadline: float) -> ssl.SSLSocket:
    """A handshake before `deadline`; non-blocking afterwards. Raises Unavailable."""
    try:
        sock.settimeout(seconds_left(deadline, "for TLS"))
        wrapped = context.wrap_socket(sock, server_hostname=host)
        wrapped.setblocking(False)
        return wrapped
    except (OSError, ValueError) as error:
        sock.close()
        reason = getattr(error, "verify_message", None) or getattr(error, "reason", None) or error
        raise Unavailable(f"no TLS connection: {reason}") from error


class TlsChannel(Channel):
    """As a plain channel; what the kernel has received is not yet what the peer has sent."""

    def __init__(self, sock: ssl.SSLSocket, patience: Patience) -> None:
        super().__init__(sock, patience)
        self._tls = sock

    def has_input(self) -> bool:
        if not super().has_input():
            return False
        try:
            # Session tickets make the socket readable although nothing was said.
            self._tls.recv(1)
        except ssl.SSLWantReadError:
            return False
        except OSError:
            return True
        return True

    def send(self, chunks: Sequence[memoryview]) -> int | None:
        chunk = next((one for one in chunks if len(one)), None)
        if chunk is None:
            return 0
        try:
            return self._tls.send(chunk)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return None

    def _take(self, target: memoryview) -> int:
        try:
            return self._tls.recv_into(target)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def _wait(self, events: int, what: str, limit: float | None = None) -> int:
        if events & select.POLLIN and self._tls.pending():
            return select.POLLIN
        return super()._wait(events, what, limit)


def open_channel(sock: socket.socket, patience: Patience) -> Channel:
    """The channel that suits a socket."""
    return (
        TlsChannel(sock, patience) if isinstance(sock, ssl.SSLSocket) else Channel(sock, patience)
    )


def open_socket(host: str, port: int, deadline: float, tls: ssl.SSLContext | None) -> socket.socket:
    """A connected, non-blocking socket before `deadline`, TLS or not. Raises Unavailable."""
    sock = connect(host, port, deadline)
    return sock if tls is None else wrap(sock, host, tls, deadline)
