"""Opening a data directory: snapshot, then log, then ready for writes; and saving it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pion_server.collector import collector_paused
from pion_server.errors import CommandError, LogFailed
from pion_server.store.budget import MemoryBudget, Victim
from pion_server.store.compaction import Compaction
from pion_server.store.entries import RecordType, dump_meta
from pion_server.store.files import (
    PRIVATE_DIR,
    PRIVATE_FILE,
    DirectoryLock,
    StoreFile,
    sync_directory,
)
from pion_server.store.key_snapshot import KeyspaceFreeze
from pion_server.store.keyspace import Keyspace
from pion_server.store.log import READ_CHUNK, DiskFull, ForeignFile, Record, RecordLog
from pion_server.store.reading import LogReader
from pion_server.store.saving import Copying, Saving
from pion_server.store.snapshot import VStoreFreeze, replay
from pion_server.store.ssm import SsmStore
from pion_server.store.vstore import VStore

VSTORE_KIND, SSM_KIND, KEYS_KIND = 1, 2, 3
# Given back beyond what is needed, so that the notes about it fit too.
ROOM_MARGIN = 64 << 10
# Of the recurrent state's and the keyspace's files beside a copy of the V-store.
SSM_COPY, KEYS_COPY = ".ssm", ".keys"


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What `pion-server`'s flags decide about the stores; sizes in bytes, None: no limit."""

    directory: Path
    worker: int = 0
    max_sessions: int = 256
    max_memory: int | None = None
    ssm_budget: int | None = None
    max_disk: int | None = None
    vstore_log: bool = True
    keyspace_log: bool = True
    keep_cut: bool = False
    # Whether other workers have files of their own in the same directory.
    shared: bool = False


