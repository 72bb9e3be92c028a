"""TLS in front of a lane: each client's bytes pass through a bridge to an ordinary channel.

The channel behind serves a socket pair, so nothing it does (files sent by the kernel, requests
received into their final memory, replies queued without a copy) knows of TLS. The bridge holds no
more than a few hundred kilobytes a direction: whoever does not read stops the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any, cast

from pion_server.wire.lane import Lane
from pion_server.wire.resp import fresh_buffer
from pion_server.wire.server import Address, Server

# Seconds a client has for its handshake, and a closing one for its goodbye.
_HANDSHAKE = 10.0
# Handshakes under way at one port: strangers all of them, each with buffers of its own.
MOST_HANDSHAKES = 512
_GOODBYE = 2.0
_BUFFER = 256 * 1024
# Encrypted bytes that may wait for a client before its channel has to.
_WAITING = 1024 * 1024


def server_context(certificate: str, key: str, clients: str | None = None) -> ssl.SSLContext:
    """TLS 1.2 or newer; with `clients`, only those whose certificate it vouches for.

    Raises OSError or ssl.SSLError for files that are not what they should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    if clients is not None:
        context.load_verify_locations(clients)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class TlsListener:
    """Lets in TLS clients of one lane: a handshake, then a bridge."""

    def __init__(self, server: Server, lane: Lane, context: ssl.SSLContext) -> None:
        self._server = server
        self._lane = lane
        self._context = context
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first

    def listen(self, listener: socket.socket) -> None:
        """Serve a bound and listening socket; it is the server's to close."""
        self._server.listen(listener, self._lane, self._admit)

    def _admit(self, sock: socket.socket, _: Address) -> None:
        if len(self._handshakes) >= MOST_HANDSHAKES:
            # Whoever means it is done in no time: the oldest has had the most.
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        sock.setblocking(False)
        task = self._server.loop.create_task(self._shake_hands(sock))
        self._handshakes[task] = None
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _shake_hands(self, sock: socket.socket) -> None:
        try:
            await self._server.loop.connect_accepted_socket(
                lambda: _Bridge(self._server, self._lane),
                sock,
                ssl=self._context,
                ssl_handshake_timeout=_HANDSHAKE,
                ssl_shutdown_timeout=_GOODBYE,
            )
        except (OSError, asyncio.CancelledError):  # no TLS client, or none in time
            # The transport closes it, but waits for the client's goodbye if nobody ends that.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class _Bridge(asyncio.BufferedProtocol):
    """Between one client's decrypted stream and the socket its channel serves."""

    def __init__(self, server: Server, lane: Lane) -> None:
        self._server = server
        self._lane = lane
        self._loop = server.loop
        self._left = memoryview(b"")  # what the channel's socket has not taken yet
        self._ended = False
        self._refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_WAITING)
        self._buffer = fresh_buffer(_BUFFER)
        try:
            self._inner, outer = socket.socketpair()
        except OSError:  # no descriptors left
            self._refused = True
            self._transport.abort()
            return
        self._inner.setblocking(False)
        peer: Any = transport.get_extra_info("peername")
        local: Any = transport.get_extra_info("sockname")
        if not self._server.adopt(outer, peer, local, self._lane):
            self._transport.abort()
            return
        self._loop.add_reader(self._inner, self._forward_replies)

    # From the client

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._left = self._buffer[:nbytes]
        if not self._forward_request():
            self._transport.pause_reading()
            self._loop.add_writer(self._inner, self._forward_rest)

    def eof_received(self) -> bool:
        self._ended = True
        if not self._left:
            self._shut_inner()
        return False

    def _forward_request(self) -> bool:
        """Pass on what was received; False while some of it is left."""
        try:
            while self._left:
                self._left = self._left[self._inner.send(self._left) :]
        except BlockingIOError:
            return False
        except OSError:
            self._left = memoryview(b"")
            self._transport.close()
        return True

    def _forward_rest(self) -> None:
        if self._forward_request():
            self._loop.remove_writer(self._inner)
            if self._ended:
                self._shut_inner()
            elif not self._transport.is_closing():
                self._transport.resume_reading()

    def _shut_inner(self) -> None:
        try:
            self._inner.shutdown(socket.SHUT_WR)
        except OSError:
            self._transport.close()

    # From the channel

    def _forward_replies(self) -> None:
        try:
            data = self._inner.recv(_BUFFER)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._transport.write(data)
        else:
            self._loop.remove_reader(self._inner)
            self._transport.close()

    def pause_writing(self) -> None:
        self._loop.remove_reader(self._inner)

    def resume_writing(self) -> None:
        self._loop.add_reader(self._inner, self._forward_replies)

    def connection_lost(self, error: Exception | None) -> None:
        if self._refused:
            return
        self._loop.remove_reader(self._inner)
        self._loop.remove_writer(self._inner)
        self._inner.close()
