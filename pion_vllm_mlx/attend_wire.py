"""The ATTEND commands as functions of arrays, on RESP and, where it can, on the binary lane.

Every array is float32 and C-contiguous, shapes as in WIRE's section on ATTEND: `[H][M][D]` queries,
`[H_kv][S][D]` suffixes. Nothing is retried here. Raises ColdEntry for a session whose K/V were
demoted, ServerError for a refusal, TransportError, and ValueError, before anything is sent, for
arrays that do not go together. With `fill`, the generation of a manifest, a session that holds
another fill is refused as `session not found`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.decode_session import DecodeSession, Rows
from pion_vllm_mlx.tally import Tally
from pion_vllm_mlx.transport import (
    Command,
    Lane,
    Patience,
    ProtocolError,
    Reply,
    ServerError,
    TransportError,
)
from pion_vllm_mlx.transport.binary import BinaryLane, ColdEntry, Declined

F32: TypeAlias = NDArray[np.float32]

#: Head dimensions the server's engine computes.
HEAD_DIMS: Final = (32, 64, 96, 128, 160, 192, 256, 512)
#: How blocks are scored, by name; see docs/attention.md.
SELECTORS: Final = {"block_mean": 0, "quest": 1}
_LONGEST_SUFFIX: Final = 2**31 - 1


class NoSessions(Exception):
    """The server keeps no suffixes: it does not know the command."""


class AttendWire:
    """One server's attention engine. `tally` counts the answers of each lane, and their time.

    Queries wait as long as `patience` says, or the wire's own where they are given none.
    """

    def __init__(
        self,
        lane: Lane,
        binary: BinaryLane | None,
        tally: Tally,
        patience: Patience | None = None,
    ) -> None:
        self._lane = lane
        self.binary = binary
        #: False once the server turned out to know nothing of decode sessions.
        self.keeps_suffixes = True
        self._tally = tally
        # A query may wait for the queries of others: one thread computes for all.
        self.patience = patience or Patience(first_byte=10, stall=5, total=60)

    # --- holding -----------------------------------------------------------------------------

    def store(self, sid: bytes, layer: int, keys: F32, values: F32, fill: int = 0) -> None:
        """ATTEND.PREFIX.STORE: K and V `[H][N][D]` become the session's."""
        if keys.shape != values.shape or keys.ndim != 3:
            raise ValueError(f"keys {keys.shape} and values {values.shape} are not [H][N][D] alike")
        words = ("ATTEND.PREFIX.STORE", sid, layer, *keys.shape, _bytes(keys), _bytes(values))
        self._ok(*words, *_meant(fill))

    def states(self, sid: bytes, layers: Iterable[int]) -> list[str]:
        """HIT, COLD or MISS of each layer, in one round trip."""
        commands = [Command.of("ATTEND.PREFIX.LOOKUP", sid, layer) for layer in layers]
        return [str(_value(reply)) for reply in self._lane.exchange(commands, self.patience)]

    def warm(self, namespace: bytes, heads: int, dim: int, sid: bytes, patience: Patience) -> int:
        """KV.PREFIX.WARM: how many layers were made of stored rows of `heads` times `dim`."""
        command = Command.of("KV.PREFIX.WARM", namespace, heads, dim, sid)
        (reply,) = self._lane.exchange([command], patience)
        count = str(_value(reply)).partition(" ")[0]
        if not count.isdigit():
            raise ProtocolError("a WARM is answered by a number of layers")
        return int(count)

    # --- asking ------------------------------------------------------------------------------

    def query(
        self,
        sid: bytes,
        layer: int,
        queries: F32,
        window: int | None = None,
        patience: Patience | None = None,
        fill: int = 0,
    ) -> tuple[F32, F32]:
        """QUERY: attention of `[H][M][D]` over the prefix, and its log-sum-exp `[H][M]`."""
        heads, rows, dim = _shape(queries, "queries")
        # A lone query is answered without its log-sum-exp, so it goes out twice.
        asked = queries if rows > 1 else np.repeat(queries, 2, axis=1)
        words = ("ATTEND.PREFIX.QUERY", sid, layer, heads, dim, _LONGEST_SUFFIX, _bytes(asked))
        options = *_given(window), *_meant(fill)
        flat = self._ask((*words, *options), asked.size + asked.size // dim, patience)
        out = flat[: asked.size].reshape(asked.shape)
        lse = flat[asked.size :].reshape(asked.shape[:2])
        return out[:, :rows], lse[:, :rows]

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
        """QUERY_FUSED: prefix and causal suffix in one softmax, as `queries`; binary lane first."""
        heads, _, dim = _shape(queries, "queries")
        kv_heads, count = check_suffix(suffix_keys, suffix_values, heads, dim)
        check_map(head_map, heads, kv_heads)
        started = time.perf_counter()
        if self.binary is not None and self.binary.usable:
            try:
                out = self.binary.query_fused(
                    sid,
                    layer,
                    queries,
                    suffix_keys,
                    suffix_values,
                    head_map,
                    window,
                    patience or self.patience,
                )
            except (Declined, TransportError, ValueError):
                pass  # RESP says why, or works
            else:
                self._answered("attend_binary", started)
                return out
        sizes = (heads, dim, count, kv_heads)
        blobs = (_bytes(queries), _bytes(suffix_keys), _bytes(suffix_values), head_map)
        words = ("ATTEND.PREFIX.QUERY_FUSED", sid, layer, *sizes, *blobs, *_given(window))
        return self._ask(words, queries.size, patience).reshape(queries.shape)

    def open_session(
        self, sid: bytes, tokens: int, patience: Patience, fill: int = 0
    ) -> DecodeSession:
        """A suffix behind the `tokens` tokens of `sid`; nothing is sent yet."""
        return DecodeSession(self._lane, self.binary, sid, tokens, patience, fill)

    def step(
        self,
        session: DecodeSession,
        layer: int,
        queries: F32,
        length: int,
        rows: Rows,
        head_map: bytes,
    ) -> tuple[F32, F32]:
        """`DecodeSession.attend`; NoSessions where the server has none."""
        started = time.perf_counter()
        try:
            parts = session.attend(layer, queries, length, rows, head_map)
        except ServerError as error:
            if "unknown command" in str(error):
                raise NoSessions from error
            raise
        binary = self.binary is not None and self.binary.usable
        self._answered("attend_binary" if binary else "attend_resp", started)
        return parts

    def query_sparse_auto(
        self,
        sid: bytes,
        layer: int,
        queries: F32,
        blocks: tuple[int, int],
        kv_heads: int,
        head_map: bytes,
        window: int | None = None,
        selector: str = "block_mean",
    ) -> F32:
        """QUERY_SPARSE_AUTO: `[H_q][D]` over the best of `blocks` (block size, how many)."""
        heads, dim = _flat_shape(queries)
        check_map(head_map, heads, kv_heads)
        options = (-1 if window is None else window, _selector(selector))
        words = ("ATTEND.PREFIX.QUERY_SPARSE_AUTO", sid, layer, heads, dim, *blocks, kv_heads)
        flat = self._ask((*words, _bytes(queries), head_map, *options), queries.size)
        return flat.reshape(queries.shape)

    def query_sparse_auto_fused(
        self,
        sid: bytes,
        layer: int,
        queries: F32,
        suffix_keys: F32,
        suffix_values: F32,
        blocks: tuple[int, int],
        head_map: bytes,
        window: int | None = None,
        selector: str = "block_mean",
        patience: Patience | None = None,
        fill: int = 0,
    ) -> F32:
        """QUERY_SPARSE_AUTO_FUSED: `[H_q][D]` over the best blocks and the whole suffix."""
        heads, dim = _flat_shape(queries)
        kv_heads, count = check_suffix(suffix_keys, suffix_values, heads, dim)
        check_map(head_map, heads, kv_heads)
        options = (-1 if window is None else window, _selector(selector))
        sizes = (heads, dim, *blocks, kv_heads, count)
        blobs = (_bytes(queries), _bytes(suffix_keys), _bytes(suffix_values), head_map)
        words = ("ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED", sid, layer, *sizes, *blobs, *options)
        return self._ask((*words, *_meant(fill)), queries.size, patience).reshape(queries.shape)

    def _ask(self, words: Sequence[Any], floats: int, patience: Patience | None = None) -> F32:
        """One command whose answer is so many floats, received where they are returned."""
        target = np.empty(floats, np.float32)

        def place(index: int, nbytes: int) -> memoryview | None:
            return target.data.cast("B") if nbytes == target.nbytes else None

        started = time.perf_counter()
        command = Command(tuple(words), place)
        (reply,) = self._lane.exchange([command], patience or self.patience)
        body = _value(reply)
        if not isinstance(body, bytes | bytearray | memoryview) or len(body) != target.nbytes:
            raise ProtocolError(f"{words[0]} is answered by {target.nbytes} bytes")
        self._answered("attend_resp", started)
        return target

    def _answered(self, lane: str, started: float) -> None:
        self._tally.add(lane)
        self._tally.add_seconds("attend_ms_total", time.perf_counter() - started)

    def _ok(self, *words: Any) -> None:
        (reply,) = self._lane.exchange([Command(words)], self.patience)
        if _value(reply) != "OK":
            raise ProtocolError(f"{words[0]} is answered by OK")


def as_f32(array: Any) -> F32:
    """Any array of numbers as contiguous float32; MLX's bfloat16, which numpy lacks, included."""
    # Even a cast that changes nothing is computed, by another thread that has to wake up.
    if isinstance(array, mx.array) and array.dtype != mx.float32:
        array = array.astype(mx.float32)
    return np.ascontiguousarray(array, dtype=np.float32)


def even_map(heads: int, kv_heads: int) -> bytes:
    """The usual grouping: query head h reads kv head h / (H_q / H_kv)."""
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} kv heads")
    return bytes(head // (heads // kv_heads) for head in range(heads))


def check_map(head_map: bytes, heads: int, kv_heads: int) -> None:
    """Raise ValueError unless `head_map` names a kv head for each query head."""
    if len(head_map) != heads:
        raise ValueError(f"head_map of {len(head_map)} for {heads} query heads")
    if max(head_map) >= kv_heads:
        raise ValueError(f"head_map names kv head {max(head_map)} of {kv_heads}")


def check_suffix(keys: F32, values: F32, heads: int, dim: int) -> tuple[int, int]:
    """The suffix's kv heads and rows; ValueError unless it fits `heads` queries of `dim`."""
    if keys.shape != values.shape or keys.ndim != 3 or keys.shape[2] != dim:
        raise ValueError(f"suffix {keys.shape}, {values.shape} is not [H_kv][S][{dim}] twice")
    if not keys.shape[0] or heads % keys.shape[0]:
        raise ValueError(f"{heads} query heads cannot share {keys.shape[0]} kv heads")
    return keys.shape[0], keys.shape[1]


def _shape(array: F32, what: str) -> tuple[int, int, int]:
    if array.ndim != 3 or not array.size:
        raise ValueError(f"{what} {array.shape} are not [H][M][D]")
    heads, rows, dim = array.shape
    return heads, rows, dim


def _flat_shape(array: F32) -> tuple[int, int]:
    if array.ndim != 2 or not array.size:
        raise ValueError(f"queries {array.shape} are not [H][D], one a head")
    heads, dim = array.shape
    return heads, dim


def _selector(name: str) -> int:
    if name not in SELECTORS:
        raise ValueError(f"selector {name!r} is not one of {', '.join(SELECTORS)}")
    return SELECTORS[name]


def _given(window: int | None) -> tuple[int, ...]:
    return () if window is None else (window,)


def _meant(fill: int) -> tuple[str | int, ...]:
    return ("GEN", fill) if fill else ()


def _bytes(array: F32) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _value(reply: Reply) -> Reply:
    """The reply, unless it is an error."""
    if isinstance(reply, ServerError):
        if reply.code == "COLDMISS":
            raise ColdEntry(str(reply))
        raise reply
    return reply


def is_missing(error: ServerError) -> bool:
    """Whether a query failed because the server holds nothing under that name."""
    return "session not found" in str(error)