@dataclass(slots=True)
class Stores:
    """Everything a worker keeps on disk."""

    vstore: VStore
    ssm: SsmStore
    keyspace: Keyspace
    budget: MemoryBudget
    options: StoreOptions
    notices: list[str]
    _lock: DirectoryLock
    # From the freeze of a SAVE until the index refers to the new files.
    saving: bool = False

    @property
    def snapshot_path(self) -> Path:
        return self.options.directory / f"pion.vstore.{self.options.worker}"

    @property
    def ssm_snapshot_path(self) -> Path:
        return self.options.directory / f"pion.ssm.{self.options.worker}"

    @property
    def keyspace_snapshot_path(self) -> Path:
        return self.options.directory / f"pion.snapshot.{self.options.worker}"

    @property
    def dead_bytes(self) -> int:
        """Bytes in log and snapshot that a SAVE gives back."""
        return max(0, self.disk_bytes - self.live_bytes)

    @property
    def logs(self) -> tuple[RecordLog, RecordLog, RecordLog]:
        """The V-store's, the recurrent state's and the keyspace's."""
        return self.vstore.log, self.ssm.log, self.keyspace.log

    @property
    def disk_bytes(self) -> int:
        """Bytes that all logs and snapshots take on the disk."""
        files = [file for log in self.logs for file in (log.file, log.snapshot)]
        return sum(file.allocated() for file in files if file is not None)

    @property
    def live_bytes(self) -> int:
        """Bytes of rows, recurrent state and keys that are held."""
        return self.vstore.stored_bytes + self.ssm.stored_bytes + self.keyspace.stored_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that the file system has left for this user."""
        status = os.statvfs(self.options.directory)
        return status.f_bavail * status.f_frsize

    def make_room(self, nbytes: int, keep: bytes | None) -> bool:
        """Give the disk back what dead rows take, then what the least recently used prefixes do.

        Whether it is worth trying again to write `nbytes`; if not, nothing was evicted. Namespace
        `keep` is left alone. The writer lock is held. Evicted rows that are on their way to a
        client keep their bytes until they are there.
        """
        try:
            wanted = self.disk_bytes - nbytes - ROOM_MARGIN
            self._release_dead()
            missing = self.disk_bytes - wanted
            chosen: list[Victim] = []
            for victim in self.budget.victims(keep):
                if missing <= 0:
                    break
                gain = sum(record.pages for record in victim.records())
                if gain:
                    chosen.append(victim)
                    missing -= gain
            if missing > 0:
                return False
            for victim in chosen:
                victim.evict()
                self._release_dead()
            return True
        except (LogFailed, OSError):
            return False

    def _release_dead(self) -> None:
        """Punch dead bodies out of the files. What made them dead must be durable before."""
        if self.saving:
            raise LogFailed("a SAVE is under way")
        for log in self.logs:
            if not log.file.can_punch():
                raise LogFailed("this file system has no holes")
            log.sync()
        for log in self.logs:
            places = {None: log.file} | ({log.covers: log.snapshot} if log.durable else {})
            for covers, file in places.items():
                released = [offset for offset, _ in file.punch()] if file is not None else []
                # Only --check misses these notes if there is no room for them.
                with contextlib.suppress(DiskFull):
                    for at in range(0, len(released), 10_000):
                        meta = {"c": covers, "o": released[at : at + 10_000]}
                        log.append(RecordType.RELEASED, dump_meta(meta))

    def begin_save(self) -> Saving:
        """Freeze all stores; the writer lock is held. CommandError if --max-disk forbids it."""
        limit = self.options.max_disk
        if limit is not None and self.disk_bytes + self.live_bytes > limit:
            raise CommandError(
                f"KV.PREFIX.SAVE failed: --max-disk {limit}: {self.disk_bytes} bytes used, "
                f"{self.live_bytes} more needed for a while"
            )
        vstore = Compaction(self.vstore.log, self.snapshot_path, VStoreFreeze(self.vstore))
        ssm = Compaction(self.ssm.log, self.ssm_snapshot_path, self.ssm.freeze())
        keys = Compaction(
            self.keyspace.log, self.keyspace_snapshot_path, KeyspaceFreeze(self.keyspace)
        )
        return Saving(self, [vstore, ssm, keys])

    def begin_copy(self, target: Path) -> Copying:
        """Freeze all stores for an extra copy; the writer lock is held."""
        ssm_target, keys_target = (
            target.with_name(target.name + suffix) for suffix in (SSM_COPY, KEYS_COPY)
        )
        return Copying(
            Compaction(self.vstore.log, target, VStoreFreeze(self.vstore)),
            Compaction(self.ssm.log, ssm_target, self.ssm.freeze()),
            Compaction(self.keyspace.log, keys_target, KeyspaceFreeze(self.keyspace)),
        )

    def sync(self) -> None:
        """COMMIT: all logs on stable storage."""
        for log in self.logs:
            log.sync()

    def close(self) -> None:
        """Flush what can be flushed and give the directory free."""
        try:
            self.sync()
            for log in self.logs:
                log.file.release_reserved()
        finally:
            self._lock.close()


def open_stores(options: StoreOptions) -> Stores:
    """Lock and load a data directory.

    Raises DirectoryInUse, ForeignFile, OSError; whatever was cut, recovered or lost is said in
    `Stores.notices`.
    """
    directory = options.directory
    if not directory.exists():
        directory.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
        sync_directory(directory.parent)
    lock = DirectoryLock(directory, shared=options.shared)
    try:
        with collector_paused():
            return _load(options, lock)
    except BaseException:
        lock.close()
        raise


def _load(options: StoreOptions, lock: DirectoryLock) -> Stores:
    directory, worker = options.directory, options.worker
    for store in ("vstore", "vstore.wal", "ssm", "ssm.wal", "snapshot", "wal"):
        (directory / f"pion.{store}.{worker}.tmp").unlink(missing_ok=True)
    budget = MemoryBudget()
    notices: list[str] = []
    vlog_path = directory / f"pion.vstore.wal.{worker}"
    vlog = RecordLog(vlog_path if options.vstore_log else None, directory, VSTORE_KIND)
    vstore = VStore(vlog, max_sessions=options.max_sessions, budget=budget)
    snapshot = directory / f"pion.vstore.{worker}"
    loading = _Loading(vlog, lambda record: replay(vstore, record), notices, options.keep_cut)
    loading.run(snapshot, vlog_path)
    slog_path = directory / f"pion.ssm.wal.{worker}"
    slog = RecordLog(slog_path, directory, SSM_KIND)
    ssm = SsmStore(
        slog,
        vstore.manifests,
        limit=options.ssm_budget,
        budget=budget,
        pinned=vstore.pins.__contains__,
    )
    snapshot = directory / f"pion.ssm.{worker}"
    _Loading(slog, ssm.replay, notices, options.keep_cut).run(snapshot, slog_path)
    klog_path = directory / f"pion.wal.{worker}"
    klog = RecordLog(klog_path if options.keyspace_log else None, directory, KEYS_KIND)
    keyspace = Keyspace(klog, budget=budget)
    snapshot = directory / f"pion.snapshot.{worker}"
    _Loading(klog, keyspace.replay, notices, options.keep_cut).run(snapshot, klog_path)
    keyspace.forget_expired()
    if not (vlog.end or slog.end or klog.end):
        # The logs' names must outlive a power loss before COMMIT may promise anything.
        sync_directory(directory)
    vstore.ssm = ssm
    budget.limit = options.max_memory
    stores = Stores(vstore, ssm, keyspace, budget, options, notices, lock)
    for log in stores.logs:
        log.max_bytes = options.max_disk
        log.disk_bytes = lambda: stores.disk_bytes
        log.make_room = stores.make_room
    return stores


@dataclass(slots=True)
class _Loading:
    """One store's snapshot and log, read at start-up; then the log is ready for writes."""

    log: RecordLog
    apply: Callable[[Record], None]
    notices: list[str]
    keep_cut: bool

    def run(self, snapshot: Path, log_path: Path) -> None:
        """Without a log of its own (`--no-wal`, say) an earlier server's is read, and left."""
        log = self.log
        covers = 0
        if snapshot.exists() and snapshot.stat().st_size:
            reader = LogReader(StoreFile.open(snapshot), log.kind, grows=False)
            self._replay(reader.records(), snapshot.name)
            covers, log.marker = reader.covers, reader.marker or log.marker
            log.snapshot, log.covers = reader.file, covers
            _tell(snapshot.name, reader, self.notices, "left as it is")
            log.seq = covers
        if not log.durable and not log_path.exists():
            return
        reader = LogReader(log.file if log.durable else StoreFile.open(log_path), log.kind)
        if covers and reader.marker and reader.marker != log.marker:
            raise ForeignFile(
                f"{snapshot.name} and {log_path.name} belong to different stores; "
                "move one of them away"
            )
        seqs = self._replay(_in_order(reader.records(), covers), log_path.name)
        log.replayed = len(seqs)
        cut = reader.report.cut_at
        if cut is not None and self.keep_cut and log.durable:
            cut_tail(log.file, cut)
        end = reader.size if cut is None else cut
        log.start_from(reader.marker, max(seqs, default=covers), end if log.durable else 0)
        _tell(log_path.name, reader, self.notices, "cut off" if log.durable else "left as it is")

    def _replay(self, records: Iterator[Record], name: str) -> list[int]:
        """Apply them and return their numbers; one that builds on a lost record is passed over."""
        seqs, misfits = [], 0
        for record in records:
            seqs.append(record.seq)
            try:
                self.apply(record)
            except (CommandError, LookupError, TypeError, ValueError):
                misfits += 1
        if misfits:
            self.notices.append(
                f"{name}: {misfits} records passed over, what they build on was lost"
            )
        return seqs


def _in_order(records: Iterator[Record], covers: int) -> Iterator[Record]:
    """Those behind the snapshot; an old record that turns up again behind newer ones is not."""
    last = covers
    for record in records:
        if record.seq > last:
            last = record.seq
            yield record


def _tell(name: str, reader: LogReader, notices: list[str], fate: str) -> None:
    report = reader.report
    notices.extend(f"{name}: {note}" for note in report.notes)
    if report.recovered:
        notices.append(f"{name}: {report.recovered} records recovered from their second head")
    if report.lost_bytes:
        notices.append(f"{name}: {report.lost_bytes} damaged bytes passed over")
    if report.cut_at is not None:
        notices.append(
            f"{name}: {report.cut_bytes} bytes after offset {report.cut_at} "
            f"are no complete record: {fate}"
        )


def cut_tail(file: StoreFile, start: int) -> Path:
    """Cut `file` at `start`; the cut bytes are kept beside it, in the file returned."""
    target = file.path.with_name(f"{file.path.name}.cut-{int(time.time())}")
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
    copy = StoreFile(target, fd)
    at = start
    while data := file.read(at, READ_CHUNK):
        copy.write([data], at - start)
        at += len(data)
    copy.sync()
    file.truncate(start)
    file.sync()
    return target
