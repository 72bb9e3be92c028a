"""What the keyspace commands share: keys of a type, Redis' numbers and refusals, large values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from pion_server.commands.registry import Context
from pion_server.commands.v import INLINE_BYTES
from pion_server.errors import BadArgument, CommandError
from pion_server.payload import Buffer, Chunk, Offload, Payload
from pion_server.store.key_changes import Change
from pion_server.store.key_values import Entry, Hash, Slice, SortedSet, Value

_INTEGER = re.compile(rb"(?:0|-?[1-9][0-9]{0,18})\Z")
_FLOAT = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z")
_INFINITE = re.compile(rb"[+-]?inf(?:inity)?\Z", re.IGNORECASE)


class WrongType(CommandError):
    """The key holds something else."""

    prefix = "WRONGTYPE"

    def __init__(self) -> None:
        super().__init__("Operation against a key holding the wrong kind of value")


def string_at(entry: Entry | None) -> Value | None:
    """A string's value, None for no key; WrongType."""
    if entry is None:
        return None
    if isinstance(entry.data, (dict, SortedSet)):
        raise WrongType
    return entry.data


def hash_at(entry: Entry | None) -> Hash | None:
    """A hash's fields, None for no key; WrongType."""
    if entry is None:
        return None
    if not isinstance(entry.data, dict):
        raise WrongType
    return entry.data


def sorted_set_at(entry: Entry | None) -> SortedSet | None:
    """A sorted set, None for no key; WrongType."""
    if entry is None:
        return None
    if not isinstance(entry.data, SortedSet):
        raise WrongType
    return entry.data


def whole_number(data: Buffer, text: str = "value is not an integer or out of range") -> int:
    """A signed 64-bit integer as Redis writes it; BadArgument `text` for anything else."""
    found = bytes(data[:21])
    number = int(found) if _INTEGER.match(found) else 2**63
    if not -(2**63) <= number < 2**63:
        raise BadArgument(text)
    return number


def added(number: int, more: int) -> int:
    """The sum; BadArgument if it does not fit into 64 bits."""
    total = number + more
    if not -(2**63) <= total < 2**63:
        raise BadArgument("increment or decrement would overflow")
    return total


def score(data: Buffer) -> float:
    """A sorted set's score; BadArgument for what is no number."""
    text = bytes(data[:400])
    if not (_FLOAT.match(text) or _INFINITE.match(text)):
        raise BadArgument("value is not a valid float")
    return float(text) + 0.0


def score_reply(value: float, protocol: int) -> object:
    """A score as RESP2 and RESP3 clients read it: 17 significant digits, or a double."""
    return value if protocol >= 3 else b"%.17g" % value


def committing(ctx: Context, change: Change, reply: object) -> object:
    """Log and apply a change, beside the loop if it is large; the reply comes afterwards."""
    keyspace = ctx.state.keyspace

    def work() -> object:
        keyspace.commit(change)
        return reply

    nbytes = sum(len(value) for value in change.values)
    return work() if nbytes <= INLINE_BYTES else Offload(work)


def sending(values: list[Value | None], shape: Callable[[list[Any]], object]) -> object:
    """A reply made by `shape` of values, of which large ones are sent from their file."""
    unread = sum(v.length for v in values if isinstance(v, Slice) and not v.verified)

    def work() -> object:
        return shape([_sendable(value) for value in values])

    return work() if unread <= INLINE_BYTES else Offload(work)


def _sendable(value: Value | None) -> object:
    if not isinstance(value, Slice):
        return value
    span = value.span()

    def chunks() -> Iterator[Chunk]:
        # The span's file stays open, but `value` keeps its place from being given back.
        if value.length:
            yield span

    return Payload(value.length, chunks)
