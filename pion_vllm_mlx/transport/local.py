"""The local lane: on the server's own machine a prefix comes as the descriptor of a final file.

    lane = LocalLane(endpoint)                # the TCP lane tells where the socket is
    manifest, loan = lane.borrow(namespace, patience)    # META GET and LEND, one round trip
    mx.load(loan.path, format="safetensors")
    loan.close()

Whatever keeps a prefix from coming this way raises NotLent with one word why; its rows can still be
fetched over TCP. Of several workers each lends what it holds, at a socket of its own.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pion_vllm_mlx.process_lock import ProcessLock
from pion_vllm_mlx.transport import (
    Command,
    Lane,
    Patience,
    Reply,
    ServerError,
    TimedOut,
    TransportError,
    Unavailable,
)
from pion_vllm_mlx.transport.channel import Channel, seconds_left
from pion_vllm_mlx.transport.endpoint import PAUSE, Endpoint
from pion_vllm_mlx.transport.homes import Worker
from pion_vllm_mlx.transport.resp import RespConnection, request_chunks

#: Set to anything but "" or "0": prefixes always come over the network.
OFF: Final = "PION_PROMPT_CACHE_NO_EXPORT"
_MOST_FILES: Final = 16
_FOLDER: Final = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


class NotLent(Exception):
    """This prefix does not come over the local lane; `reason` is one word for the statistics."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class _Silent(Unavailable):
    """The server behind a connection that has served before misses its deadline."""


@dataclass(frozen=True, slots=True)
class Loan:
    """An open descriptor of a file that nobody changes, `nbytes` long.

    It holds fill `gen`, laid out as a layout of this `digest` (blake2b-128) says.
    """

    fd: int
    nbytes: int
    gen: int
    digest: bytes

    @property
    def path(self) -> str:
        """A path that opens it again."""
        return f"{_FOLDER}/{self.fd}"

    def close(self) -> None:
        """Close the descriptor; what was read stays."""
        os.close(self.fd)


