"""The listening sockets and all connections of one process."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from pion_server.wire.channel import Channel
from pion_server.wire.connection import Connection
from pion_server.wire.lane import Lane, Service
from pion_server.wire.resp import SCRATCH

ACCEPTS_A_TURN = 64
_SPOOL = 256 * 1024
# Out of descriptors: accepting again at once would only spin.
_ACCEPT_PAUSE = 0.1
# All clients together may let this many times the limit of one of them pile up, each way.
_SHARES = 4
# Replies a client that has not authenticated may leave unread: they are all refusals.
_STRANGERS_OUTPUT = 64 * 1024
# Seconds between two lines about strangers: their number is theirs to choose.
_COMPLAINT_PAUSE = 10.0

Address: TypeAlias = "tuple[Any, ...] | str | bytes"
Admit: TypeAlias = Callable[[socket.socket, Address], None]


class Server:
    """Accepts clients and owns their channels. One event loop, one thread."""

    def __init__(
        self,
        service: Service,
        *,
        max_clients: int = 10_000,
        per_address: int | None = None,
        output_limit: int = 256 * 1024 * 1024,
        input_limit: int = 1024 * 1024 * 1024,
        auth_timeout: float = 10.0,
        accepts_a_turn: int = ACCEPTS_A_TURN,
    ) -> None:
        """`output_limit`, `input_limit`: unread replies, and half-sent requests, of one client.

        `accepts_a_turn`: 1 leaves a burst's others to those who accept from the same socket.
        """
        self.service = service
        self.max_clients = max_clients
        self.per_address = per_address
        self.output_limit = output_limit
        self.input_limit = input_limit
        self.auth_timeout = auth_timeout
        self._accepts_a_turn = accepts_a_turn
        self.loop = asyncio.get_running_loop()
        self.scratch = memoryview(bytearray(SCRATCH))
        self.spool = memoryview(bytearray(_SPOOL))
        self.stopping = False
        self.connections_accepted = 0
        self.turned_away = 0
        self.stalled = 0
        self.strangers_dropped = 0
        self.queued_bytes = 0
        self.received_bytes = 0
        self._channels: set[Channel] = set()
        # Who has not authenticated, and since when; the oldest first.
        self._strangers: dict[Channel, float] = {}
        self._strangers_watched = False
        self._next_complaint = 0.0
        self._by_address: dict[str, int] = {}
        self._listeners: list[socket.socket] = []

    def listen(self, sock: socket.socket, lane: Lane, admit: Admit | None = None) -> None:
        """Serve a bound and listening socket, from now on ours to close.

        `admit(client, peer)`: who looks after a new client instead, until `adopt`.
        """
        sock.setblocking(False)
        self._listeners.append(sock)
        chosen = admit or partial(self._admit, lane)
        self.loop.add_reader(sock.fileno(), self._accept, sock, chosen)

    def _accept(self, listener: socket.socket, admit: Admit) -> None:
        for _ in range(self._accepts_a_turn):
            try:
                sock, peer = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause_accepting(listener, admit)
                return
            admit(sock, peer)

    def _admit(self, lane: Lane, sock: socket.socket, peer: Address) -> None:
        if self._has_room_for(peer):
            self._open(sock, peer, lane)
        else:
            self.turned_away += 1
            _turn_away(sock, lane.too_many_clients)

    def _has_room_for(self, peer: Address) -> bool:
        """Whether one more may come in; where it is full, the longest unknown goes for it.

        So a crowd of strangers keeps nobody out who knows the password.
        """
        if self._address_is_full(peer):
            return False
        if len(self._channels) >= self.max_clients and self._strangers:
            self._drop_stranger(next(iter(self._strangers)), "made room for another client")
            return True  # also where its refusal is under way still: its socket is closed
        return len(self._channels) < self.max_clients

    def adopt(self, sock: socket.socket, peer: Address, local: Address, lane: Lane) -> bool:
        """Serve a client whose bytes come through another socket of ours; False: too many.

        `peer`, `local`: the addresses of the connection it really has.
        """
        if self.stopping or not self._has_room_for(peer):
            self.turned_away += 1
            sock.close()
            return False
        sock.setblocking(False)
        self._serve(sock, peer, local, lane, is_unix=False)
        return True

    def _address_is_full(self, peer: Address) -> bool:
        if self.per_address is None or not isinstance(peer, tuple):
            return False
        return self._by_address.get(_host_of(format_address(peer)), 0) >= self.per_address

    def _pause_accepting(self, listener: socket.socket, admit: Admit) -> None:
        self.loop.remove_reader(listener.fileno())

        def accept_again() -> None:
            if not self.stopping:
                self.loop.add_reader(listener.fileno(), self._accept, listener, admit)

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
        if self.per_address is not None:
            host = _host_of(connection.address)
            self._by_address[host] = self._by_address.get(host, 0) + 1
        self.service.connected(connection)
        self._channels.add(Channel(self, sock, connection, lane))

    def note_known(self, channel: Channel, known: bool) -> None:
        """A client has authenticated, or has yet to: within `auth_timeout`."""
        if known:
            self._strangers.pop(channel, None)
            return
        self._strangers[channel] = self.loop.time()
        if not self._strangers_watched:
            self._strangers_watched = True
            self.loop.call_later(self.auth_timeout, self._drop_strangers)

    def _drop_strangers(self) -> None:
        """Close those whose time is up, and look again when the next one's is."""
        now = self.loop.time()
        for channel, since in list(self._strangers.items()):
            if since + self.auth_timeout > now:
                self.loop.call_at(since + self.auth_timeout, self._drop_strangers)
                return
            self._drop_stranger(channel, f"no password within {self.auth_timeout:g} seconds")
        self._strangers_watched = False

    def _drop_stranger(self, channel: Channel, reason: str) -> None:
        del self._strangers[channel]
        self.strangers_dropped += 1
        if self.loop.time() < self._next_complaint:
            return channel.close()
        self._next_complaint = self.loop.time() + _COMPLAINT_PAUSE
        return channel.drop(f"{reason} ({self.strangers_dropped} such so far)")

    def note_queued(self, channel: Channel) -> None:
        """Keep count of unread replies; over a limit the slowest reader goes, not the data."""
        held = channel.outbox.held
        self.queued_bytes += held - channel.connection.queued_bytes
        channel.connection.queued_bytes = held
        if not held:
            return
        limit = self.output_limit if channel.connection.authenticated else _STRANGERS_OUTPUT
        # A single reply has no limit: without the one being sent, what waits behind it counts.
        if held - channel.outbox.current > limit:
            channel.drop(_unread(channel))
        elif self.queued_bytes > _SHARES * self.output_limit:
            slowest = max(self._channels, key=lambda other: other.connection.queued_bytes)
            # Alone, it holds up nobody: then the rule above is all there is.
            if slowest.connection.queued_bytes < self.queued_bytes:
                slowest.drop(_unread(slowest))

    def note_received(self, channel: Channel, held: int) -> None:
        """Keep count of half-sent requests; over a limit the one that rests longest goes."""
        self.received_bytes += held - channel.received
        channel.received = held
        if held and self.received_bytes > _SHARES * self.input_limit:
            waiting = [one for one in self._channels if one.received and not one.busy] or [channel]
            slowest = min(waiting, key=lambda other: other.heard)
            slowest.drop(f"does not finish its request: {slowest.received} bytes of it dropped")

    def forget(self, channel: Channel) -> None:
        """Called by a channel that has closed."""
        self._channels.discard(channel)
        self._strangers.pop(channel, None)
        if self.per_address is not None:
            host = _host_of(channel.connection.address)
            self._by_address[host] -= 1
            if not self._by_address[host]:
                del self._by_address[host]
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


def _unread(channel: Channel) -> str:
    return f"does not read: {channel.outbox.held} reply bytes dropped"


def _host_of(address: str) -> str:
    return address.rpartition(":")[0]


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
