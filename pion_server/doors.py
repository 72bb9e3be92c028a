"""The sockets a server listens on: its port for RESP, the next one for the binary lane.

With W workers, W > 1, worker n listens on port + 2 + n and port + 2 + W + n, too.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass, field, replace
from typing import NoReturn

from pion_server.config import Config, resolve
from pion_server.flag_values import ConfigError

_BACKLOG = 1024
LOOPBACK = "127.0.0.1"
_LAST_PORT = 65_535
# `--port 0` picks below the ports that systems lend to outgoing connections: a server that is
# restarted on its port then finds the next one free, too.
_FREE_PORTS = range(10_240, 32_766)
_ATTEMPTS = 100
# The public client sends a frame with one call and does not look whether all of it went: what
# our kernel takes at once is what arrives.
_RECEIVE_BUFFER = 8 * 1024 * 1024
_LEAST_RECEIVE_BUFFER = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Doors:
    """Bound sockets, one an address: RESP's all on `port`, the binary lane's on the next.

    `own`: with several workers, each one's own pair of lanes.
    """

    port: int
    resp: list[socket.socket]
    binary: list[socket.socket]
    own: list[tuple[list[socket.socket], list[socket.socket]]] = field(default_factory=list)

    def of_worker(self, worker: int) -> Doors:
        """All that one worker listens on: the shared ports and its own."""
        resp, binary = self.own[worker]
        return Doors(self.port, self.resp + resp, self.binary + binary)

    def close(self) -> None:
        for pair in [(self.resp, self.binary), *self.own]:
            for sock in pair[0] + pair[1]:
                sock.close()


def port_count(workers: int) -> int:
    """How many consecutive ports a server takes."""
    return 2 if workers == 1 else 2 + 2 * workers


def bind_tls_doors(config: Config) -> Doors | None:
    """The same two for TLS clients, at `--tls-port`; None without. Raises ConfigError."""
    if config.tls_port is None:
        return None
    return bind_doors(replace(config, port=config.tls_port, tls_only=False))


def bind_doors(config: Config) -> Doors:
    """Take all ports on all addresses. Nothing listens yet. Raises ConfigError.

    For port 0 any free ones in a row will do.
    """
    if config.port == _LAST_PORT:
        raise ConfigError(f"--port {_LAST_PORT} leaves no port for the binary lane, which is next")
    wanted = port_count(config.workers)
    if config.port + wanted - 1 > _LAST_PORT:
        raise ConfigError(f"--port {config.port} leaves no ports for {config.workers} workers")
    if config.port:
        return _bind_all(config, config.port)
    import random

    for port in random.sample(_FREE_PORTS, _ATTEMPTS):
        try:
            return _bind_all(config, port)
        except PortInUse:
            continue
    raise ConfigError(f"no {wanted} consecutive ports are free on {config.bind}")


class PortInUse(ConfigError):
    """Another program has the port."""


def start_listening(config: Config, doors: Doors) -> None:
    """Let clients queue at all doors. Raises ConfigError."""
    for listener in doors.resp + doors.binary:
        try:
            listener.listen(_BACKLOG)
        except OSError as error:
            _refuse(config, listener.getsockname()[1], error)


def _bind_all(config: Config, port: int) -> Doors:
    doors = Doors(port, [], [])
    try:
        doors.resp.extend(_bind(config, port, 0))
        doors.binary.extend(_bind(config, port + 1, _receive_buffer()))
        for worker in range(config.workers if config.workers > 1 else 0):
            own = port + 2 + worker
            pair: tuple[list[socket.socket], list[socket.socket]] = ([], [])
            doors.own.append(pair)
            pair[0].extend(_bind(config, own, 0))
            pair[1].extend(_bind(config, own + config.workers, _receive_buffer()))
    except ConfigError:
        doors.close()
        raise
    return doors


def _bind(config: Config, port: int, receive_buffer: int) -> list[socket.socket]:
    bound: list[socket.socket] = []
    bind = LOOPBACK if config.tls_only else config.bind
    for family, address in resolve(bind, port):
        sock = socket.socket(family, socket.SOCK_STREAM)
        bound.append(sock)
        try:
            if config.port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if receive_buffer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            sock.bind(address)
            # With it, two that pick a port at once would share it until both listen; without it,
            # this server's own past connections would keep the next one from the port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError as error:
            for other in bound:
                other.close()
            _refuse(config, port, error)
    return bound


def _receive_buffer() -> int:
    """What to ask for, or 0 where the system gives less than it would by itself."""
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        except OSError:  # some systems refuse what is above their limit
            return 0
        given = probe.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    return _RECEIVE_BUFFER if given >= _LEAST_RECEIVE_BUFFER else 0


def _refuse(config: Config, port: int, error: OSError) -> NoReturn:
    where = f"{config.bind}:{port}"
    if error.errno != errno.EADDRINUSE:
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from None
    lane = "" if port == config.port else " (the binary lane, next to --port)"
    if port > config.port + 1:
        lane = " (a worker's own port, above --port)"
    raise PortInUse(f"{where}{lane} is in use by another program; choose another --port") from None
