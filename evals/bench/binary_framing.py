"""One QUERY_FUSED on the binary lane and on RESP: framing alone, and the whole call.

Expected: encoding and parsing request and reply at least 20% cheaper than RESP's, and the whole
call never slower. Framing is what both ends do in Python between numpy arrays and socket buffers,
without sockets and without the engine. Two copies of every byte stand in for the kernel's, which no
framing can spare; they are timed alone as well, and the ratio is given with and without them.
Shapes are a decode step's: SmolLM2 (9 and 3 heads of 64) and one of 32 and 8 heads of 128, over a
prefix of 1,024, with suffixes that make payloads of 8 KB, 64 KB and 2 MB.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from evals.findings import Bar, Findings, Table
from evals.rounds import interleave, medians, ratio_of
from pion_server.commands import attend
from pion_server.commands.frames import FRAMES
from pion_server.wire.binary import FrameParser, encode_frame
from pion_server.wire.replies import Outgoing, encode
from pion_server.wire.resp import SCRATCH, RequestParser
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.transport import Command, Patience, binary, resp
from pion_vllm_mlx.transport.binary import BinaryLane
from pion_vllm_mlx.transport.resp import RespConnection

PREFIX = 1024
ROUNDS, FRAMINGS = 300, 5
#: RESP's framing to the binary lane's, which is to be a fifth cheaper.
CHEAPER = 1 / 0.8
SHAPES = {
    "8 KB: 9/3 x 64, suffix 4": (9, 3, 64, 4),
    "64 KB: 9/3 x 64, suffix 40": (9, 3, 64, 40),
    "145 KB: 32/8 x 128, suffix 16": (32, 8, 128, 16),
    "2 MB: 32/8 x 128, suffix 256": (32, 8, 128, 256),
}
PATIENCE = Patience(first_byte=30, stall=30)


class Query:
    """One QUERY_FUSED, as a client holds it; the same tensors for both lanes."""

    def __init__(self, heads: int, kv_heads: int, dim: int, suffix: int) -> None:
        def draw(*shape: int) -> NDArray[np.float32]:
            return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)

        self.heads, self.kv_heads, self.dim, self.suffix = heads, kv_heads, dim, suffix
        self.prefix = draw(kv_heads, PREFIX, dim)
        self.q = draw(heads, 1, dim)
        self.keys, self.values = draw(kv_heads, suffix, dim), draw(kv_heads, suffix, dim)
        self.head_map = bytes(head * kv_heads // heads for head in range(heads))

    @property
    def nbytes(self) -> int:
        """Of the tensors it sends."""
        return self.q.nbytes + self.keys.nbytes + self.values.nbytes

    def copied(self, room: memoryview) -> None:
        """What `_Wire` does with these bytes and the reply's, and nothing else."""
        stream = memoryview(b"".join((_view(self.q), _view(self.keys), _view(self.values))))
        room[: len(stream)] = stream
        room[: self.q.nbytes] = memoryview(b"".join((_view(self.q),)))

    def over_resp(self, connection: RespConnection) -> NDArray[np.float32]:
        blobs = (_view(self.q), _view(self.keys), _view(self.values), self.head_map)
        sizes = self.heads, self.dim, self.suffix, self.kv_heads
        words = Command.of("ATTEND.PREFIX.QUERY_FUSED", "bench_attn", 0, *sizes, *blobs)
        (reply,) = connection.exchange([words], PATIENCE)
        assert isinstance(reply, bytearray), f"QUERY_FUSED answered {reply!r}"
        return np.frombuffer(reply, np.float32).reshape(self.q.shape)

    def over_binary(self, lane: BinaryLane) -> NDArray[np.float32]:
        return lane.query_fused(
            b"bench_attn", 0, self.q, self.keys, self.values, self.head_map, None, PATIENCE
        )


def run() -> Findings:
    """Microseconds and the ratios RESP / binary, by shape: framing, then the whole call."""
    results: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="pion-bench-") as name,
        LocalServer(Path(name) / "data", Path(name) / "server.log") as server,
    ):
        for title, shape in SHAPES.items():
            query = Query(*shape)
            with _framings(query) as contestants:
                framing = _compare(contestants, FRAMINGS)
            call = _compare(_calls(server, query), 1)
            copies = framing["copies"]
            framing["without"] = (framing["RESP"] - copies) / (framing["binary"] - copies)
            results[title] = {"framing": framing, "call": call}
    return _findings(results)


