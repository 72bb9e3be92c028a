"""Steps of decode sessions as both lanes say them, for tests. Shapes as in docs/wire.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pion_server.attend import reference
from pion_server.attend.requests import DecodeStep

F32: TypeAlias = NDArray[np.float32]

STEP, CLOSE = 0x40, 0x41
OK, MISS, ERROR, COLDMISS, REPLAY = range(5)
TOKEN = b"0123456789abcdef"
SIZES = "<6H6I16sQ"


@dataclass(frozen=True)
class Step:
    """One DECODE.STEP: q [H_q][M][D]; k, v [H_kv][S][D]."""

    q: F32
    k: F32
    v: F32
    head_map: bytes
    prefix: int
    length: int = 0
    drop: int = 0
    window: int = 0
    sid: bytes = b"s"
    layer: int = 0
    token: bytes = TOKEN
    fill: int = 0

    def but(self, **changed: Any) -> Self:
        return replace(self, **changed)

    def words(self) -> tuple[Any, ...]:
        """For RESP."""
        heads, _, dim = self.q.shape
        sizes = heads, dim, self.k.shape[0], self.prefix, self.length, self.drop, self.k.shape[1]
        blobs = self.q.tobytes(), self.k.tobytes(), self.v.tobytes(), self.head_map
        head = "ATTEND.DECODE.STEP", self.sid, self.layer, self.token
        meant = ("GEN", self.fill) if self.fill else ()
        return *head, *sizes, *blobs, *((self.window,) if self.window else ()), *meant

    def body(self) -> bytes:
        """For a frame."""
        (heads, many, dim), (kv_heads, rows, _) = self.q.shape, self.k.shape
        sizes = len(self.sid), self.layer, heads, kv_heads, dim, 0
        more = self.prefix, self.length, self.drop, many, rows, self.window
        blobs = self.q.tobytes() + self.k.tobytes() + self.v.tobytes()
        head = struct.pack(SIZES, *sizes, *more, self.token, self.fill)
        return head + blobs + self.head_map + self.sid

    def request(self) -> DecodeStep:
        """For the engine."""
        (heads, _, dim), (kv_heads, rows, _) = self.q.shape, self.k.shape
        blobs = [self.q.tobytes(), self.k.tobytes(), self.v.tobytes(), self.head_map]
        place = self.prefix, self.length, self.drop
        key = self.sid, self.layer
        return DecodeStep.of(
            key, self.token, (heads, kv_heads), dim, place, rows, blobs, self.window, self.fill
        )

    def parts(self, reply: bytes | memoryview) -> tuple[F32, F32]:
        """Output [H_q][M][D] and log-sum-exp [H_q][M] of a reply."""
        floats = np.frombuffer(reply, np.float32)
        assert floats.size == self.q.size + self.q.shape[0] * self.q.shape[1]
        return (
            floats[: self.q.size].reshape(self.q.shape),
            floats[self.q.size :].reshape(self.q.shape[:2]),
        )


def assert_equal_to_float64(
    step: Step, reply: bytes | memoryview, prefix: tuple[F32, F32], suffix: tuple[F32, F32]
) -> None:
    """The reply is the attention over that prefix and suffix, by WIRE's tolerances."""
    out, lse = step.parts(reply)
    wanted, wanted_lse = reference.decode(step.q, prefix, suffix, list(step.head_map), step.window)
    np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse, wanted_lse, rtol=2e-5, atol=2e-6)
    if out.size:
        assert reference.cosine(out, wanted) >= 0.99999
