"""A generation whose suffix K/V stay in the server: each step sends its new tokens only.

    session = DecodeSession(endpoint, lane, b"ns_attn", tokens=2048)
    out, lse = session.attend(layer, q, length, rows, head_map)

The server names a suffix by a token drawn here; nothing else knows of it. Whatever happens to it
there (restart, eviction, idleness), the whole suffix is sent once more under a new token, and the
step is answered as if nothing had been.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from pion_vllm_mlx.process_lock import ProcessLock
from pion_vllm_mlx.transport import (
    Buffer,
    Command,
    Lane,
    Patience,
    ProtocolError,
    ServerError,
    TimedOut,
    TransportError,
)
from pion_vllm_mlx.transport.binary import (
    DECODE_CLOSE,
    DECODE_STEP,
    F32,
    BinaryLane,
    ColdEntry,
    Declined,
    Forgotten,
    bytes_of,
    checked,
)

#: `rows(start)` answers K and V `[H_kv][length - start][D]` of the suffix from row `start` on.
Rows: TypeAlias = Callable[[int], tuple[F32, F32]]

_TOKEN_BYTES: Final = 16
# sid length, layer, H_q, H_kv, D, 0; N, length, drop, M, S, window; token; generation.
_STEP: Final = struct.Struct("<6H6I16sQ")
_LENGTH: Final = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class Step:
    """One ATTEND.DECODE.STEP: `queries` [H_q][M][D], new rows `keys`, `values` [H_kv][S][D].

    The rows go behind the first `length - drop` of a suffix that has `length` in the server.
    `generation` is the fill of the prefix that is meant, 0 for whatever is held.
    """

    sid: bytes
    token: bytes
    layer: int
    prefix: int
    queries: F32
    keys: F32
    values: F32
    head_map: bytes
    length: int
    drop: int = 0
    window: int = 0
    generation: int = 0

    def frame(self) -> list[memoryview]:
        """The parts of the frame's body. Raises ValueError for what no frame can say."""
        (heads, many, dim), (kv_heads, rows, _) = self.queries.shape, self.keys.shape
        try:
            front = _STEP.pack(
                *(len(self.sid), self.layer, heads, kv_heads, dim, 0),
                *(self.prefix, self.length, self.drop, many, rows, self.window),
                self.token,
                self.generation,
            )
        except struct.error as error:
            raise ValueError(f"no frame can hold this step: {error}") from None
        tail = memoryview(self.head_map + self.sid)
        return checked([memoryview(front), *self._tensors(), tail])

    def command(self) -> Command:
        """The same on RESP."""
        (heads, _, dim), (kv_heads, rows, _) = self.queries.shape, self.keys.shape
        sizes = heads, dim, kv_heads, self.prefix, self.length, self.drop, rows
        words = "ATTEND.DECODE.STEP", self.sid, self.layer, self.token, *sizes
        meant = ("GEN", self.generation) if self.generation else ()
        return Command.of(*words, *self._tensors(), self.head_map, self.window, *meant)

    @property
    def reply_bytes(self) -> int:
        """The size of an answer."""
        heads, many, _ = self.queries.shape
        return int(self.queries.nbytes + 4 * heads * many)

    def parts(self, reply: Buffer) -> tuple[F32, F32]:
        """Output [H_q][M][D] and log-sum-exp [H_q][M]. Raises ProtocolError for another size."""
        if len(reply) != self.reply_bytes:
            raise ProtocolError(f"a reply of {len(reply)} bytes, not {self.reply_bytes}")
        floats, count = np.frombuffer(reply, np.float32), self.queries.size
        shape = self.queries.shape
        return floats[:count].reshape(shape), floats[count:].reshape(shape[:2])

    def _tensors(self) -> list[memoryview]:
        return [bytes_of(tensor) for tensor in (self.queries, self.keys, self.values)]


