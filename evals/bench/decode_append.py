"""A decode step with its suffix sent along (QUERY_FUSED) or kept in the server (DECODE.STEP).

Expected: bytes per step do not depend on the suffix when it is kept, on either lane; a step costs
no more than sending the suffix, from some length on less. One layer, SmolLM2's shapes (9 and 3
heads of 64) over a prefix of 1,024; bytes are counted where the client's sockets take and hand them
out. Times are a step's at that length: its row is taken off and appended again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from evals.findings import Bar, Findings, Table
from evals.rounds import interleave, medians, ratio_of
from pion_vllm_mlx.decode_session import DecodeSession
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.transport import Command, Patience
from pion_vllm_mlx.transport.binary import BinaryLane
from pion_vllm_mlx.transport.channel import Channel
from pion_vllm_mlx.transport.endpoint import Endpoint

F32: TypeAlias = NDArray[np.float32]

HEADS, KV_HEADS, DIM, PREFIX = 9, 3, 64, 1024
LENGTHS = (16, 64, 256, 1024, 4096)
ROUNDS = 100
PATIENCE = Patience(first_byte=30, stall=30)
HEAD_MAP = bytes(head * KV_HEADS // HEADS for head in range(HEADS))


class Generation:
    """A client's own suffix K/V of one layer, and four ways to ask about its last token."""

    def __init__(self, server: LocalServer) -> None:
        prefix = _normal(1, KV_HEADS, PREFIX, DIM)
        stored = _view(prefix)
        server.command("ATTEND.PREFIX.STORE", "bench_attn", 0, *prefix.shape, stored, stored)
        self.keys = _normal(2, KV_HEADS, max(LENGTHS), DIM)
        self.q = _normal(3, HEADS, 1, DIM)
        self.resp = Endpoint("127.0.0.1", server.port, connect_timeout=5)
        self.binary = BinaryLane("127.0.0.1", server.port + 1, connect_timeout=5)
        self._over_resp = DecodeSession(self.resp, None, b"bench_attn", PREFIX, PATIENCE)
        self._over_binary = DecodeSession(self.resp, self.binary, b"bench_attn", PREFIX, PATIENCE)

    def ways(self, length: int) -> dict[str, Callable[[], F32]]:
        """Each asks for the attention of the suffix's last token, `length` tokens long."""

        def rows(start: int) -> tuple[F32, F32]:
            part = self.keys[:, start:length]
            return part, part

        def fused_binary() -> F32:
            sent = rows(0)
            return self.binary.query_fused(
                b"bench_attn", 0, self.q, *sent, HEAD_MAP, None, PATIENCE
            )

        def fused_resp() -> F32:
            blob = _view(np.ascontiguousarray(rows(0)[0]))
            words = "ATTEND.PREFIX.QUERY_FUSED", "bench_attn", 0, HEADS, DIM, length, KV_HEADS
            sent = Command.of(*words, _view(self.q), blob, blob, HEAD_MAP)
            (reply,) = self.resp.exchange([sent], PATIENCE)
            assert isinstance(reply, bytearray), f"QUERY_FUSED answered {reply!r}"
            return np.frombuffer(reply, np.float32).reshape(self.q.shape)

        def step(session: DecodeSession) -> F32:
            return session.attend(0, self.q, length, rows, HEAD_MAP)[0]

        return {
            "sent, RESP": fused_resp,
            "sent, binary": fused_binary,
            "kept, RESP": lambda: step(self._over_resp),
            "kept, binary": lambda: step(self._over_binary),
        }


class Traffic:
    """Bytes that sockets took and handed out."""

    sent = received = 0


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count what goes through every `Channel` meanwhile."""
    traffic, send, receive = Traffic(), Channel.send, Channel.receive_into

    def count_sent(channel: Channel, chunks: Any) -> int | None:
        taken = send(channel, chunks)
        traffic.sent += taken or 0
        return taken

    def count_received(channel: Channel, target: memoryview) -> int:
        got = receive(channel, target)
        traffic.received += got
        return got

    with (
        mock.patch.object(Channel, "send", count_sent),
        mock.patch.object(Channel, "receive_into", count_received),
    ):
        yield traffic


def run() -> Findings:
    """Bytes up and down and median microseconds of a step, by suffix length and way."""
    results: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="pion-bench-") as name,
        LocalServer(Path(name) / "data", Path(name) / "server.log") as server,
    ):
        generation = Generation(server)
        for length in LENGTHS:
            ways = generation.ways(length)
            _compare_answers({way: ask() for way, ask in ways.items()})
            sizes = {}
            for way, ask in ways.items():
                with counted() as traffic:
                    ask()
                sizes[way] = traffic.sent, traffic.received
            seconds = interleave(ways, ROUNDS)
            results[str(length)] = {
                "bytes": sizes,
                "micros": {way: value * 1e6 for way, value in medians(seconds).items()},
                "gain": ratio_of(seconds["sent, binary"], seconds["kept, binary"]),
            }
    return _findings(results)


def _findings(results: Mapping[str, Any]) -> Findings:
    rows = [
        (length, way, sent, received, f"{result['micros'][way]:,.0f} us")
        for length, result in results.items()
        for way, (sent, received) in result["bytes"].items()
    ]
    columns = "suffix, tokens", "suffix and lane", "bytes up", "bytes down", "a step, median"
    last = str(LENGTHS[-1])
    bars = [
        Bar("bytes of a kept step, least / most, binary", _evenness(results, "kept, binary"), 1.0),
        # RESP writes numbers in decimals: 4,096 has two digits more than 16.
        Bar("bytes of a kept step, least / most, RESP", _evenness(results, "kept, RESP"), 0.99),
        Bar(f"sent / kept at {last}, binary", results[last]["gain"]["high"], 1.0, decides=False),
    ]
    figures = {"rounds": ROUNDS, "prefix": PREFIX, "lengths": results}
    return Findings(figures, [Table("A decode step of one layer", columns, rows)], bars=bars)


def _evenness(results: Mapping[str, Any], way: str) -> float:
    sizes: list[int] = [sum(result["bytes"][way]) for result in results.values()]
    return min(sizes) / max(sizes)


def _compare_answers(answers: Mapping[str, F32]) -> None:
    first, *others = answers.values()
    worst = max(float(np.max(np.abs(first - other))) for other in others)
    if worst > 1e-5:
        raise RuntimeError(f"the answers differ by {worst}")


def _normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _view(tensor: F32) -> memoryview:
    return tensor.data.cast("B")
