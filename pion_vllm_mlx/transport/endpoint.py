"""One server as this process sees it: a connection kept open, one reconnect, then a pause.

Of a server of several workers it is a connection to each that holds what was asked for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from ssl import SSLContext
from typing import Final

from pion_vllm_mlx.process_lock import ProcessLock
from pion_vllm_mlx.transport import (
    Command,
    GivenUp,
    Patience,
    Refused,
    Reply,
    ServerError,
    TimedOut,
    TransportError,
    Unavailable,
)
from pion_vllm_mlx.transport.homes import FIRST_WORKER_PORT, Homes, Worker
from pion_vllm_mlx.transport.resp import RespConnection

log = logging.getLogger("pion_vllm_mlx")

#: Seconds without any attempt after a failure: a dead server costs one call its deadline, not all.
PAUSE: Final = 5.0
#: How often the commands of one exchange may be sent on to another worker.
_ROUNDS: Final = 4
#: Connections to the shared port until it is the right worker that accepts.
_KNOCKS: Final = 16
_WHO: Final = Command.of("KV.PREFIX.INFO")


class Outage:
    """Since when a server does not answer, as far as the lanes to it know.

    `pause`: seconds without any attempt after a failure; None: `PAUSE`.
    """

    def __init__(self, clock: Callable[[], float], pause: float | None = None) -> None:
        self.clock = clock
        self.pause = PAUSE if pause is None else pause
        self._resume_at = 0.0
        self._failing = False

    @property
    def over(self) -> bool:
        """False during the pause after a failure."""
        return self.clock() >= self._resume_at

    def begin(self, server: Endpoint, reason: str) -> None:
        """Pause; the first of a row of failures is told."""
        self._resume_at = self.clock() + self.pause
        if not self._failing:
            log.warning(
                "%s: %s. Prefixes are computed locally; next attempt in %g s.",
                server,
                reason,
                self.pause,
            )
        self._failing = True

    def end(self) -> None:
        """An exchange went well."""
        self._failing = False


class Endpoint:
    """A `Lane` to `host:port` that knows when to leave a server alone.

    An exchange that fails closes the connection and, unless only a kept connection had gone
    stale, makes the endpoint unavailable for `pause` seconds: calls then fail at once, without
    touching the network. Each outage logs one warning. Thread-safe: one exchange at a time.

    Commands whose first argument names a prefix that lives on another worker are repeated there,
    and from then on sent there at once; so the parts of one exchange may go to several workers.
    With `follow=False` they are answered by the error that says where it lives.
    """

    name = "tcp"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 1974,
        *,
        username: str | None = None,
        password: str | None = None,
        connect_timeout: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
        outage: Outage | None = None,
        tls: SSLContext | None = None,
        homes: Homes | None = None,
        pause: float | None = None,
        follow: bool = True,
    ) -> None:
        """`connect_timeout` (seconds) covers name resolution, connecting and authenticating."""
        self.host, self.port = host, port
        self.tls = tls
        self._username, self._password = username, password
        self._connect_timeout = connect_timeout
        self._outage = outage or Outage(clock, pause)
        self._lock = ProcessLock()
        #: Which workers hold what; other lanes to the same server may share it.
        self.homes = homes or Homes()
        self._follow = follow
        self._connections: dict[Worker, RespConnection] = {}
        #: Connections opened so far.
        self.connects = 0

    @property
    def available(self) -> bool:
        """False during the pause after a failure."""
        return self._outage.over

    def pause(self, reason: str) -> None:
        """Leave the server alone for a while: it was found to be silent on another way to it."""
        self._outage.begin(self, reason)

    @property
    def credentials(self) -> tuple[str | None, str | None]:
        """User name and password."""
        return self._username, self._password

    def twin(self) -> Endpoint:
        """Another connection to the same server; an outage of one is an outage of both."""
        return Endpoint(
            self.host,
            self.port,
            username=self._username,
            password=self._password,
            connect_timeout=self._connect_timeout,
            outage=self._outage,
            tls=self.tls,
            homes=self.homes,
            follow=self._follow,
        )

    def exchange(
        self, commands: Sequence[Command], patience: Patience, *, retry: bool = True
    ) -> list[Reply]:
        """Send one pipeline, return its replies; see `Lane.exchange`.

        With `retry` a kept connection that turns out dead is replaced once, at once.
        """
        bound = () if retry else commands
        return self._guarded(lambda: self._attempt(commands, patience, retry), bound)

    def workers(self, patience: Patience) -> list[Worker]:
        """The server's workers, for `exchange_at`; None alone where one process is all of it.

        Raises ServerError where the server does not tell.
        """
        (info,) = self.exchange([_WHO], patience)
        if isinstance(info, ServerError):
            raise info
        found = _figures(info)
        return list(range(found["directory_workers"])) if found["directory_enabled"] else [None]

    def exchange_at(
        self, worker: Worker, commands: Sequence[Command], patience: Patience
    ) -> list[Reply]:
        """The same with this worker alone, whatever the commands are about."""
        if worker is None:
            return self.exchange(commands, patience)

        def ask() -> list[Reply]:
            (info,) = self._ask(worker, [_WHO], patience, True)
            if not _is_of(worker, info):
                raise Unavailable(f"worker {worker} cannot be reached")
            return self._ask(worker, commands, patience, True)

        return self._guarded(ask)

    def _guarded(
        self, attempt: Callable[[], list[Reply]], bound: Sequence[Command] = ()
    ) -> list[Reply]:
        """One exchange at a time; a failure closes the connections and starts a pause.

        The `bound` commands make sense on connections only that are open already.
        """
        with self._lock:
            if not self.available:
                raise Unavailable(f"{self} was unavailable less than {self._outage.pause:g} s ago")
            if not all(self._is_kept(self.homes.of(one)) for one in bound):
                raise Unavailable("the connection these commands belong to is gone")
            try:
                replies = attempt()
            except GivenUp:
                self._close()  # what still comes answers nobody; the server itself is well
                raise
            except TransportError as error:
                closed_here = any(one.aborted for one in self._connections.values())
                self._close()
                if not closed_here:
                    self._outage.begin(self, str(error))
                raise
            except BaseException:
                self._close()
                raise
            self._outage.end()
            return replies

    def close(self) -> None:
        """Close the connection; an exchange going on in another thread fails at once."""
        if self._lock.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._lock.release()
        else:
            for connection in list(self._connections.values()):
                connection.abort()

    def _is_kept(self, worker: Worker) -> bool:
        kept = self._connections.get(worker)
        return kept is not None and kept.usable

    def _attempt(self, commands: Sequence[Command], patience: Patience, retry: bool) -> list[Reply]:
        """The replies, those of other workers included."""
        replies: list[Reply] = [None] * len(commands)
        wanted = list(range(len(commands)))
        for _ in range(_ROUNDS):
            for worker, chosen in self.homes.grouped(commands, wanted).items():
                asked = [commands[index] for index in chosen]
                answers = self._ask(worker, asked, patience, retry)
                for index, answer in zip(chosen, answers, strict=True):
                    replies[index] = answer
            # What belongs to one connection cannot go on at another.
            if not (retry and self._follow):
                break
            wanted = [i for i in wanted if self.homes.learn(commands[i], replies[i])]
            if not wanted:
                break
        return replies

    def _ask(
        self, worker: Worker, commands: Sequence[Command], patience: Patience, retry: bool
    ) -> list[Reply]:
        kept = self._connections.get(worker)
        if kept is not None and kept.usable:
            if not retry:
                return _checked(kept.exchange(commands, patience))
            try:
                return _checked(kept.exchange(commands, patience))
            except TimedOut:
                raise
            except Unavailable:
                if kept.aborted:
                    raise
                # Closed since it was last used: the server may have restarted.
        return _checked(self._connect(worker).exchange(commands, patience))

    def _connect(self, worker: Worker) -> RespConnection:
        """A new connection to a worker, by another one to the shared port if need be."""
        old = self._connections.pop(worker, None)
        if old is not None:
            old.close()
        if worker is None:
            connection = self._open(self.port)
        else:
            try:
                connection = self._open(self.port + FIRST_WORKER_PORT + worker)
            except Unavailable:
                connection = self._knock(worker)
        self._connections[worker] = connection
        return connection

    def _knock(self, worker: int) -> RespConnection:
        """Connect to the shared port until it is the worker that accepts.

        So it goes where only one port is forwarded. A server that was restarted with fewer workers
        has none of that number: then what was known of it is forgotten.
        """
        for _ in range(_KNOCKS):
            connection = self._open(self.port)
            (info,) = connection.exchange([_WHO], Patience())
            if _is_of(worker, info):
                return connection
            connection.close()
        self.homes.forget(worker)
        return self._open(self.port)

    def _open(self, port: int) -> RespConnection:
        self.connects += 1
        return RespConnection(
            self.host,
            port,
            deadline=time.monotonic() + self._connect_timeout,
            username=self._username,
            password=self._password,
            tls=self.tls,
        )

    def _close(self) -> None:
        while self._connections:
            self._connections.popitem()[1].close()

    def __str__(self) -> str:
        return f"pion-server {self.host}:{self.port}"


def _figures(info: Reply) -> dict[str, int]:
    """What a KV.PREFIX.INFO says of workers; of a server that says nothing, that it is alone."""
    found = {"directory_enabled": 0, "my_worker_id": 0, "directory_workers": 1}
    for line in bytes(info).splitlines() if isinstance(info, bytes | bytearray) else []:
        name, _, value = line.decode("utf-8", "replace").partition(":")
        if name in found and value.isdecimal():
            found[name] = int(value)
    return found


def _is_of(worker: int, info: Reply) -> bool:
    """Whether a KV.PREFIX.INFO is a worker's own."""
    found = _figures(info)
    return found["my_worker_id"] == worker and bool(found["directory_enabled"])


def _checked(replies: list[Reply]) -> list[Reply]:
    """Turn away a server that answers everything with a demand for credentials."""
    for reply in replies:
        if isinstance(reply, ServerError) and reply.code in ("NOAUTH", "WRONGPASS"):
            raise Refused(str(reply))
    return replies