class LocalLane:
    """Asks the server behind `lane` for its Unix socket, and borrows files there.

    Thread-safe. After a failure it leaves the socket alone for `PAUSE` seconds, for good where the
    server is on another machine or has no socket.
    """

    def __init__(
        self,
        lane: Lane,
        *,
        username: str | None = None,
        password: str | None = None,
        connect_timeout: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`username`, `password`: as for `lane`. `connect_timeout`: seconds, AUTH included."""
        self._lane = lane if isinstance(lane, Endpoint) else Endpoint()
        self._username, self._password = username, password
        self._connect_timeout = connect_timeout
        self._clock = clock
        self._lock = ProcessLock()
        #: By worker, None: of the one that the shared port led to.
        self._connections: dict[Worker, LocalConnection] = {}
        here = isinstance(lane, Endpoint) and is_loopback(lane.host)
        self._why_never = "" if here else "remote"
        self._resume_at = 0.0

    @classmethod
    def beside(cls, endpoint: Endpoint, connect_timeout: float = 0.25) -> LocalLane:
        """The local lane to the server of an endpoint, under the same credentials."""
        username, password = endpoint.credentials
        return cls(endpoint, username=username, password=password, connect_timeout=connect_timeout)

    @property
    def is_possible(self) -> bool:
        """Whether files may come this way, as far as is known."""
        return not self._why_never and os.environ.get(OFF, "0") in ("", "0")

    def borrow(self, namespace: bytes, patience: Patience) -> tuple[Reply, Loan | None]:
        """What META GET answers, and the file of that prefix if there is one.

        Raises NotLent where the lane cannot be used, and for a file that is not sound;
        TransportError for a server that was well and has fallen silent.
        """
        with self._guarded():
            for _ in range(_ROUNDS):
                asked = [_get(namespace), _lend(namespace)]
                (manifest, lent), files = self._ask(namespace, asked, patience)
                try:
                    if not self._lane.homes.learn(_get(namespace), manifest):
                        return manifest, _checked(lent, files)
                except BaseException:
                    _close_all(files)
                    raise
                _close_all(files)
            raise NotLent("elsewhere", str(manifest))

    def borrow_each(self, namespaces: Sequence[bytes], patience: Patience) -> list[Loan | None]:
        """The file of each prefix that has one, in one round trip to each worker.

        Raises as `borrow`.
        """
        asked = [_lend(namespace) for namespace in namespaces]
        loans: list[Loan | None] = [None] * len(asked)
        with self._guarded():
            try:
                for chosen in self._lane.homes.grouped(asked, range(len(asked))).values():
                    commands = [asked[index] for index in chosen]
                    replies, files = self._ask(namespaces[chosen[0]], commands, patience)
                    for index, loan in zip(chosen, _sorted(replies, files), strict=True):
                        loans[index] = loan
            except BaseException:
                _close_all([loan.fd for loan in loans if loan is not None])
                raise
        return loans

    def _ask(
        self, namespace: bytes, commands: Sequence[Command], patience: Patience
    ) -> tuple[list[Reply], list[int]]:
        """The answers of the worker that has the prefix, as far as is known, and files."""
        connection, fresh = self._connected(namespace, patience)
        greeting = [_WHERE] if fresh else []
        try:
            replies = connection.exchange([*greeting, *commands], patience)
        except TimedOut as error:
            if greeting:
                raise
            # The server itself, which has answered here before: TCP must not wait as well.
            self._lane.pause(str(error))
            raise _Silent(str(error)) from error
        files = connection.take_files()
        if greeting:
            try:
                self._recognise(replies.pop(0), connection.run_id)
            except BaseException:
                _close_all(files)
                raise
        return replies, files

    def tell(self, command: Command) -> None:
        """Send a command whose answer nobody waits for, if it can be sent."""
        with contextlib.suppress(NotLent, TransportError), self._guarded():
            kept = self._connections.get(self._lane.homes.of(command))
            if kept is not None:
                kept.tell(command, _NOT_LONG)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """One thread at a time; a failure closes the connection and starts a pause."""
        if os.environ.get(OFF, "0") not in ("", "0"):
            raise NotLent("off")
        with self._lock:
            if self._why_never or self._clock() < self._resume_at:
                raise NotLent(self._why_never or "paused")
            try:
                yield
            except NotLent:
                raise
            except _Silent:
                self._drop()
                raise
            except (TransportError, OSError) as error:
                self._drop()
                self._resume_at = self._clock() + PAUSE
                raise NotLent("unreachable", str(error)) from error
            except BaseException:
                self._drop()
                raise

    def close(self) -> None:
        """Close the connection; a later call opens a new one."""
        connections = list(self._connections.values())
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()
        else:
            for connection in connections:
                connection.abort()

    def _connected(self, namespace: bytes, patience: Patience) -> tuple[LocalConnection, bool]:
        """A connection to the worker that has the prefix, and whether it is a new one."""
        homes = self._lane.homes
        kept = self._connections.get(homes.of_name(namespace))
        if kept is not None:
            if kept.is_alive():
                return kept, False
            self._drop()
        # The answer comes from where the prefix lives, which may be news.
        (reply,) = self._lane.exchange([Command.of("PION.SOCKET", namespace)], patience)
        path, run_id = self._where(reply)
        if self._password is not None:
            _refuse_strangers(path)
        worker = homes.of_name(namespace)
        kept = self._connections.pop(worker, None)
        if kept is not None:
            kept.close()
        connection = self._connections[worker] = LocalConnection(
            path,
            0,
            deadline=time.monotonic() + self._connect_timeout,
            username=self._username,
            password=self._password,
        )
        connection.run_id = run_id
        return connection, True

    def _recognise(self, reply: Reply, run_id: bytes) -> None:
        # A forwarded port makes another machine's server look local: its path may be anybody's.
        if self._where(reply)[1] != run_id:
            self._never("remote", "another server listens at its socket's path")

    def _where(self, reply: Reply) -> tuple[str, bytes]:
        match reply:
            case [bytes() | bytearray() as path, bytes() | bytearray() as run_id]:
                return os.fsdecode(bytes(path)), bytes(run_id)
            case None:
                self._never("socketless", "the server has no Unix socket for us")
            case ServerError() if "lives on worker" in str(reply):
                raise NotLent("elsewhere", str(reply))
            case _:
                self._never("unknown", f"PION.SOCKET was answered {reply!r}")
        raise AssertionError

    def _never(self, reason: str, detail: str) -> None:
        self._why_never = reason
        self._drop()
        raise NotLent(reason, detail)

    def _drop(self) -> None:
        while self._connections:
            self._connections.popitem()[1].close()


_WHERE: Final = Command.of("PION.SOCKET")
# Asked again where a prefix has moved meanwhile.
_ROUNDS: Final = 3
_NOT_LONG: Final = Patience(first_byte=0.25, stall=0.25, total=0.5)


def _get(namespace: bytes) -> Command:
    return Command.of("KV.PREFIX.META", namespace, "GET")


def _lend(namespace: bytes) -> Command:
    return Command.of("KV.PREFIX.LEND", namespace)


class LocalConnection(RespConnection):
    """RESP over a Unix socket, `host` being its path. Collects the descriptors that come along."""

    #: The server's, as it was told where this socket was learned.
    run_id = b""
    _files: list[int]
    _owed: int

    def _open(self, host: str, port: int, deadline: float) -> socket.socket:
        self._files, self._owed = [], 0
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(seconds_left(deadline, "to connect"))
            sock.connect(host)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            raise Unavailable(f"cannot connect to {host}: {error}") from error
        except BaseException:
            sock.close()
            raise
        return sock

    def _channel(self, sock: socket.socket, patience: Patience) -> Channel:
        return _FileChannel(sock, patience, self._files)

    def is_alive(self) -> bool:
        """Whether the server has not closed it; takes in the answers to what it was only told."""
        if not self.usable:
            return False
        try:
            with self._use(_NOT_LONG) as channel:
                if self._owed:
                    self._replies(channel, [None] * self._owed)
                    self._owed = 0
                return not channel.has_input()
        except TransportError:
            return False

    def tell(self, command: Command, patience: Patience) -> None:
        """Send a command; its reply is read before the next exchange."""
        with self._use(patience) as channel:
            self._send(channel, request_chunks([command]))
            self._owed += 1

    def take_files(self) -> list[int]:
        """The descriptors received so far, from now on the caller's to close."""
        files = self._files[:]
        self._files.clear()
        return files

    def close(self) -> None:
        super().close()
        _close_all(self.take_files())


class _FileChannel(Channel):
    """A Unix socket under deadlines; descriptors are appended to `files` as they arrive."""

    def __init__(self, sock: socket.socket, patience: Patience, files: list[int]) -> None:
        super().__init__(sock, patience)
        self._files = files

    def _take(self, target: memoryview) -> int:
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        room = socket.CMSG_SPACE(_MOST_FILES * array.array("i").itemsize)
        count, ancillary, _, _ = self._socket.recvmsg_into([target], room, flags)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self._files += numbers
                for number in numbers:
                    os.set_inheritable(number, False)
        return count


def is_loopback(host: str) -> bool:
    """Whether a host name can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refuse_strangers(path: str) -> None:
    """A password goes only to a socket of our own user or of root. Raises NotLent, OSError."""
    found = os.stat(path)
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid not in (0, os.geteuid()):
        raise NotLent("stranger", f"{path} is no socket of this user")


def _sorted(replies: Sequence[Reply], files: list[int]) -> list[Loan | None]:
    """What each reply announces; its descriptors come in the order of the replies, one each.

    Closes all of them where anything is wrong.
    """
    at, loans = 0, []
    try:
        for reply in replies:
            count = int(isinstance(reply, list))
            loans.append(_checked(reply, files[at : at + count]))
            at += count
        if at < len(files):
            raise NotLent("unsound", f"{len(files)} descriptors for {at} files")
    except BaseException:
        _close_all(files)
        raise
    return loans


def _checked(reply: Reply, files: list[int]) -> Loan | None:
    """The one file announced, of the length announced, which nobody can change any more."""
    if reply is None and not files:
        return None
    if isinstance(reply, ServerError):
        raise NotLent("refused", str(reply))
    match reply, files:
        case [int() as gen, int() as nbytes, bytes() | bytearray() as digest], [fd]:
            found = os.fstat(fd)
        case _:
            raise NotLent("unsound", f"{len(files)} descriptors for the reply {reply!r}")
    if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
        raise NotLent("unsound", f"a file of {found.st_size} bytes, not {nbytes}")
    if found.st_nlink or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
        raise NotLent("unsound", "a file that others may change")
    return Loan(fd, nbytes, gen, bytes(digest))


def _close_all(files: list[int]) -> None:
    for fd in files:
        with contextlib.suppress(OSError):
            os.close(fd)
