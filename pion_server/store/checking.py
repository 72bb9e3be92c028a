"""`--check DIR`, `--repair DIR`: read all that a data directory holds and say what is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pion_server.errors import DamagedEntry, printable
from pion_server.store.entries import RecordType, load_meta, name_bytes
from pion_server.store.files import DirectoryLock, StoreFile
from pion_server.store.log import ForeignFile, Record
from pion_server.store.opening import KEYS_KIND, SSM_KIND, VSTORE_KIND, cut_tail
from pion_server.store.reading import LogReader
from pion_server.tenants import DIRECTORY as TENANTS

KINDS = {
    "pion.vstore.[0-9]*": VSTORE_KIND,
    "pion.vstore.wal.[0-9]*": VSTORE_KIND,
    "pion.ssm.[0-9]*": SSM_KIND,
    "pion.ssm.wal.[0-9]*": SSM_KIND,
    "pion.snapshot.[0-9]*": KEYS_KIND,
    "pion.wal.[0-9]*": KEYS_KIND,
}


@dataclass(slots=True)
class CheckReport:
    """What was found; `problems` empty: every record is whole."""

    files: int = 0
    records: int = 0
    nbytes: int = 0
    problems: list[str] = field(default_factory=list)


def check_directory(
    directory: Path, *, repair: bool = False, progress: Callable[[str], None] = lambda name: None
) -> CheckReport:
    """Verify every record of every file; with `repair`, cut torn tails (kept beside the file).

    Raises DirectoryInUse if a server runs on the directory, FileNotFoundError if there is none.
    A damaged record stays where it is: reading its entry answers an error, storing it again or
    dropping it mends that.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"no data directory {directory}")
    report = CheckReport()
    with contextlib.ExitStack() as locks:
        locks.callback(DirectoryLock(directory).close)
        for home in (directory, *sorted(directory.glob(f"{TENANTS}/*/"))):
            if home != directory:
                locks.callback(DirectoryLock(home).close)
            paths = [(path, KINDS[pattern]) for pattern in KINDS for path in home.glob(pattern)]
            for path, kind in sorted(paths):
                if path.name.rpartition(".")[2].isdigit():
                    progress(str(path.relative_to(directory)))
                    _check_file(path, kind, report, repair)
    return report


def _read(path: Path, kind: int) -> LogReader:
    return LogReader(StoreFile.open(path), kind, grows=".wal." in path.name)


def _shown(path: Path) -> str:
    """A file's name as told: a tenant's with its directory."""
    return "/".join(path.parts[-3:]) if TENANTS in path.parts[-3:-2] else path.name


def _check_file(path: Path, kind: int, report: CheckReport, repair: bool) -> None:
    report.files += 1
    try:
        reader = _read(path, kind)
        released = _released_bodies(path, reader)
        for record in reader.records():
            report.records += 1
            if record.where[1] not in released:
                report.nbytes += record.length
                _check_record(path, record, report)
    except ForeignFile as error:
        report.problems.append(str(error))
        return
    found = reader.report
    report.problems.extend(f"{_shown(path)}: {note}" for note in found.notes)
    if halves := found.recovered + found.half_closed:
        report.problems.append(f"{_shown(path)}: {halves} records have one damaged head")
    if found.lost_bytes:
        report.problems.append(f"{_shown(path)}: {found.lost_bytes} bytes are no record")
    if found.cut_at is not None:
        text = f"{_shown(path)}: torn tail of {found.cut_bytes} bytes at offset {found.cut_at}"
        if repair:
            text += f", cut and kept as {cut_tail(reader.file, found.cut_at).name}"
        report.problems.append(text)


def _released_bodies(path: Path, reader: LogReader) -> set[int]:
    """The offsets of bodies in `path` whose bytes the log says were given back to the disk."""
    store, _, worker = path.name.rpartition(".")
    log = path
    if not store.endswith(".wal"):
        store = "pion" if reader.kind == KEYS_KIND else store
        log = path.with_name(f"{store}.wal.{worker}")
    covers = None if log == path else reader.covers
    found: set[int] = set()
    if log.exists():
        with contextlib.suppress(ForeignFile):
            for record in _read(log, reader.kind).records():
                if record.type == RecordType.RELEASED:
                    meta = load_meta(record.meta)
                    found.update(meta["o"] if meta["c"] == covers else ())
    return found


def _check_record(path: Path, record: Record, report: CheckReport) -> None:
    try:
        record.verify()
    except DamagedEntry as error:
        meta = load_meta(record.meta)
        name = meta["o"][0][1] if "o" in meta else meta.get("s", meta.get("n", ""))
        shown = printable(name_bytes(name)) if isinstance(name, str) else "?"
        layer = f" layer {meta['l']}" if "l" in meta else ""
        report.problems.append(
            f"{_shown(path)}: record {record.seq} ({RecordType(record.type).name} "
            f"'{shown}'{layer}): {str(error)[4:]}"
        )
