"""What a fuzzer may do with bytes that come from outside: each function states a promise.

A target takes any bytes and raises for a broken promise only. `test_fuzz` feeds them from
hypothesis, `test_coverage` from atheris, which looks for inputs that reach new code.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CoroutineType
from typing import Any, Final, TypeAlias

import hiredis

from pion_server.commands.dispatch import Dispatcher
from pion_server.commands.frames import FRAMES
from pion_server.commands.registry import COMMANDS
from pion_server.config import parse
from pion_server.errors import CommandError, DamagedEntry
from pion_server.payload import Chunk, FileSpan, Payload
from pion_server.state import open_state
from pion_server.store.files import StoreFile
from pion_server.store.log import ForeignFile, RecordLog
from pion_server.store.opening import VSTORE_KIND
from pion_server.store.reading import LogReader
from pion_server.wire import auth
from pion_server.wire.binary import Frame, FrameParser
from pion_server.wire.connection import Connection
from pion_server.wire.inline import UnbalancedQuotes, split_inline
from pion_server.wire.lane import Parser
from pion_server.wire.replies import NO_REPLY, Attached, encode
from pion_server.wire.resp import SCRATCH, Limits, ProtocolError, RequestParser
from pion_vllm_mlx.manifest import KIND, VERSION, ManifestError, read_manifest, write_manifest
from pion_vllm_mlx.manifest_fields import LARGEST, seal
from tests.fuzz.edits import edited
from tests.pion_server.access_samples import body_for, words_for
from tests.pion_vllm_mlx.test_manifest import EXAMPLE

Target: TypeAlias = Callable[[bytes], None]

SMALL: Final = Limits(bulk=4096, elements=64, request=16 * 1024)
# What a parser may hold of an incomplete request within these limits: bytes, and objects for them.
_MOST_HELD: Final = SMALL.request + 64 * SMALL.elements
PASSWORDS: Final = ("the right word", "ann's own word")


def _events(make: Callable[[memoryview, Limits], Parser], data: bytes, step: int) -> list[object]:
    """The requests in `data` given in pieces of `step` bytes; last the refusal, if any."""
    parser = make(memoryview(bytearray(SCRATCH)), SMALL)
    found: list[object] = []
    at = 0
    try:
        while at < len(data):
            room = parser.get_buffer()
            n = min(len(room), step, len(data) - at)
            room[:n] = data[at : at + n]
            parser.buffer_updated(n)
            at += n
            while (request := parser.next_request()) is not None:
                found.append([part if isinstance(part, int) else _plain(part) for part in request])
            assert 0 <= parser.held <= _MOST_HELD
    except ProtocolError as error:
        found.append(str(error))
    return found


def _plain(part: Any) -> bytes | None:
    return None if part is None else bytes(part)


def _same_in_any_pieces(make: Callable[[memoryview, Limits], Parser], data: bytes) -> None:
    step, stream = 1 + data[0] % 64 if data else 1, data[1:]
    whole = _events(make, stream, SCRATCH)
    assert _events(make, stream, step) == whole
    assert _events(make, stream, 1) == whole


def resp(data: bytes) -> None:
    """The first byte says how the rest is cut: requests are the same in any pieces."""
    _same_in_any_pieces(RequestParser, data)


def frames(data: bytes) -> None:
    """The same for the binary lane."""
    _same_in_any_pieces(FrameParser, data)


def inline(data: bytes) -> None:
    """A line is words that are not longer than itself, or refused."""
    with suppress(UnbalancedQuotes):
        assert sum(map(len, split_inline(data))) <= len(data)


class _Session:
    """A dispatcher without sockets, its stores in a folder of its own, and what talks to it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pion-fuzz-")
        admin, ann = PASSWORDS
        words = ["--dir", self._folder.name, "--no-attention", "--maxmemory", "64mb"]
        words += ["--requirepass", admin, "--tenant", f"ann={ann}", "--max-disk", "512mb"]
        auth.FAILURE_DELAY = 0.0
        self._loop = asyncio.new_event_loop()
        self.dispatcher = Dispatcher(open_state(parse(words, {})))
        self._count = 0

    def connection(self, *, tenant: bool = False) -> Connection:
        self._count += 1
        connection = Connection(self._count, "127.0.0.1:1", "127.0.0.1:2", peer_is_local=True)
        self.dispatcher.connected(connection)
        if tenant:
            self.ask(connection, [b"AUTH", b"ann", PASSWORDS[1].encode()])
            assert connection.tenant == b"ann"
        return connection

    def ask(self, connection: Connection, words: list[Any]) -> None:
        """One request: its reply must be one that RESP can say, and no internal error."""
        reply = self.dispatcher.execute(connection, words)
        if isinstance(reply, CoroutineType):
            coming: Coroutine[Any, Any, object] = reply
            reply = self._loop.run_until_complete(coming)
        assert not str(reply).startswith("ERR internal error"), (words, reply)
        if reply is not NO_REPLY:
            _check_reply(reply, connection.protocol)

    def ask_frame(self, connection: Connection, frame: Frame) -> None:
        """One frame: bytes, nothing, or a refusal."""
        reply = self.dispatcher.execute_frame(connection, frame)
        if isinstance(reply, CoroutineType):
            coming: Coroutine[Any, Any, object] = reply
            reply = self._loop.run_until_complete(coming)
        assert reply is None or isinstance(reply, bytes | memoryview | CommandError), (frame, reply)
        assert not str(reply).startswith("ERR internal error"), (frame, reply)


