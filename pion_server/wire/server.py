"""The listening sockets and all connections of one process."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from typing import Any, TypeAlias

from pion_server.wire.channel import Channel
from pion_server.wire.connection import Connection
from pion_server.wire.lane import Lane, Service
from pion_server.wire.resp import SCRATCH

_ACCEPTS_A_TURN = 64
_SPOOL = 256 * 1024
# Out of descriptors: accepting again at once would only spin.
_ACCEPT_PAUSE = 0.1
# All clients together may let this many times the limit of one of them pile up.
_OUTPUT_SHARES = 4

Address: TypeAlias = "tuple[Any, ...] | str | bytes"


class Server:
    """Accepts clients and owns their channels. One event loop, one thread."""

    def __init__(
        self,
        service: Service,
        *,
        max_clients: int = 10_000,
        output_limit: int = 256 * 1024 * 1024,
    ) -> None:
        self.service = service
        self.max_clients = max_clients
        self.output_limit = output_limit
        self.loop = asyncio.get_running_loop()
        self.scratch = memoryview(bytearray(SCRATCH))
        self.spool = memoryview(bytearray(_SPOOL))
        self.stopping = False
        self.connections_accepted = 0
        self.queued_bytes = 0
        self._channels: set[Channel] = set()
        self._listeners: list[socket.socket] = []

    def listen(self, sock: socket.socket, lane: Lane) -> None:
        """Serve a bound and listening socket, from now on ours to close."""
        sock.setblocking(False)
        self._listeners.append(sock)
        self.loop.add_reader(sock.fileno(), self._accept, sock, lane)

    def _accept(self, listener: socket.socket, lane: Lane) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                sock, peer = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause_accepting(listener, lane)
                return
            if len(self._channels) >= self.max_clients:
                _turn_away(sock, lane.too_many_clients)
                continue
            self._open(sock, peer, lane)

    def adopt(self, sock: socket.socket, peer: Address, local: Address, lane: Lane) -> bool:
        """Serve a client whose bytes come through another socket of ours; False: too many.

        `peer`, `local`: the addresses of the connection it really has.
        """
        if self.stopping or len(self._channels) >= self.max_clients:
            sock.close()
            return False
        sock.setblocking(False)
        self._serve(sock, peer, local, lane, is_unix=False)
        return True

    def _pause_accepting(self, listener: socket.socket, lane: Lane) -> None:
        self.loop.remove_reader(listener.fileno())

        def accept_again() -> None:
            if not self.stopping:
                self.loop.add_reader(listener.fileno(), self._accept, listener, lane)

        self.loop.call_later(_ACCEPT_PAUSE, accept_again)

    def _open(self, sock: socket.socket, peer: Address, lane: Lane) -> None:
        try:
            sock.setblocking(False)
            is_unix = sock.family == socket.AF_UNIX
            if not is_unix:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            local = sock.getsockname()
        except OSError:  # gone already
            sock.close()
            return
        self._serve(sock, peer, local, lane, is_unix)

    def _serve(
        self, sock: socket.socket, peer: Address, local: Address, lane: Lane, is_unix: bool
    ) -> None:
        self.connections_accepted += 1
        connection = Connection(
            id=self.connections_accepted,
            address=format_address(peer),
            local_address=format_address(local),
            peer_is_local=is_unix or is_local(str(peer[0])),
            takes_descriptors=is_unix,
        )
        self.service.connected(connection)
        self._channels.add(Channel(self, sock, connection, lane))

    def note_queued(self, channel: Channel) -> None:
        """Keep count of unread replies; over a limit the slowest reader goes, not the data."""
        held = channel.outbox.held
        self.queued_bytes += held - channel.connection.queued_bytes
        channel.connection.queued_bytes = held
        # A single reply has no limit: without the one being sent, what waits behind it counts.
        if held - channel.outbox.current > self.output_limit:
            channel.drop()
        elif self.queued_bytes > _OUTPUT_SHARES * self.output_limit:
            slowest = max(self._channels, key=lambda other: other.connection.queued_bytes)
            # Alone, it holds up nobody: then the rule above is all there is.
            if slowest.connection.queued_bytes < self.queued_bytes:
                slowest.drop()

    def forget(self, channel: Channel) -> None:
        """Called by a channel that has closed."""
        self._channels.discard(channel)
        self.service.disconnected(channel.connection)

    async def stop(self, grace: float = 5.0) -> None:
        """Accept and read nothing more, let running commands end, send their replies, close.

        Commands are waited for without a limit, as a write in progress must not be torn; clients
        that do not read their replies get `grace` seconds.
        """
        self.stopping = True
        for listener in self._listeners:
            self.loop.remove_reader(listener.fileno())
            listener.close()
        for channel in list(self._channels):
            channel.drain()
        deadline = self.loop.time() + grace
        while self._channels:
            if self.loop.time() > deadline:
                for channel in [channel for channel in self._channels if not channel.busy]:
                    channel.close()
            await asyncio.sleep(0.01)


def _turn_away(sock: socket.socket, farewell: bytes) -> None:
    try:
        sock.setblocking(False)
        sock.send(farewell)
    except OSError:
        pass
    sock.close()


def format_address(address: Address) -> str:
    """`host:port`; a Unix socket's path, empty for its clients, and :0 as Redis writes it."""
    if not isinstance(address, tuple):
        return f"{os.fsdecode(address) or 'unix'}:0"
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_local(host: str) -> bool:
    """Whether a peer address is this machine's loopback."""
    address = ipaddress.ip_address(host.split("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
