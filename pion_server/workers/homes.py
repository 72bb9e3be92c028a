"""Each name has one home: the worker that took its first REGISTER, CREATE or BEGIN.

A worker tells the others what it holds (`names`), keeps that right as prefixes come and go, and
turns away what is asked of a name that lives on another one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pion_server import journal
from pion_server.errors import CommandError, Elsewhere
from pion_server.store.sessions import Session, namespace_of, sides
from pion_server.workers.names import Entry, Names

if TYPE_CHECKING:
    from pion_server.store.ssm import SsmStore
    from pion_server.store.vstore import VStore

_ATTENTION_SUFFIX = b"_attn"
_SWEEP_SECONDS = 1.0
# Generations of a name are never used twice, though it may move: each worker has its own residue.
MOST_WORKERS = 256


def key_of(name: bytes, command: str = "") -> bytes:
    """What a namespace, its two sides and, for ATTEND.*, its attention session have in common."""
    if command.startswith("ATTEND") and name.endswith(_ATTENTION_SUFFIX):
        return name[: -len(_ATTENTION_SUFFIX)]
    ns = namespace_of(name)
    return name if ns is None else ns


class Homes:
    """What one worker knows of one tenant's names. Thread-safe."""

    def __init__(self, names: Names, vstore: VStore, ssm: SsmStore) -> None:
        self.worker = names.worker
        self._names = names
        self._vstore, self._ssm = vstore, ssm
        self._lock = threading.RLock()
        # What the others have been told of our names, and of which K side.
        self._told: dict[bytes, tuple[Entry, Session | None]] = {}
        self._claimed: Counter[bytes] = Counter()
        # To be looked at again: what could not be told, and fills, which end by the clock.
        self._late: set[bytes] = set()
        self._filling: set[bytes] = set()
        vstore.manifests.number_by(MOST_WORKERS, self.worker)
        self._move_in()
        vstore.on_change.append(self.settle)
        vstore.manifests.on_change.append(self.settle)
        ssm.on_change.append(self.settle)

    # --- asking ------------------------------------------------------------------------------

    def elsewhere(self, name: bytes, command: str = "") -> tuple[int, Entry] | None:
        """Another worker that holds it, and what that one says of it."""
        key = key_of(name, command)
        if key in self._told:
            return None
        found = self._names.find(key)
        return None if found is None or found[0] == self.worker else found

    def find(self, name: bytes) -> tuple[int, Entry] | None:
        """The worker that holds it, this one included, and what the others are told of it."""
        told = self._told.get(key_of(name))
        return self.elsewhere(name) if told is None else (self.worker, told[0])

    def require(self, command: str, names: Iterable[bytes]) -> None:
        """Raises Elsewhere if one of them lives on another worker."""
        for name in names:
            found = self.elsewhere(name, command)
            if found is not None:
                raise self.refusal(command, found[0])

    def refusal(self, command: str, worker: int) -> Elsewhere:
        """What clients read the worker from: `lives on worker N`."""
        if command.startswith("V."):
            return Elsewhere(
                f"session lives on worker {worker} (this is worker {self.worker}); "
                f"reconnect for {command}"
            )
        return Elsewhere(f"{command} session lives on worker {worker}")

    def count(self) -> int:
        """How many names all workers hold."""
        return self._names.count()

    def admit(self, name: bytes) -> int:
        """One more miss of a name, counted for all workers."""
        return self._names.admit(name)

    # --- telling -----------------------------------------------------------------------------

    def claim(self, command: str, names: Iterable[bytes]) -> list[bytes]:
        """Make names ours before anything is written under them; `unclaim` what is returned.

        Raises Elsewhere if another worker has or just took one.
        """
        taken: list[bytes] = []
        for name in names:
            key = key_of(name)
            with self._lock:
                self._claimed[key] += 1
            taken.append(key)
            owner = self.worker if key in self._told else self._names.claim(key)
            if owner != self.worker:
                self.unclaim(taken)
                raise self.refusal(command, owner)
        return taken

    def unclaim(self, keys: Iterable[bytes]) -> None:
        """The command is done: what it made stays ours, the rest goes back."""
        for key in keys:
            with self._lock:
                self._claimed[key] -= 1
                if not self._claimed[key]:
                    del self._claimed[key]
                if key not in self._told:
                    self._late.add(key)
            self.settle(key)

    def settle(self, name: bytes) -> None:
        """Tell the others what we hold of a name now, if that is news. Never raises.

        It is called within writes that are done already: what cannot be told now is told later.
        """
        key = key_of(name)
        with self._lock:
            try:
                self._settle(key)
            except CommandError as error:
                if not self._late:
                    journal.complain("names", str(error))
                self._late.add(key)

    def _settle(self, key: bytes) -> None:
        k_side = self._vstore.table.get(sides(key)[0])
        told = self._told.get(key)
        if not self._holds(key):
            if (told is not None or key in self._late) and key not in self._claimed:
                self._names.release(key)
                self._told.pop(key, None)
        else:
            hit = self._is_hit(key)
            if told is None or told[0].hit != hit or told[1] is not k_side or key in self._late:
                entry = _entry(hit, k_side)
                self._names.publish(key, entry)
                self._told[key] = entry, k_side
        self._late.discard(key)
        if self._vstore.manifests.fill(key) is not None:
            self._filling.add(key)
        else:
            self._filling.discard(key)

    def _holds(self, key: bytes) -> bool:
        vstore = self._vstore
        return (
            vstore.holds(key)
            or vstore.table.get(key) is not None
            or vstore.manifests.fill(key) is not None
            or self._ssm.holds(key)
        )

    def _is_hit(self, key: bytes) -> bool:
        table = self._vstore.table
        whole = all(table.get(sid) is not None for sid in sides(key))
        return whole and self._vstore.manifests.fill(key) is None

    def _move_in(self) -> None:
        """At start-up: tell what our own files hold, and let go of what another worker has too.

        That happens when a data directory was served by another number of workers meanwhile.
        """
        vstore = self._vstore
        keys = {key_of(sid) for sid in vstore.table.by_sid}
        keys |= vstore.manifests.by_ns.keys() | {sid for sid, _, _ in self._ssm.held()}
        for key in keys:
            k_side = vstore.table.get(sides(key)[0])
            self._told[key] = _entry(self._is_hit(key), k_side), k_side
        others = self._names.replace({key: told[0] for key, told in self._told.items()})
        for key in others:
            del self._told[key]
            self._ssm.drop(key, owner=None)
        vstore.drop_sessions(others, None)
        vstore.drop_prefixes(others, None)
        if others:
            journal.complain(
                "names",
                f"worker {self.worker} drops {len(others)} names that another worker holds too",
            )

    def sweep(self) -> None:
        """Settle what no call tells of."""
        with self._lock:
            keys = self._late | self._filling
        for key in keys:
            self.settle(key)

    async def keep_settled(self) -> None:
        """Sweep once a second, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.sweep()

    def close(self) -> None:
        """Tell nothing more; what we hold stays ours, as we may come back."""
        self._names.close()


def _entry(hit: bool, k_side: Session | None) -> Entry:
    return Entry(hit, k_side.schema.digest() if k_side is not None else 0)
