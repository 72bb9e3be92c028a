"""The HTTP side of one answer: JSON with a length, or a stream of events until the end."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any


class Reply:
    """Writes to one request's connection. A stream ends with its connection."""

    def __init__(self, handler: BaseHTTPRequestHandler, headers: Mapping[str, str]) -> None:
        """`headers` go with every answer."""
        self._handler = handler
        self._headers = headers
        self.streaming = False
        self.status = 0

    def json(self, status: int, body: Mapping[str, Any]) -> None:
        """A whole answer."""
        self.send(status, json.dumps(body).encode(), "application/json")

    def send(self, status: int, body: bytes, kind: str) -> None:
        """A whole answer of any type."""
        self._start(status, {"Content-Type": kind, "Content-Length": str(len(body))})
        if self._handler.command != "HEAD":
            self._handler.wfile.write(body)

    def begin_stream(self) -> None:
        """The headers of an event stream."""
        self.streaming = True
        self._handler.close_connection = True
        kind = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self._start(200, kind | {"Connection": "close", "X-Accel-Buffering": "no"})

    def event(self, data: Mapping[str, Any], name: str | None = None) -> None:
        """One event of a stream."""
        head = f"event: {name}\n" if name is not None else ""
        self.raw(f"{head}data: {json.dumps(data)}\n\n".encode())

    def comment(self, text: str) -> None:
        """A line every client skips, and every proxy takes for a sign of life."""
        self.raw(f": {text}\n\n".encode())

    def raw(self, data: bytes) -> None:
        """Bytes of a stream."""
        self._handler.wfile.write(data)
        self._handler.wfile.flush()

    def end_stream(self) -> None:
        """Nothing more comes; the connection is closed after this request."""
        self._handler.wfile.flush()

    def is_gone(self) -> bool:
        """Whether the other side has closed the connection."""
        connection: socket.socket = self._handler.connection
        poll = select.poll()  # select() takes no descriptor above 1,023
        try:
            poll.register(connection, select.POLLIN)
            return bool(poll.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self._handler.send_response(status)
        for name, value in {**headers, **self._headers}.items():
            self._handler.send_header(name, value)
        self._handler.end_headers()