def _findings(results: Mapping[str, Any]) -> Findings:
    rows, bars = [], []
    for title, one in results.items():
        framing, call = one["framing"], one["call"]
        times = (
            framing["RESP"],
            framing["binary"],
            framing["copies"],
            call["RESP"],
            call["binary"],
        )
        shown = [f"{micros:,.1f} us" for micros in times]
        gains = [framing["gain"]["ratio"], framing["without"], call["gain"]["ratio"]]
        rows.append((title, *shown, *(f"{gain:.2f}" for gain in gains)))
        bars += [
            Bar(
                f"framing without copies, RESP / binary, {title}",
                framing["without"],
                CHEAPER,
                False,
            ),
            Bar(f"whole call, RESP / binary, {title}", call["gain"]["high"], 1.0, False),
        ]
    columns = (
        *("query", "framing, RESP", "binary", "copies alone", "whole call, RESP", "binary"),
        *("framing, RESP / binary", "without copies", "call, RESP / binary"),
    )
    figures = {"rounds": ROUNDS, "prefix": PREFIX, "shapes": results}
    return Findings(figures, [Table("QUERY_FUSED on both lanes", columns, rows)], bars=bars)


def _compare(contestants: Mapping[str, Callable[[], object]], times: int) -> dict[str, Any]:
    """Median microseconds a call, and `gain`, the ratio RESP / binary with its interval."""

    def repeat(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: [call() for _ in range(times)]

    repeated = {name: repeat(call) for name, call in contestants.items()}
    seconds = interleave(repeated, ROUNDS)
    micros = {name: value / times * 1e6 for name, value in medians(seconds).items()}
    return {**micros, "gain": ratio_of(seconds["RESP"], seconds["binary"])}


# --- the whole call ----------------------------------------------------------------------------


def _calls(server: LocalServer, query: Query) -> dict[str, Callable[[], object]]:
    stored = _view(query.prefix)
    server.command("ATTEND.PREFIX.STORE", "bench_attn", 0, *query.prefix.shape, stored, stored)
    connection = RespConnection("127.0.0.1", server.port, deadline=time.monotonic() + 5)
    lane = BinaryLane("127.0.0.1", server.port + 1)
    if query.over_resp(connection).tobytes() != query.over_binary(lane).tobytes():
        raise RuntimeError("the lanes' replies differ")
    return {
        "RESP": lambda: query.over_resp(connection),
        "binary": lambda: query.over_binary(lane),
    }


# --- framing alone -----------------------------------------------------------------------------


class _Engine:
    """Answers every request with its own queries, at once."""

    def require(self) -> None:
        """Always there."""

    def answer(self, request: Any) -> memoryview:
        return memoryview(request.queries).cast("B")


class _Wire:
    """Stands where the sockets are: what the client sends is parsed, executed and answered here.

    Takes the place of the client's `Channel`; its copies are the ones the kernel would make.
    """

    def __init__(self, parser: Any, execute: Any, encode_reply: Any) -> None:
        self._parser, self._execute, self._encode = parser, execute, encode_reply
        self._reply: list[memoryview] = []

    def open(self, *_: object) -> Self:
        """What the client calls to make a `Channel`."""
        return self

    def has_input(self) -> bool:
        return False

    def await_first_byte(self) -> None:
        """The reply is there as soon as the request is."""

    def send(self, chunks: list[memoryview]) -> int:
        stream = memoryview(b"".join(chunks))
        sent = len(stream)
        while stream:
            target = self._parser.get_buffer()
            count = min(len(target), len(stream))
            target[:count] = stream[:count]
            self._parser.buffer_updated(count)
            stream = stream[count:]
            while (request := self._parser.next_request()) is not None:
                pieces: list[Outgoing] = self._encode(self._execute(request), 2)
                self._reply.append(memoryview(b"".join(pieces)))  # type: ignore[arg-type]
        return sent

    def receive_into(self, target: memoryview) -> int:
        piece = self._reply.pop(0)
        count = min(len(target), len(piece))
        target[:count] = piece[:count]
        if count < len(piece):
            self._reply.insert(0, piece[count:])
        return count


@contextmanager
def _framings(query: Query) -> Iterator[dict[str, Callable[[], object]]]:
    context: Any = SimpleNamespace(state=SimpleNamespace(attend=_Engine()))
    scratch = memoryview(bytearray(SCRATCH))
    room = memoryview(bytearray(query.nbytes))
    wires = {
        "RESP": _Wire(RequestParser(scratch), lambda r: attend.query_fused(context, r[1:]), encode),
        "binary": _Wire(
            FrameParser(scratch),
            lambda f: FRAMES[f.command].handler(context, f.body),
            encode_frame,
        ),
    }
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    connection = RespConnection("127.0.0.1", port, deadline=time.monotonic() + 5)
    lane = BinaryLane("127.0.0.1", port)

    with (
        mock.patch.object(resp, "open_channel", new=wires["RESP"].open),
        mock.patch.object(binary, "open_channel", new=wires["binary"].open),
    ):
        yield {
            "RESP": lambda: query.over_resp(connection),
            "binary": lambda: query.over_binary(lane),
            "copies": lambda: query.copied(room),
        }
    connection.close()
    lane.close()
    listener.close()


def _view(tensor: NDArray[np.float32]) -> memoryview:
    return tensor.data.cast("B")