class DecodeSession:
    """The suffix of one generation behind the prefix `sid` of `tokens` tokens. Thread-safe.

    With `fill`, the manifest's generation, a prefix of another fill is `session not found`.
    Steps go over the binary lane while it is usable, else over RESP; one whose reply was lost is
    repeated there, as a step done twice is done once.
    """

    def __init__(
        self,
        resp: Lane,
        binary: BinaryLane | None,
        sid: bytes,
        tokens: int,
        patience: Patience | None = None,
        fill: int = 0,
    ) -> None:
        self._resp, self._binary = resp, binary
        self._sid, self._tokens, self._fill = sid, tokens, fill
        self._patience = patience or Patience(first_byte=60.0)
        self._lock = ProcessLock()
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        # What the server holds, by layer.
        self._lengths: dict[int, int] = {}
        #: How often the server had lost the session.
        self.replays = 0

    def attend(
        self,
        layer: int,
        queries: F32,
        length: int,
        rows: Rows,
        head_map: bytes,
        window: int = 0,
    ) -> tuple[F32, F32]:
        """Attention of `queries` [H_q][M][D], the last M positions of a suffix of `length` tokens.

        They are new: whatever the server held from position `length - M` on is replaced, so that
        a rewind needs no call of its own. `window` W > 0 shows each query the last W positions up
        to its own, of prefix and suffix together. Float32 throughout; scores are scaled by
        1/sqrt(D). Returns output [H_q][M][D] and log-sum-exp [H_q][M].

        Raises ColdEntry (KV.PREFIX.WARM, then ask again), ServerError for a refusal, Forgotten
        for a session lost twice at once, TransportError; asking again is safe after each of them.
        ValueError for shapes that do not fit.
        """
        many = queries.shape[1]
        if not 0 < many <= length:
            raise ValueError(f"{many} queries at the end of a suffix of {length}")
        with self._lock:
            try:
                return self._step(layer, queries, length, rows, head_map, window)
            except Forgotten:
                self._begin_anew()
                return self._step(layer, queries, length, rows, head_map, window)

    def close(self) -> None:
        """Let the server forget the suffix; if it cannot be reached, it will by itself."""
        with self._lock:
            self._close()
            self._lengths.clear()

    def _step(
        self, layer: int, queries: F32, length: int, rows: Rows, head_map: bytes, window: int
    ) -> tuple[F32, F32]:
        held = self._lengths.get(layer, 0)
        start = min(held, length - queries.shape[1])
        keys, values = rows(start)
        heads, _, dim = queries.shape
        shape = keys.shape[0], length - start, dim
        if keys.shape != shape or values.shape != shape or len(head_map) != heads:
            raise ValueError(
                f"K {keys.shape}, V {values.shape}, {len(head_map)} heads mapped; wanted {shape}, "
                f"{heads}"
            )
        place = held, held - start, window, self._fill
        names = self._sid, self._token, layer, self._tokens
        parts = self._ask(Step(*names, queries, keys, values, head_map, *place))
        self._lengths[layer] = length
        return parts

    def _ask(self, step: Step) -> tuple[F32, F32]:
        if self._binary is not None and self._binary.usable:
            try:
                reply = self._binary.ask(
                    DECODE_STEP, step.frame(), step.reply_bytes, self._patience, step.sid
                )
                return step.parts(reply.data)
            except TimedOut:
                raise
            except (Declined, TransportError):
                pass  # RESP says why, or does it again: a step done twice is done once
        (answer,) = self._resp.exchange([step.command()], self._patience)
        if isinstance(answer, ServerError):
            if answer.code == "REPLAY":
                raise Forgotten(str(answer))
            if answer.code == "COLDMISS":
                raise ColdEntry(str(answer))
            raise answer
        if not isinstance(answer, bytes | bytearray | memoryview):
            raise ProtocolError(f"a decode step is answered {answer!r}")
        return step.parts(answer)

    def _begin_anew(self) -> None:
        # What may still be held under the old token must not wait for its timeout.
        self._close()
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._lengths.clear()
        self.replays += 1

    def _close(self) -> None:
        with contextlib.suppress(TransportError, Declined):
            if self._binary is not None and self._binary.usable:
                body = memoryview(_LENGTH.pack(len(self._sid)) + self._sid + self._token)
                self._binary.ask(DECODE_CLOSE, [body], 0, self._patience, self._sid)
            elif self._resp.available:
                words = Command.of("ATTEND.DECODE.CLOSE", self._sid, self._token)
                self._resp.exchange([words], self._patience)
