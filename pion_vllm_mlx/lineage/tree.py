"""Which records leave so that others fit: a choice over a tree, without any I/O.

Segments hang on the segments they rest on; a trace and a state hang on the segment they are of.
First leaves what costs least: states within a conversation, so that those which stay lie the
denser the nearer its end they are. Then leaves, the longest unused first: segments that no other
rests on, with all that hangs on them. Last of all go the states that most is expected of: those
others are likely to begin with, those where conversations part, and the last two of each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

#: States this near the end of a conversation are kept for the next turn, or the last one again.
_NEAR_END: Final = 2


class Kind(Enum):
    """What a record is; traces and states go with the segment they hang on."""

    SEGMENT = "segment"
    TRACE = "trace"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Node:
    """A record as the server lists it. `parent`: the record it hangs on, or none.

    `unused`: seconds since it was last touched. `rows`: whether it takes session slots. `end`: the
    tokens at a segment's end; `stateful`: it can be resumed only where its state is. `anchor`: of a
    state that others are expected to begin with.
    """

    name: bytes
    nbytes: int
    parent: bytes = b""
    kind: Kind = Kind.SEGMENT
    unused: float = 0.0
    rows: bool = True
    end: int = 0
    stateful: bool = False
    anchor: bool = False


@dataclass(slots=True)
class Plan:
    """What to drop, in order, and the bytes and session slots that frees."""

    names: list[bytes] = field(default_factory=list)
    nbytes: int = 0
    sessions: int = 0

    def add(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.names.append(node.name)
            self.nbytes += node.nbytes
            self.sessions += 2 * node.rows


def unreachable(nodes: Mapping[bytes, Node]) -> list[Node]:
    """Records that no match can reach any more: a record above them is gone."""
    gone: dict[bytes, bool] = {b"": False}

    def is_gone(name: bytes) -> bool:
        path = []
        while name not in gone:
            path.append(name)
            gone[name] = True  # a loop reaches no root
            name = nodes[name].parent if name in nodes else name
        for each in path:
            gone[each] = gone[name]
        return gone[name]

    return [node for node in nodes.values() if is_gone(node.parent)]


def choose(
    nodes: Mapping[bytes, Node], nbytes: int, sessions: int, keep: Iterable[bytes] = ()
) -> Plan:
    """What to drop until so many bytes and session slots are free, in the order above.

    Nothing in `keep` is dropped, nor the segments a kept record hangs on.
    """
    plan, tree = Plan(), _Tree(nodes, frozenset(keep))
    spare, valued = tree.sort_states()
    for state in tree.thin(spare):
        if plan.nbytes >= nbytes:
            break
        plan.add(tree.without(state))
    for leaf in tree.leaves():
        if plan.nbytes >= nbytes and plan.sessions >= sessions:
            break
        plan.add(tree.without(leaf))
    for state in sorted(valued, key=lambda state: (state.anchor, -state.unused)):
        if plan.nbytes >= nbytes:
            break
        plan.add(tree.without(state))
    return plan


class _Tree:
    """The records that are left, and what hangs on what."""

    def __init__(self, nodes: Mapping[bytes, Node], keep: Collection[bytes]) -> None:
        self._left = dict(nodes)
        self._keep = keep
        self._states: dict[bytes, Node] = {}
        self._traces: dict[bytes, list[Node]] = {}
        self._resting: dict[bytes, list[bytes]] = {}
        for node in nodes.values():
            if node.kind is Kind.STATE:
                self._states[node.parent] = node
            elif node.kind is Kind.TRACE:
                self._traces.setdefault(node.parent, []).append(node)
            else:
                self._resting.setdefault(node.parent, []).append(node.name)

    def without(self, node: Node) -> Iterator[Node]:
        """Take a node out, with all that hangs on a segment: what is taken out."""
        if self._left.pop(node.name, None) is None:
            return
        yield node
        if node.kind is Kind.STATE:
            del self._states[node.parent]
            return
        self._resting[node.parent].remove(node.name)
        if node.name in self._states:
            yield from self.without(self._states[node.name])
        yield from self._traces.pop(node.name, ())

    def leaves(self) -> Iterator[Node]:
        """Segments to drop, each a leaf by then, the longest unused first.

        One that has lost its state is of no use once nothing rests on it, so it is next.
        """
        segments = [node for node in self._left.values() if node.kind is Kind.SEGMENT]
        free = [(-self._age(node), node.name) for node in segments if self._may_go(node)]
        heapq.heapify(free)
        while free:
            node = self._left[heapq.heappop(free)[1]]
            yield node
            above = self._left.get(node.parent)
            if above is not None and self._may_go(above):
                heapq.heappush(free, (-self._age(above), above.name))

    def sort_states(self) -> tuple[list[Node], list[Node]]:
        """The states that may go: those in between, and those that most is expected of."""
        heights: dict[bytes, int] = {}
        for name in reversed(self._downwards()):
            heights[name] = min((heights[n] + 1 for n in self._resting.get(name, ())), default=0)
        spare: list[Node] = []
        valued: list[Node] = []
        for name, state in self._states.items():
            resting = len(self._resting.get(name, ()))
            is_leaf = not resting and name not in self._keep
            if state.name in self._keep or name not in heights or is_leaf:
                continue  # a leaf's state goes with the leaf
            is_near = heights[name] <= _NEAR_END
            (valued if state.anchor or resting > 1 or is_near else spare).append(state)
        return spare, valued

    def thin(self, states: Iterable[Node]) -> Iterator[Node]:
        """States in the order they may go, each taken out before the next is asked for.

        First the one that costs least to be without: the tokens from the state before it to the
        one after it, for the tokens from it to the end.
        """
        tips = self._tips()
        heap = [(self._cost(state, tips), state.name) for state in states]
        heapq.heapify(heap)
        while heap:
            cost, name = heapq.heappop(heap)
            state = self._left[name]
            now = self._cost(state, tips)
            if now > cost:  # one beside it has gone since
                heapq.heappush(heap, (now, name))
            else:
                yield state

    def _age(self, node: Node) -> float:
        """Seconds a leaf is unused; endless for one that cannot be resumed at.

        Its state is read whenever it is resumed at, and one without rows has no other age.
        """
        state = self._states.get(node.name)
        if state is None:
            return math.inf if node.stateful else node.unused
        return min(node.unused, state.unused) if node.rows else state.unused

    def _may_go(self, node: Node) -> bool:
        return node.name not in self._keep and not self._resting.get(node.name)

    def _downwards(self) -> list[bytes]:
        """Segments that hang on a root, each after the one it rests on."""
        order = list(self._resting.get(b"", ()))
        for name in order:  # which grows meanwhile
            order.extend(self._resting.get(name, ()))
        return order

    def _tips(self) -> dict[bytes, int]:
        """By segment, the tokens at the end of the longest conversation it is in."""
        tips: dict[bytes, int] = {}
        for name in reversed(self._downwards()):
            ends = (tips[resting] for resting in self._resting.get(name, ()))
            tips[name] = max((self._left[name].end, *ends))
        return tips

    def _cost(self, state: Node, tips: Mapping[bytes, int]) -> float:
        segment = self._left[state.parent]
        before = self._left.get(segment.parent)
        while before is not None and before.name not in self._states:
            before = self._left.get(before.parent)
        start = before.end if before is not None else 0
        below, after = list(self._resting.get(segment.name, ())), tips[segment.name]
        while below:
            name = below.pop()
            if name in self._states:
                after = min(after, self._left[name].end)
            else:
                below.extend(self._resting.get(name, ()))
        return (after - start) / (1 + tips[segment.name] - segment.end)
