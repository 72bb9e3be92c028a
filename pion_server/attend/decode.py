"""Decode sessions: suffixes that stay in the server while a generation appends to them.

A session is (sid, token): the prefix it continues, and 16 bytes its client drew. It holds a suffix
for each layer. Who knows the token may go on, over any connection; nobody else can tell that it is
there. A session that was evicted, timed out or lost with the process is answered REPLAY: its client
sends the whole suffix once more, under a new token.

Sessions are bookkept on the event loop; a suffix's rows and length are the engine thread's own.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pion_server.attend.sessions import Shape, Source
from pion_server.errors import Replay
from pion_server.store.budget import Victim

if TYPE_CHECKING:
    import mlx.core as mx

    from pion_server.attend.requests import F32, DecodeStep

Name: TypeAlias = tuple[bytes, bytes]

_LEAST_ROOM = 64


class Rows(NamedTuple):
    """K and V `[heads][room][dim]`, float32; the numpy arrays are the same memory, to write to."""

    keys: mx.array
    values: mx.array
    key_rows: F32
    value_rows: F32


@dataclass(eq=False, slots=True)
class Suffix:
    """One layer's suffix behind a prefix of that shape. `planned`: rows there is room for.

    `source` is the slot's that it was attended to with, None as long as it only grew.
    """

    prefix: Shape
    planned: int = 0
    length: int = 0
    rows: Rows | None = None
    source: Source | None = None

    @property
    def nbytes(self) -> int:
        return _nbytes(self.prefix, self.planned)

    def append(self, step: DecodeStep, allocate: Callable[[Shape], Rows]) -> None:
        """Take `step.drop` rows off the end and put the step's rows there.

        A step that was done already, and whose reply was lost, changes nothing. Raises Replay for
        a suffix that is not as long as the step says.
        """
        start, end = step.length - step.drop, step.end
        if self.length != step.length:
            if self.length == end and self._holds(step, start, end):
                return
            raise Replay(f"the suffix of layer {step.key[1]} has {self.length} tokens here")
        if self.rows is None or end > self.rows.key_rows.shape[1]:
            self._grow(start, allocate)
        assert self.rows is not None
        self.rows.key_rows[:, start:end] = step.keys
        self.rows.value_rows[:, start:end] = step.values
        self.length = end

    def _holds(self, step: DecodeStep, start: int, end: int) -> bool:
        """Whether the rows are there already, bit for bit: NaN equals itself here."""
        if self.rows is None:
            return start == end
        import numpy as np

        pairs = (self.rows.key_rows, step.keys), (self.rows.value_rows, step.values)
        return all(
            np.array_equal(held[:, start:end].view(np.uint32), new.view(np.uint32))
            for held, new in pairs
        )

    def _grow(self, kept: int, allocate: Callable[[Shape], Rows]) -> None:
        rows = allocate(self.prefix._replace(tokens=self.planned))
        if self.rows is not None:
            rows.key_rows[:, :kept] = self.rows.key_rows[:, :kept]
            rows.value_rows[:, :kept] = self.rows.value_rows[:, :kept]
        self.rows = rows


@dataclass(eq=False, slots=True)
class Session:
    """The suffixes of one generation, and how many steps are under way."""

    name: Name
    layers: dict[int, Suffix] = field(default_factory=dict)
    used_at: float = 0.0
    steps: int = 0

    @property
    def nbytes(self) -> int:
        return sum(suffix.nbytes for suffix in self.layers.values())


class DecodeSessions:
    """At most `limit` sessions; one not used for `idle` seconds ends, as does the oldest beyond.

    Thread-safe, as the memory budget evicts from the thread of whoever needs room. A session with
    a step under way is not evicted.
    """

    def __init__(
        self, limit: int = 256, idle: float = 600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.idle = idle
        self.evictions = 0
        self.nbytes = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._held: OrderedDict[Name, Session] = OrderedDict()

    @property
    def count(self) -> int:
        return len(self._held)

    @contextmanager
    def stepping(self, step: DecodeStep) -> Iterator[Session]:
        """The session of a step, held while it lasts; a step from length 0 begins one.

        Raises Replay where another step is of a session that is not held.
        """
        name = step.name
        with self._lock:
            session = self._held.get(name)
            if session is None:
                if step.length:
                    raise Replay("no such decode session")
                session = self._held[name] = Session(name)
            session.steps += 1
            self._held.move_to_end(name)
            self._shrink()
        try:
            yield session
        finally:
            with self._lock:
                session.steps -= 1
                session.used_at = self._clock()
                # Closed meanwhile, its name may be another's by now.
                if self._held.get(name) is session and not (session.layers or session.steps):
                    self._remove(name)

    def growth(
        self, session: Session, step: DecodeStep, prefix: Shape, source: Source | None = None
    ) -> int:
        """Bytes that a step adds to what is held. Raises Replay where it cannot be done.

        `source` is of the slot that will be asked, if one will.
        """
        suffix = session.layers.get(step.key[1])
        if suffix is None:
            if step.length:
                raise Replay(f"no suffix of layer {step.key[1]} here")
            return _nbytes(prefix, _room(step.end))
        if suffix.prefix != prefix or _differ(suffix.source, source):
            raise Replay("the prefix was replaced by another")
        if step.end <= suffix.planned:
            return 0
        return _nbytes(prefix, _room(step.end)) - suffix.nbytes

    def open(
        self, session: Session, step: DecodeStep, prefix: Shape, source: Source | None = None
    ) -> Suffix:
        """The suffix of a step with its growth counted. Raises Replay if it has gone meanwhile."""
        with self._lock:
            if self._held.get(session.name) is not session:
                raise Replay("the decode session was closed")
            growth = self.growth(session, step, prefix, source)
            suffix = session.layers.setdefault(step.key[1], Suffix(prefix))
            suffix.source = source or suffix.source
            if growth:
                suffix.planned = _room(step.end)
                self.nbytes += growth
            return suffix

    def close(self, name: Name) -> bool:
        """Forget a session; whether it was held."""
        with self._lock:
            return self._remove(name)

    def drop(self, sid: bytes, layer: int | None = None) -> None:
        """Forget what continues a prefix that goes, or one layer of it."""
        with self._lock:
            for session in [one for one in self._held.values() if one.name[0] == sid]:
                if layer is None:
                    self._remove(session.name)
                elif (suffix := session.layers.pop(layer, None)) is not None:
                    self.nbytes -= suffix.nbytes

    def drop_idle(self) -> None:
        """Forget what nobody has used for long; called by the clock."""
        with self._lock:
            before = self._clock() - self.idle
            for session in list(self._held.values()):
                if not session.steps and session.used_at <= before:
                    self._remove(session.name)
                    self.evictions += 1

    def victims(self, keep: bytes | None) -> Iterator[Victim]:
        """Sessions from least to most recently used; their clients can send all again.

        That includes those of namespace `keep`: one prefix may have any number of generations.
        """
        with self._lock:
            chosen = [one for one in self._held.values() if not one.steps]
        for session in chosen:
            yield Victim(session.nbytes, partial(self._evict, session.name))

    def _evict(self, name: Name) -> None:
        with self._lock:
            self.evictions += self._remove(name)

    def _shrink(self) -> None:
        while len(self._held) > self.limit:
            unused = (name for name, session in self._held.items() if not session.steps)
            name = next(unused, None)
            if name is None:
                return
            self._remove(name)
            self.evictions += 1

    def _remove(self, name: Name) -> bool:
        session = self._held.pop(name, None)
        if session is None:
            return False
        self.nbytes -= session.nbytes
        return True


def _differ(one: Source | None, other: Source | None) -> bool:
    return None not in (one, other) and one != other


def _room(rows: int) -> int:
    """Rows to make room for: half as many again, so that growing copies little in all."""
    return max(_LEAST_ROOM, -(-rows * 3 // 2 // _LEAST_ROOM) * _LEAST_ROOM)


def _nbytes(prefix: Shape, rows: int) -> int:
    return 2 * 4 * prefix.heads * prefix.dim * rows
