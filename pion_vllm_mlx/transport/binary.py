"""The binary lane on the server's next port: one query or decode step, one frame, one reply.

Frames both ways are u16 magic CA5E, u8 command or status, u32 length and body, little-endian. A
query leaves as one scatter-gather write from where its tensors lie, and the answer is received
straight into the array that is returned.

A query that another worker has to answer comes back as ERROR, which cannot say so: FIND_HOME asks
where, and that worker has a port of its own.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from ssl import SSLContext
from typing import Final, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.transport import (
    Buffer,
    Patience,
    ProtocolError,
    Refused,
    TimedOut,
    TransportError,
    Unavailable,
)
from pion_vllm_mlx.transport.channel import Channel, seconds_left
from pion_vllm_mlx.transport.endpoint import PAUSE
from pion_vllm_mlx.transport.homes import Homes, Worker
from pion_vllm_mlx.transport.tls import open_channel, open_socket

F32: TypeAlias = NDArray[np.float32]

MAGIC: Final = 0xCA5E
PING: Final = 0xFF
AUTH: Final = 0x37
QUERY_FUSED: Final = 0x24
FIND_HOME: Final = 0x38
DECODE_STEP: Final = 0x40
DECODE_CLOSE: Final = 0x41
OK: Final = 0
MISS: Final = 1
ERROR: Final = 2
COLDMISS: Final = 3
#: Of decode steps only.
REPLAY: Final = 4

_HEADER: Final = struct.Struct("<HBI")
_SIZES: Final = struct.Struct("<HHHHII")  # layer, H_q, D, H_kv, M, S_suf
_LENGTH: Final = struct.Struct("<H")
_HOME: Final = struct.Struct("<3H")  # worker to ask, worker that answers, how many there are
_DEFAULT_WINDOW: Final = 0xFFFFFFFF
_LARGEST_BODY: Final = 1 << 30
#: Bytes before a reply's header, so that the floats behind it are aligned.
_LEAD: Final = 1


class Declined(Exception):
    """The server answered MISS or ERROR; the same query on RESP says why."""


class ColdEntry(Exception):
    """COLDMISS: the K/V were demoted; KV.PREFIX.WARM on RESP brings them back."""


class Forgotten(Exception):
    """REPLAY: the server does not hold a decode session, or not as long as its client believes."""


class BinaryLane:
    """A connection to the binary lane, made at the first query; thread-safe, one query at a time.

    Of a server of several workers it is a connection to each that holds what was asked for.

    The lane is used only after it has answered PING. A server that breaks the protocol here, or
    does not let us in, is never tried again by this object (`usable`); one that is gone or slow
    not for `PAUSE` seconds.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 1975,
        *,
        username: str | None = None,
        password: str | None = None,
        connect_timeout: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
        tls: SSLContext | None = None,
        homes: Homes | None = None,
    ) -> None:
        """`port` is the lane's own. `connect_timeout` (seconds) includes AUTH and the probe.

        `homes`: what other lanes to the same server know of its workers.
        """
        self.host, self.port = host, port
        self._secret = _secret(username, password)
        self._tls = tls
        self._connect_timeout = connect_timeout
        self._clock = clock
        self._lock = threading.Lock()
        self._homes = homes or Homes()
        #: Of the server, 0 while that is not known.
        self._workers = 0
        #: By worker, None: by the shared port.
        self._sockets: dict[Worker, socket.socket] = {}
        #: Workers whose own ports could not be reached, and until when they are left alone.
        self._away: dict[int, float] = {}
        self._pid = 0
        self._resume_at = 0.0
        self._given_up = False

    @property
    def usable(self) -> bool:
        """False for good after a breach of protocol, and for a while after a failure."""
        return not self._given_up and self._clock() >= self._resume_at

    def close(self) -> None:
        """Close the connection; a later query may open a new one."""
        with self._lock:
            self._drop()

    def query_fused(
        self,
        sid: bytes,
        layer: int,
        queries: F32,
        suffix_keys: F32,
        suffix_values: F32,
        head_map: bytes,
        window: int | None = None,
        patience: Patience | None = None,
    ) -> F32:
        """Attention of `queries` [H_q][M][D] over the stored prefix and a suffix [H_kv][S][D].

        All float32, the suffix causal. `head_map` is the kv head of each query head; `window` None
        leaves the number of visible prefix tokens to the server, 0 is all. Returns [H_q][M][D].
        Raises ColdEntry, Declined, TransportError, or ValueError for what no frame can say.
        """
        body = _fused_body(sid, layer, queries, suffix_keys, suffix_values, head_map, window)
        reply = self.ask(QUERY_FUSED, body, queries.nbytes, patience, sid)
        return reply.view(np.float32).reshape(queries.shape)

    def ask(
        self,
        command: int,
        body: list[memoryview],
        size: int,
        patience: Patience | None = None,
        about: bytes = b"",
    ) -> NDArray[np.uint8]:
        """One request of our own making; the `size` bytes of its reply, aligned for floats.

        It goes to the worker that holds the session `about`. Raises ColdEntry, Declined, Forgotten
        (decode steps) or TransportError.
        """
        patience = patience or Patience(first_byte=60.0)
        with self._lock:
            if not self.usable:
                raise Unavailable(f"binary lane {self.host}:{self.port} is not in use")
            try:
                status, reply = self._ask_home(command, body, size, patience, about)
                if status == COLDMISS:
                    raise ColdEntry("the session is cold")
                if status == REPLAY:
                    raise Forgotten("the decode session is not held")
                if status != OK:
                    raise Declined(f"the binary lane answered {status}")
            except (ProtocolError, Refused):
                self._given_up = True
                self._drop()
                raise
            except TransportError:
                self._resume_at = self._clock() + PAUSE
                self._drop()
                raise
            except (ColdEntry, Declined, Forgotten):
                raise
            except BaseException:
                self._drop()
                raise
        return reply

    def _ask_home(
        self, command: int, body: list[memoryview], size: int, patience: Patience, about: bytes
    ) -> tuple[int, NDArray[np.uint8]]:
        """The answer of the worker that holds `about`; of any other, ERROR and where to ask."""
        worker = self._homes.of_name(about) if about and self._workers > 1 else None
        status, reply = self._ask(worker, command, body, size, patience)
        if status == ERROR and about and self._workers != 1:
            home = self._find_home(worker, about, patience)
            if home is not None:
                return self._ask(home, command, body, size, patience)
        return status, reply

    def _find_home(self, worker: Worker, about: bytes, patience: Patience) -> int | None:
        """Another worker than the one that just answered, if that one knows of it."""
        body = memoryview(_LENGTH.pack(len(about)) + about)
        status, reply = self._ask(worker, FIND_HOME, [body], _HOME.size, patience)
        home, here, self._workers = _HOME.unpack(reply.data) if status == OK else (0, 0, 1)
        if home == here:
            return None
        self._homes.remember(about, home)
        return int(home)

    def _ask(
        self,
        worker: Worker,
        command: int,
        body: list[memoryview],
        size: int,
        patience: Patience,
    ) -> tuple[int, NDArray[np.uint8]]:
        """One frame on a live connection; a kept one that has gone stale is replaced, once."""
        kept = self._sockets.get(worker)
        if kept is not None and self._pid == os.getpid():
            try:
                channel = open_channel(kept, patience)
                if not channel.has_input():
                    return _exchange(channel, command, body, size)
            except TimedOut:
                raise
            except (Unavailable, OSError):
                pass  # closed since it was last used: the server may have restarted
        try:
            sock = self._connect(worker)
            return _exchange(open_channel(sock, patience), command, body, size)
        except OSError as error:
            _lost(error)

    def _connect(self, worker: Worker) -> socket.socket:
        if self._pid != os.getpid():
            self._drop()
        if (old := self._sockets.pop(worker, None)) is not None:
            old.close()
        deadline = time.monotonic() + self._connect_timeout
        self._sockets[worker] = sock = self._open(worker, deadline)
        self._pid = os.getpid()
        if self._secret is not None:
            self._greet(sock, AUTH, [memoryview(self._secret)], deadline)
        self._greet(sock, PING, [], deadline)
        return sock

    def _open(self, worker: Worker, deadline: float) -> socket.socket:
        """A socket to the shared port or a worker's own. Raises Declined for one out of reach:
        where one port is forwarded, the same query on RESP finds its way."""
        if worker is None:
            return open_socket(self.host, self.port, deadline, self._tls)
        try:
            if self._clock() < self._away.get(worker, 0.0):
                raise Unavailable("its port could not be reached")
            # The shared lane's port is next to RESP's, whose workers' own come first.
            own = self.port + 1 + self._workers + worker
            return open_socket(self.host, own, deadline, self._tls)
        except Unavailable as error:
            if self._clock() >= self._away.get(worker, 0.0):
                self._away[worker] = self._clock() + PAUSE
            raise Declined(f"worker {worker}: {error}") from error

    def _greet(
        self, sock: socket.socket, command: int, body: list[memoryview], deadline: float
    ) -> None:
        left = seconds_left(deadline, "for the probe")
        status, _ = _exchange(open_channel(sock, Patience(left, left, left)), command, body, 0)
        if status != OK:
            what = "the probe" if command == PING else "the password"
            raise Refused(f"binary lane {self.host}:{self.port} refuses {what}")

    def _drop(self) -> None:
        self._away.clear()
        while self._sockets:
            self._sockets.popitem()[1].close()


