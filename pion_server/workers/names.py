"""Which worker holds a name: a table that all workers of a server read and write.

An SQLite file in write-ahead mode: readers never wait, a writer for microseconds, and a worker
that is killed in the middle of a write leaves the table as it was before. It is made anew with
each start of the parent, as every worker knows from its own store what it holds; so nothing here
has to survive a power loss, and nothing is synced.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pion_server.errors import CommandError

FILE_NAME = "pion.names"
# Seconds. Who has stopped in the middle of a write holds up the others' for so long at most.
_PATIENCE = 1.0
# Miss counters kept; beyond, the oldest starts again at 1.
_MOST_MISSES = 65_536
_TABLES = """
CREATE TABLE names (
    tenant TEXT, name BLOB, worker INTEGER, hit INTEGER, digest INTEGER,
    PRIMARY KEY (tenant, name)
) WITHOUT ROWID;
CREATE TABLE misses (
    id INTEGER PRIMARY KEY, tenant TEXT, name BLOB, count INTEGER, UNIQUE (tenant, name)
);
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a name everywhere: LOOKUP's answer, and the schema's digest or 0."""

    hit: bool
    digest: int


class Names:
    """One tenant's part of the table, as one worker sees it. Thread-safe.

    Raises CommandError where the table cannot be read or written.
    """

    def __init__(self, directory: Path, tenant: str, worker: int) -> None:
        self.worker = worker
        self._tenant = tenant
        self._lock = threading.Lock()
        self._table = sqlite3.connect(
            directory / FILE_NAME,
            timeout=_PATIENCE,
            isolation_level=None,
            check_same_thread=False,
        )
        self._table.execute("PRAGMA synchronous=OFF")

    def find(self, name: bytes) -> tuple[int, Entry] | None:
        """The worker that holds it, and what it says of it."""
        rows = self._run(
            "SELECT worker, hit, digest FROM names WHERE tenant = ? AND name = ?", name
        )
        return (rows[0][0], Entry(bool(rows[0][1]), rows[0][2])) if rows else None

    def claim(self, name: bytes) -> int:
        """Make a name ours unless somebody has it; whose it is now."""
        self._run("INSERT OR IGNORE INTO names VALUES (?, ?, ?, 0, 0)", name, self.worker)
        found = self.find(name)
        return self.worker if found is None else found[0]

    def publish(self, name: bytes, entry: Entry) -> None:
        """Say what we hold of a name that is ours or nobody's."""
        self._run(
            "INSERT INTO names VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET hit = excluded.hit, digest = excluded.digest WHERE worker = excluded.worker",
            name,
            self.worker,
            entry.hit,
            entry.digest,
        )

    def release(self, name: bytes) -> None:
        """We hold nothing of it any more."""
        self._run(
            "DELETE FROM names WHERE tenant = ? AND name = ? AND worker = ?", name, self.worker
        )

    def replace(self, held: Mapping[bytes, Entry]) -> list[bytes]:
        """Say all that we hold, and nothing else; the names of it that another worker has."""
        rows = [(self._tenant, n, self.worker, e.hit, e.digest) for n, e in held.items()]
        ours = (self._tenant, self.worker)
        with self._lock:
            try:
                self._table.execute("BEGIN IMMEDIATE")
                self._table.execute("DELETE FROM names WHERE tenant = ? AND worker = ?", ours)
                self._table.executemany("INSERT OR IGNORE INTO names VALUES (?, ?, ?, ?, ?)", rows)
                found = self._table.execute(
                    "SELECT name FROM names WHERE tenant = ? AND worker = ?", ours
                ).fetchall()
                self._table.execute("COMMIT")
            except sqlite3.Error as error:
                raise _unreadable(error) from error
        return list(held.keys() - {bytes(row[0]) for row in found})

    def count(self) -> int:
        """How many names all workers hold."""
        return int(self._run("SELECT count(*) FROM names WHERE tenant = ?")[0][0])

    def admit(self, name: bytes) -> int:
        """Count one more miss of a name, whichever worker was asked."""
        rows = self._run(
            "INSERT INTO misses (tenant, name, count) VALUES (?, ?, 1) "
            "ON CONFLICT DO UPDATE SET count = count + 1 RETURNING id, count",
            name,
        )
        number, count = rows[0]
        with self._lock:
            self._table.execute("DELETE FROM misses WHERE id <= ?", (number - _MOST_MISSES,))
        return int(count)

    def close(self) -> None:
        with self._lock:
            self._table.close()

    def _run(self, statement: str, *values: object) -> list[tuple[int, ...]]:
        """All rows of a statement whose first value is the tenant."""
        with self._lock:
            try:
                return self._table.execute(statement, (self._tenant, *values)).fetchall()
            except sqlite3.Error as error:
                raise _unreadable(error) from error


def _unreadable(error: sqlite3.Error) -> CommandError:
    return CommandError(f"the workers' table of names cannot be used: {error}")


def make_table(directory: Path) -> None:
    """An empty table, whatever was there. Raises OSError, sqlite3.Error."""
    remove_table(directory)
    table = sqlite3.connect(directory / FILE_NAME)
    table.execute("PRAGMA journal_mode=WAL")
    table.executescript(_TABLES)
    table.close()


def remove_table(directory: Path) -> None:
    for name in _files():
        (directory / name).unlink(missing_ok=True)


def _files() -> Iterable[str]:
    return (FILE_NAME + suffix for suffix in ("", "-wal", "-shm"))
