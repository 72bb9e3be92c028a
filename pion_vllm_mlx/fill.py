"""A fill: the lease to write one namespace, in pieces that readers see whole or not at all.

    META BEGIN → REGISTER → rows and blobs, each with the fill's generation → META SET

The manifest is written last and only after every piece was acknowledged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Protocol, Self

from pion_server.formats import Format
from pion_vllm_mlx.transport import (
    Command,
    Lane,
    Patience,
    ProtocolError,
    Reply,
    ServerError,
    TransportError,
)

ROWS_A_COMMAND: Final = 4096
#: A fill opens with one small record in the log, behind the writes of others at most.
SHORT: Final = Patience(first_byte=2, stall=2, total=5)
#: Bytes a second that a server, its disk and the way there manage even on a bad day.
_SLOWEST: Final = 4 << 20


class StoreFailed(Exception):
    """The server took the connection but not the prefix.

    `code` is its error's first word; STALE: somebody else stored or dropped the prefix meanwhile.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Side(Protocol):
    """One side ("keys", "values") of a V-store layer, and the format its rows are stored in."""

    @property
    def side(self) -> str: ...
    @property
    def layer(self) -> int: ...
    @property
    def format(self) -> Format: ...


class Fill:
    """An open fill of `namespace`; leaving its context by an exception gives it up.

    Every method raises StoreFailed when the server refuses something and TransportError when it
    is gone; then the manifest is not there, and nobody takes the half for the whole.
    """

    def __init__(self, lane: Lane, namespace: bytes, begun: Reply, nbytes: int) -> None:
        """`begun`: what META BEGIN answered, for which `is_mine` has to be true.

        `nbytes`: about how much will be written. Writes wait for a disk: seconds, and more for
        more bytes.
        """
        if isinstance(begun, ServerError):
            raise StoreFailed(begun.code, str(begun))
        if not isinstance(begun, int) or begun < 0:
            raise ProtocolError("META BEGIN answers an integer")
        self._lane = lane
        self._namespace = namespace
        self._gen = begun
        seconds = nbytes / _SLOWEST
        self._patience = Patience(first_byte=10 + seconds, stall=10, total=30 + 2 * seconds)

    @property
    def is_mine(self) -> bool:
        """False where another client is filling the namespace right now."""
        return self._gen > 0

    def register(self, sides: Sequence[Side], prefill_ms: int) -> Command:
        """REGISTER where all sides are of one width and format, else REGISTER.SCHEMA."""
        measured = ("PREFILL_MS", prefill_ms) if prefill_ms > 0 else ()
        specs = {(side.side, side.layer): _spec(side.format) for side in sides}
        layers = 1 + max(side.layer for side in sides)
        if len(set(specs.values())) == 1 and len(specs) == 2 * layers:
            fmt = sides[0].format
            return Command.of("KV.PREFIX.REGISTER", self._namespace, fmt.dim, fmt.name, *measured)
        # A leaf may have one side only; its layer is declared on the other and stays empty.
        all_specs = [
            specs.get((side, layer), "fmt=raw,dim=1")
            for side in ("keys", "values")
            for layer in range(layers)
        ]
        name = "KV.PREFIX.REGISTER.SCHEMA"
        return Command.of(name, self._namespace, layers, *all_specs, *measured)

    def rows(self, side: Side, data: memoryview, first: int = 0) -> Iterator[Command]:
        """Commands that write the PACKED rows of `data` from row `first` on."""
        width = side.format.packed_row_bytes

        def take(start: int, end: int) -> memoryview:
            return data[start * width : end * width]

        return self.rows_later(side, len(data) // width, take, first)

    def rows_later(
        self, side: Side, total: int, take: Callable[[int, int], memoryview], first: int = 0
    ) -> Iterator[Command]:
        """The same where `take(start, end)` gives PACKED rows, in order, once they are sent."""
        sid = session_id(self._namespace, side.side)
        for start in range(first, total, ROWS_A_COMMAND):
            count = min(ROWS_A_COMMAND, total - start)
            blob = partial(take, start, start + count)
            span = (side.layer, start, count)
            yield Command.of("V.STOREBATCH", sid, *span, blob, "FMT", "PACKED", "GEN", self._gen)

    def blobs(self, blobs: Iterable[tuple[int, bytes]]) -> Iterator[Command]:
        """Commands that write recurrent state, each with its layer."""
        for layer, blob in blobs:
            yield Command.of("SSM.PREFIX.STORE", self._namespace, layer, blob, "GEN", self._gen)

    def write(self, commands: Sequence[Command]) -> None:
        """Send commands in one pipeline and wait until each is acknowledged."""
        if not commands:
            return
        for reply in self._lane.exchange(commands, self._patience, retry=False):
            if isinstance(reply, ServerError):
                # A session that was there is gone: its prefix was dropped, which ends a fill too.
                gone = str(reply) == "ERR session not found"
                raise StoreFailed("STALE" if gone else reply.code, str(reply))
            if reply != "OK":
                raise ProtocolError("a store is answered by OK")

    def seal(self, manifest: bytes) -> None:
        """Write the manifest: now it is there for everybody."""
        self.write([Command.of("KV.PREFIX.META", self._namespace, "SET", self._gen, manifest)])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After a TransportError it has ended with its connection.
        if isinstance(error, Exception) and not isinstance(error, TransportError):
            abort = Command.of("KV.PREFIX.META", self._namespace, "ABORT", self._gen)
            with contextlib.suppress(TransportError):
                self._lane.exchange([abort], SHORT, retry=False)


def begin(namespace: bytes) -> Command:
    """The command that opens a fill."""
    return Command.of("KV.PREFIX.META", namespace, "BEGIN")


def session_id(namespace: bytes, side: str) -> bytes:
    """The V-store session of a namespace's side."""
    return namespace + (b"_pk" if side == "keys" else b"_pv")


def _spec(fmt: Format) -> str:
    return f"fmt={fmt.name},dim={fmt.dim}"
