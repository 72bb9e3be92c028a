"""V.EXPORT: files of K and V that clients on this machine map instead of fetching rows.

A file is written once, under a new name each time, and goes when either session changes: whoever
has mapped it keeps its bytes. All of them are copies, safe to delete at any moment.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pion_server.errors import BadArgument, CommandError, OutOfMemory
from pion_server.store.files import PRIVATE_DIR, PRIVATE_FILE, StoreFile
from pion_server.store.rows import StoredRows
from pion_server.store.sessions import Session
from pion_server.store.vstore import VStore

if TYPE_CHECKING:
    from pion_server.store.tensor_file import TensorFile


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Rows `[start, end)` of the first layers of two sessions, rows being `[heads][head_dim]`.

    `stored`: as the formats keep them; otherwise as F16.
    """

    k_sid: bytes
    v_sid: bytes
    start: int
    end: int
    layers: int
    heads: int
    head_dim: int
    stored: bool = False

    @property
    def sids(self) -> frozenset[bytes]:
        return frozenset((self.k_sid, self.v_sid))


@dataclass(frozen=True, slots=True)
class Exported:
    """A finished file: its absolute path, its length and how much of it is tensors, in bytes."""

    path: Path
    nbytes: int
    data_bytes: int


@dataclass(slots=True, eq=False)
class Draft:
    """A file being written; `stale` once a session changed since its rows were chosen."""

    request: ExportRequest
    content: TensorFile
    stale: bool = field(default=False)


