"""The HTTP server: who may come in, which endpoint is asked, and a body within bounds."""

from __future__ import annotations

import json
import logging
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

from pion_vllm_mlx.serve.channel import ClientGone
from pion_vllm_mlx.serve.errors import BadRequest
from pion_vllm_mlx.serve.guard import Guard
from pion_vllm_mlx.serve.reply import Reply
from pion_vllm_mlx.serve.service import Service, error_body

log = logging.getLogger("pion_vllm_mlx")

GETS: Final = {
    # Agents ask for it to see whether anybody is there.
    "/": "root",
    "/v1/models": "models",
    "/health": "health",
    "/v1/pion/stats": "stats",
    "/metrics": "metrics",
}
POSTS: Final = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/responses": "responses",
}
#: A long conversation is some megabytes; anything near this is a mistake.
LARGEST_BODY: Final = 64 << 20


class Refused(Exception):
    """A request that gets no further than the door."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Door(ThreadingHTTPServer):
    """Listens from the start; `open` has the requests served."""

    daemon_threads = True
    request_queue_size = 128
    # A second server on the port is a mistake to be told, not a half of the requests each.
    allow_reuse_port = False

    def __init__(self, host: str, port: int, guard: Guard) -> None:
        """Raises OSError where nothing can listen there."""
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = info[0]
        self.guard = guard
        self.service: Service | None = None
        address: Any = info[4][:2]
        super().__init__(address, Visit)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.exception("a request failed")


class Visit(BaseHTTPRequestHandler):
    """One connection."""

    server: Door
    protocol_version = "HTTP/1.1"
    server_version = "pion-vllm-mlx"
    #: Seconds without a byte to or from a client, in a request or between two.
    timeout = 120

    def do_GET(self) -> None:
        self._visit(GETS, None)

    def do_POST(self) -> None:
        self._visit(POSTS, self._read_body)

    def do_HEAD(self) -> None:
        """The headers of a GET."""
        self._visit(GETS, None)

    def do_OPTIONS(self) -> None:
        """A browser's question before it lets a page send anything."""
        origin = self.headers.get("Origin")
        refusal = self.server.guard.refusal(self.headers.get("Host"), origin)
        self.send_response(403 if refusal else 204)
        for name, value in self.server.guard.headers(origin).items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _visit(self, endpoints: dict[str, str], read: Any) -> None:
        path = urlsplit(self.path).path.rstrip("/") or "/"
        origin = self.headers.get("Origin")
        reply = Reply(self, self.server.guard.headers(origin))
        try:
            refusal = self.server.guard.refusal(self.headers.get("Host"), origin)
            if refusal is not None:
                raise Refused(403, refusal)
            name = endpoints.get(path)
            if name is None and endpoints is GETS and path.startswith("/v1/models/"):
                name = "model"
            if name is None:
                raise Refused(404, f"there is no {self.command} {path}")
            if self.server.service is None:
                raise Refused(503, "the server is starting")
            endpoint = getattr(self.server.service, name)
            if read is None:
                endpoint(reply)
            else:
                body = read()
                if not self.server.service.generator.model_provider.ready.is_set():
                    raise Refused(503, "the model is loading")
                endpoint(reply, body)
        except Refused as refused:
            self.close_connection = True
            reply.json(refused.status, error_body(path, refused.status, str(refused)))
        except BadRequest as error:
            reply.json(400, error_body(path, 400, str(error)))
        except LookupError as error:
            reply.json(404, error_body(path, 404, str(error.args[0])))
        except (ClientGone, ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            log.exception("a request failed")
            self.close_connection = True
            if not reply.status:
                reply.json(500, error_body(path, 500, f"{type(error).__name__}: {error}"))

    def _read_body(self) -> dict[str, Any]:
        """The JSON object of a POST. Raises Refused."""
        length = self.headers.get("Content-Length")
        if length is None or not length.isdecimal():
            raise Refused(411, "a Content-Length header is needed")
        if int(length) > LARGEST_BODY:
            raise Refused(413, f"the body is larger than {LARGEST_BODY >> 20} MB")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refused(400, "the body is not a JSON object")
        return body

    def log_message(self, *message: Any) -> None:
        log.debug("%s %s", self.address_string(), message[0] % message[1:])