def _exchange(
    channel: Channel, command: int, body: list[memoryview], size: int
) -> tuple[int, NDArray[np.uint8]]:
    """Send a frame, receive its status and, with OK, exactly `size` bytes. Raises ProtocolError."""
    length = sum(map(len, body))
    _send(channel, [memoryview(_HEADER.pack(MAGIC, command, length)), *body])
    start = _LEAD + _HEADER.size
    memory = np.empty(start + size, np.uint8)
    reply = memory.data[_LEAD:]
    channel.await_first_byte()
    got = _receive(channel, reply, 0, _HEADER.size)
    magic, status, length = _HEADER.unpack_from(reply)
    expected = size if status == OK else 0
    known = REPLAY if command == DECODE_STEP else COLDMISS
    if magic != MAGIC or status > known or length != expected:
        raise ProtocolError(f"a reply of status {status} and {length} bytes, not {expected}")
    if _receive(channel, reply, got, _HEADER.size + length) > _HEADER.size + length:
        raise ProtocolError("a reply longer than it says")
    return status, memory[start:]


def _send(channel: Channel, chunks: list[memoryview]) -> None:
    """Write everything: nothing comes back before the whole frame is there."""
    first = 0
    while first < len(chunks):
        sent = channel.send(chunks[first:])
        if sent is None:
            channel.wait_to_write(can_read=False)
            continue
        while first < len(chunks) and sent >= len(chunks[first]):
            sent -= len(chunks[first])
            first += 1
        if sent:
            chunks[first] = chunks[first][sent:]


