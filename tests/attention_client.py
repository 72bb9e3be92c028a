"""The ATTEND commands with numpy arrays, for tests. Shapes as in WIRE.md section 7."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

F32: TypeAlias = NDArray[np.float32]
Words: TypeAlias = tuple[Any, ...]


def normal(seed: int, *shape: int, scale: float = 1.0) -> F32:
    """Reproducible numbers from scale * N(0, 1)."""
    drawn = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return drawn * np.float32(scale)


def store_words(sid: str, layer: int, k: F32, v: F32) -> Words:
    """The words of ATTEND.PREFIX.STORE."""
    return "ATTEND.PREFIX.STORE", sid, layer, *k.shape, k.tobytes(), v.tobytes()


def query_words(sid: str, layer: int, q: F32, window: int | None = None) -> Words:
    """The words of ATTEND.PREFIX.QUERY, q [H][M][D]."""
    heads, _, dim = q.shape
    return "ATTEND.PREFIX.QUERY", sid, layer, heads, dim, 1, q.tobytes(), *_given(window)


def fused_words(
    sid: str, layer: int, q: F32, sk: F32, sv: F32, head_map: bytes, window: int | None = None
) -> Words:
    """The words of ATTEND.PREFIX.QUERY_FUSED, q [H_q][M][D], sk and sv [H_kv][S][D]."""
    sizes = q.shape[0], q.shape[2], sk.shape[1], sk.shape[0]
    blobs = q.tobytes(), sk.tobytes(), sv.tobytes(), head_map
    return "ATTEND.PREFIX.QUERY_FUSED", sid, layer, *sizes, *blobs, *_given(window)


def sparse_words(
    sid: str,
    layer: int,
    q: F32,
    ids: NDArray[np.int32],
    counts: list[int],
    window: int | None = None,
) -> Words:
    """The words of ATTEND.PREFIX.QUERY_SPARSE, q [H][D], ids [H][Kmax]."""
    blobs = q.tobytes(), ids.astype("<i4").tobytes(), np.array(counts, "<u4").tobytes()
    sizes = *q.shape, ids.shape[1]
    return "ATTEND.PREFIX.QUERY_SPARSE", sid, layer, *sizes, *blobs, *_given(window)


def auto_words(
    sid: str,
    layer: int,
    q: F32,
    kv_heads: int,
    blocks: tuple[int, int],
    *options: int,
    head_map: bytes = b"",
) -> Words:
    """The words of ATTEND.PREFIX.QUERY_SPARSE_AUTO, q [H_q][D], blocks (B, K_top)."""
    words = "ATTEND.PREFIX.QUERY_SPARSE_AUTO", sid, layer, *q.shape, *blocks, kv_heads
    return *words, q.tobytes(), head_map, *options


def auto_fused_words(
    sid: str,
    layer: int,
    q: F32,
    sk: F32,
    sv: F32,
    blocks: tuple[int, int],
    *options: int,
    head_map: bytes = b"",
) -> Words:
    """The words of ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED, sk and sv [H_kv][S][D]."""
    sizes = *q.shape, *blocks, *sk.shape[:2]
    blobs = q.tobytes(), sk.tobytes(), sv.tobytes(), head_map
    return "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED", sid, layer, *sizes, *blobs, *options


def _given(window: int | None) -> tuple[int, ...]:
    return () if window is None else (window,)


class AttentionClient:
    """One connection to a server, speaking arrays."""

    def __init__(self, server: ServerProcess) -> None:
        self.raw: RawClient = server.client(120.0)

    def ask(self, words: Words, *shape: int) -> F32:
        """Send a query; its reply as an array of `shape`."""
        return np.frombuffer(self.raw.call(*words), np.float32).reshape(shape or (-1,))

    def store(self, sid: str, layer: int, k: F32, v: F32) -> None:
        assert self.raw.call(*store_words(sid, layer, k, v)) == "OK"

    def lookup(self, sid: str, layer: int = 0) -> str:
        return str(self.raw.call("ATTEND.PREFIX.LOOKUP", sid, layer))

    def query(self, sid: str, layer: int, q: F32, window: int | None = None) -> tuple[F32, F32]:
        """Output [H][M][D] and log-sum-exp [H][M], which is empty for M = 1."""
        reply = self.ask(query_words(sid, layer, q, window))
        out, lse = reply[: q.size], reply[q.size :]
        assert lse.size == (0 if q.shape[1] == 1 else q.size // q.shape[2])
        return out.reshape(q.shape), lse.reshape(q.shape[:2] if lse.size else (0,))

    def info(self) -> dict[str, int]:
        """The figures of KV.PREFIX.INFO."""
        lines = self.raw.call("KV.PREFIX.INFO").decode().split()
        return {name: int(value) for name, value in (line.split(":") for line in lines)}
