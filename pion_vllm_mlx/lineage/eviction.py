"""A byte budget over all records on a server: what leaves so that others fit is `tree`'s choice.

The server itself evicts by last access alone, and of a conversation that is the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pion_vllm_mlx.fill import StoreFailed
from pion_vllm_mlx.lineage.blocks import BLOCK, CHECKPOINT, SEGMENT, STATE, TRACE
from pion_vllm_mlx.lineage.drafts import Draft
from pion_vllm_mlx.lineage.search import get_manifest, segment_in, state_in
from pion_vllm_mlx.lineage.tree import Kind, Node, Plan, choose, unreachable
from pion_vllm_mlx.tally import Tally
from pion_vllm_mlx.transport import Command, Lane, Patience, Reply, ServerError

_PATIENCE: Final = Patience(first_byte=5, stall=5, total=30)
_AT_ONCE: Final = 64
#: Seconds that are no time between two uses.
_MOMENT: Final = 5.0
#: Session slots left to others before leaves are evicted for want of slots.
SPARE_SESSIONS: Final = 16


class Oversize(Exception):
    """A conversation that does not fit by itself, into the budget or the server's session slots.

    Nothing is evicted for it.
    """


class Keeper:
    """Keeps all records under one name prefix within a budget. One thread at a time."""

    def __init__(self, lane: Lane, ns_prefix: bytes, budget: int | None, tally: Tally) -> None:
        self._lane = lane
        self._prefix = ns_prefix
        self._starts = tuple(ns_prefix + kind for kind in (SEGMENT, CHECKPOINT, TRACE, STATE))
        self._kinds = dict(zip(self._starts[2:], (Kind.TRACE, Kind.STATE), strict=True))
        self._budget = budget
        self._tally = tally
        #: What manifests say, by name and generation; None of a damaged one.
        self._rests: dict[tuple[bytes, int], Rest | None] = {}

    def used_bytes(self) -> int:
        """Rows and state of all records; raises TransportError."""
        listed, _ = self._list()
        return sum(row.nbytes for row in listed)

    def used_last(self) -> dict[bytes, Node]:
        """The tree of all whole records, used last first; raises TransportError."""
        listed, _ = self._list()
        # A server that was restarted has touched all of them at that moment; fills it numbers.
        return self._nodes(sorted(listed, key=lambda row: (row.unused // _MOMENT, -row.gen)))

    def make_room(self, drafts: Sequence[Draft], ancestors: Iterable[bytes]) -> None:
        """Evict so that `drafts` fit; raises Oversize, having evicted nothing, TransportError."""
        if not drafts:
            return
        listed, slots = self._list()
        kept = {*ancestors, *(draft.name for draft in drafts)}
        more = sum(draft.stored_bytes for draft in drafts)
        wanted = 0
        if self._budget is not None:
            # Rows it rests on; the states along them need not stay.
            chain = sum(row.nbytes for row in listed if row.name in kept)
            if chain + more > self._budget:
                raise Oversize(f"{chain + more} bytes, the budget is {self._budget}")
            wanted = sum(row.nbytes for row in listed) + more - self._budget
        needed = slots.missing(2 * sum(bool(draft.pieces) for draft in drafts))
        ours = 2 * sum(row.rows for row in listed)
        self._evict(listed, wanted, needed if needed < ours else 0, kept)

    def trim(self, nbytes: int) -> None:
        """Evict down to `nbytes`; raises TransportError."""
        listed, _ = self._list()
        self._evict(listed, sum(row.nbytes for row in listed) - nbytes, 0, ())

    def reconcile(self) -> None:
        """Drop what broken fills left and what no match can reach; raises TransportError."""
        listed, _ = self._list()
        nodes = self._nodes(listed)
        plan = Plan()
        plan.add(_debris(listed))
        plan.add(unreachable(nodes))
        self._drop(plan)

    def _evict(
        self, listed: Sequence[Row], nbytes: int, sessions: int, keep: Iterable[bytes]
    ) -> None:
        if nbytes <= 0 and sessions <= 0:
            return
        nodes = self._nodes(listed)
        plan, kept = Plan(), set(keep)
        plan.add(_debris(listed))
        plan.add(node for node in unreachable(nodes) if node.name not in kept)
        left = {name: node for name, node in nodes.items() if name not in plan.names}
        chosen = choose(left, nbytes - plan.nbytes, sessions - plan.sessions, kept)
        plan.add(left[name] for name in chosen.names)
        if plan.sessions < sessions:
            # The server would take a slot from whoever is longest unused: this one's own root.
            raise Oversize(f"{sessions} session slots more, and {plan.sessions} can be freed")
        self._drop(plan)

    def _drop(self, plan: Plan) -> None:
        if not plan.names:
            return
        # State without a manifest is nobody's, to KV.PREFIX.DROP.
        states = [Command.of("SSM.PREFIX.DROP", name) for name in plan.names]
        drop = Command.of("KV.PREFIX.DROP", *plan.names)
        self._lane.exchange([drop, *states], _PATIENCE)
        self._tally.add("evictions", len(plan.names))
        self._tally.add("bytes_evicted", plan.nbytes)

    def _list(self) -> tuple[list[Row], Slots]:
        commands = [Command.of("KV.PREFIX.LIST", start) for start in self._starts]
        *lists, info = self._lane.exchange([*commands, Command.of("KV.PREFIX.INFO")], _PATIENCE)
        refused = next((reply for reply in lists if isinstance(reply, ServerError)), None)
        if refused is not None and self._budget is not None:
            # What cannot be counted cannot be kept within a budget.
            raise StoreFailed(refused.code, str(refused))
        return [row for reply in lists for row in rows_in(reply)], Slots.of(info)

    def _nodes(self, listed: Sequence[Row]) -> dict[bytes, Node]:
        """The tree of what has a manifest. What is not known yet of it is read."""
        whole = {(row.name, row.gen): row for row in listed if row.gen > 0}
        new = [key for key in whole if key not in self._rests]
        for at in range(0, len(new), _AT_ONCE):
            batch = new[at : at + _AT_ONCE]
            replies = self._lane.exchange([get_manifest(name) for name, _ in batch], _PATIENCE)
            self._rests.update(zip(batch, map(_rest_in, replies), strict=True))
        self._rests = {key: self._rests[key] for key in whole}
        by_name = {name: rest for (name, _), rest in self._rests.items()}
        return {row.name: self._node(row, by_name) for row in whole.values()}

    def _node(self, row: Row, rests: Mapping[bytes, Rest | None]) -> Node:
        kind = next((k for start, k in self._kinds.items() if row.name.startswith(start)), None)
        rest = rests[row.name]
        return Node(
            row.name,
            row.nbytes,
            self._parent(row.name, kind, rests),
            kind or Kind.SEGMENT,
            row.unused,
            row.rows,
            0 if rest is None else rest.end,
            row.name.startswith(self._starts[1]),
            rest is not None and rest.anchor,
        )

    def _parent(self, name: bytes, own: Kind | None, rests: Mapping[bytes, Rest | None]) -> bytes:
        """What a record hangs on; itself, which no root reaches, if it rests on rows long gone."""
        rest = rests[name]
        if rest is None:
            return name
        if not rest.parent:
            return b""
        kind = SEGMENT if name.startswith(self._starts[0]) else CHECKPOINT
        parent = self._prefix + kind + rest.parent.encode()
        above = rests.get(parent)
        if above is None or (own is None and not rest.is_on(above)):
            return name
        return parent


@dataclass(frozen=True, slots=True)
class Rest:
    """What a record rests on, and what may rest on it; see `Segment`."""

    parent: str
    start: int = 0
    end: int = 0
    base: str = ""
    trail: tuple[str, ...] = ()
    anchor: bool = False

    def is_on(self, above: Rest) -> bool:
        """Whether it was computed on top of the very rows of `above`."""
        block = (self.start - above.start) // BLOCK
        return 0 < block <= len(above.trail) and above.trail[block - 1] == self.base


def _rest_in(reply: Reply) -> Rest | None:
    if (held := state_in(reply)) is not None:
        return Rest(held[1].digest, anchor=held[1].anchor)
    segment = segment_in(reply)
    if segment is None:
        return None
    return Rest(segment.parent, segment.start, segment.end, segment.base, segment.trail)


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of KV.PREFIX.LIST. `gen`: 0 without a manifest, -1 while it is being filled."""

    name: bytes
    nbytes: int
    gen: int
    unused: float
    rows: bool


