"""Clients that write at random, each its own namespaces, and remember what was acknowledged."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pion_server.store.key_values import LARGE
from tests.conftest import RawClient, ReplyError
from tests.pion_server.faults import oracle
from tests.pion_server.faults.observer import observe
from tests.pion_server.faults.oracle import (
    DIM,
    FORMATS,
    HASHES,
    LAYERS,
    SIDES,
    STRINGS,
    Act,
    Image,
)

MAX_ROWS = 24
PIPELINE = 8
# Values of the keyspace on both sides of where they stay in the log.
VALUE_SIZES = (0, 1, 40, 400, LARGE - 1, LARGE)


@dataclass
class Ledger:
    """One namespace: the acknowledged image, and the acts that are under way."""

    ns: str
    image: Image = field(default_factory=dict)
    pending: list[Act] = field(default_factory=list)

    def acknowledge(self) -> None:
        """The first pending act has been answered."""
        self.image = self.pending.pop(0).lead(self.image)[-1]

    def candidates(self) -> list[Image]:
        """What may stand after a crash now: the acknowledged image, or one further along."""
        images = [self.image]
        for act in self.pending:
            images += act.lead(images[-1])
        return images

    def settle(self, client: RawClient) -> None:
        """After a restart: one of the candidates stands, and is acknowledged from now on."""
        found = observe(client, self.ns)
        candidates = self.candidates()
        assert found in candidates, difference(self.ns, found, candidates)
        self.image = found
        self.pending.clear()


def difference(ns: str, found: Image, candidates: list[Image]) -> str:
    """What a wrong image has that the nearest candidate has not."""

    def wrong(image: Image) -> list[tuple[object, ...]]:
        keys = found.keys() | image.keys()
        return sorted((k for k in keys if found.get(k) != image.get(k)), key=repr)

    nearest = min(candidates, key=lambda image: len(wrong(image)))
    lines = [f"  {k}: {_short(found.get(k))}, not {_short(nearest.get(k))}" for k in wrong(nearest)]
    return "\n".join([f"{ns}: none of {len(candidates)} images fits", *lines])


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + " ".join(_short(item) for item in value) + ")"
    text = value.hex() if isinstance(value, bytes) else repr(value)
    return text if len(text) < 40 else f"{text[:32]}..({len(text)})"


def perform(client: RawClient, ledger: Ledger, acts: Iterable[Act]) -> Any:
    """These acts one by one, each acknowledged before the next; the last reply."""
    reply = None
    for act in acts:
        ledger.pending = [act]
        reply = client.call(*act.words)
        ledger.acknowledge()
    return reply


class Writer(threading.Thread):
    """One client under load until `stop` or until its connection breaks.

    An error reply must not have changed anything; it is counted in `refusals`.
    """

    def __init__(
        self, client: RawClient, ledgers: list[Ledger], seed: int, *, large: float = 0.01
    ) -> None:
        """`large`: the share of stores that are of half a megabyte."""
        super().__init__(daemon=True)
        self.client = client
        self._large = large
        self.acknowledged = 0
        self.refusals: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._ledgers = ledgers
        self._random = random.Random(seed)
        self._stop_asked = threading.Event()
        self._gens: dict[str, int] = {}
        self._snapshots: dict[tuple[str, str], tuple[int, dict[int, int]]] = {}

    def run(self) -> None:
        try:
            while not self._stop_asked.is_set():
                self.one_turn()
        except (EOFError, OSError):
            pass  # the server is gone, which is what these tests are about
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        self._stop_asked.set()

    def one_turn(self) -> None:
        """A few acts on one namespace, pipelined as a client may."""
        ledger, acts = self.choose()
        ledger.pending = list(acts)
        self.client.send(b"".join(RawClient.pack(*act.words) for act in acts))
        for act in acts:
            self.answered(ledger, act, self.client.read())

    def answered(self, ledger: Ledger, act: Act, reply: Any) -> None:
        """Note the reply to the first pending act."""
        if isinstance(reply, ReplyError):
            self.refusals[str(reply)] += 1
            ledger.pending.pop(0)
            return
        ledger.acknowledge()
        self.acknowledged += 1
        if act.words[-1] == "BEGIN":
            self._gens[ledger.ns] = reply
        elif act.words[2:3] == ("SET",):
            self._gens.pop(ledger.ns, None)

    def choose(self) -> tuple[Ledger, list[Act]]:
        """A namespace, and what to do next to it."""
        ledger = self._random.choice(self._ledgers)
        return ledger, self._choose(ledger)

    def _choose(self, ledger: Ledger) -> list[Act]:
        ns, image, draw = ledger.ns, ledger.image, self._random
        if draw.random() < 0.2:
            return [self._key(ns) for _ in range(draw.randint(1, 3))]
        sessions = [key[1] for key in image if key[0] == "session"]
        dice = draw.random()
        if len(sessions) < 2 or dice < 0.05:
            self._forget(ns)
            hashes = draw.randbytes(8 * draw.randint(1, 40)) if draw.random() < 0.5 else b""
            return [oracle.register(ns, draw.choice(FORMATS), hashes)]
        if dice < 0.08:
            self._forget(ns)
            return [oracle.drop(ns)]
        if dice < 0.10:
            side = draw.choice(SIDES)
            self._snapshots.pop((ns, side), None)
            return [oracle.drop_side(ns, side)]
        if dice < 0.25:
            return self._manifest(ns)
        if dice < 0.40:
            return self._state(ns)
        if dice < 0.50:
            return self._rewind(ledger, draw.choice(SIDES))
        return [self._store(ledger) for _ in range(draw.randint(1, PIPELINE))]

    def _store(self, ledger: Ledger) -> Act:
        """Mostly a few rows; now and then so many that a write can be torn."""
        draw, image = self._random, ledger.image
        side, layer = draw.choice(SIDES), draw.randrange(LAYERS)
        fmt = image[("session", side)][0]
        held = len(image.get(("rows", side, layer), ()))
        start = held if draw.random() < 0.6 and held < MAX_ROWS else draw.randint(0, MAX_ROWS)
        count = draw.randint(1, 6)
        if draw.random() < self._large:
            start, count = 0, 4000
        width = DIM if fmt == "raw" else 4 * DIM
        values = draw.randbytes(width * count) if fmt == "raw" else self._floats(count)
        return oracle.store(ledger.ns, side, fmt, layer, start, values, self._gen(ledger.ns))

    def _floats(self, count: int) -> bytes:
        """Finite float32 rows, cheap to make: small multiples of 1/16."""
        numbers = np.frombuffer(self._random.randbytes(count * DIM), np.int8)
        return (numbers.astype(np.float32) / 16).tobytes()

    def _gen(self, ns: str) -> int | None:
        return self._gens.get(ns)

    def _manifest(self, ns: str) -> list[Act]:
        gen = self._gen(ns)
        if gen is None:
            return [oracle.begin(ns)]
        return [oracle.complete(ns, gen, self._random.randbytes(self._random.randint(0, 300)))]

    def _state(self, ns: str) -> list[Act]:
        layer = self._random.randrange(LAYERS)
        if self._random.random() < 0.2:
            return [oracle.drop_state(ns, layer)]
        blob = self._random.randbytes(self._random.choice((0, 1, 100, 3000)))
        return [oracle.store_state(ns, layer, blob, self._gen(ns))]

    def _key(self, ns: str) -> Act:
        """SET, HSET of some fields or DEL of some keys."""
        draw = self._random
        dice = draw.random()
        if dice < 0.25:
            return oracle.delete_keys(ns, *draw.sample((*STRINGS, *HASHES), draw.randint(1, 2)))
        if dice < 0.6:
            return oracle.set_key(ns, draw.choice(STRINGS), self._value())
        names = draw.sample((b"f", b"\xff\0", b""), draw.randint(1, 3))
        return oracle.set_fields(ns, draw.choice(HASHES), {name: self._value() for name in names})

    def _value(self) -> bytes:
        return self._random.randbytes(self._random.choice(VALUE_SIZES))

    def _rewind(self, ledger: Ledger, side: str) -> list[Act]:
        """V.SNAPSHOT now and V.RESTORE another time; the numbers end with the connection."""
        held = self._snapshots.pop((ledger.ns, side), None)
        if held is not None:
            return [oracle.restore(ledger.ns, side, *held)]
        counts = {k[2]: len(v) for k, v in ledger.image.items() if k[:2] == ("rows", side)}
        number = self.client.call("V.SNAPSHOT", ledger.ns + side)
        self._snapshots[(ledger.ns, side)] = (number, counts)
        return []

    def _forget(self, ns: str) -> None:
        """A recreated session has no snapshots; the fill's own writes leave it open."""
        for side in SIDES:
            self._snapshots.pop((ns, side), None)