class Exports:
    """The export directory of one worker. `write` may run in any thread, one at a time."""

    def __init__(
        self,
        vstore: VStore,
        data_directory: Path,
        *,
        directory: Path | None = None,
        worker: int = 0,
        budget: int | None = None,
    ) -> None:
        """`directory` None: `pion-export` in the data directory. `budget`: bytes of all files."""
        self._vstore = vstore
        self._directory = directory or data_directory / "pion-export"
        self._mark = f"export-{worker}-"
        if directory is not None:
            import hashlib

            # Other servers may use the same directory: each knows its own files by its data's home.
            home = hashlib.blake2b(os.fsencode(data_directory.resolve()), digest_size=6)
            self._mark += f"{home.hexdigest()}-"
        self._budget = budget
        self._lock = threading.Lock()
        self._files: OrderedDict[ExportRequest, Exported] = OrderedDict()
        self._drafts: list[Draft] = []
        self._predecessor_gone = False
        vstore.on_change.append(self._forget_sid)

    def find(self, request: ExportRequest) -> Exported | None:
        """The file already written for this request, if it is still there; touches its sessions."""
        with self._lock:
            found = self._files.get(request)
            if found is None:
                return None
            self._files.move_to_end(request)
        try:
            sound = found.path.stat().st_size == found.nbytes
        except OSError:
            sound = False
        if not sound:
            with self._lock:
                self._drop(request)
            return None
        with self._vstore.lock:
            for sid in request.sids:
                self._vstore.table.touch(sid)
        return found

    def prepare(self, request: ExportRequest) -> Draft:
        """Check the request and choose its rows as they are now. Touches both sessions.

        Raises NotFound and BadArgument; nothing is written yet.
        """
        from pion_server.store.tensor_file import Side, TensorFile, choose_layout

        with self._vstore.lock:
            sessions = [self._vstore.session(sid) for sid in (request.k_sid, request.v_sid)]
            for session in sessions:
                _check(request, session)
            rows = [
                (f"{side}.{layer}", self._rows(request, session, layer))
                for layer in range(request.layers)
                for side, session in zip("kv", sessions, strict=True)
            ]
            sides = [
                Side(
                    name,
                    held,
                    choose_layout(
                        held.format, request.heads, request.head_dim, stored=request.stored
                    ),
                )
                for name, held in rows
            ]
            draft = Draft(request, TensorFile(sides))
            with self._lock:
                self._drafts.append(draft)
        return draft

    def _rows(self, request: ExportRequest, session: Session, layer: int) -> StoredRows:
        rows = self._vstore.rows(session.sid, layer, request.start, request.end)
        if rows is None:
            raise BadArgument(
                f"V.EXPORT: layer {layer}: rows never written in [{request.start}, {request.end})"
            )
        return rows

    def write(self, draft: Draft) -> Exported | None:
        """Write the file; None (and no file) if a session changed since `prepare`.

        Raises CommandError, leaving no partial file.
        """
        try:
            return self._publish(draft)
        except OSError as error:
            raise CommandError(f"V.EXPORT: cannot write: {error.strerror or error}") from error
        finally:
            with self._lock:
                self._drafts.remove(draft)

    def _publish(self, draft: Draft) -> Exported | None:
        content = draft.content
        directory = self._open_directory()
        self._make_room(content.nbytes)
        name = f"{self._mark}{os.urandom(8).hex()}.safetensors"
        target, draft_path = directory / name, directory / f".tmp-{name}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = StoreFile(draft_path, os.open(draft_path, flags, PRIVATE_FILE))
        try:
            content.write(file)
            draft_path.rename(target)
        except BaseException:
            _remove(draft_path)
            raise
        exported = Exported(target, content.nbytes, content.data_bytes)
        with self._lock:
            if draft.stale:
                _remove(target)
                return None
            self._files[draft.request] = exported
        return exported

    def _open_directory(self) -> Path:
        """The directory, made if missing, ours alone; without what an earlier process left."""
        try:
            self._directory.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
            directory = self._directory.resolve(strict=True)
            found = directory.stat()
            if found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
                raise CommandError("V.EXPORT: the export directory must be this user's alone")
            if stat.S_IMODE(found.st_mode) != PRIVATE_DIR:
                directory.chmod(PRIVATE_DIR)
        except OSError as error:
            raise CommandError(
                f"V.EXPORT: cannot create the export directory: {error.strerror or error}"
            ) from error
        if not self._predecessor_gone:
            self._predecessor_gone = True
            for path in directory.iterdir():
                if path.name.removeprefix(".tmp-").startswith(self._mark):
                    _remove(path)
        return directory

    def _make_room(self, nbytes: int) -> None:
        """Remove the files longest unused until `nbytes` more fit into the budget."""
        if self._budget is None:
            return
        if nbytes > self._budget:
            raise OutOfMemory(f"V.EXPORT: {nbytes} bytes exceed --export-budget {self._budget}")
        with self._lock:
            used = sum(exported.nbytes for exported in self._files.values())
            for request in list(self._files):
                if used + nbytes <= self._budget:
                    break
                used -= self._files[request].nbytes
                self._drop(request)

    def _forget_sid(self, sid: bytes) -> None:
        """A session changed: files and drafts with its old rows are no answer any more."""
        with self._lock:
            for draft in self._drafts:
                draft.stale |= sid in draft.request.sids
            for request in [request for request in self._files if sid in request.sids]:
                self._drop(request)

    def _drop(self, request: ExportRequest) -> None:
        found = self._files.pop(request, None)
        if found is not None:
            _remove(found.path)


def _check(request: ExportRequest, session: Session) -> None:
    """BadArgument unless the session has what is asked for in the shape asked for."""
    if request.layers > session.num_layers:
        raise BadArgument(
            f"V.EXPORT: num_layers {request.layers} exceeds the {session.num_layers} stored"
        )
    if request.stored:
        return
    if session.schema.has_raw(range(request.layers)):
        raise BadArgument("V.EXPORT: raw rows are exported with FMT STORED only")
    for layer in range(request.layers):
        dim = session.schema.layer(layer).dim
        if dim != request.heads * request.head_dim:
            raise BadArgument(
                f"V.EXPORT: layer {layer} holds {dim} values a row, "
                f"not {request.heads} heads of {request.head_dim}"
            )


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
