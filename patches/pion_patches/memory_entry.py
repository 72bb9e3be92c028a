"""One remembered conversation: rows once, and the states it can be resumed from."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from .live_caches import arrays_of, counts_of, has_rows, leaves_of, regroup, shorten
from .token_ids import common_length


class Incoherent(Exception):
    """A cache that does not hold the tokens it is said to hold; the message says what it holds."""


@dataclasses.dataclass(frozen=True, eq=False)
class States:
    """The leaves without a row a token, as they are after one token count; None for the others."""

    leaves: tuple[Any, ...]
    nbytes: int

    @classmethod
    def of(cls, cache: Sequence[Any]) -> Self:
        """The state of a cache, shared with it."""
        leaves = tuple(None if has_rows(leaf) else leaf for leaf in leaves_of(cache))
        return cls(leaves, sum(array.nbytes for array in arrays_of(leaves)))

    def __bool__(self) -> bool:
        return any(leaf is not None for leaf in self.leaves)


@dataclasses.dataclass(eq=False)
class Entry:
    """`cache` holds all `tokens`; `states` maps a token count to the state after so many."""

    key: Any
    tokens: np.ndarray
    cache: list[Any]
    kind: str
    states: dict[int, States]

    @classmethod
    def of(cls, key: Any, tokens: np.ndarray, cache: Sequence[Any], kind: str) -> Self:
        """Take a cache over. Raises Incoherent unless it can be cut to what `tokens` name."""
        held = min(counts_of(leaves_of(cache)) | {len(tokens)})
        if held < 1:
            raise Incoherent("a batch, or no tokens")
        leaves = list(leaves_of(cache))
        if counts_of(leaves) - {held} or held < len(tokens):
            # A draft model's caches, or a generation stopped half way: cut all to the shortest.
            cut = [shorten(leaf, held) for leaf in leaves]
            if any(leaf is None for leaf in cut):
                raise Incoherent(f"caches of {sorted(counts_of(leaves))} for {len(tokens)} tokens")
            leaves = cut
        entry = cls(key, tokens[:held], regroup(cache, iter(leaves)), kind, {})
        if state := States.of(entry.cache):
            entry.states[held] = state
        return entry

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and of every state."""
        return self.row_bytes + sum(states.nbytes for states in self.states.values())

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of the rows, which never change; what is kept as state counts with the states."""
        return sum(
            a.nbytes for leaf in leaves_of(self.cache) if has_rows(leaf) for a in arrays_of(leaf)
        )

    @property
    def row_kinds(self) -> set[type]:
        """The classes of the caches that keep a row a token."""
        return {type(leaf) for leaf in leaves_of(self.cache) if has_rows(leaf)}

    def common(self, tokens: np.ndarray) -> int:
        """How many leading tokens are the same."""
        return common_length(self.tokens, tokens)

    def longest(self, matched: int) -> int:
        """After how many of `matched` equal leading tokens this entry can be resumed."""
        if matched and self._cut(matched) is not None:
            return matched
        return max((tokens for tokens in self.states if tokens <= matched), default=0)

    def resume(self, tokens: int) -> list[Any] | None:
        """The caller's own cache of the first `tokens` tokens."""
        return self._cut(tokens)

    def thin(self) -> bool:
        """Let go of every other state but the first and the last; False if there are no more."""
        inner = sorted(self.states)[1:-1]
        for tokens in inner[::2]:
            del self.states[tokens]
        return bool(inner)

    def _cut(self, tokens: int) -> list[Any] | None:
        kept = self.states.get(tokens)
        leaves = leaves_of(self.cache)
        states = kept.leaves if kept is not None else (None,) * len(leaves)
        # A copy of a cache shares its arrays until one of the two is written to.
        cut = [
            copy.deepcopy(state) if state is not None else shorten(leaf, tokens)
            for leaf, state in zip(leaves, states, strict=True)
        ]
        return None if any(leaf is None for leaf in cut) else regroup(self.cache, iter(cut))
