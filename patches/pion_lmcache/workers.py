"""One client of a server of one or several workers: connections by worker, redirects followed.

A prefix lives on one worker. Another one answers `ERR session lives on worker N (this is worker M);
reconnect for …`; worker N also listens on a port of its own, the shared one plus 2 + N.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Final

from pion_vllm_mlx.transport import (
    Command,
    Patience,
    Refused,
    Reply,
    ServerError,
    TimedOut,
    Unavailable,
)
from pion_vllm_mlx.transport.address import Address
from pion_vllm_mlx.transport.resp import RespConnection
from pion_vllm_mlx.transport.tls import client_context

MAX_REDIRECTS: Final = 16
#: The shared port plus this plus its number: a worker's own port.
FIRST_WORKER_PORT: Final = 2
_LIVES_ON = re.compile(r"lives on worker (\d+)")


class Workers:
    """Connections to a server's shared port and to its workers. Thread-safe, one call at a time.

    `timeout` and `connect_timeout` are seconds: for each answer, and for each connection.
    """

    def __init__(
        self,
        address: Address,
        *,
        auto_redirect: bool,
        timeout: float,
        connect_timeout: float,
    ) -> None:
        self.address = address
        self._tls = client_context(address.tls)
        self._auto_redirect = auto_redirect
        self._patience = Patience(first_byte=timeout, stall=timeout, total=10 * timeout)
        self._connect_timeout = connect_timeout
        self._lock = threading.Lock()
        # None: the shared port, behind which any worker may be.
        self._connections: dict[int | None, RespConnection] = {}
        self._owners: dict[str, int] = {}

    def ask(self, command: Command, about: str | None = None) -> Reply:
        """The reply to one command about namespace `about`, from the worker that has it.

        Raises ServerError for an error reply, TransportError if there is no reply.
        """
        with self._lock:
            worker = self._owners.get(about) if about is not None else None
            redirects = 0
            while True:
                reply = self._try(worker, command)
                if not isinstance(reply, ServerError):
                    return reply
                if reply.code in ("NOAUTH", "WRONGPASS"):
                    raise Refused(str(reply))
                found = _LIVES_ON.search(str(reply))
                if found is None or not self._auto_redirect or redirects == MAX_REDIRECTS:
                    raise reply
                worker = self._redirected(int(found[1]), about)
                redirects += 1

    def close(self) -> None:
        """Close all connections; a later call opens them again."""
        with self._lock:
            while self._connections:
                self._connections.popitem()[1].close()

    def _try(self, worker: int | None, command: Command) -> Reply:
        kept = self._connections.get(worker)
        if kept is not None and kept.usable:
            try:
                return kept.exchange([command], self._patience)[0]
            except TimedOut:
                raise
            except Unavailable:
                pass  # the server closed it since: it may have restarted
        return self._connect(worker).exchange([command], self._patience)[0]

    def _connect(self, worker: int | None) -> RespConnection:
        old = self._connections.pop(worker, None)
        if old is not None:
            old.close()
        shared = self.address.port
        connection = RespConnection(
            self.address.host,
            shared if worker is None else shared + FIRST_WORKER_PORT + worker,
            deadline=time.monotonic() + self._connect_timeout,
            username=self.address.username,
            password=self.address.password,
            tls=self._tls,
        )
        self._connections[worker] = connection
        return connection

    def _redirected(self, worker: int, about: str | None) -> int | None:
        """Where to ask next: the worker, or by another connection to the shared port if the
        worker's own cannot be reached, as behind a forwarded port."""
        try:
            kept = self._connections.get(worker)
            if kept is None or not kept.usable:
                self._connect(worker)
        except Unavailable:
            self._connect(None)
            return None
        if about is not None:
            self._owners[about] = worker
        return worker