def _check_reply(reply: object, protocol: int) -> None:
    reader = hiredis.Reader()
    for piece in encode(reply, protocol):
        if isinstance(piece, Attached):
            reader.feed(piece.data)
        elif isinstance(piece, Payload):
            assert sum(map(_length, piece.chunks())) == piece.nbytes
            reader.feed(bytes(piece.nbytes))
        else:
            reader.feed(bytes(piece))
    reader.gets()
    assert not reader.has_data(), "more than one reply"


def _length(chunk: Chunk) -> int:
    return chunk.length if isinstance(chunk, FileSpan) else memoryview(chunk).nbytes


@cache
def _session() -> _Session:
    return _Session()


def login(data: bytes) -> None:
    """A stranger gets well-formed replies, and is not in without a right password."""
    session = _session()
    connection = session.connection()
    parser = RequestParser(memoryview(bytearray(SCRATCH)), SMALL)
    data = data[:SCRATCH]
    parser.get_buffer()[: len(data)] = data
    try:
        parser.buffer_updated(len(data))
        while (request := parser.next_request()) is not None and not connection.closing:
            session.ask(connection, request)
    except ProtocolError:
        pass
    knew = any(word.encode() in data for word in PASSWORDS)
    assert knew or (not connection.authenticated and connection.tenant is None)
    session.dispatcher.disconnected(connection)


def commands(data: bytes) -> None:
    """Any command with spoilt arguments, from a tenant: a reply or a refusal, no internal error.

    One command after the other: number, which argument, how many edits of it.
    """
    session = _session()
    connection = session.connection(tenant=True)
    table = sorted(COMMANDS)
    at = 0
    while at + 3 <= len(data) and not connection.closing and connection.tenant:
        number, which, count = data[at : at + 3]
        name = table[number % len(table)].decode()
        words = list(words_for(name, b"ns%d" % (which % 3)))
        edits = data[at + 3 : at + 3 + 4 * (count % 4)]
        at += 3 + len(edits)
        if which & 0x80:
            words = words[: 1 + (which & 0x0F)] + words[1 : 1 + (which >> 4 & 7)]
        if len(words) > 1:
            place = 1 + which % (len(words) - 1)
            words[place] = edited(words[place], edits)
        session.ask(connection, words)
    session.dispatcher.disconnected(connection)


