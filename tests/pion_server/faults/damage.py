"""A recorded history of a small store, and copies of its files to be damaged.

`record` performs random acts one by one and notes, after each, every image and the length of all
logs: so it is known which images a log cut anywhere must show.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pion_server.store.key_values import LARGE
from tests.conftest import RawClient
from tests.pion_server.faults import oracle
from tests.pion_server.faults.forge import ForgedServer
from tests.pion_server.faults.load import Ledger, Writer, perform
from tests.pion_server.faults.observer import Refused, observe
from tests.pion_server.faults.oracle import Image

VLOG, SLOG, KLOG = "pion.vstore.wal.0", "pion.ssm.wal.0", "pion.wal.0"
LOGS = (VLOG, SLOG, KLOG)
VSNAPSHOT, SSNAPSHOT, KSNAPSHOT = "pion.vstore.0", "pion.ssm.0", "pion.snapshot.0"
NAMES = ("alpha", "beta", "gamma")
Images = dict[str, Image]


@dataclass(frozen=True)
class Moment:
    """The store after one acknowledged act; `between` is the images its records lead through."""

    lengths: dict[str, int]
    images: Images
    ns: str
    between: list[Image]


@dataclass(frozen=True)
class History:
    """A directory of files and what was acknowledged on the way to them."""

    directory: Path
    moments: list[Moment]

    @property
    def images(self) -> Images:
        return self.moments[-1].images

    def copy(self, target: Path) -> Path:
        """The files, to be damaged."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.directory, target, ignore=shutil.ignore_patterns("*.sock"))
        return target


def record(server: ForgedServer, acts: int, seed: int, before_save: int = 0) -> History:
    """A history of random acts; of those `before_save`, in snapshots then, only the outcome."""
    client = server.client()
    ledgers = [Ledger(name) for name in NAMES]
    writer = Writer(client, ledgers, seed, large=0)
    moments: list[Moment] = []

    def note(ns: str, between: list[Image]) -> None:
        lengths = {name: (server.directory / name).stat().st_size for name in LOGS}
        images = {ledger.ns: ledger.image for ledger in ledgers}
        moments.append(Moment(lengths, images, ns, between))

    def go_on(until: int) -> None:
        while len(moments) < until:
            ledger, chosen = writer.choose()
            ledger.pending = list(chosen)
            for act in chosen:
                between = act.lead(ledger.image)[:-1]
                writer.answered(ledger, act, client.call(*act.words))
                note(ledger.ns, between)

    if before_save:
        go_on(before_save)
        assert client.call("KV.PREFIX.SAVE") == "OK"
        moments.clear()
    note(NAMES[0], [])
    go_on(acts)
    client.close()
    server.kill()
    return History(server.directory, moments)


def read_all(client: RawClient) -> Images:
    return {name: observe(client, name) for name in NAMES}


def differences(found: Images, expected: Images) -> list[tuple[str, tuple[object, ...]]]:
    """Where they differ; wrong bytes are an AssertionError: only errors and absence may differ."""
    places = []
    for name in NAMES:
        for key in found[name].keys() | expected[name].keys():
            have, want = found[name].get(key), expected[name].get(key)
            if have == want:
                continue
            places.append((name, key))
            if key[0] == "rows" and have is not None and want is not None:
                assert len(have) == len(want), (name, key)
                pairs = [(a, b) for a, b in zip(have, want, strict=True) if a != b]
                assert all(isinstance(a, Refused) for a, _ in pairs), (name, key)
            else:
                assert have is None or isinstance(have, Refused), (name, key, have, want)
    return places


def write_more(client: RawClient) -> Ledger:
    """A new prefix, as a client would go on after a restart."""
    ledger = Ledger("afterwards")
    values = bytes([1, 2, 3, 60] * (2 * oracle.DIM))
    acts = [oracle.register("afterwards", "fp32"), oracle.store_state("afterwards", 0, b"state")]
    acts += [oracle.set_key("afterwards", "s0", b"value")]
    acts += [oracle.set_fields("afterwards", "h0", {b"small": b"1", b"large": bytes(LARGE)})]
    acts += [oracle.store("afterwards", side, "fp32", 0, 0, values) for side in oracle.SIDES]
    perform(client, ledger, acts)
    return ledger


def restart_and_read(
    server: ForgedServer, damage: Callable[[Path], None] = lambda directory: None
) -> Images:
    """Kill it, damage its files, start it again: what it holds then."""
    server.kill()
    damage(server.directory)
    server.start()
    client = server.client()
    images = read_all(client)
    client.close()
    return images
