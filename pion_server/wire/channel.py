"""One client's socket: reads requests, has them executed one at a time, writes replies in order.

Requests are read on while replies wait for a slow reader, or a client that writes its whole
pipeline before it reads would deadlock. While a command runs off the loop only the request behind
it is read: rows of one layer arrive while those before them are written.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from pion_server import journal
from pion_server.errors import CommandError
from pion_server.wire.connection import Connection
from pion_server.wire.lane import Lane
from pion_server.wire.outbox import BrokenPayload, Outbox
from pion_server.wire.replies import NO_REPLY
from pion_server.wire.resp import ProtocolError

if TYPE_CHECKING:
    from pion_server.wire.server import Server

# Commands, and reply bytes, one connection may have before the others get their turn.
_TURN_COMMANDS = 256
_TURN_BYTES = 8 * 1024 * 1024
_TURN_REPLIES = 1024 * 1024
# A request read while a command runs holds memory beside that command's: no larger argument.
_LARGEST_AHEAD = 8 * 1024 * 1024
# Bytes of replies, and the seconds they may wait, while a pipeline's next request arrives: one
# system call less for every blob of it.
_LITTLE = 4 * 1024
_GATHER = 0.001
# How long a closing connection's late bytes are read and dropped. Closing with unread input
# resets the connection, and the reset can overtake the error that explains it.
_LINGER = 1.0


class Channel:
    """The moving part of one connection; lives until both directions are done."""

    def __init__(
        self, server: Server, sock: socket.socket, connection: Connection, lane: Lane
    ) -> None:
        self.connection = connection
        self.outbox = Outbox(server.spool)
        self._server = server
        self._loop = server.loop
        self._sock = sock
        self._fd = sock.fileno()
        self._lane = lane
        self._parser = lane.make_parser(server.scratch, lane.limits)
        self.received = 0  # bytes of the request under way, as the server counts them
        self._running = 0  # those of the one that runs off the loop
        self.heard = 0.0  # when the last bytes of an incomplete request came
        self._watch: asyncio.TimerHandle | None = None
        self._taken = 0.0  # when the client last took some of the replies that wait for it
        self._known: bool | None = None  # whether it had authenticated at the last look
        self._busy = False  # a command is running off the loop
        self._ahead: Any = None  # the request behind it, or what is wrong with that
        self._reads_ahead = False  # it is still on its way
        self._queued = False  # the rest of the parsed input waits for the next turn
        self._reading = False
        self._writing = False
        self._input_ended = False
        self._ending = False  # no more commands; close when the outbox is empty
        self._lingering = False
        self._closed = False
        self._gathering: asyncio.TimerHandle | None = None  # small replies wait for company
        self._limit_input()
        self._read(True)

    @property
    def busy(self) -> bool:
        """Whether commands are running or wait for their turn."""
        return self._busy or self._queued

    # Reading

    def _read(self, wanted: bool) -> None:
        if wanted and not self._reading:
            self._loop.add_reader(self._fd, self._on_readable)
        elif self._reading and not wanted:
            self._loop.remove_reader(self._fd)
        self._reading = wanted

    def _on_readable(self) -> None:
        if self._ending:
            return self._discard()
        if self._queued or (self._busy and not self._reads_ahead):
            # The parser is not empty yet. Most clients send nothing now, so only here is it
            # worth the system calls to stop listening.
            return self._read(False)
        if self._busy:
            return self._receive_ahead()
        try:
            n = self._sock.recv_into(self._parser.get_buffer())
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return self.close()
        if n == 0:
            self._input_ended = True
            self._read(False)
            return self._end()
        try:
            self._parser.buffer_updated(n)
        except (ProtocolError, MemoryError) as error:
            self._refuse(error)
            return self._flush()
        return self._advance()

    def _receive_ahead(self) -> None:
        """Take more of the request behind the running command; how the input ends is seen later."""
        try:
            n = self._sock.recv_into(self._parser.get_buffer())
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            n = 0
        if n == 0:
            self._reads_ahead = False
            return self._read(False)
        try:
            self._parser.buffer_updated(n)
        except ProtocolError as error:
            self._ahead, self._reads_ahead = error, False
            return None
        self.heard = self._loop.time()
        self._server.note_received(self, self._running + self._parser.held)
        return None if self._closed else self._look_ahead()

    def _look_ahead(self) -> None:
        """Parse the request behind the running command, or read on until it is there."""
        try:
            self._ahead = self._parser.next_request()
        except (ProtocolError, MemoryError) as error:
            self._ahead = error
        more = self._ahead is None and len(self._parser.get_buffer()) <= _LARGEST_AHEAD
        self._reads_ahead = more and not self._input_ended
        if self._reads_ahead:
            self._read(True)

    def _take_ahead(self) -> Any:
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, Exception):
            raise ahead
        return ahead

    def _limit_input(self) -> None:
        known = self.connection.authenticated
        if known is not self._known:
            self._known = known
            self._parser.limits = self._lane.limits if known else self._lane.unauthenticated
            self._server.note_known(self, known)

    def _await_rest(self) -> None:
        """A request is incomplete: count what it holds; its sender must not fall silent."""
        self.heard = self._loop.time()
        self._watch_stall(self.heard + self._lane.silence)
        self._server.note_received(self, self._parser.held)

    def _watch_stall(self, deadline: float) -> None:
        if self._watch is None:
            self._watch = self._loop.call_at(deadline, self._check_stall)

    def _check_stall(self) -> None:
        """One timer for both directions; it asks no more often than it must."""
        self._watch = None
        if self._closed:
            return
        resting = []
        if self._writing:
            resting.append(self._taken)
        if self._parser.in_request and not (self._busy or self._queued or self._ending):
            resting.append(self.heard)
        if resting:
            deadline = min(resting) + self._lane.silence
            if deadline > self._loop.time():
                self._watch_stall(deadline)
            else:
                self._server.stalled += 1
                self.close()

    # Executing

    def _advance(self) -> None:
        """Execute what has been received whole, within this connection's turn."""
        self._queued = False
        if self._closed:
            return
        turn = _TURN_COMMANDS
        held = self.outbox.held
        while not (self._busy or self._ending or self._closed):
            if turn == 0 or self.outbox.held - held > _TURN_REPLIES:
                self._queued = True
                self._loop.call_soon(self._advance)
                break
            try:
                request = self._parser.next_request() if self._ahead is None else self._take_ahead()
            except (ProtocolError, MemoryError) as error:
                self._refuse(error)
                break
            if request is None:
                if self._input_ended:
                    self._ending = True
                else:
                    self._read(True)
                    if self._parser.in_request:
                        self._await_rest()
                    elif self.received:
                        self._server.note_received(self, 0)
                break
            turn -= 1
            self._execute(request)
        self._flush_soon()

    def _execute(self, request: Any) -> None:
        result = self._lane.execute(self.connection, request)
        if type(result) is CoroutineType:
            self._busy = True
            self._running = self.received
            self._loop.create_task(self._await(result))
            if self.connection.authenticated:  # else what may follow is not known yet
                self._look_ahead()
        else:
            self._reply(result)

    async def _await(self, result: Coroutine[Any, Any, object]) -> None:
        value = await result
        self._busy = self._reads_ahead = False
        if self._closed:
            return self._server.forget(self)
        if self._ending:  # an earlier reply broke off: nothing may follow it
            return self._flush()
        self._reply(value)
        return self._advance()

    def _reply(self, value: object) -> None:
        connection = self.connection
        if value is not NO_REPLY:
            try:
                pieces = self._lane.encode(value, connection.protocol)
            except Exception as error:
                _complain(connection, f"a reply could not be encoded: {error!r}")
                failure = CommandError("internal error: the reply could not be encoded")
                pieces = self._lane.encode(failure, connection.protocol)
            self.outbox.put(pieces)
        self._limit_input()
        if connection.closing:
            self._ending = True

    def _refuse(self, error: Exception) -> None:
        """A protocol error: at most one line, then the end."""
        text = str(error) if isinstance(error, ProtocolError) else "out of memory"
        self.outbox.put(self._lane.refuse(text))
        self._ending = True

    # Writing

    def _on_writable(self) -> None:
        self._taken = self._loop.time()
        self._flush()

    def _flush_soon(self) -> None:
        """Send at once, unless little is to be sent and the next request is arriving already."""
        arriving = self._parser.in_request and not (self._busy or self._queued or self._ending)
        if not arriving or self._writing or self.outbox.held > _LITTLE:
            self._flush()
        elif self._gathering is None and self.outbox:
            self._gathering = self._loop.call_later(_GATHER, self._flush)

    def _flush(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._closed:
            return None
        try:
            done = self.outbox.send(self._sock, _TURN_BYTES)
        except BrokenPayload as error:
            _complain(self.connection, f"reply broken off: {error}")
            self.outbox.abandon()
            self._ending = done = True
        except OSError:
            return self.close()
        self._server.note_queued(self)
        if self._closed:  # it was the slowest reader
            return None
        if done is self._writing:
            if done:
                self._loop.remove_writer(self._fd)
            else:
                self._loop.add_writer(self._fd, self._on_writable)
                self._taken = self._loop.time()
                self._watch_stall(self._taken + self._lane.silence)
            self._writing = not done
        if done and self._ending and not self._busy:
            self._say_goodbye()
        return None

    # Ending

    def drain(self) -> None:
        """Read nothing more; finish what was received whole, send it, then close."""
        self._input_ended = True
        self._read(False)
        self._end()

    def _end(self) -> None:
        if not (self._busy or self._queued):
            self._ending = True
            self._flush()

    def _say_goodbye(self) -> None:
        if self._input_ended or self._lingering:
            return self.close()
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return self.close()
        self._lingering = True
        self._loop.call_later(_LINGER, self.close)
        return self._read(True)

    def _discard(self) -> None:
        try:
            n = self._sock.recv_into(self._server.scratch)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return self.close()
        if n == 0 and self._lingering:
            return self.close()
        if n == 0:
            self._input_ended = True
            self._read(False)
        return None

    def drop(self, reason: str) -> None:
        """Close a client that takes more than its part, and say so."""
        _complain(self.connection, reason)
        self.close()

    def close(self) -> None:
        """Close at once; unsent replies are lost. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._read(False)
        if self._writing:
            self._loop.remove_writer(self._fd)
        for timer in (self._watch, self._gathering):
            if timer is not None:
                timer.cancel()
        self.outbox.abandon()
        self._server.note_queued(self)
        self._server.note_received(self, 0)
        self._sock.close()
        # A command still running keeps its connection: what it began must end before on_close.
        if not self._busy:
            self._server.forget(self)


def _complain(connection: Connection, text: str) -> None:
    journal.complain_of_client("client", connection.id, connection.address, text)