def frame_bodies(data: bytes) -> None:
    """Any frame with a spoilt body, from a tenant: bytes or a refusal, no internal error.

    The first byte says which frame, the second how much of the rest are edits of a good body.
    """
    if len(data) < 2:
        return
    session = _session()
    connection = session.connection(tenant=True)
    codes = sorted(FRAMES)
    code = codes[data[0] % len(codes)]
    body = body_for(FRAMES[code].name, b"ns")
    rest = data[2:]
    edits = data[1] % (len(rest) + 1)
    session.ask_frame(connection, Frame(code, edited(body, rest[:edits]) + rest[edits:]))
    session.ask_frame(connection, Frame(data[1], rest))
    session.dispatcher.disconnected(connection)


def manifest(data: bytes) -> None:
    """Any bytes, and any JSON under the right checksum: a manifest or ManifestError."""
    body = write_manifest(EXAMPLE).partition(b"\n")[2]
    blobs = [data, edited(write_manifest(EXAMPLE), data)]
    with suppress(ValueError, RecursionError):
        blobs.append(seal(KIND, VERSION, json.loads(edited(body, data))))
    for blob in blobs:
        assert len(blob) <= LARGEST + 4 * len(data)
        with suppress(ManifestError):
            found = read_manifest(blob)
            assert read_manifest(write_manifest(found)) == found


@cache
def _example_log() -> tuple[bytes, frozenset[tuple[int, int, bytes, bytes]]]:
    """A log of a few records, and what they say."""
    with tempfile.TemporaryDirectory(prefix="pion-fuzz-") as name:
        path = Path(name) / "log"
        log = RecordLog(path, Path(name), VSTORE_KIND)
        log.start_from(log.marker, 0, 0)
        bodies = [(1, b"meta", b"body" * 20), (2, b"", b""), (3, b"m" * 40, bytes(300))]
        said = {(log.append(t, m, [b]).seq, t, m, b) for t, m, b in bodies}
        return path.read_bytes(), frozenset(said)


def record_log(data: bytes) -> None:
    """Any file: records that were written, whole, or none; every byte accounted for."""
    base, said = _example_log()
    with tempfile.TemporaryDirectory(prefix="pion-fuzz-") as name:
        for number, content in enumerate((data, edited(base, data))):
            path = Path(name) / str(number)
            path.write_bytes(content)
            try:
                reader = LogReader(StoreFile.open(path), VSTORE_KIND)
            except ForeignFile:
                continue
            for record in reader.records():
                with suppress(DamagedEntry):
                    assert (record.seq, record.type, record.meta, record.read()) in said
            report = reader.report
            assert 0 <= report.lost_bytes + report.cut_bytes <= len(content)
            assert path.read_bytes() == content


TARGETS: Final[dict[str, Target]] = {
    "resp": resp,
    "frames": frames,
    "inline": inline,
    "login": login,
    "commands": commands,
    "frame_bodies": frame_bodies,
    "manifest": manifest,
    "record_log": record_log,
}

#: Words that a fuzzer does not guess.
DICTIONARY: Final[dict[str, tuple[bytes, ...]]] = {
    "resp": (b"*1\r\n", b"*2\r\n$4\r\n", b"$-1\r\n", b"\r\n", b'"', b"'", b"\\x", b"PING\r\n"),
    "frames": (b"\x5e\xca", b"\x5e\xca\xff\0\0\0\0", b"\x5e\xca\x24\x05\0\0\0body!"),
    "inline": (b'"', b"'", b"\\x0", b'\\"', b" ", b"\0"),
    "login": (
        *(b"*1\r\n", b"*3\r\n$4\r\nAUTH\r\n", b"HELLO ", b"AUTH ", b"RESET\r\n", b"QUIT\r\n"),
        *(
            b" 3 ",
            b"SETNAME ",
            b"ann",
            b"default",
            b"\r\n",
            *(b'"' + w.encode() for w in PASSWORDS),
        ),
    ),
    "commands": (b"\0\0\0", b"-1", b"\xff\xff\x04\0", b"9223372036854775807", b"nan", b"0"),
    "frame_bodies": (b"\0\0", b"\2\0", b"\xff\xff\xff\xff", b"\x20\0", b"ns_attn"),
    "manifest": (b"null", b"1e999", b"[[[[", b'{"', b"-1", b"\\ud800"),
    "record_log": (b"PION", b"\0\0\0\0"),
}
