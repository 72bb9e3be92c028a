"""`--metrics-port`: what `metrics` has to say, over the least HTTP there is.

`GET /metrics`, one request a connection. A client on this machine needs nothing; any other, and one
whose Host header names a machine (a page in a browser here can be made to ask that way), HTTP Basic
with the admin's password, under any name that is no tenant's.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import socket

from pion_server.config import Config, resolve
from pion_server.doors import LOOPBACK
from pion_server.errors import CommandError
from pion_server.flag_values import ConfigError
from pion_server.metrics import CONTENT_TYPE, expose, figures
from pion_server.state import ServerState
from pion_server.wire.auth import Credentials
from pion_server.wire.server import Server, is_local

# Bytes of a request's head, seconds for it and for its answer, and how many are heard at once.
_HEAD_LIMIT = 8 * 1024
_PATIENCE = 5.0
_MOST_CLIENTS = 64
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def _bind(config: Config, port: int) -> list[socket.socket]:
    """A socket on each address of `--bind`, all on one port. Raises ConfigError."""
    bind = LOOPBACK if config.tls_only else config.bind
    bound: list[socket.socket] = []
    for family, address in resolve(bind, port):
        try:
            # The first one's port is the others' too.
            sock = socket.create_server((address[0], port), family=family, backlog=_MOST_CLIENTS)
        except OSError as error:
            for other in bound:
                other.close()
            reason = error.strerror or error
            raise ConfigError(f"--metrics-port: cannot listen on {bind}:{port}: {reason}") from None
        bound.append(sock)
        port = sock.getsockname()[1]
    return bound


class MetricsDoor:
    """Bound sockets; once `open`, they answer scrapes for as long as the loop runs."""

    def __init__(self, config: Config, port: int) -> None:
        """Take the port, 0: any free one, on each address of `--bind`. Raises ConfigError."""
        self._sockets = _bind(config, port)
        self.port: int = self._sockets[0].getsockname()[1]
        self._open = 0

    async def open(self, state: ServerState, server: Server, credentials: Credentials) -> None:
        """Let Prometheus in."""
        self._state, self._server, self._credentials = state, server, credentials
        self._serving = [
            await asyncio.start_server(self._serve, sock=sock, limit=_HEAD_LIMIT)
            for sock in self._sockets
        ]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            async with asyncio.timeout(_PATIENCE):
                status, body = await self._answer(reader, writer.get_extra_info("peername"))
                writer.write(_response(status, body))
                await writer.drain()
                if status != 503:
                    writer.write_eof()
                    # What else it sent: closing over it would reset the answer.
                    while await reader.read(_HEAD_LIMIT):
                        pass
        except (OSError, EOFError, TimeoutError):
            writer.transport.abort()
        finally:
            self._open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, peer: object) -> tuple[int, bytes]:
        if self._open > _MOST_CLIENTS:
            return 503, b""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return 431, b""
        request, *lines = head[:-4].decode("latin-1").split("\r\n")
        words = request.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return 400, b""
        split = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in split}
        if not await self._may_look(peer, headers):
            return 401, b""
        if words[1].partition("?")[0] != "/metrics":
            return 404, b""
        if words[0] != "GET":
            return 405, b""
        return 200, await asyncio.to_thread(expose, figures(self._state, self._server))

    async def _may_look(self, peer: object, headers: dict[str, str]) -> bool:
        host = str(peer[0]) if isinstance(peer, tuple) else ""
        if is_local(host) and _names_no_machine(headers.get("host", "")):
            return True
        if not self._credentials.needed:
            return False
        user, password = _basic(headers.get("authorization", ""))
        if self._credentials.tenant(user) is not None:
            password = b""  # a tenant's is refused as any wrong one, as late
        refusal = self._credentials.check(None, password)
        if refusal is not None:
            try:
                await refusal
            except CommandError:
                return False
        return True


def _names_no_machine(host: str) -> bool:
    """Whether a Host header is an address or localhost, as no other site's page can make it."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _basic(header: str) -> tuple[bytes, bytes]:
    """User and password of an Authorization header; empty for anything else."""
    scheme, _, word = header.partition(" ")
    if scheme.lower() != "basic":
        return b"", b""
    try:
        user, _, password = base64.b64decode(word.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return b"", b""
    return user, password


def _response(status: int, body: bytes) -> bytes:
    reason = _REASONS[status]
    lines = [
        f"HTTP/1.1 {status} {reason}",
        f"Content-Type: {CONTENT_TYPE if status == 200 else 'text/plain'}",
        f"Content-Length: {len(body) or len(reason) + 1}",
        "Connection: close",
        "X-Content-Type-Options: nosniff",
    ]
    if status == 401:
        lines.append('WWW-Authenticate: Basic realm="pion"')
    if status == 405:
        lines.append("Allow: GET")
    return "\r\n".join([*lines, "", ""]).encode() + (body or f"{reason}\n".encode())