def _receive(channel: Channel, target: memoryview, got: int, wanted: int) -> int:
    """Receive until `wanted` bytes of `target` are there; how many are, perhaps more."""
    while got < wanted:
        got += channel.receive_into(target[got:])
    return got


def _lost(error: OSError) -> NoReturn:
    raise Unavailable(f"binary lane lost: {error}") from error


def _fused_body(
    sid: bytes,
    layer: int,
    queries: F32,
    suffix_keys: F32,
    suffix_values: F32,
    head_map: bytes,
    window: int | None,
) -> list[memoryview]:
    """The parts of a QUERY_FUSED body. Raises ValueError for shapes or numbers it cannot hold."""
    heads, rows, dim = queries.shape
    kv_heads, suffix, _ = suffix_keys.shape
    if suffix_keys.shape != suffix_values.shape or suffix_keys.shape[2] != dim:
        raise ValueError(f"suffix {suffix_keys.shape}, {suffix_values.shape} for D {dim}")
    if len(head_map) != heads:
        raise ValueError(f"head_map of {len(head_map)} for {heads} query heads")
    try:
        front = _LENGTH.pack(len(sid)) + sid
        front += _SIZES.pack(layer, heads, dim, kv_heads, rows, suffix)
        width = b"" if window is None else struct.pack("<I", min(window, _DEFAULT_WINDOW - 1))
    except struct.error as error:
        raise ValueError(f"no frame can hold this query: {error}") from None
    tensors = [bytes_of(tensor) for tensor in (queries, suffix_keys, suffix_values)]
    return checked([memoryview(front), *tensors, memoryview(head_map + width)])


def checked(body: list[memoryview]) -> list[memoryview]:
    """The parts of a body. Raises ValueError if no frame can hold them."""
    if sum(map(len, body)) > _LARGEST_BODY:
        raise ValueError("a frame holds at most 1 GiB")
    return body


def bytes_of(tensor: F32) -> memoryview:
    """A tensor's bytes, in place if they lie in order. Raises ValueError if not float32."""
    if tensor.dtype != np.float32:
        raise ValueError(f"float32 wanted, not {tensor.dtype}")
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def _secret(username: str | None, password: str | None) -> Buffer | None:
    if password is None:
        return None
    return password.encode() if username is None else f"{username}\0{password}".encode()