@dataclass(frozen=True, slots=True)
class Slots:
    """Session slots of the server, taken and in all; 0 in all: unknown."""

    taken: int
    most: int

    @classmethod
    def of(cls, reply: Reply) -> Slots:
        """From KV.PREFIX.INFO."""
        if not isinstance(reply, bytes | bytearray | memoryview):
            return cls(0, 0)
        fields = dict(line.partition(b":")[::2] for line in bytes(reply).split(b"\r\n"))
        values = [fields.get(name, b"") for name in (b"vstore_sessions", b"vstore_max_sessions")]
        if not all(value.isdigit() for value in values):
            return cls(0, 0)
        return cls(int(values[0]), int(values[1]))

    def missing(self, more: int) -> int:
        """How many to free so that `more` fit and some are spare."""
        spare = min(SPARE_SESSIONS, self.most // 4)
        return self.taken + more + spare - self.most if self.most and more else 0


def rows_in(reply: Reply) -> list[Row]:
    """What KV.PREFIX.LIST has answered; nothing of anything else."""
    if not isinstance(reply, list):
        return []
    found = []
    for entry in reply:
        match entry:
            case [
                bytes() | bytearray() | memoryview() as name,
                int() as rows,
                int() as state,
                int() as gen,
                int() as unused,
            ]:
                found.append(Row(bytes(name), rows + state, gen, unused / 1000, rows > 0))
    return found


def _debris(listed: Iterable[Row]) -> list[Node]:
    """What has neither a manifest nor anybody who is writing one."""
    return [Node(row.name, row.nbytes, rows=row.rows) for row in listed if row.gen == 0]
