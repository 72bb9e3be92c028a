"""KV.PREFIX.LEND: whole prefixes as final files, lent to clients on this machine.

A file holds exactly the rows and state of one fill, head-major, checked against the checksums that
the asker brings from the manifest. Once made it belongs to whoever has its descriptor: eviction,
DROP, SAVE and the server's end take the server's copy only.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pion_server.errors import BadArgument, CommandError, NotFound, OutOfMemory, Stale
from pion_server.store.files import StoreFile
from pion_server.store.final_file import make_final_file
from pion_server.store.sessions import namespace_of, sides
from pion_server.store.ssm import SsmStore
from pion_server.store.tensor_file import (
    BlockSums,
    Part,
    Side,
    StateBlob,
    TensorFile,
    split_packed,
)
from pion_server.store.vstore import VStore

# Bytes of all files where no --export-budget is given.
DEFAULT_BUDGET = 1 << 30
# Files held open at most, whatever their size.
_MOST_FILES = 256
# Seconds for which a file that could not be made is not tried again.
_FAILURE_KEPT = 10.0


@dataclass(frozen=True, slots=True)
class RowsWanted:
    """All rows of a layer, `count` of them: side "k" or "v", and what a PACKED row is made of.

    `checksum`: None where blocks of all layers have one.
    `room`: rows of zeros behind them.
    """

    side: str
    layer: int
    count: int
    checksum: str | None
    parts: tuple[Part, ...]
    room: int = 0


@dataclass(frozen=True, slots=True)
class BlobWanted:
    """The recurrent state of one layer, `nbytes` long."""

    layer: int
    nbytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class LendRequest:
    """A file of what fill `gen` of a namespace stored, in the order of its tensors.

    `digest`: blake2b-128 of the layout as it was asked for.
    """

    ns: bytes
    gen: int
    digest: bytes
    rows: tuple[RowsWanted, ...]
    blobs: tuple[BlobWanted, ...]
    blocks: BlockSums | None = None


@dataclass(frozen=True, slots=True)
class Lent:
    """A finished file, `nbytes` long, `data_bytes` of them tensors."""

    gen: int
    digest: bytes
    file: StoreFile
    nbytes: int
    data_bytes: int


@dataclass(frozen=True, slots=True)
class _Failure:
    gen: int
    digest: bytes
    until: float
    error: CommandError


class Lending:
    """The lent files of one worker, one a namespace. `make` may run in any thread."""

    def __init__(
        self,
        vstore: VStore,
        ssm: SsmStore,
        directory: Path,
        *,
        budget: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directory`: where the files are made. `budget`: bytes of all of them."""
        self._vstore, self._ssm = vstore, ssm
        self._directory = directory
        self._budget = DEFAULT_BUDGET if budget is None else budget
        self._clock = clock
        self._lock = threading.Lock()
        self._files: OrderedDict[bytes, Lent] = OrderedDict()
        self._failures: OrderedDict[bytes, _Failure] = OrderedDict()
        self._begun: set[tuple[bytes, int, bytes]] = set()
        vstore.on_change.append(self._forget_sid)
        vstore.on_drop.append(self._forget)

    @property
    def held(self) -> tuple[int, int]:
        """How many files there are, and their bytes."""
        with self._lock:
            return len(self._files), sum(lent.nbytes for lent in self._files.values())

    def find(self, ns: bytes) -> Lent | None:
        """The file of what `ns` holds now, touched together with its prefix, or None.

        Raises what kept it from being made a moment ago.
        """
        with self._lock:
            lent, failure = self._files.get(ns), self._failures.get(ns)
            if lent is not None and self._is_current(ns, lent.gen):
                self._files.move_to_end(ns)
            elif failure is not None and self._stands(ns, failure):
                raise failure.error
            else:
                return None
        with self._vstore.lock:
            for sid in sides(ns):
                if self._vstore.table.get(sid):
                    self._vstore.table.touch(sid)
        self._ssm.touch(ns)
        return lent

    def begin(self, request: LendRequest) -> bool:
        """Whether the caller is to `make` the file: it is not there, and nobody is making it.

        Raises Stale if the namespace holds another fill.
        """
        self._check_current(request)
        mark = (request.ns, request.gen, request.digest)
        with self._lock:
            lent, failure = self._files.get(request.ns), self._failures.get(request.ns)
            if lent is not None and (request.ns, lent.gen, lent.digest) == mark:
                return False
            if failure is not None and failure.digest == request.digest:
                failed = self._stands(request.ns, failure)
            else:
                failed = False
            if failed or mark in self._begun:
                return False
            self._begun.add(mark)
            return True

    def make(self, request: LendRequest) -> None:
        """Make the file that `begin` announced; a failure is kept for a while."""
        try:
            content = self._choose(request)
            self._make_room(content.nbytes)
            file = make_final_file(self._directory, content.nbytes, content.write)
            sizes = content.nbytes, content.data_bytes
            self._keep(request.ns, Lent(request.gen, request.digest, file, *sizes))
        except CommandError as error:
            self._fail(request, error)
        except OSError as error:
            text = f"KV.PREFIX.LEND: cannot write: {error.strerror or error}"
            self._fail(request, CommandError(text))
        finally:
            with self._lock:
                self._begun.discard((request.ns, request.gen, request.digest))

    def _is_current(self, ns: bytes, gen: int) -> bool:
        manifest = self._vstore.manifests.by_ns.get(ns)
        return manifest is not None and manifest.gen == gen

    def _check_current(self, request: LendRequest) -> None:
        if not self._is_current(request.ns, request.gen):
            raise Stale(f"generation {request.gen} is not what this namespace holds")

    def _stands(self, ns: bytes, failure: _Failure) -> bool:
        return self._is_current(ns, failure.gen) and self._clock() < failure.until

    def _choose(self, request: LendRequest) -> TensorFile:
        """The rows and blobs as they are now: exactly those of the fill."""
        k_sid, v_sid = sides(request.ns)
        chosen = []
        for wanted in request.rows:
            sid = k_sid if wanted.side == "k" else v_sid
            rows = self._vstore.rows(sid, wanted.layer, 0, wanted.count)
            name = f"{wanted.side}.{wanted.layer}"
            if rows is None:
                raise NotFound(f"KV.PREFIX.LEND: {name}: rows not found")
            try:
                layout = split_packed(rows.format, wanted.parts)
            except ValueError as error:
                raise BadArgument(f"KV.PREFIX.LEND: {name}: {error}") from None
            chosen.append(Side(name, rows, layout, wanted.checksum, wanted.room))
        blobs = []
        for state in request.blobs:
            record = self._ssm.fetch(request.ns, state.layer)
            if record is None or record.length != state.nbytes:
                raise NotFound(f"KV.PREFIX.LEND: s.{state.layer}: state not found")
            blobs.append(StateBlob(f"s.{state.layer}", record, state.checksum))
        # A write takes the manifest away before it changes a row: still there, nothing was mixed.
        self._check_current(request)
        return TensorFile(chosen, blobs, request.blocks)

    def _make_room(self, nbytes: int) -> None:
        """Let go of outdated files, and of those longest unused until `nbytes` more fit."""
        if nbytes > self._budget:
            raise OutOfMemory(f"KV.PREFIX.LEND: {nbytes} bytes exceed the budget {self._budget}")
        with self._lock:
            for ns, lent in list(self._files.items()):
                if not self._is_current(ns, lent.gen):
                    del self._files[ns]
            used = sum(lent.nbytes for lent in self._files.values())
            while self._files and (used + nbytes > self._budget or len(self._files) >= _MOST_FILES):
                _, oldest = self._files.popitem(last=False)
                used -= oldest.nbytes

    def _keep(self, ns: bytes, lent: Lent) -> None:
        with self._lock:
            if self._is_current(ns, lent.gen):
                self._files[ns] = lent
                self._files.move_to_end(ns)
                self._failures.pop(ns, None)

    def _fail(self, request: LendRequest, error: CommandError) -> None:
        until = self._clock() + _FAILURE_KEPT
        with self._lock:
            self._failures[request.ns] = _Failure(request.gen, request.digest, until, error)
            self._failures.move_to_end(request.ns)
            while len(self._failures) > _MOST_FILES:
                self._failures.popitem(last=False)

    def _forget_sid(self, sid: bytes) -> None:
        ns = namespace_of(sid)
        if ns is not None:
            self._forget(ns)

    def _forget(self, ns: bytes) -> None:
        """Let go of the file of a namespace if that holds something else now."""
        with self._lock:
            lent = self._files.get(ns)
            if lent is not None and not self._is_current(ns, lent.gen):
                del self._files[ns]
